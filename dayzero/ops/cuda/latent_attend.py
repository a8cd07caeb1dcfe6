"""``latent.attend`` with ``latent_decode`` for the absorbed form; records in bf16 or of 656 bytes."""

from __future__ import annotations

from torch import Tensor

from dayzero.ops.cuda.build import check_machine
from dayzero.ops.cuda.paged import paged
from dayzero.ops.triton.latent_attend import attend_by, chunk
from dayzero.view import Paged

__all__ = ["attend", "check_machine", "chunk"]


def attend(q_THD: Tensor, rows: Paged, kv_b: Tensor, *, scale: float) -> Tensor:
    """``latent.attend``. In a graph, as ``attention.paged``."""
    return attend_by(paged, chunk, q_THD, rows, kv_b, scale)
