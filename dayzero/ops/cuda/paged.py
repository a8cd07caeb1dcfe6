"""``attention.paged`` by kernels in CUDA C++ where they read the records, and by those in Triton elsewhere.

Grouped heads of widths 64 and 128: ``paged_decode`` for rows of one token, ``paged_prefill`` for others. Latent rows of
512 + 64: ``latent_decode``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dayzero.ops.cuda import latent_decode, paged_decode, paged_prefill
from dayzero.ops.cuda.build import check_machine
from dayzero.ops.triton import paged_prefill as in_triton
from dayzero.ops.triton.paged_decode import decode, shape_of
from dayzero.view import Paged

__all__ = ["check_machine", "paged"]


def paged(
    q_THD: Tensor,
    keys: Paged,
    values: Paged | None,
    *,
    scale: float,
    value_dim: int = 0,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``attention.paged``: (out [T, H, V] in q's dtype, lse [T, H] f32). Products take q in bf16.

    How latent rows are split follows from how many queries and heads a step has, and the last bits of a result from
    that. For grouped heads a row's result depends on nothing beside it.
    """
    options: dict[str, Any] = {"scale": scale, "window": window, "sinks_H": sinks_H, "softcap": softcap}
    if values is None:
        if window is None and softcap is None and latent_decode.takes(q_THD, keys, value_dim):
            return latent_decode.latent(q_THD, keys, scale=scale, sinks_H=sinks_H)
        return in_triton.paged(q_THD, keys, None, value_dim=value_dim, **options)
    if softcap is not None or not paged_prefill.takes(q_THD, keys, values):
        return in_triton.paged(q_THD, keys, values, **options)
    out_THD = q_THD.new_empty(q_THD.shape)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    if any(span.count == 1 for span in keys.spans):
        _decode(q_THD, keys, values, out_THD, lse_TH, options)
    if any(span.count > 1 for span in keys.spans):
        paged_prefill.chunks(q_THD, keys, values, out_THD, lse_TH, options)
    return out_THD, lse_TH


def _decode(
    q_THD: Tensor, keys: Paged, values: Paged, out_THD: Tensor, lse_TH: Tensor, options: dict[str, Any]
) -> None:  # fmt: skip
    """Which kernels these rows have follows from shapes of heads and records, and from how many rows a step has only
    where these are more than ``paged_decode`` can order (16,384)."""
    if paged_decode.takes(q_THD, keys):
        paged_decode.decode(q_THD, keys, values, out_THD, lse_TH, options)
        return
    options = options | {"sinks_H": None if options["sinks_H"] is None else options["sinks_H"].contiguous()}
    packed = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    decode(packed, keys, values, out_THD, lse_TH, shape_of(packed, keys, values, 0), options)
