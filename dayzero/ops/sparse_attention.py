"""The one entry to sparse attention: softmax over the rows that an index lists, whatever made the list.

T queries, L rows of a sequence, H query heads, K key heads, D query and key width, V value width, N listed rows. All
rows of a step are attended over their own pages. Two ways to the same result: ``gather`` reads the listed records,
``masked`` goes through all records a tile of keys at a time and merges by log-sum-exp. Which is faster depends on how
many there are for each listed one: ``by_length`` decides by the device's crossover.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dayzero.ops import tiles
from dayzero.ops.attention import NEGATIVE_INFINITY, softmax_f64
from dayzero.ops.bounds import ATTENTION
from dayzero.ops.contract import contract
from dayzero.ops.line import KV_RECORDS, LATENT_RECORDS
from dayzero.ops.sparse_index import query_blocks
from dayzero.view import Paged, Span

ALWAYS = float("inf")  # a crossover beyond every length
_REFERENCE_QUERIES = 16  # bounds the gathered rows [queries, N, D]


def whole(rows_L: Tensor) -> Paged:
    """Records [L, ...] of one sequence as pages of which there is one, every record a token of the step."""
    count, device = rows_L.shape[0], rows_L.device
    zero = torch.zeros(1, dtype=torch.int32, device=device)
    ends = torch.tensor([0, count], dtype=torch.int32, device=device)
    return Paged(rows_L[None], zero[None], zero, ends, zero, (Span(0, 0, count, 0),))


def _value_width(keys: Paged, values: Paged | None, value_dim: int) -> int:
    if (values is None) != (value_dim > 0):
        raise ValueError("either values are given, or the width of the values that the keys begin with")
    return value_dim if values is None else values.shape[-1]


def _grouped(q_THD: Tensor, key_heads: int) -> Tensor:
    """[T, K, G, D]."""
    if q_THD.shape[1] % key_heads:
        raise ValueError(f"{q_THD.shape[1]} query heads cannot share {key_heads} key heads evenly")
    return q_THD.unflatten(1, (key_heads, -1))


def _taken(keys: Paged, values: Paged | None, span: Span, at_TN: Tensor, value_dim: int) -> tuple[Tensor, Tensor]:
    """Keys [T, K, N, D] and values [T, K, N, V] of listed rows."""
    first = keys.take(span, at_TN).transpose(1, 2)
    return first, first[..., :value_dim] if values is None else values.take(span, at_TN).transpose(1, 2)


@contract(
    "attention.sparse",
    bound=ATTENTION,
    traits={
        "sinks": (False, True), "softcap": (False, True), "value_width": ("same", "other"), "grouped": (False, True),
        "latent": (False, True), "record": (*LATENT_RECORDS, *KV_RECORDS),
    },
)  # fmt: skip
def sparse(
    q_THD: Tensor,
    keys: Paged,
    values: Paged | None,
    listed_TN: Tensor,
    *,
    scale: float,
    value_dim: int = 0,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] f32) of each query over the rows its list names.

    keys: records [K, D]; values: records [K, V] in the same blocks, or None where the first ``value_dim`` numbers of a
    key are its value (latent attention, K = 1). listed [T, N] int64: positions in the query's own sequence, ascending,
    each once, -1 pads at the end; all heads read the same. The list alone says what is seen: it may name rows after
    the query, as a window over an image does. sinks, softcap as in ``attention.causal``; a query without rows gives
    zeros and lse -inf (or the sink).
    """
    width = _value_width(keys, values, value_dim)
    out_THV = q_THD.new_empty(*q_THD.shape[:2], width)
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    for span, rows, _ in query_blocks(keys, _REFERENCE_QUERIES):
        at_TN = listed_TN[rows]
        k_TKND, v_TKNV = _taken(keys, values, span, at_TN.clamp(min=0), value_dim)
        q_TKGD = _grouped(q_THD[rows].double(), k_TKND.shape[1])
        s_TKGN = q_TKGD @ k_TKND.double().transpose(-1, -2) * scale
        if softcap is not None:
            s_TKGN = softcap * torch.tanh(s_TKGN / softcap)
        s_THN = s_TKGN.flatten(1, 2).masked_fill((at_TN < 0)[:, None], NEGATIVE_INFINITY)
        p_THN, lse_TH[rows] = softmax_f64(s_THN, sinks_H)
        # What a pad stands for may hold anything, and 0 * NaN is NaN.
        v_TKNV = v_TKNV.double().masked_fill((at_TN < 0)[:, None, :, None], 0.0)
        out_THV[rows] = (p_THN.unflatten(1, (k_TKND.shape[1], -1)) @ v_TKNV).flatten(1, 2).to(q_THD.dtype)
    return out_THV, lse_TH


