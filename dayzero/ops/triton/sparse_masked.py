"""``attention.sparse`` over all records of a sequence, those that a list does not name at -inf: for chunks, in Triton.

R rows, T queries, H query heads, K key heads, G = H/K, D query and key width, V value width, N listed rows, M queries
of a block, L keys of a tile, W words of marks. Lists become marks first, one bit for each position of a query's
sequence. Then a block of queries, with the heads that share a key head, goes through all records up to its chunk's end:
records are read once for the block, not once for each query, which pays as long as a sequence is short for its lists or
its records are wide.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.machine import INTERPRETED, check_machine
from dayzero.view import Paged, Span

__all__ = ["attend_masked", "check_machine"]

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _mark(listed, marks, first_token, listed_t, words, width_n, CHUNK: tl.constexpr):
    """One query's list as bits; ``marks`` is zero before."""
    token = tl.program_id(0).to(tl.int64)
    for begin in range(0, width_n, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        place = tl.load(listed + (first_token + token) * listed_t + at, mask=at < width_n, other=-1).to(tl.int32)
        tl.atomic_or(marks + token * words + place // 32, 1 << (place % 32), mask=place >= 0, sem="relaxed")


@triton.jit
def _attend_all(
    q, keys, values, marks, table, first, sinks, out, lse,
    first_token, count, end, words, q_t, q_h, q_d, key_block, value_block, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, VALUE: tl.constexpr,
    TILE: tl.constexpr, HAS_SINKS: tl.constexpr, HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """TOKENS queries of a chunk and up to GROUP heads of a key head. TAIL 0: values are records of their own."""
    m = tl.arange(0, TOKENS * GROUP)
    blocks_a_key: tl.constexpr = (G + GROUP - 1) // GROUP
    key_head = tl.program_id(1) // blocks_a_key
    in_group = tl.program_id(1) % blocks_a_key * GROUP + m % GROUP
    number = (tl.num_programs(0) - 1 - tl.program_id(0)) * TOKENS + m // GROUP  # of the query in its chunk
    real, heads = (in_group < G) & (number < count), key_head * G + in_group
    main: tl.constexpr = V if TAIL > 0 else D
    col, tail_col, value_col = tl.arange(0, MAIN), tl.arange(0, TAIL if TAIL > 0 else 16), tl.arange(0, VALUE)
    in_tail = (tail_col < D - V)[None, :]
    token = (first_token + number).to(tl.int64)
    q_at = q + token[:, None] * q_t + heads[:, None] * q_h
    q_main = tl.load(q_at + col[None, :] * q_d, mask=real[:, None] & (col < main)[None, :], other=0.0)
    q_main = q_main.to(tl.float32) if UPCAST else q_main.to(keys.dtype.element_ty)
    if TAIL > 0:
        q_tail = tl.load(q_at + (V + tail_col)[None, :] * q_d, mask=real[:, None] & in_tail, other=0.0)
        q_tail = q_tail.to(tl.float32) if UPCAST else q_tail.to(keys.dtype.element_ty)
    top = tl.full((TOKENS * GROUP,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS * GROUP,), tl.float32)
    acc = tl.zeros((TOKENS * GROUP, VALUE), tl.float32)
    row_first = tl.load(first)
    mark_at = marks + number.to(tl.int64) * words
    for tile in range(row_first // TILE * TILE, end, TILE):
        position = tile + tl.arange(0, TILE)
        there = (position >= row_first) & (position < end)
        place = tl.where(there, position - row_first, 0)
        block = tl.load(table + place // PAGE, mask=there, other=0).to(tl.int64)
        record = ((place % PAGE) * K + key_head).to(tl.int64)
        k_at = keys + (block * key_block + record * D)[:, None]
        k_main = tl.load(k_at + col[None, :], mask=there[:, None] & (col < main)[None, :], other=0.0)
        if UPCAST:
            k_main = k_main.to(tl.float32)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if TAIL > 0:
            k_tail = tl.load(k_at + (V + tail_col)[None, :], mask=there[:, None] & in_tail, other=0.0)
            if UPCAST:
                k_tail = k_tail.to(tl.float32)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        if HAS_CAP:
            scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E * scale / softcap)) + 1)) * LOG2_E
        else:
            scores = scores * (scale * LOG2_E)
        bits = tl.load(mark_at[:, None] + (position // 32)[None, :], mask=real[:, None] & there[None, :], other=0)
        seen = (bits >> (position % 32)[None, :]) & 1
        scores = tl.where(seen != 0, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        top = new_top
        if TAIL > 0:
            acc = tl.dot(weights.to(k_main.dtype), k_main, acc, input_precision="ieee")
        else:
            v_at = values + (block * value_block + record * V)[:, None]
            v = tl.load(v_at + value_col[None, :], mask=there[:, None] & (value_col < V)[None, :], other=0.0)
            if UPCAST:
                v = v.to(tl.float32)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=real, other=float("-inf")).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        safe = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - safe) + tl.exp2(sink - safe)
        acc, top = acc * tl.exp2(top - safe)[:, None], new_top
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    got = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf")) * LN_2
    tl.store(lse + token * H + heads, got, mask=real)
    tl.store(
        out + (token * H + heads)[:, None] * V + value_col[None, :], acc.to(out.dtype.element_ty),
        mask=real[:, None] & (value_col < V)[None, :],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Masked:
    """What all chunks of a call share; options as in ``attention.sparse``."""

    q_THD: Tensor
    keys: Paged
    values: Paged | None
    listed_TN: Tensor
    sinks_H: Tensor | None
    scale: float
    softcap: float | None


def attend_masked(call: Masked, span: Span, out_THV: Tensor, lse_TH: Tensor) -> None:
    """Write the results of one chunk's queries. Takes one bit of workspace for each query and position."""
    keys, (heads, width), value = call.keys, call.q_THD.shape[1:], out_THV.shape[2]
    key_heads, latent = keys.rows.shape[2], call.values is None
    group = heads // key_heads
    end = span.start + span.count
    words = -(-end // 32)
    marks = torch.zeros(span.count, words, dtype=torch.int32, device=call.q_THD.device)
    listed = call.listed_TN
    _mark[(span.count,)](listed, marks, span.first, listed.stride(0), words, listed.shape[1], CHUNK=256)
    main = max(16, triton.next_power_of_2(value if latent else width))
    wide = max(main, triton.next_power_of_2(value)) >= 256
    rows = 64 if wide else 128
    heads_of_block = min(rows, triton.next_power_of_2(group))
    tokens = max(rows, 16) // heads_of_block
    grid = (-(-span.count // tokens), key_heads * -(-group // heads_of_block))
    _attend_all[grid](
        call.q_THD, keys.rows, keys.rows if call.values is None else call.values.rows, marks, keys.table[span.row],
        keys.first[span.row :], call.sinks_H, out_THV, lse_TH, span.first, span.count, end, words, *call.q_THD.stride(),
        keys.rows.stride(0), 0 if call.values is None else call.values.rows.stride(0), call.scale, call.softcap or 0.0,
        H=heads, G=group, K=key_heads, D=width, V=value, PAGE=keys.page, TOKENS=tokens, GROUP=heads_of_block,
        MAIN=main, TAIL=max(16, triton.next_power_of_2(max(1, width - value))) if latent else 0,
        VALUE=max(16, triton.next_power_of_2(value)), TILE=32 if wide and keys.rows.dtype == torch.float32 else 64,
        HAS_SINKS=call.sinks_H is not None, HAS_CAP=call.softcap is not None, UPCAST=INTERPRETED,
        num_warps=8, num_stages=1 if latent or keys.rows.dtype == torch.float32 else 2,
    )  # fmt: skip
