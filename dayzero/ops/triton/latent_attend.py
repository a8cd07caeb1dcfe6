"""``latent.attend``: rows of one token and short chunks in the absorbed form, longer chunks in the expanded one
(``ops/latent_forms``): cached rows of some keys are gathered, keys and values of all heads made of them in one product,
and queries attend to them; then the keys before those, whose sums join the ones there are.

T tokens, H heads, N key width from the latent, P shared key width, R latent width, C = R + P, V value width, X = N + V,
L keys of a scratch, M queries of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.latent import absorb
from dayzero.ops.latent_forms import ABSORBED_TOKENS, Widths, expands, keys_at_once
from dayzero.ops.triton.latent import queries_into_latent, values_out_of_latent
from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.paged_decode import LOG2_E, product
from dayzero.ops.triton.paged_prefill import paged
from dayzero.view import Paged, Span

__all__ = ["Expanded", "Projection", "Sums", "attend", "attend_by", "check_machine", "expanded"]


@triton.jit
def _steps(
    top, total, acc, q1, q2, own_M, kv_h, shared, from_key, to_key, num_keys, kv_row, shared_row, scale,
    N: tl.constexpr, N1: tl.constexpr, P: tl.constexpr, P1: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles of keys from one to another, both a tile's beginning. MASKED: some may not be seen by all."""
    n, v = tl.arange(0, N1), tl.arange(0, V1)
    element = q1.dtype
    for tile in range(from_key, to_key, TILE):
        at_L = tile + tl.arange(0, TILE)
        key_L = kv_h + at_L.to(tl.int64) * kv_row
        # The scratch behind the last key may hold anything, and 0 * NaN is NaN.
        if MASKED:
            k1 = tl.load(key_L[:, None] + n[None], mask=(at_L < num_keys)[:, None] & (n[None] < N), other=0)
        elif N1 > N:
            k1 = tl.load(key_L[:, None] + n[None], mask=n[None] < N, other=0)
        else:
            k1 = tl.load(key_L[:, None] + n[None])
        s = product(q1, tl.trans(k1))
        if P > 0:
            p = tl.arange(0, P1)
            shared_L = shared + at_L.to(tl.int64) * shared_row
            if MASKED:
                k2 = tl.load(shared_L[:, None] + p[None], mask=(at_L < num_keys)[:, None] & (p[None] < P), other=0)
            elif P1 > P:
                k2 = tl.load(shared_L[:, None] + p[None], mask=p[None] < P, other=0)
            else:
                k2 = tl.load(shared_L[:, None] + p[None])
            s += product(q2, tl.trans(k2))
        s = s * (scale * LOG2_E)
        if MASKED:
            s = tl.where((at_L[None] <= own_M[:, None]) & (at_L < num_keys)[None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = higher
        if MASKED:
            safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
        value_L = key_L + N
        if MASKED:
            v1 = tl.load(value_L[:, None] + v[None], mask=(at_L < num_keys)[:, None] & (v[None] < V), other=0)
        elif V1 > V:
            v1 = tl.load(value_L[:, None] + v[None], mask=v[None] < V, other=0)
        else:
            v1 = tl.load(value_L[:, None] + v[None])
        acc = acc * shrink[:, None] + product(weights.to(element), v1)
    return top, total, acc


# Else compiled anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_tokens", "first_own", "num_keys", "first_block"])
def _chunk(
    q, kv, shared, out, sums, lse, q_token, q_head, kv_row, shared_row, num_heads, num_tokens, first_own, num_keys,
    first_block, scale,
    N: tl.constexpr, N1: tl.constexpr, P: tl.constexpr, P1: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr, JOINS: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head over the keys of the scratch. first_own: which of these keys is the first query's
    own; a query may lie before all of them, or behind. JOINS: queries behind all of them have sums over later keys.
    LAST: no keys come before these."""
    h = tl.program_id(0)
    block = first_block + tl.num_programs(1) - 1 - tl.program_id(1)  # late blocks see the most keys; they begin first
    token_M = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real_M = token_M < num_tokens
    own_M = first_own + token_M
    lowest = first_own + block * BLOCK_M
    seen = tl.minimum(tl.minimum(lowest + BLOCK_M, first_own + num_tokens), num_keys)  # by some query
    by_all = tl.maximum(tl.minimum(lowest + 1, num_keys), 0) // TILE * TILE
    q_row = q + token_M.to(tl.int64)[:, None] * q_token + h * q_head
    n = tl.arange(0, N1)
    q1 = tl.load(q_row + n[None], mask=real_M[:, None] & (n[None] < N), other=0)
    q2 = q1
    if P > 0:
        p = tl.arange(0, P1)
        q2 = tl.load(q_row + (N + p)[None], mask=real_M[:, None] & (p[None] < P), other=0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V1], tl.float32)
    kv_h = kv + h * (N + V)
    top, total, acc = _steps(
        top, total, acc, q1, q2, own_M, kv_h, shared, 0, by_all, num_keys, kv_row, shared_row, scale,
        N, N1, P, P1, V, V1, TILE, False,
    )  # fmt: skip
    top, total, acc = _steps(
        top, total, acc, q1, q2, own_M, kv_h, shared, by_all, seen, num_keys, kv_row, shared_row, scale,
        N, N1, P, P1, V, V1, TILE, True,
    )  # fmt: skip
    v = tl.arange(0, V1)
    at_M = token_M.to(tl.int64) * num_heads + h
    place = at_M[:, None] * V + v[None]
    if JOINS:
        joins_M = real_M & (own_M >= num_keys)
        later_M = tl.load(lse + at_M, mask=joins_M, other=float("-inf"))
        higher = tl.maximum(top, later_M)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        shrink, weight = tl.exp2(top - safe), tl.exp2(later_M - safe)
        later = tl.load(sums + place, mask=joins_M[:, None] & (v[None] < V), other=0.0)
        acc = acc * shrink[:, None] + later * weight[:, None]
        total = total * shrink + weight
        top = higher
    result = acc / tl.where(total == 0, 1.0, total)[:, None]
    if LAST:
        tl.store(out + place, result.to(out.dtype.element_ty), mask=real_M[:, None] & (v[None] < V))
    else:
        has_M = real_M & (own_M >= 0)
        tl.store(sums + place, result, mask=has_M[:, None] & (v[None] < V))
        tl.store(lse + at_M, top + tl.log2(total), mask=has_M)


@dataclass(frozen=True, slots=True)
class Expanded:
    """Some keys in a row of one sequence. kv [L, H * X]: of each head a key's N numbers, then the value's V. shared
    [L, P], bf16 as kv. first_own: which of these keys is the first query's own, as in ``_chunk``. joins: whether there
    are sums over later keys; last: whether no keys come before these."""

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


@dataclass(frozen=True, slots=True)
class Tuning:
    """block: queries at once; tile: keys at once."""

    block: int
    tile: int
    warps: int
    stages: int


def tuning_of(widths: Widths) -> Tuning:
    """By widths alone: a row's result must not depend on the rows beside it."""
    if max(widths.nope, widths.value) > 128:
        return Tuning(block=64, tile=32, warps=4, stages=2)
    return Tuning(block=128, tile=64, warps=8, stages=3)


def chunk(
    q_THD: Tensor, keys: Expanded, sums: Sums, out_THV: Tensor, widths: Widths, scale: float,
    tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """``Chunk`` in Triton."""
    heads, nope, shared, _, value = widths
    tuning = tuning or tuning_of(widths)
    tokens, num_keys = q_THD.shape[0], keys.kv_LX.shape[0]
    first_block = max(0, -keys.first_own) // tuning.block  # those before it see no key
    padded = [max(16, triton.next_power_of_2(max(width, 1))) for width in (nope, shared, value)]
    _chunk[(heads, triton.cdiv(tokens, tuning.block) - first_block)](
        q_THD, keys.kv_LX, keys.shared_LP, out_THV, sums.out_THV, sums.lse_TH, *q_THD.stride()[:2],
        keys.kv_LX.stride(0), keys.shared_LP.stride(0), heads, tokens, keys.first_own, num_keys, first_block, scale,
        N=nope, N1=padded[0], P=shared, P1=padded[1], V=value, V1=padded[2], BLOCK_M=tuning.block, TILE=tuning.tile,
        JOINS=keys.joins, LAST=keys.last, num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip


def expanded(
    q_THD: Tensor, rows: Paged, span: Span, by: Projection, out_THV: Tensor, *, chunk: Chunk = chunk, at_once: int = 0
) -> None:  # fmt: skip
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


def attend_by(
    paged: Callable[..., tuple[Tensor, Tensor]], chunk: Chunk, q_THD: Tensor, rows: Paged, kv_b: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    """``latent.attend`` by a variant of ``attention.paged`` for the absorbed form and a ``Chunk`` for the other."""
    heads, rank = q_THD.shape[1], kv_b.shape[1]
    shared = rows.shape[-1] - rank
    nope = q_THD.shape[2] - shared
    widths = Widths(heads, nope, shared, rank, kv_b.shape[0] // heads - nope)
    by = Projection(kv_b, widths, scale)
    w_uk_HNR, w_uv_HVR = absorb.body(kv_b, heads, nope, widths.value)
    out_THV = q_THD.new_empty(q_THD.shape[0], heads, widths.value)
    options: dict[str, Any] = {"scale": scale, "value_dim": rank}
    for large, begin, end in _runs(rows.spans, widths):
        spans = rows.spans[begin:end]
        tokens = slice(spans[0].first, spans[-1].rows.stop)
        if large:
            q = q_THD[tokens] if q_THD.stride(2) == 1 else q_THD[tokens].contiguous()
            expanded(q, rows, spans[0], by, out_THV[tokens], chunk=chunk)
            continue
        q_THC = queries_into_latent(q_THD[tokens], w_uk_HNR)
        out_THR, _ = paged(q_THC, _some(rows, begin, end).headed(), None, **options)
        if len(spans) == len(rows.spans):
            return values_out_of_latent(out_THR, w_uv_HVR, q_THD.dtype)
        out_THV[tokens] = values_out_of_latent(out_THR, w_uv_HVR, q_THD.dtype)
    return out_THV


def attend(q_THD: Tensor, rows: Paged, kv_b: Tensor, *, scale: float) -> Tensor:
    """``latent.attend`` of bf16 rows. Where every row has one token, only shapes decide what is launched: such a step
    can be captured in a graph."""
    return attend_by(paged, chunk, q_THD, rows, kv_b, scale)
