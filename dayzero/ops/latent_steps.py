"""Dense latent attention of a step, row by row in the form that it takes (``ops/latent_forms``): rows of one token and
short chunks absorbed, by operators that are given; longer chunks expanded: cached rows of some keys are gathered, keys
and values of all heads made of them in one product, and a kernel attends to them; then to the keys before those, whose
sums join the ones there are.

T tokens, H heads, N key width from the latent, P shared key width, R latent width, C = R + P, V value width, X = N + V,
L keys of a scratch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from dayzero.ops.latent import absorb
from dayzero.ops.latent_forms import ABSORBED_TOKENS, Widths, expands, keys_at_once
from dayzero.view import Paged, Span


@dataclass(frozen=True, slots=True)
class Expanded:
    """Some keys in a row of one sequence. kv [L, H * X]: of each head a key's N numbers, then the value's V; shared
    [L, P]: both in the queries' dtype. first_own: which of these keys is the first query's own; a query may lie before
    all of them, or behind. joins: whether queries behind all of them have sums over later keys; last: whether no keys
    come before these."""

    kv_LX: Tensor
    shared_LP: Tensor
    first_own: int
    joins: bool
    last: bool


@dataclass(frozen=True, slots=True)
class Sums:
    """Of the tokens of one row over later keys: out [T, H, V] f32 and lse [T, H] f32 in base 2; either empty where all
    keys are attended at once."""

    out_THV: Tensor
    lse_TH: Tensor


class Projection(NamedTuple):
    """kv_b [H * X, R]; scale of logits."""

    kv_b: Tensor
    widths: Widths
    scale: float


# (queries [T, H, N + P] of one row, keys, what is kept from some keys to the next, out [T, H, V], widths, scale):
# writes out behind the last keys, sums before; queries before all of the keys are left alone.
Chunk = Callable[[Tensor, Expanded, Sums, Tensor, Widths, float], None]


def expanded(
    q_THD: Tensor, rows: Paged, span: Span, by: Projection, out_THV: Tensor, *, chunk: Chunk, at_once: int = 0
) -> None:
    """Write out [T, H, V] of the queries [T, H, N + P] of one row. at_once: keys, a whole number of pages; 0: as many
    as ``keys_at_once`` says. Keys are divided where they stand in their sequence, whatever the chunk is."""
    kv_b, widths, scale = by
    end, at_once = span.start + span.count, at_once or keys_at_once(widths, rows.page)
    begins = range(0, end, at_once)
    several = len(begins) > 1
    kept = q_THD.new_empty(span.count if several else 0, widths.heads, widths.value, dtype=torch.float32)
    sums = Sums(kept, torch.empty(kept.shape[:2], dtype=torch.float32, device=q_THD.device))
    scratch_LX = q_THD.new_empty(min(end, at_once), kv_b.shape[0])
    for begin in reversed(begins):
        held_LC = _gathered(rows, span.row, begin, min(begin + at_once, end), q_THD.dtype)
        kv_LX = scratch_LX[: held_LC.shape[0]]
        torch.mm(held_LC[:, : widths.rank], kv_b.T, out=kv_LX)
        joins = begin + at_once < end
        keys = Expanded(kv_LX, held_LC[:, widths.rank :], span.start - begin, joins, begin == 0)
        chunk(q_THD, keys, sums, out_THV, widths, scale)


def _gathered(rows: Paged, row: int, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """[end - begin, C]: cached rows of positions in one sequence, from the beginning of a page on. Asks the device for
    nothing: without a window a table begins at position 0."""
    pages = rows.table[row, begin // rows.page : -(-end // rows.page)].long()
    held = rows.rows[pages] if rows.codec is None else rows.codec.pages(rows.rows, pages)
    return held.flatten(0, 1)[: end - begin].to(dtype)


def _runs(spans: tuple[Span, ...], widths: Widths) -> Iterator[tuple[bool, int, int]]:
    """(whether in the expanded form, first row, behind the last): each row of that form by itself, of the other as many
    in a row as may be computed at once. Rows of one token are never parted: a recorded step has no others."""
    number = 0
    for large, some in groupby(spans, lambda span: span.count > 1 and expands(span.count, span.start, widths)):
        tokens, begin = 0, number
        for span in some:
            tokens += span.count
            if number > begin and (large or (span.count > 1 and tokens > ABSORBED_TOKENS)):
                yield large, begin, number
                tokens, begin = span.count, number
            number += 1
        yield large, begin, number


def _some(rows: Paged, begin: int, end: int) -> Paged:
    """Rows from one to another as a step of their own."""
    if begin == 0 and end == len(rows.spans):
        return rows
    first = rows.spans[begin].first
    spans = tuple(replace(s, row=s.row - begin, first=s.first - first) for s in rows.spans[begin:end])
    return replace(
        rows, table=rows.table[begin:end], first=rows.first[begin:end], start=rows.start[begin:end],
        query_start=rows.query_start[begin : end + 1] - first, spans=spans,
    )  # fmt: skip


class Absorbed(NamedTuple):
    """Variants of ``latent.queries``, ``attention.paged`` and ``latent.values``."""

    queries: Callable[..., Tensor]
    paged: Callable[..., tuple[Tensor, Tensor]]
    values: Callable[..., Tensor]


def attend_by(by: Absorbed, chunk: Chunk, q_THD: Tensor, rows: Paged, kv_b: Tensor, scale: float) -> Tensor:
    """``latent.attend`` by operators of the absorbed form, and a ``Chunk`` for the other."""
    heads, rank = q_THD.shape[1], kv_b.shape[1]
    shared = rows.shape[-1] - rank
    nope = q_THD.shape[2] - shared
    widths = Widths(heads, nope, shared, rank, kv_b.shape[0] // heads - nope)
    projection = Projection(kv_b, widths, scale)
    w_uk_HNR, w_uv_HVR = absorb.body(kv_b, heads, nope, widths.value)
    out_THV = q_THD.new_empty(q_THD.shape[0], heads, widths.value)
    for large, begin, end in _runs(rows.spans, widths):
        spans = rows.spans[begin:end]
        tokens = slice(spans[0].first, spans[-1].rows.stop)
        if large:
            q = q_THD[tokens] if q_THD.stride(2) == 1 else q_THD[tokens].contiguous()
            expanded(q, rows, spans[0], projection, out_THV[tokens], chunk=chunk)
            continue
        q_THC = by.queries(q_THD[tokens], w_uk_HNR)
        out_THR, _ = by.paged(q_THC, _some(rows, begin, end).headed(), None, scale=scale, value_dim=rank)
        if len(spans) == len(rows.spans):
            return by.values(out_THR, w_uv_HVR, q_THD.dtype)
        out_THV[tokens] = by.values(out_THR, w_uv_HVR, q_THD.dtype)
    return out_THV
