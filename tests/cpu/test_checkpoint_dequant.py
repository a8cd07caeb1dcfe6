"""Decoders against the definition, other libraries and the oracle's own reader."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from safetensors.torch import save_file

from dayzero.checkpoint.dequant import (
    dequantize,
    e2m1_table,
    e4m3_table,
    e8m0_table,
    int4_table,
    quantize,
)
from dayzero.checkpoint.formats import parts
from dayzero.decl import (
    BF16,
    F16,
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
from dayzero.errors import CheckpointError
from dayzero.oracles.decode import open_checkpoint

FP8_FORMATS = (FP8_BLOCK, FP8_BLOCK_E8M0, FP8_BLOCK_WEIGHT_SCALE)
GROUP_FORMATS = tuple(f for f in QUANTIZED_FORMATS if f not in FP8_FORMATS)
MXFP4_FORMATS = (MXFP4_SCALE, MXFP4_INTERLEAVED, MXFP4_PACK)
NVFP4_FORMATS = (NVFP4_PACK, NVFP4_MODELOPT)
by_name = pytest.mark.parametrize("fmt", QUANTIZED_FORMATS, ids=lambda f: f.name)


def random_weight(shape, seed=0, spread=3.0):
    """Rows of very different size, so that a scale applied to the wrong row shows."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator)
    return weight * torch.exp(spread * torch.randn((*shape[:-1], 1), generator=generator))


def same(a, b):
    """Equal bits, NaNs and the sign of zero included."""
    assert a.dtype == b.dtype
    view = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}[a.dtype]
    nan = a.isnan() & b.isnan()
    return bool(((a.view(view) == b.view(view)) | nan).all())


def write(folder, name, fmt, held, shape, config=None):
    named = {p.name: held[p.role].contiguous() for p in parts(fmt, name, shape) if p.role in held}
    save_file(named, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config or {}))
    return open_checkpoint(folder)


# -- element and scale codes ------------------------------------------------------------------------------------------


def test_e4m3_table_equals_torchs_type_on_all_256_codes():
    assert same(e4m3_table(), torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float())


def test_e8m0_table_equals_torchs_type_on_all_256_codes():
    assert same(e8m0_table(), torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).float())
    assert e8m0_table()[0].item() == 2.0**-127


def test_e2m1_table_from_bit_fields():
    for code, value in enumerate(e2m1_table().tolist()):
        sign, exponent, mantissa = -1 if code & 8 else 1, code >> 1 & 3, code & 1
        expected = sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2 ** (exponent - 1))
        assert value == expected
        assert math.copysign(1, value) == sign


@pytest.mark.parametrize("fmt", MXFP4_FORMATS, ids=lambda f: f.name)
def test_fp4_codes_times_all_e8m0_scales(fmt, tmp_path):
    # Row u has scale code u and every element code twice: 255 is NaN and from 253 on the largest codes overflow f32.
    shape = (253, 32)
    packed = torch.tensor([c | (15 - c) << 4 for c in range(16)], dtype=torch.uint8).repeat(253, 1)
    scale = torch.arange(253, dtype=torch.uint8)[:, None]
    weight_part, scale_part = parts(fmt, "w.weight", shape)
    held = {"weight": packed.reshape(weight_part.shape), "scale": scale.reshape(scale_part.shape)}
    if weight_part.dtype[0] == "I8":
        held["weight"] = held["weight"].view(torch.int8)
    out = dequantize(fmt, held, shape)
    codes = torch.tensor([[c, 15 - c] for c in range(16)]).flatten()
    # Float64 holds value x 2^(u - 127) exactly, and so does f32: the smallest is 2^-128, a subnormal.
    exact = e2m1_table().double()[codes] * torch.exp2(torch.arange(253, dtype=torch.float64) - 127)[:, None]
    assert torch.equal(out.double(), exact)
    assert same(write(tmp_path, "w.weight", fmt, held, shape).tensor("w.weight"), out)
    too_large = r"w\.weight: the value at index \[7, "
    for code, message in ((255, r"w\.weight: scale at index \[7, 0\] is nan"), (254, too_large), (253, too_large)):
        held["scale"] = torch.full((253, 1), 127, dtype=torch.uint8)
        held["scale"][7] = code
        with pytest.raises(CheckpointError, match=message):
            dequantize(fmt, held, shape, tensor="w.weight")


@pytest.mark.parametrize("code", [253, 254])
def test_the_largest_e8m0_scales_decode_what_f32_can_hold(code):
    held = {"weight": torch.tensor([[0x0, 0x91, 0xA2, 0xB3] * 4], dtype=torch.uint8)}
    held["scale"] = torch.tensor([[code]], dtype=torch.uint8)
    values = [0, 0, 0.5, -0.5, 1, -1, 1.5, -1.5] * 4
    assert dequantize(MXFP4_PACK, held, (1, 32)).double().tolist() == [[v * 2.0 ** (code - 127) for v in values]]


