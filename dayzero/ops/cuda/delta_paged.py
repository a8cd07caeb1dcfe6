"""``recurrence.paged`` in CUDA C++: rows of one token, which come first, and longer ones in chunks."""

from __future__ import annotations

from torch import Tensor

from dayzero.ops.cuda.build import check_machine
from dayzero.ops.cuda.delta_chunk import prefill
from dayzero.ops.cuda.delta_decode import LARGEST_GROUP, decode
from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.triton.delta_decode import recurrent
from dayzero.ops.triton.delta_paged import empty_out

__all__ = ["check_machine", "paged"]


def paged(raw: Raw, weights: Weights, kept: Kept, *, eps: float, act: str, lower: float | None = None) -> Tensor:
    """``recurrence.paged`` for K = V = 128, four taps, bf16. With more than eight value heads a key head in Triton."""
    out_THV = empty_out(raw, kept)
    if raw.v_TC.shape[1] > LARGEST_GROUP * raw.q_TC.shape[1]:
        recurrent(out_THV, raw, weights, kept, range(kept.num_single), eps=eps, act=act, lower=lower)
    else:
        decode(out_THV, raw, weights, kept, eps=eps, act=act, lower=lower)
    if kept.num_single < len(kept.spans):
        prefill(out_THV, raw, weights, kept, kept.num_single, eps=eps, act=act, lower=lower)
    return out_THV