class Merged:
    """Softmax over keys that come in parts: a running maximum and total [...], and a weighted sum [..., V]."""

    def __init__(self, top: Tensor, total: Tensor, value_dim: int) -> None:
        """top, total: -inf and 0, or a sink's logit and 1 (it takes its share and has no value)."""
        self.top, self.total = top, total
        self.sum = top.new_zeros(*top.shape, value_dim)

    def weights(self, scores: Tensor) -> Tensor:
        """exp(scores [..., L] - the new maximum), once what was summed is brought to it. Overwrites scores."""
        top = torch.maximum(self.top, scores.amax(-1))
        safe = torch.where(top == NEGATIVE_INFINITY, 0.0, top)
        shrink = torch.exp(self.top - safe)
        weights = scores.sub_(safe[..., None]).exp_()
        self.top, self.total = top, self.total * shrink + weights.sum(-1)
        self.sum.mul_(shrink[..., None])
        return weights

    def result(self) -> tuple[Tensor, Tensor]:
        """(out [..., V], lse [...])."""
        total = torch.where(self.total == 0, 1.0, self.total)
        return self.sum.div_(total[..., None]), self.top + total.log()


def within(listed_TN: Tensor, begin: int, end: int) -> Tensor:
    """[T, end - begin] bool: which of the rows from ``begin`` to ``end`` a list names."""
    inside_TN = (listed_TN >= begin) & (listed_TN < end)
    table = torch.zeros(listed_TN.shape[0], end - begin + 1, dtype=torch.bool, device=listed_TN.device)
    return table.scatter_(1, torch.where(inside_TN, listed_TN - begin, end - begin), True)[:, :-1]


