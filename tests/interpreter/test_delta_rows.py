"""Rows of many tokens of the delta rule in Triton, on a CPU: convolutions and windows by themselves, whole rows beside
others and alone, prompts in pieces, decays of trained models."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.ops import conv, norm
from dayzero.ops.bounds import ELEMENTWISE
from dayzero.ops.cases_delta import Rows, delta_inputs
from dayzero.ops.contract import CONTRACTS
from dayzero.ops.delta_paged import Kept, Raw
from dayzero.ops.random_inputs import Inputs
from dayzero.view import Span
from tests.parity import bitwise_equal, close, moved

triton = pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)

BF16, F32 = torch.bfloat16, torch.float32
POOLS = ("state_NHKV", "q_NCS", "k_NCS", "v_NCS")
# A whole chunk and less, a row that begins, one shorter than its window, one that pads the step.
ROWS: Rows = ((0, 70), (9, 1), (0, 2), (7, 128), (64, 3), (5, 6), (0, 64))


def part_of(given: dict[str, Any], row: int, first: int, last: int) -> dict[str, Any]:
    """The row's tokens first..last as a step of their own, over the same pools."""
    kept, span = given["kept"], given["kept"].spans[row]
    tokens = slice(span.first + first, span.first + last)
    raw = Raw(*(getattr(given["raw"], name)[tokens] for name in Raw.__slots__))
    start, count = span.start + first, last - first
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([0, count], [start])]
    pools = [getattr(kept, name) for name in POOLS]
    own = Kept(*pools, kept.table_R[row : row + 1], *ints, (Span(0, 0, count, start),))
    return {**given, "raw": raw, "kept": own}


def paged(given: dict[str, Any]) -> Tensor:
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
    from dayzero.ops.triton.delta_prefill import _convolved, _rows_of

    given = delta_inputs(Inputs(3), ROWS, heads, widths, dtype, taps=taps, padding=(5,))
    raw, weights, kept, was = given["raw"], given["weights"], given["kept"], moved(given["kept"], "cpu")
    made = _convolved(raw, weights, kept, _rows_of(kept, 0))
    parts = (
        (raw.q_TC, weights.q_taps_CW, was.q_NCS, kept.q_NCS, made[0]),
        (raw.k_TC, weights.k_taps_CW, was.k_NCS, kept.k_NCS, made[1]),
        (raw.v_TC, weights.v_taps_CW, was.v_NCS, kept.v_NCS, made[2]),
    )
    for x_TC, taps_CW, old_NCS, new_NCS, got in parts:
        for span in kept.spans:
            block = int(kept.table_R[span.row])
            known = span.start > 0 and block >= 0
            window = old_NCS[block] if known else torch.zeros_like(old_NCS[0])
            want, after_SC = conv.causal.body(x_TC[span.rows], taps_CW, window.T)
            close(got.flatten(1)[span.rows], want, ELEMENTWISE["bf16" if dtype == BF16 else "f32"].value)
            if block >= 0:
                assert torch.equal(new_NCS[block], after_SC.T), "a window only moves"
                old_NCS[block] = new_NCS[block]
        assert bitwise_equal(old_NCS, new_NCS), "nothing else of the pool is written"


@pytest.mark.parametrize("decay, lower", [("channel", -5.0), ("channel", None), ("head", None)])
def test_rows_beside_others_are_rows_alone_and_right(decay: str, lower: float | None) -> None:
    made = delta_inputs(Inputs(4), ROWS, (4, 2), (16, 16), F32, decay=decay, padding=(5,)) | {"lower": lower}
    together, alone, want = (moved(made, "cpu") for _ in range(3))
    got = paged(together)
    for span in made["kept"].spans:
        assert bitwise_equal(paged(part_of(alone, span.row, 0, span.count)), got[span.rows])
    bound = CONTRACTS["recurrence.paged"].bound["f32"].value
    close(got, CONTRACTS["recurrence.paged"].body(**want), bound)
    for name in POOLS:
        assert bitwise_equal(getattr(together["kept"], name), getattr(alone["kept"], name))
        close(getattr(together["kept"], name).nan_to_num(), getattr(want["kept"], name).nan_to_num(), bound)


def test_a_prompt_in_pieces_leaves_the_same_outputs_states_and_windows() -> None:
    """Pieces that end where chunks do: what a snapshot at a page's end holds is what the whole run had there."""
    made = delta_inputs(Inputs(5), ((7, 200),), (2, 2), (16, 16), F32) | {"lower": -5.0}
    whole, pieces = (moved(made, "cpu") for _ in range(2))
    want = paged(whole)
    cuts = (0, 64, 192, 200)
    got = torch.cat([paged(part_of(pieces, 0, *cut)) for cut in pairwise(cuts)])
    assert bitwise_equal(got, want)
    for name in POOLS:
        assert bitwise_equal(getattr(pieces["kept"], name), getattr(whole["kept"], name))


@pytest.mark.parametrize("act", ["silu", "sigmoid"])
@pytest.mark.parametrize("sizes, dtype", [((5, 3, 20), F32), ((4, 17, 128), BF16), ((1, 32, 16), BF16)])
def test_the_output_norm_is_right_for_any_heads(act: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    from dayzero.ops.triton.delta_prefill import _normed

    tokens, heads, width = sizes
    r = Inputs(tokens)
    out = r.normal(tokens, heads, width, dtype=dtype)
    joint = r.normal(tokens, 4 + heads * width, dtype=dtype) * 20  # 1 + e^-x is infinite for some
    gate, weight = joint[:, 4:], r.normal(width)
    want = norm.rms_gated.body(out, gate.unflatten(1, (heads, width)), weight, eps=1e-5, act=act)
    _normed(out, gate, weight, 1e-5, act)
    close(out, want, ELEMENTWISE["bf16" if dtype == BF16 else "f32"].value)
