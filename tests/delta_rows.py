"""What is held of rows of many tokens of ``recurrence.paged`` on any device: for tests/interpreter and tests/gpu."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from dayzero.ops import conv
from dayzero.ops.bounds import ELEMENTWISE
from dayzero.ops.delta_paged import Kept, Raw
from dayzero.view import Span
from tests.parity import ELEMENT, bitwise_equal, close, moved

POOLS = ("state_NHKV", "q_NCS", "k_NCS", "v_NCS")
Given = dict[str, Any]  # arguments of ``recurrence.paged``
Run = Callable[[Given], Tensor]


def part_of(given: Given, row: int, first: int, last: int) -> Given:
    """The row's tokens first..last as a step of their own, over the same pools."""
    kept, span = given["kept"], given["kept"].spans[row]
    tokens = slice(span.first + first, span.first + last)
    raw = Raw(*(getattr(given["raw"], name)[tokens] for name in Raw.__slots__))
    start, count = span.start + first, last - first
    ints = [torch.tensor(x, dtype=torch.int32, device=kept.start.device) for x in ([0, count], [start])]
    pools = [getattr(kept, name) for name in POOLS]
    own = Kept(*pools, kept.table_R[row : row + 1], *ints, (Span(0, 0, count, start),))
    return {**given, "raw": raw, "kept": own}


def joint(given: Given, more: int) -> Given:
    """q, k, v and beta as parts of one product's rows, with so many other columns among them; the rest packed."""
    raw = given["raw"]
    parts = [raw.q_TC, raw.k_TC, raw.v_TC, raw.v_TC.new_full((raw.v_TC.shape[0], more), torch.nan), raw.beta_TH]
    q_TC, k_TC, v_TC, _, beta_TH = torch.cat(parts, dim=1).split([x.shape[1] for x in parts], dim=1)
    return {**given, "raw": replace(raw, q_TC=q_TC, k_TC=k_TC, v_TC=v_TC, beta_TH=beta_TH)}


def check_convolutions(given: Given) -> None:
    """Right to one rounding; windows are those of the reference to the bit, and nothing else of their pools changes."""
    from dayzero.ops.triton.delta_prefill import _convolved, _rows_of

    raw, weights, kept = given["raw"], given["weights"], given["kept"]
    was = moved(kept, str(raw.q_TC.device))
    made = _convolved(raw, weights, kept, _rows_of(kept, 0))
    parts = (
        (raw.q_TC, weights.q_taps_CW, was.q_NCS, kept.q_NCS, made[0]),
        (raw.k_TC, weights.k_taps_CW, was.k_NCS, kept.k_NCS, made[1]),
        (raw.v_TC, weights.v_taps_CW, was.v_NCS, kept.v_NCS, made[2]),
    )
    for x_TC, taps_CW, old_NCS, new_NCS, got in parts:
        for span in kept.spans:
            block = int(kept.table_R[span.row])
            window = old_NCS[block] if span.start > 0 and block >= 0 else torch.zeros_like(old_NCS[0])
            want, after_SC = conv.causal.body(x_TC[span.rows], taps_CW, window.T)
            close(got.flatten(1)[span.rows], want, ELEMENTWISE[ELEMENT[x_TC.dtype]].value)
            if block >= 0:
                assert torch.equal(new_NCS[block], after_SC.T), "a window only moves"
                old_NCS[block] = new_NCS[block]
        assert bitwise_equal(old_NCS, new_NCS), "nothing else of the pool is written"


def check_alone(run: Run, given: Given) -> Tensor:
    """Each row comes to the same bits alone, and leaves the same. What all rows give together."""
    together, alone = (moved(given, str(given["raw"].q_TC.device)) for _ in range(2))
    got = run(together)
    for span in given["kept"].spans:
        assert bitwise_equal(run(part_of(alone, span.row, 0, span.count)), got[span.rows])
    for name in POOLS:
        assert bitwise_equal(getattr(together["kept"], name), getattr(alone["kept"], name))
    return got


def check_pieces(run: Run, given: Given, cuts: Sequence[int]) -> None:
    """The first row in pieces that end where chunks do: what a snapshot at a page's end holds is what the whole run had
    there, and all that follows is the same to the bit."""
    whole, pieces = (moved(given, str(given["raw"].q_TC.device)) for _ in range(2))
    want = run(whole)
    got = torch.cat([run(part_of(pieces, 0, *cut)) for cut in pairwise(cuts)])
    assert bitwise_equal(got, want)
    for name in POOLS:
        assert bitwise_equal(getattr(pieces["kept"], name), getattr(whole["kept"], name))
