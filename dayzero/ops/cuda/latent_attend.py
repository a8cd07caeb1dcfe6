"""``latent.attend`` with ``latent_decode`` for the absorbed form; records in bf16 or of 656 bytes.

``attend`` computes the expanded form in Triton, ``attend_chunks`` by ``latent_prefill`` where that has the widths.
"""

from __future__ import annotations

from torch import Tensor

from dayzero.ops.cuda import latent_prefill
from dayzero.ops.cuda.build import check_machine
from dayzero.ops.cuda.paged import paged
from dayzero.ops.latent_forms import Widths
from dayzero.ops.latent_steps import Expanded, Sums, attend_by
from dayzero.ops.triton import latent_attend as in_triton
from dayzero.view import Paged

__all__ = ["attend", "attend_chunks", "check_machine", "chunk"]

ABSORBED = in_triton.ABSORBED._replace(paged=paged)


def chunk(q_THD: Tensor, keys: Expanded, sums: Sums, out_THV: Tensor, widths: Widths, scale: float) -> None:
    """``Chunk`` of ``ops/latent_steps``. Which kernel runs follows from widths, and where keys are divided."""
    by = latent_prefill if latent_prefill.takes(q_THD, keys, widths) else in_triton
    by.chunk(q_THD, keys, sums, out_THV, widths, scale)


def attend(q_THD: Tensor, rows: Paged, kv_b: Tensor, *, scale: float) -> Tensor:
    """``latent.attend``. In a graph, as ``attention.paged``."""
    return attend_by(ABSORBED, in_triton.chunk, q_THD, rows, kv_b, scale)


def attend_chunks(q_THD: Tensor, rows: Paged, kv_b: Tensor, *, scale: float) -> Tensor:
    """The same with chunks by a kernel in CUDA C++."""
    return attend_by(ABSORBED, chunk, q_THD, rows, kv_b, scale)
