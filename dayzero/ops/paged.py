"""Attention of all rows of a step over their own pages: what an engine calls, once a layer.

T tokens of the step, H query heads, K key heads, D query and key width, V value width, R rows. A row's queries see its
own records only. The body goes row by row through ``attention.causal``; variants read the pages where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dayzero.ops import tiles
from dayzero.ops.attention import NEGATIVE_INFINITY, TRAITS, causal, visible
from dayzero.ops.bounds import ATTENTION
from dayzero.ops.contract import contract
from dayzero.ops.line import KV_RECORDS, LATENT_RECORDS
from dayzero.ops.sparse_attention import Merged
from dayzero.view import Paged, Span

_SCORE_ROWS = 2048  # queries times heads that the body scores at once


def value_width(keys: Paged, values: Paged | None, value_dim: int) -> int:
    """V. ValueError unless either values are given, or the width of those that the keys begin with."""
    if (values is None) != (value_dim > 0):
        raise ValueError("either values are given, or the width of the values that the keys begin with")
    if values is not None:
        return values.shape[-1]
    if value_dim > keys.shape[-1]:
        raise ValueError(f"keys of width {keys.shape[-1]} do not begin with values of width {value_dim}")
    return value_dim


def by_row(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q_THD: Tensor,
    keys: Paged,
    values: Paged | None,
    *,
    value_dim: int = 0,
    at_once: int = 0,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """``attend`` (as ``attention.causal``) for each row of the step: (out [T, H, V] in q's dtype, lse [T, H] f32).

    at_once: queries of a row in one call, 0 for all.
    """
    out_THV = q_THD.new_empty(*q_THD.shape[:2], value_width(keys, values, value_dim))
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    for span in keys.spans:
        k_LKD, first = keys.history(span)
        if values is None:
            v_LKV = k_LKD[..., :value_dim]
        else:
            v_LKV, v_first = values.history(span)
            assert first == v_first and k_LKD.shape[0] == v_LKV.shape[0], "keys and values of a layer go out of step"
        for rows, start in _query_blocks(span, at_once or span.count):
            out_THV[rows], lse_TH[rows] = attend(q_THD[rows], k_LKD, v_LKV, start=start - first, **options)
    return out_THV, lse_TH


def _query_blocks(span: Span, most: int) -> Iterator[tuple[slice, int]]:
    """(packed tokens, position of the first) of up to so many tokens of a row at a time."""
    for begin in range(0, span.count, most):
        yield slice(span.first + begin, span.first + min(begin + most, span.count)), span.start + begin


@contract(
    "attention.paged",
    bound=ATTENTION,
    traits={
        **TRAITS, "latent": (False, True), "latent_width": ("int",), "record": (*LATENT_RECORDS, *KV_RECORDS),
    },
)  # fmt: skip
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
    """(out [T, H, V] in q's dtype, lse [T, H] f32); options as in ``attention.causal``.

    keys: records [K, D]; values: records [K, V] in the same blocks, or None where the first ``value_dim`` numbers of a
    key are its value (latent attention, absorbed: K = 1). q's dtype may differ from theirs.
    """
    return by_row(
        causal.body, q_THD, keys, values, value_dim=value_dim, at_once=max(1, _SCORE_ROWS // q_THD.shape[1]),
        scale=scale, window=window, sinks_H=sinks_H, softcap=softcap,
    )  # fmt: skip


def paged_tiled(
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
    """``attention.paged`` straight from the pages, some queries and a tile of keys at a time, merged by log-sum-exp.

    Sums are in float32, or in q's dtype where that is wider; nothing grows with queries times keys.
    """
    tiled = _Tiled(keys, values, scale, value_width(keys, values, value_dim), window, sinks_H, softcap)
    out_THV = q_THD.new_empty(*q_THD.shape[:2], tiled.width)
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    wide = torch.promote_types(q_THD.dtype, torch.float32)
    for span in keys.spans:
        for rows, start in _query_blocks(span, tiles.queries_by_heads(q_THD.shape[1])):
            out, lse = tiled.attend(q_THD[rows].to(wide), span, start)
            out_THV[rows], lse_TH[rows] = out.to(q_THD.dtype), lse.float()
    return out_THV, lse_TH


@dataclass(frozen=True, slots=True)
class _Tiled:
    """One call of ``paged_tiled``: its records and options. width: of values."""

    keys: Paged
    values: Paged | None
    scale: float
    width: int
    window: int | None
    sinks_H: Tensor | None
    softcap: float | None

    def attend(self, q_THD: Tensor, span: Span, start: int) -> tuple[Tensor, Tensor]:
        """(out [T, H, V], lse [T, H]) in q's dtype, of queries of one row, the first of them at position ``start``."""
        key_heads, count, first = self.keys.shape[0], q_THD.shape[0], int(self.keys.first[span.row])
        q_KTGD = q_THD.unflatten(1, (key_heads, -1)).permute(1, 0, 2, 3).contiguous()
        merged = Merged(*self._beginning(q_KTGD), self.width)
        low = first if self.window is None else max(first, start - self.window + 1)
        for begin in range(low, start + count, tiles.KEYS):
            end = min(begin + tiles.KEYS, start + count)
            k_KLD = self.keys.part(span, begin, end).to(q_THD.dtype).transpose(0, 1)
            v_KLV = (
                k_KLD[..., : self.width] if self.values is None
                else self.values.part(span, begin, end).to(q_THD.dtype).transpose(0, 1)
            )  # fmt: skip
            s_KTGL = (q_KTGD.flatten(1, 2) @ k_KLD.transpose(1, 2)).unflatten(1, q_KTGD.shape[1:3]).mul_(self.scale)
            if self.softcap is not None:
                s_KTGL = s_KTGL.div_(self.softcap).tanh_().mul_(self.softcap)
            seen_TL = visible(count, end - begin, start - begin, self.window, q_THD.device)
            weights = merged.weights(s_KTGL.masked_fill_(~seen_TL[:, None], NEGATIVE_INFINITY))
            merged.sum += (weights.flatten(1, 2) @ v_KLV).unflatten(1, q_KTGD.shape[1:3])
        out_KTGV, lse_KTG = merged.result()
        return out_KTGV.transpose(0, 1).flatten(1, 2), lse_KTG.transpose(0, 1).flatten(1)

    def _beginning(self, q_KTGD: Tensor) -> tuple[Tensor, Tensor]:
        """Maximum and total [K, T, G] before any key: nothing, or the sinks."""
        top_KTG = q_KTGD.new_full(q_KTGD.shape[:3], NEGATIVE_INFINITY)
        if self.sinks_H is None:
            return top_KTG, torch.zeros_like(top_KTG)
        sinks_KG = self.sinks_H.to(q_KTGD.dtype).view(q_KTGD.shape[0], -1)
        return sinks_KG[:, None].expand_as(top_KTG), torch.ones_like(top_KTG)
