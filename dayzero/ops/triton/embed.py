"""Rows of a table by token id. T tokens, V vocabulary, H model width."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.rows import FOLLOWS, follow

__all__ = ["check_machine", "lookup"]

BLOCK = 2048


@triton.jit
def _lookup_kernel(ids, table, out, ids_t, table_v, table_h, vocab, width, BLOCK: tl.constexpr):
    follow()
    token = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    known = tl.load(ids + token * ids_t).to(tl.int64)
    inside = (known >= 0) & (known < vocab)
    row = tl.where(inside, known, 0)
    value = tl.load(table + row * table_v + col.to(tl.int64) * table_h, mask=(col < width) & inside, other=float("nan"))
    tl.store(out + token * width + col, value, mask=col < width)


def lookup(ids_T: Tensor, table_VH: Tensor) -> Tensor:
    """``embed.lookup`` of a float table, without asking the host: a row of an id outside [0, V) is NaN."""
    (tokens,), (vocab, width) = ids_T.shape, table_VH.shape
    out = torch.empty(tokens, width, dtype=table_VH.dtype, device=table_VH.device)
    if out.numel():
        block = min(BLOCK, triton.next_power_of_2(width))
        _lookup_kernel[(tokens, triton.cdiv(width, block))](
            ids_T, table_VH, out, ids_T.stride(0), *table_VH.stride(), vocab, width, BLOCK=block, num_warps=4, **FOLLOWS
        )
    return out
