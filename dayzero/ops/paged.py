"""Attention of all rows of a step over their own pages: what an engine calls, once a layer.

T tokens of the step, H query heads, K key heads, D query and key width, V value width, R rows. A row's queries see its
own records only. The bodies go row by row through ``attention.causal``; variants read the pages where they lie.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.attention import TRAITS, causal, causal_tiled
from dayzero.ops.bounds import ATTENTION
from dayzero.ops.contract import contract
from dayzero.view import Paged


def by_row(
    attend: Callable[..., tuple[Tensor, Tensor]], q_THD: Tensor, keys: Paged, values: Paged, **options: Any
) -> tuple[Tensor, Tensor]:
    """``attend`` (as ``attention.causal``) for each row of the step: (out [T, H, V] in q's dtype, lse [T, H] f32)."""
    out_THV = q_THD.new_empty(*q_THD.shape[:2], values.rows.shape[-1])
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    for span in keys.spans:
        k_LKD, first = keys.history(span)
        v_LKV, v_first = values.history(span)
        assert first == v_first and k_LKD.shape[0] == v_LKV.shape[0], "keys and values of a layer go out of step"
        out_THV[span.rows], lse_TH[span.rows] = attend(
            q_THD[span.rows], k_LKD, v_LKV, start=span.start - first, **options
        )
    return out_THV, lse_TH


@contract("attention.paged", bound=ATTENTION, traits=TRAITS)
def paged(
    q_THD: Tensor,
    keys: Paged,
    values: Paged,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] f32); options as in ``attention.causal``.

    keys: records [K, D]; values: records [K, V], in the same blocks. q's dtype may differ from theirs.
    """
    return by_row(causal.body, q_THD, keys, values, scale=scale, window=window, sinks_H=sinks_H, softcap=softcap)


def paged_tiled(q_THD: Tensor, keys: Paged, values: Paged, **options: Any) -> tuple[Tensor, Tensor]:
    """``attention.paged`` a tile of keys at a time, merged by log-sum-exp: scores never exceed [H, T, tile]."""
    return by_row(causal_tiled, q_THD, keys, values, **options)