def test_all_e4m3_codes_under_all_finite_e8m0_scales(tmp_path):
    shape = (2 * 128, 119 * 128)  # scales 2^-118 .. 2^118: products stay in f32's range
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(shape[1]).reshape(256, -1)
    held = {
        "weight": codes.view(torch.float8_e4m3fn),
        "scale": torch.arange(9, 9 + 238, dtype=torch.uint8).reshape(2, 119).view(torch.float8_e8m0fnu),
    }
    out = dequantize(FP8_BLOCK_E8M0, held, shape)
    scale = torch.exp2(held["scale"].view(torch.uint8).double() - 127)
    exact = (e4m3_table().double()[:, None] * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)).float()
    assert same(out, exact)
    assert same(write(tmp_path, "w.weight", FP8_BLOCK_E8M0, held, shape).tensor("w.weight"), out)


@pytest.mark.parametrize("fmt", NVFP4_FORMATS, ids=lambda f: f.name)
def test_fp4_codes_times_all_e4m3_scales_round_once(fmt, tmp_path):
    scales = [c for c in range(256) if c & 127 != 127]
    shape = (len(scales), 16)
    held = {
        "weight": torch.tensor([2 * k | (2 * k + 1) << 4 for k in range(8)], dtype=torch.uint8).repeat(len(scales), 1),
        "scale": torch.tensor(scales, dtype=torch.uint8)[:, None].view(torch.float8_e4m3fn),
        "tensor_scale": torch.tensor([0.1234567]),
    }
    out = dequantize(fmt, held, shape)
    factor = Fraction(held["tensor_scale"].item())
    values, steps = e2m1_table().tolist(), e4m3_table()[torch.tensor(scales)].tolist()
    for row, step in zip(out.tolist(), steps, strict=True):
        for got, value in zip(row, values, strict=True):
            product = Fraction(value) * Fraction(step)
            exact = product / factor if fmt.tensor_scale == "divide" else product * factor
            # float(Fraction) rounds once to 53 bits, and 53 bits are too many for the second rounding to matter.
            assert got == torch.tensor(float(exact), dtype=torch.float64).float().item()
    assert same(write(tmp_path, "w.weight", fmt, held, shape).tensor("w.weight"), out)


def test_all_int4_codes_lowest_bits_first(tmp_path):
    words = [0x76543210, 0xFEDCBA98, 0x01234567, 0x89ABCDEF]
    held = {
        "weight": torch.tensor([w - (w >> 31 << 32) for w in words], dtype=torch.int32)[None],
        "scale": torch.tensor([[3.0]], dtype=torch.bfloat16),
        "shape": torch.tensor([1, 32]),
    }
    expected = [w >> 4 * j & 15 for w in words for j in range(8)]
    out = dequantize(INT4_PACK, held, (1, 32))
    assert out.tolist() == [[3.0 * (code - 8) for code in expected]]
    assert int4_table().tolist() == list(range(-8, 8))
    assert same(write(tmp_path, "w.weight", INT4_PACK, held, (1, 32)).tensor("w.weight"), out)


# -- against other libraries ------------------------------------------------------------------------------------------


def test_interleaved_mxfp4_equals_transformers():
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    shape = (3, 70, 96)
    held = quantize(MXFP4_INTERLEAVED, random_weight(shape))
    for dtype in (torch.float32, torch.bfloat16):
        theirs = mxfp4.convert_moe_packed_tensors(held["weight"], held["scale"], dtype=dtype)
        # Theirs is [E, in, out]; in bf16 both are exact, as 2 significant bits times a power of two.
        assert same(theirs.transpose(1, 2).contiguous(), dequantize(MXFP4_INTERLEAVED, held, shape, dtype))


def scheme_of(compressed_format, **args):
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=quantization.QuantizationArgs(**args))
    return compressors.BaseCompressor.get_value_from_registry(compressed_format), scheme


