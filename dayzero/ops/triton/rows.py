"""Rows of tensors with any strides, as kernels over rows take them; and how short kernels follow each other.

A tensor of any shape is seen as [A, B, D]: row r is [r // B, r % B], of width D.

A kernel that is launched with ``FOLLOWS`` and begins with ``follow()`` lets the next one of the stream be launched
while it still runs, and itself touches memory only once the one ahead of it has ended: launches overlap, work does not
(programmatic dependent launch). Whoever comes next and does not wait by itself is held back as always.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dayzero.ops.triton.machine import INTERPRETED

FOLLOWS: dict[str, bool] = {} if INTERPRETED else {"launch_pdl": True}
_ALONE = tl.constexpr(INTERPRETED)


class Rows(NamedTuple):
    """x as [A, B, D]; a copy only where leading dimensions cannot be seen as two."""

    x: Tensor
    inner: int
    stride_a: int
    stride_b: int
    stride_d: int

    @property
    def num(self) -> int:
        return self.x.shape[0] * self.x.shape[1]

    @property
    def width(self) -> int:
        return self.x.shape[2]


def rows_of(x: Tensor) -> Rows:
    """``x`` [..., D] as rows."""
    if x.dim() == 2:
        x = x[:, None]
    elif x.dim() != 3:
        x = x.reshape(1, 1, -1) if x.dim() < 2 else x.flatten(0, -3)
    return Rows(x, x.shape[1], *x.stride())


def num_rows_at_once(rows: int, width: int, elements: int) -> int:
    """Rows of a program, a power of two: about ``elements`` numbers, fewer where rows are too few to fill a chip."""
    most = max(1, elements // width)
    return most if rows >= 1024 * most else max(1, most // 8)


@triton.jit
def follow():
    """First in a kernel: see above."""
    if not _ALONE:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def row_starts(first, count, inner, stride_a, stride_b, ROWS: tl.constexpr):
    """([ROWS] int64 offset of each row's first element, [ROWS] whether there is such a row)."""
    row_R = first + tl.arange(0, ROWS)
    start_R = (row_R // inner).to(tl.int64) * stride_a + (row_R % inner).to(tl.int64) * stride_b
    return start_R, row_R < count
