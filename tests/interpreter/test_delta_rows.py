"""Rows of many tokens of the delta rule in Triton, on a CPU: convolutions and windows by themselves, whole rows beside
others and alone, prompts in pieces, decays of trained models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dayzero.ops import norm
from dayzero.ops.bounds import ELEMENTWISE
from dayzero.ops.cases_delta import Rows, delta_inputs
from dayzero.ops.contract import CONTRACTS
from dayzero.ops.random_inputs import Inputs
from tests.delta_rows import POOLS, Given, check_alone, check_convolutions, check_pieces, joint
from tests.parity import close, moved

triton = pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)

BF16, F32 = torch.bfloat16, torch.float32
# Chunks with and without a rest, a row of one token, one shorter than its window, one that pads the step.
ROWS: Rows = ((0, 70), (9, 1), (0, 2), (7, 67), (64, 3), (5, 6), (0, 64))


def paged(given: Given) -> Tensor:
    """``recurrence.paged`` with rows of one token in chunks too."""
    from dayzero.ops.triton.delta_paged import empty_out
    from dayzero.ops.triton.delta_prefill import prefill

    raw, weights, kept = (given[name] for name in ("raw", "weights", "kept"))
    out_THV = empty_out(raw, kept)
    prefill(out_THV, raw, weights, kept, 0, **{name: given[name] for name in ("eps", "act", "lower") if name in given})
    return out_THV


@pytest.mark.parametrize(
    "heads, widths, dtype, taps",
    [
        ((3, 3), (16, 16), BF16, 4), ((4, 2), (12, 20), F32, 4), ((16, 8), (128, 128), BF16, 4),
        ((2, 1), (16, 8), F32, 2), ((2, 2), (16, 16), F32, 3), ((2, 2), (16, 16), BF16, 7), ((2, 2), (16, 16), F32, 1),
        ((9, 9), (128, 128), BF16, 4),
    ],
)  # fmt: skip
def test_convolutions_are_right_and_windows_only_move(
    heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, taps: int
) -> None:
    check_convolutions(delta_inputs(Inputs(3), ROWS, heads, widths, dtype, taps=taps, padding=(5,)))


@pytest.mark.parametrize("more", [1, 4, 16])
def test_convolutions_of_parts_of_a_joint_product(more: int) -> None:
    check_convolutions(joint(delta_inputs(Inputs(3), ((0, 70), (9, 5)), (4, 4), (16, 16), BF16), more))


@pytest.mark.parametrize("decay, lower", [("channel", -5.0), ("channel", None), ("head", None)])
def test_rows_beside_others_are_rows_alone_and_right(decay: str, lower: float | None) -> None:
    made = delta_inputs(Inputs(4), ROWS, (4, 2), (16, 16), F32, decay=decay, padding=(5,)) | {"lower": lower}
    want, twin = (moved(made, "cpu") for _ in range(2))
    bound = CONTRACTS["recurrence.paged"].bound["f32"].value
    close(check_alone(paged, made), CONTRACTS["recurrence.paged"].body(**want), bound)
    paged(twin)
    for name in POOLS:
        close(getattr(twin["kept"], name).nan_to_num(), getattr(want["kept"], name).nan_to_num(), bound)


def test_a_prompt_in_pieces_leaves_the_same_outputs_states_and_windows() -> None:
    made = delta_inputs(Inputs(5), ((7, 200),), (2, 2), (16, 16), F32) | {"lower": -5.0}
    check_pieces(paged, made, (0, 64, 192, 200))


@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize("sizes, dtype", [((5, 3, 20), F32), ((4, 17, 128), BF16), ((1, 32, 16), BF16)])
def test_the_output_norm_is_right_for_any_heads(act: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    from dayzero.ops.triton.delta_chunk_run import Finish, normed

    tokens, heads, width = sizes
    r = Inputs(tokens)
    out = r.normal(tokens, heads, width, dtype=dtype)
    joined = r.normal(tokens, 4 + heads * width, dtype=dtype) * 20  # 1 + e^-x is infinite for some
    gate, weight = joined[:, 4:], r.normal(width)
    want = norm.rms_gated.body(out, gate.unflatten(1, (heads, width)), weight, eps=1e-5, act=act)
    others = out[:1].clone()
    given = torch.cat([others, out]), torch.cat([gate[:1], gate])
    normed(given[0], Finish(given[1], weight, 1e-5, act == "silu", 1))
    assert torch.equal(given[0][:1], others), "tokens before the rows are left alone"
    close(given[0][1:], want, ELEMENTWISE["bf16" if dtype == BF16 else "f32"].value)