def test_mxfp4_pack_equals_compressed_tensors():
    compressor, scheme = scheme_of("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32)
    held = quantize(MXFP4_PACK, random_weight((70, 96)))
    state = {"weight_packed": held["weight"], "weight_scale": held["scale"]}
    theirs = compressor.decompress(state, scheme)["weight"]
    assert same(theirs, dequantize(MXFP4_PACK, held, (70, 96), torch.bfloat16))


def test_int4_pack_equals_compressed_tensors_both_ways():
    compressor, scheme = scheme_of("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)
    weight = random_weight((70, 96))
    held = quantize(INT4_PACK, weight)
    state = {"weight_packed": held["weight"], "weight_scale": held["scale"], "weight_shape": held["shape"]}
    theirs = compressor.decompress(state, scheme)["weight"]
    # The library multiplies in the scale's type: one rounding of the same exact product to bf16.
    assert same(theirs, dequantize(INT4_PACK, held, (70, 96), torch.bfloat16))
    packed = compressor.compress({"weight": theirs, "weight_scale": held["scale"]}, scheme)
    assert torch.equal(packed["weight_packed"], held["weight"])
    assert packed["weight_shape"].tolist() == held["shape"].tolist()


@pytest.mark.parametrize("global_scale", [32.0, 1377.0])
def test_nvfp4_pack_equals_compressed_tensors(global_scale):
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    _, scheme = scheme_of("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
    held = quantize(NVFP4_PACK, random_weight((70, 96)))
    held["tensor_scale"] = torch.tensor([global_scale])
    elements = helpers.unpack_fp4_from_uint8(held["weight"], 70, 96, dtype=torch.float32)
    theirs = forward.dequantize(
        elements, held["scale"].float(), args=scheme.weights, global_scale=held["tensor_scale"], dtype=torch.float32
    )
    ours = dequantize(NVFP4_PACK, held, (70, 96))
    if global_scale == 32.0:
        assert torch.equal(theirs, ours)
    else:
        # Theirs rounds scale / global before multiplying, ours only the result: at most one unit in the last place.
        assert ((theirs - ours).abs() <= ours.abs() * 2.0**-23).all()


def test_float_quantized_block_fp8_equals_compressed_tensors():
    compressor, scheme = scheme_of(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]
    )
    shape = (255, 129)
    held = quantize(FP8_BLOCK_WEIGHT_SCALE, random_weight(shape))
    state = {"weight": held["weight"], "weight_scale": held["scale"]}
    assert torch.equal(compressor.decompress(state, scheme)["weight"], dequantize(FP8_BLOCK_WEIGHT_SCALE, held, shape))


# -- against the oracle's own reader ----------------------------------------------------------------------------------

SIZES = (128, 129, 255)


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("num_rows", SIZES)
@pytest.mark.parametrize("num_columns", SIZES)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_ragged_fp8_blocks_equal_the_oracle(fmt, num_rows, num_columns, lead, tmp_path):
    shape = (*lead, num_rows, num_columns)
    held = quantize(fmt, random_weight(shape))
    if fmt.scale == "f32":  # scales whose products need more bits than f32 has
        held["scale"] *= 1 + torch.rand(held["scale"].shape, generator=torch.Generator().manual_seed(1))
    assert held["scale"].shape == (*lead, math.ceil(num_rows / 128), math.ceil(num_columns / 128))
    reader = write(tmp_path, "a.weight", fmt, held, shape)
    for dtype in (torch.float32, torch.bfloat16):
        assert same(reader.tensor("a.weight", dtype), dequantize(fmt, held, shape, dtype))


@pytest.mark.parametrize("fmt", FP8_FORMATS, ids=lambda f: f.name)
def test_every_element_takes_the_scale_of_its_own_block(fmt):
    shape = (257, 130)
    held = {"weight": torch.ones(shape).to(torch.float8_e4m3fn), "scale": torch.exp2(torch.arange(6.0).reshape(3, 2))}
    if fmt.scale == "e8m0":
        held["scale"] = held["scale"].to(torch.float8_e8m0fnu)
    out = dequantize(fmt, held, shape)
    for row, column in ((0, 0), (127, 127), (127, 128), (128, 127), (255, 129), (256, 0), (256, 129)):
        assert out[row, column].item() == 2.0 ** (row // 128 * 2 + column // 128)


@pytest.mark.parametrize("fmt", GROUP_FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("shape", [(1, 32), (127, 96), (3, 70, 160)], ids=str)
def test_packed_formats_equal_the_oracle(fmt, shape, tmp_path):
    held = quantize(fmt, random_weight(shape))
    name = "a.experts.up_proj" if fmt is MXFP4_INTERLEAVED else "a.weight"
    reader = write(tmp_path, name, fmt, held, shape)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        if dtype == torch.float16 and held["scale"].numel() and dequantize(fmt, held, shape).abs().max() > 65504:
            continue
        assert same(reader.tensor(name, dtype), dequantize(fmt, held, shape, dtype))


def test_other_block_sizes_come_from_the_config(tmp_path):
    fmt, shape = replace(FP8_BLOCK, block=(32, 32)), (70, 65)
    held = quantize(fmt, random_weight(shape))
    assert held["scale"].shape == (3, 3)
    claim = {"text_config": {"quantization_config": {"weight_block_size": [32, 32]}}}
    reader = write(tmp_path, "a.weight", fmt, held, shape, claim)
    assert same(reader.tensor("a.weight"), dequantize(fmt, held, shape))


@pytest.mark.parametrize(("fmt", "dtype"), [(F32, torch.float32), (BF16, torch.bfloat16), (F16, torch.float16)])
def test_plain_tensors(fmt, dtype, tmp_path):
    weight = torch.randn(5, 7)
    held = quantize(fmt, weight)
    assert held["weight"].dtype == dtype
    assert same(dequantize(fmt, held, (5, 7), torch.float32), weight.to(dtype).float())
    assert same(write(tmp_path, "a.weight", fmt, held, (5, 7)).tensor("a.weight"), weight.to(dtype).float())


# -- views, poison, damage --------------------------------------------------------------------------------------------


@by_name
def test_parts_that_are_views_into_poison_decode_the_same_and_stay_unchanged(fmt):
    shape = (2, 130, 160)
    held = quantize(fmt, random_weight(shape))
    expected = dequantize(fmt, held, shape)
    views = {}
    for role, part in held.items():
        if part.dim() != len(shape) and part.dim() != 4:
            views[role] = part
            continue
        # All bits set is NaN in every floating type and a wrong code in every integer one.
        wide_shape = (part.shape[0], part.shape[1] + 2, *part.shape[2:-1], part.shape[-1] * part.element_size() + 8)
        wide = torch.full(wide_shape, 255, dtype=torch.uint8).view(part.dtype)
        views[role] = wide[:, 1:-1, ..., : part.shape[-1]]
        views[role].copy_(part)
        assert not views[role].is_contiguous()
    views["input_scale"] = torch.full((2,), torch.nan)
    before = {role: view.clone() for role, view in views.items()}
    assert same(dequantize(fmt, views, shape), expected)
    for role, view in views.items():
        assert torch.equal(view.contiguous().view(torch.uint8), before[role].contiguous().view(torch.uint8))


@by_name
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_scale_that_is_not_finite_is_named_with_its_index(fmt, bad):
    shape = (130, 256)
    held = quantize(fmt, random_weight(shape))
    if fmt.scale in ("e8m0", "e4m3"):
        spot = held["scale"].view(torch.uint8)
        spot[1, 1] = 255  # the only code of either type that is no number
        bad = torch.nan
    else:
        held["scale"][1, 1] = bad
    with pytest.raises(CheckpointError, match=rf"m\.weight: scale at index \[1, 1\] is {bad}"):
        dequantize(fmt, held, shape, tensor="m.weight")


@pytest.mark.parametrize("fmt", NVFP4_FORMATS, ids=lambda f: f.name)
def test_a_tensor_scale_that_is_no_number_is_named(fmt):
    held = quantize(fmt, random_weight((4, 32)))
    held["tensor_scale"] = held["tensor_scale"] * torch.nan
    with pytest.raises(CheckpointError, match=r"m\.weight: tensor scale at index \[0\] is nan"):
        dequantize(fmt, held, (4, 32), tensor="m.weight")


def test_dividing_by_a_zero_tensor_scale_is_refused():
    held = quantize(NVFP4_PACK, random_weight((4, 32))) | {"tensor_scale": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="tensor scale is 0"):
        dequantize(NVFP4_PACK, held, (4, 32))


@by_name
def test_missing_transposed_and_mistyped_parts_are_named(fmt):
    shape = (130, 256)
    held = quantize(fmt, random_weight(shape))
    scale_name = parts(fmt, "m.weight", shape)[1].name.replace(".", r"\.")
    with pytest.raises(CheckpointError, match=f"{scale_name} is missing"):
        dequantize(fmt, {"weight": held["weight"]}, shape, tensor="m.weight")
    if held["scale"].shape[0] != held["scale"].shape[1]:
        with pytest.raises(CheckpointError, match=f"{scale_name} has shape"):
            dequantize(fmt, held | {"scale": held["scale"].t()}, shape, tensor="m.weight")
    with pytest.raises(CheckpointError, match=f"{scale_name} is stored as I64"):
        dequantize(fmt, held | {"scale": held["scale"].view(torch.uint8).long()}, shape, tensor="m.weight")


def test_int4_shape_tensor_must_agree():
    held = quantize(INT4_PACK, random_weight((4, 32))) | {"shape": torch.tensor([4, 31])}
    with pytest.raises(CheckpointError, match=r"m\.weight_shape says \[4, 31\]"):
        dequantize(INT4_PACK, held, (4, 32), tensor="m.weight")


def test_a_value_too_large_for_the_asked_type_is_refused():
    held = quantize(FP8_BLOCK, torch.full((2, 2), 1e6))
    assert dequantize(FP8_BLOCK, held, (2, 2)).isfinite().all()
    with pytest.raises(CheckpointError, match=r"index \[0, 0\] is too large for torch\.float16"):
        dequantize(FP8_BLOCK, held, (2, 2), torch.float16)
