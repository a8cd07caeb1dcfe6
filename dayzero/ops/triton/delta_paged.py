"""``recurrence.paged`` in Triton: rows of one token, which come first, and longer ones."""

from __future__ import annotations

from torch import Tensor

from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.triton.delta_decode import recurrent
from dayzero.ops.triton.delta_prefill import prefill
from dayzero.ops.triton.machine import check_machine

__all__ = ["check_machine", "empty_out", "paged"]


def paged(raw: Raw, weights: Weights, kept: Kept, *, eps: float, act: str, lower: float | None = None) -> Tensor:
    """``recurrence.paged`` for any widths, taps and dtype."""
    out_THV = empty_out(raw, kept)
    recurrent(out_THV, raw, weights, kept, range(kept.num_single), eps=eps, act=act, lower=lower)
    if kept.num_single < len(kept.spans):
        prefill(out_THV, raw, weights, kept, kept.num_single, eps=eps, act=act, lower=lower)
    return out_THV


def empty_out(raw: Raw, kept: Kept) -> Tensor:
    """Room for [T, H, V] in the dtype of the projections."""
    return raw.v_TC.new_empty(raw.v_TC.shape[0], kept.state_NHKV.shape[1], kept.state_NHKV.shape[3])