@dataclass(frozen=True, slots=True)
class _Call:
    """One call of a variant: its records and options. Blocks are computed in float32."""

    keys: Paged
    values: Paged | None
    scale: float
    value_dim: int
    sinks_H: Tensor | None
    softcap: float | None

    def run(self, q_THD: Tensor, listed_TN: Tensor, crossover: float) -> tuple[Tensor, Tensor]:
        """crossover: a chunk of a sequence of up to so many times N rows is masked, all else gathered."""
        out_THV = q_THD.new_empty(*q_THD.shape[:2], _value_width(self.keys, self.values, self.value_dim))
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        for span in self.keys.spans:
            masked = crossover == ALWAYS or (
                span.count > 1 and span.start + span.count <= crossover * listed_TN.shape[1]
            )
            block, queries = (
                (self._masked, tiles.queries_by_heads(q_THD.shape[1])) if masked
                else (self._gathered, tiles.queries_by_list(listed_TN.shape[1]))
            )  # fmt: skip
            for begin in range(0, span.count, queries):
                rows = slice(span.first + begin, span.first + min(begin + queries, span.count))
                out, lse_TH[rows] = block(span, q_THD[rows].float(), listed_TN[rows])
                out_THV[rows] = out.to(q_THD.dtype)
        return out_THV, lse_TH

    def _capped(self, scores: Tensor) -> Tensor:
        scores = scores.mul_(self.scale)
        return scores if self.softcap is None else scores.div_(self.softcap).tanh_().mul_(self.softcap)

    def _gathered(self, span: Span, q_THD: Tensor, listed_TN: Tensor) -> tuple[Tensor, Tensor]:
        pads_TN = listed_TN < 0
        k_TKND, v_TKNV = _taken(self.keys, self.values, span, listed_TN.clamp(min=0), self.value_dim)
        k_TKND = k_TKND.float()
        v_TKNV = k_TKND[..., : self.value_dim] if self.values is None else v_TKNV.float()
        some_pads = bool(pads_TN.any())
        if some_pads:  # what a pad stands for may hold anything, and 0 * NaN is NaN; this is a copy of it
            v_TKNV.masked_fill_(pads_TN[:, None, :, None], 0.0)
        s_TKGN = self._capped(_grouped(q_THD, k_TKND.shape[1]) @ k_TKND.transpose(-1, -2))
        if some_pads:
            s_TKGN.masked_fill_(pads_TN[:, None, None], NEGATIVE_INFINITY)
        top_TKG = s_TKGN.new_full(s_TKGN.shape[:3], NEGATIVE_INFINITY)
        total_TKG = torch.zeros_like(top_TKG)
        if self.sinks_H is not None:
            top_TKG, total_TKG = self.sinks_H.float().view(top_TKG.shape[1:]).expand_as(top_TKG), total_TKG + 1
        merged = Merged(top_TKG, total_TKG, 0)
        sum_TKGV = merged.weights(s_TKGN) @ v_TKNV
        _, lse_TKG = merged.result()
        total_TKG = torch.where(merged.total == 0, 1.0, merged.total)
        return (sum_TKGV / total_TKG[..., None]).flatten(1, 2), lse_TKG.flatten(1)

    def _masked(self, span: Span, q_THD: Tensor, listed_TN: Tensor) -> tuple[Tensor, Tensor]:
        """[K, T, G] inside: one product for each key head and tile."""
        q_KTGD = _grouped(q_THD, self.keys.shape[0]).permute(1, 0, 2, 3).contiguous()
        width = _value_width(self.keys, self.values, self.value_dim)
        top_KTG = q_KTGD.new_full(q_KTGD.shape[:3], NEGATIVE_INFINITY)
        total_KTG = torch.zeros_like(top_KTG)
        if self.sinks_H is not None:
            sinks_KG = self.sinks_H.float().view(q_KTGD.shape[0], -1)
            top_KTG, total_KTG = sinks_KG[:, None].expand_as(top_KTG), total_KTG + 1
        merged = Merged(top_KTG, total_KTG, width)
        for begin in range(0, span.start + span.count, tiles.KEYS):
            end = min(begin + tiles.KEYS, span.start + span.count)
            seen_TL = within(listed_TN, begin, end)
            k_KLD = self.keys.part(span, begin, end).float().transpose(0, 1)
            v_KLV = k_KLD[..., :width] if self.values is None else (
                self.values.part(span, begin, end).float().transpose(0, 1)
            )  # fmt: skip
            s_KTGL = self._capped(q_KTGD.flatten(1, 2) @ k_KLD.transpose(1, 2)).unflatten(1, q_KTGD.shape[1:3])
            weights = merged.weights(s_KTGL.masked_fill_(~seen_TL[:, None], NEGATIVE_INFINITY))
            merged.sum += (weights.flatten(1, 2) @ v_KLV).unflatten(1, q_KTGD.shape[1:3])
        out_KTGV, lse_KTG = merged.result()
        return out_KTGV.transpose(0, 1).flatten(1, 2), lse_KTG.transpose(0, 1).flatten(1)


def sparse_gather(q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor, **options: Any) -> Any:
    """``attention.sparse`` in float32: the listed records of a few queries at once."""
    return _call(keys, values, **options).run(q_THD, listed_TN, 0.0)


def sparse_masked(q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor, **options: Any) -> Any:
    """``attention.sparse`` in float32: scores of a tile of records, those that are not listed at -inf."""
    return _call(keys, values, **options).run(q_THD, listed_TN, ALWAYS)


def sparse_by_length(q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor, **options: Any) -> Any:
    """``attention.sparse`` in float32: masked while a sequence is short for its lists, gathered from then on."""
    crossover = tiles.crossover_of(q_THD.device.type, "latent" if values is None else "grouped")
    return _call(keys, values, **options).run(q_THD, listed_TN, crossover)


def _call(
    keys: Paged,
    values: Paged | None,
    *,
    scale: float,
    value_dim: int = 0,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> _Call:
    return _Call(keys, values, scale, value_dim, sinks_H, softcap)
