"""Which tensors hold a matrix, without torch: names, dtypes, shapes, bytes, refusals."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from dayzero.checkpoint.formats import parts, stored_bytes, why_not
from dayzero.decl import (
    BF16,
    F32,
    FP8_BLOCK,
    FP8_BLOCK_E8M0,
    FP8_BLOCK_WEIGHT_SCALE,
    INT4_PACK,
    MXFP4_INTERLEAVED,
    MXFP4_PACK,
    MXFP4_SCALE,
    NVFP4_MODELOPT,
    NVFP4_PACK,
    QUANTIZED_FORMATS,
)

NAME = "model.layers.3.mlp.experts.5.gate_proj.weight"


def described(fmt, tensor, shape):
    return [(p.role, p.name.removeprefix("model.layers.3.mlp.experts."), p.dtype[0], p.shape, p.optional)
            for p in parts(fmt, tensor, shape)]  # fmt: skip


def test_plain_is_itself():
    assert described(BF16, NAME, (7, 5)) == [("weight", "5.gate_proj.weight", "BF16", (7, 5), False)]
    assert described(F32, "model.norm.weight", (7,)) == [("weight", "model.norm.weight", "F32", (7,), False)]


@pytest.mark.parametrize(
    ("fmt", "expected"),
    [
        (FP8_BLOCK, [("weight", "5.gate_proj.weight", "F8_E4M3", (576, 256), False),
                     ("scale", "5.gate_proj.weight_scale_inv", "F32", (5, 2), False)]),
        (FP8_BLOCK_E8M0, [("weight", "5.gate_proj.weight", "F8_E4M3", (576, 256), False),
                          ("scale", "5.gate_proj.scale", "F8_E8M0", (5, 2), False)]),
        (FP8_BLOCK_WEIGHT_SCALE, [("weight", "5.gate_proj.weight", "F8_E4M3", (576, 256), False),
                                  ("scale", "5.gate_proj.weight_scale", "F32", (5, 2), False)]),
        (MXFP4_SCALE, [("weight", "5.gate_proj.weight", "I8", (576, 128), False),
                       ("scale", "5.gate_proj.scale", "F8_E8M0", (576, 8), False)]),
        (MXFP4_PACK, [("weight", "5.gate_proj.weight_packed", "U8", (576, 128), False),
                      ("scale", "5.gate_proj.weight_scale", "U8", (576, 8), False)]),
        (NVFP4_PACK, [("weight", "5.gate_proj.weight_packed", "U8", (576, 128), False),
                      ("scale", "5.gate_proj.weight_scale", "F8_E4M3", (576, 16), False),
                      ("tensor_scale", "5.gate_proj.weight_global_scale", "F32", (1,), False),
                      ("input_scale", "5.gate_proj.input_global_scale", "F32", (1,), True)]),
        (NVFP4_MODELOPT, [("weight", "5.gate_proj.weight", "U8", (576, 128), False),
                          ("scale", "5.gate_proj.weight_scale", "F8_E4M3", (576, 16), False),
                          ("tensor_scale", "5.gate_proj.weight_scale_2", "F32", (), False),
                          ("input_scale", "5.gate_proj.input_scale", "F32", (), True)]),
        (INT4_PACK, [("weight", "5.gate_proj.weight_packed", "I32", (576, 32), False),
                     ("scale", "5.gate_proj.weight_scale", "BF16", (576, 8), False),
                     ("shape", "5.gate_proj.weight_shape", "I64", (2,), False)]),
    ],
    ids=lambda v: v.name if hasattr(v, "name") else "",
)  # fmt: skip
def test_parts_of_a_matrix(fmt, expected):
    assert described(fmt, NAME, (576, 256)) == expected


def test_parts_of_stacked_experts_without_a_weight_suffix():
    assert described(MXFP4_INTERLEAVED, "model.layers.3.mlp.experts.gate_up_proj", (32, 5760, 2880)) == [
        ("weight", "gate_up_proj_blocks", "U8", (32, 5760, 90, 16), False),
        ("scale", "gate_up_proj_scales", "U8", (32, 5760, 90), False),
    ]
    assert described(FP8_BLOCK, "model.layers.3.mlp.experts.down_proj", (4, 130, 100))[1] == (
        "scale", "down_proj_scale_inv", "F32", (4, 2, 1), False,
    )  # fmt: skip


def test_both_spellings_of_a_scale_are_allowed():
    scale = parts(MXFP4_PACK, NAME, (2, 32))[1]
    assert scale.misfit("U8", (2, 1)) is None
    assert scale.misfit("F8_E8M0", (2, 1)) is None
    assert scale.misfit("F32", (2, 1)) == "is stored as F32, expected U8 or F8_E8M0"
    assert scale.misfit("U8", (1, 2)) == "has shape [1, 2], expected [2, 1]"


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_scalar_may_have_rank_zero_or_one(shape):
    assert parts(NVFP4_MODELOPT, NAME, (2, 32))[2].misfit("F32", shape) is None
    assert parts(NVFP4_PACK, NAME, (2, 32))[2].misfit("F32", shape) is None


@pytest.mark.parametrize("fmt", QUANTIZED_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("columns", [127, 128, 129, 160, 33])
def test_illegal_sizes_have_a_reason_and_no_parts(fmt, columns):
    legal = fmt.block[0] > 1 or columns % fmt.block[1] == 0
    reason = why_not(fmt, (64, columns))
    assert (reason is None) == legal
    if not legal:
        assert str(columns) in reason
        assert fmt.name in reason
        with pytest.raises(ValueError, match=fmt.name):
            parts(fmt, NAME, (64, columns))


@pytest.mark.parametrize("fmt", QUANTIZED_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(), (128,), (2, 2, 128, 128), (0, 128)])
def test_only_matrices_are_quantised(fmt, shape):
    assert why_not(fmt, shape) is not None


def test_bytes_of_one_routed_expert():
    # Three matrices of 3072 x 3584 lie together as 17,547,264 bytes in a published 1.5 TB checkpoint.
    assert 3 * stored_bytes(MXFP4_PACK, (3072, 3584)) == 17_547_264


def test_bytes_count_scales_but_not_optional_parts():
    assert stored_bytes(FP8_BLOCK, (129, 1)) == 129 + 2 * 4
    assert stored_bytes(NVFP4_PACK, (2, 32)) == 32 + 4 + 4
    assert stored_bytes(INT4_PACK, (2, 32)) == 32 + 2 * 2 + 16
    assert stored_bytes(BF16, (3, 5)) == 30


def test_naming_a_quarter_million_matrices_is_cheap():
    names = [f"model.layers.{i}.mlp.experts.{e}.w1.weight" for i in range(50) for e in range(500)]
    began = time.process_time()
    for name in names:
        parts(MXFP4_PACK, name, (3072, 3584))
    # A tenth of the largest published checkpoint. Measured 0.1 to 0.3 s; the bound allows a busy machine.
    assert time.process_time() - began < 2.0


def test_no_torch():
    code = "import sys, dayzero.checkpoint.formats, dayzero.checkpoint.quant_config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
