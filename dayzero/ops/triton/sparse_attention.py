"""``attention.sparse`` in Triton: records are gathered by their lists, straight from the pages where they lie.

T queries, H query heads, K key heads, G = H/K, D query and key width, V value width, N listed rows, R rows of a step,
S parts of a list. A program holds some query heads that share a key head, goes through the list a tile of records at a
time and stops where the pads begin. Where records begin with their values (K = 1), one tile in shared memory serves
both products; what follows the values is a tile of its own, the tail.

A row of one token is split: each part of its list is a program, and a second kernel merges by log-sum-exp. Parts have a
fixed size and a row's own length alone decides, so that a result does not depend on the rows beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.tiles import CROSSOVER, crossover_of
from dayzero.ops.triton.machine import INTERPRETED, check_machine, hardware_word
from dayzero.ops.triton.sparse_masked import Masked, attend_masked
from dayzero.view import Paged

__all__ = ["check_machine", "sparse_listed", "sparse_masked", "sparse_up_to"]

PART_ROWS = 512  # listed rows of one part of a split list
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _row_of(query_start, token, num_rows, CHUNK: tl.constexpr):
    """Which row of the step a token belongs to: how many rows end at or before it."""
    found = 0
    for begin in range(0, num_rows, CHUNK):
        at = begin + tl.arange(0, CHUNK)
        ends = tl.load(query_start + 1 + at, mask=at < num_rows, other=2147483647)
        found += tl.sum((ends <= token).to(tl.int32))
    return found


@triton.jit(do_not_specialize=["first_token", "num_rows"])  # else compiled anew for multiples of 16
def _attend(
    q, keys, values, listed, table, first, query_start, sinks, out, lse,
    first_token, width_n, num_rows, pages, q_t, q_h, q_d, listed_t, table_r, key_block, value_block, scale, softcap,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, D: tl.constexpr, V: tl.constexpr, PAGE: tl.constexpr,
    HEAD_TILE: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, VALUE: tl.constexpr, TILE: tl.constexpr,
    PART_TILES: tl.constexpr, MAX_TILES: tl.constexpr, PARTS: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_CAP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One (query, block of heads, part of the list). TAIL 0: values are records of their own."""
    token, head_block, part = first_token + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    blocks_a_key: tl.constexpr = (G + HEAD_TILE - 1) // HEAD_TILE
    key_head = head_block // blocks_a_key
    in_group = head_block % blocks_a_key * HEAD_TILE + tl.arange(0, HEAD_TILE)
    heads, real = key_head * G + in_group, in_group < G
    main: tl.constexpr = V if TAIL > 0 else D
    col, tail_col, value_col = tl.arange(0, MAIN), tl.arange(0, TAIL if TAIL > 0 else 16), tl.arange(0, VALUE)
    row = _row_of(query_start, token, num_rows, 128)
    inside = row < num_rows
    row_first = tl.load(first + row, mask=inside, other=0)
    begins = tl.arange(0, MAX_TILES) * TILE
    firsts = tl.load(listed + token.to(tl.int64) * listed_t + begins, mask=(begins < width_n) & inside, other=-1)
    num_tiles = tl.sum((firsts >= 0).to(tl.int32))

    q_at = q + token.to(tl.int64) * q_t + heads[:, None] * q_h
    q_main = tl.load(q_at + col[None, :] * q_d, mask=real[:, None] & (col < main)[None, :], other=0.0)
    q_main = q_main.to(tl.float32) if UPCAST else q_main.to(keys.dtype.element_ty)
    if TAIL > 0:
        in_tail = (tail_col < D - V)[None, :]
        q_tail = tl.load(q_at + (V + tail_col)[None, :] * q_d, mask=real[:, None] & in_tail, other=0.0)
        q_tail = q_tail.to(tl.float32) if UPCAST else q_tail.to(keys.dtype.element_ty)
    top = tl.full((HEAD_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((HEAD_TILE,), tl.float32)
    acc = tl.zeros((HEAD_TILE, VALUE), tl.float32)
    for tile in range(part * PART_TILES, tl.minimum(num_tiles, (part + 1) * PART_TILES)):
        in_list = tile * TILE + tl.arange(0, TILE)
        at = tl.load(listed + token.to(tl.int64) * listed_t + in_list, mask=in_list < width_n, other=-1)
        seen = at >= 0
        place = tl.where(seen, at.to(tl.int32) - row_first, 0)
        block = tl.load(table + row.to(tl.int64) * table_r + place // PAGE, mask=seen, other=0).to(tl.int64)
        record = ((place % PAGE) * K + key_head).to(tl.int64)
        k_at = keys + (block * key_block + record * D)[:, None]
        k_main = tl.load(k_at + col[None, :], mask=seen[:, None] & (col < main)[None, :], other=0.0)
        if UPCAST:
            k_main = k_main.to(tl.float32)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if TAIL > 0:
            k_tail = tl.load(k_at + (V + tail_col)[None, :], mask=seen[:, None] & in_tail, other=0.0)
            if UPCAST:
                k_tail = k_tail.to(tl.float32)
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        if HAS_CAP:
            scores = softcap * (1 - 2 / (tl.exp2(scores * (2 * LOG2_E * scale / softcap)) + 1)) * LOG2_E
        else:
            scores = scores * (scale * LOG2_E)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))  # finite: a tile's first row is no pad
        weights = tl.exp2(scores - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        acc = acc * shrink[:, None]
        top = new_top
        if TAIL > 0:
            acc = tl.dot(weights.to(k_main.dtype), k_main, acc, input_precision="ieee")
        else:
            v_at = values + (block * value_block + record * V)[:, None]
            v = tl.load(v_at + value_col[None, :], mask=seen[:, None] & (value_col < V)[None, :], other=0.0)
            if UPCAST:
                v = v.to(tl.float32)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    if HAS_SINKS and PARTS == 1:
        sink = tl.load(sinks + heads, mask=real, other=float("-inf")).to(tl.float32) * LOG2_E
        new_top = tl.maximum(top, sink)
        shrink = tl.where(top == float("-inf"), 0.0, tl.exp2(top - new_top))
        total = total * shrink + tl.where(sink == float("-inf"), 0.0, tl.exp2(sink - new_top))
        acc, top = acc * shrink[:, None], new_top
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)[:, None]
    got = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), float("-inf")) * LN_2
    place_out = (tl.program_id(0).to(tl.int64) * PARTS + part) * H + heads
    tl.store(lse + place_out, got, mask=real)
    tl.store(
        out + place_out[:, None] * V + value_col[None, :], acc.to(out.dtype.element_ty),
        mask=real[:, None] & (value_col < V)[None, :],
    )  # fmt: skip


@triton.jit
def _merge(
    part_out, part_lse, sinks, out, lse, H: tl.constexpr, V: tl.constexpr, VALUE: tl.constexpr, PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """One (query, head): parts by their log-sum-exp, in order."""
    token, head, col = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, VALUE)
    top = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    acc = tl.zeros((VALUE,), tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks + head).to(tl.float32)
        total += tl.where(top > float("-inf"), 1.0, 0.0)
    for part in range(PARTS):
        at = (token * PARTS + part) * H + head
        got = tl.load(part_lse + at)
        if got > float("-inf"):
            new_top = tl.maximum(top, got)
            shrink, share = tl.exp2((top - new_top) * LOG2_E), tl.exp2((got - new_top) * LOG2_E)
            acc = acc * shrink + share * tl.load(part_out + at * V + col, mask=col < V, other=0.0)
            total, top = total * shrink + share, new_top
    some = total > 0
    acc = acc / tl.where(some, total, 1.0)
    tl.store(out + (token * H + head) * V + col, acc.to(out.dtype.element_ty), mask=col < V)
    tl.store(lse + token * H + head, tl.where(some, top + tl.log2(tl.where(some, total, 1.0)) * LN_2, float("-inf")))


def _sizes(width: int, dtype: torch.dtype) -> tuple[int, int, int]:
    """(rows of a tile, warps, stages) for records of that padded width."""
    if dtype == torch.float32:
        return (32, 8, 1) if width >= 256 else (64, 4, 1)
    return (64, 8, 2) if width >= 256 else (64, 4, 2)


@dataclass(frozen=True, slots=True)
class _Call:
    q_THD: Tensor
    keys: Paged
    values: Paged | None
    listed_TN: Tensor
    sinks_H: Tensor | None
    scale: float
    value_dim: int
    softcap: float | None

    def everything(self, crossover: float) -> tuple[Tensor, Tensor]:
        """(out [T, H, V], lse [T, H]); crossover as in ``sparse_up_to``."""
        q_THD, keys, values = self.q_THD, self.keys, self.values
        if (values is None) != (self.value_dim > 0):
            raise ValueError("either values are given, or the width of the values that the keys begin with")
        if keys.codec is not None:
            raise ValueError(f"attention.sparse in Triton reads plain rows, not the record {keys.record}")
        if q_THD.shape[1] % keys.rows.shape[2]:
            raise ValueError(f"{q_THD.shape[1]} query heads cannot share {keys.rows.shape[2]} key heads evenly")
        width = self.value_dim if values is None else values.rows.shape[-1]
        out_THV = q_THD.new_empty(*q_THD.shape[:2], width)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        masked = Masked(q_THD, keys, values, self.listed_TN, self.sinks_H, self.scale, self.softcap)
        num = q_THD.shape[0]
        single = next((span.first for span in keys.spans if span.count != 1), num)
        self.run(out_THV, lse_TH, 0, single, True)
        begin = single  # of queries that are gathered and still to do
        for span in keys.spans:
            if span.count > 1 and span.start + span.count <= crossover * self.listed_TN.shape[1]:
                self.run(out_THV, lse_TH, begin, span.first, False)
                attend_masked(masked, span, out_THV, lse_TH)
                begin = span.first + span.count
        self.run(out_THV, lse_TH, begin, num, False)
        return out_THV, lse_TH

    def run(self, out_THV: Tensor, lse_TH: Tensor, begin: int, end: int, split: bool) -> None:
        """Tokens from ``begin`` to ``end``."""
        heads, width, num = out_THV.shape[1], self.listed_TN.shape[1], end - begin
        parts = max(1, -(-width // PART_ROWS)) if split else 1
        if num == 0:
            return
        if parts == 1:
            self._attend(out_THV[begin:end], lse_TH[begin:end], begin, 1)
            return
        part_out = out_THV.new_empty((num, parts, *out_THV.shape[1:]), dtype=torch.float32)
        part_lse = lse_TH.new_empty((num, parts, heads))
        self._attend(part_out, part_lse, begin, parts)
        _merge[(num, heads)](
            part_out, part_lse, self.sinks_H, out_THV[begin:end], lse_TH[begin:end], H=heads, V=out_THV.shape[2],
            VALUE=triton.next_power_of_2(out_THV.shape[2]), PARTS=parts, HAS_SINKS=self.sinks_H is not None,
        )  # fmt: skip

    def _attend(self, out: Tensor, lse: Tensor, begin: int, parts: int) -> None:
        (heads, width), keys = self.q_THD.shape[1:], self.keys
        key_heads, value = keys.rows.shape[2], out.shape[-1]
        group, rows = heads // key_heads, self.listed_TN.shape[1]
        latent = self.values is None
        head_tile = max(16, min(64, triton.next_power_of_2(group)))
        main = max(16, triton.next_power_of_2(value if latent else width))
        tail = max(16, triton.next_power_of_2(max(1, width - value))) if latent else 0
        tile, num_warps, num_stages = _sizes(max(main, triton.next_power_of_2(value)), keys.rows.dtype)
        tiles = max(1, -(-rows // tile))
        _attend[(out.shape[0], key_heads * -(-group // head_tile), parts)](
            self.q_THD, keys.rows, keys.rows if self.values is None else self.values.rows, self.listed_TN, keys.table,
            keys.first, keys.query_start, self.sinks_H, out, lse, begin, rows, keys.table.shape[0],
            keys.table.shape[1], *self.q_THD.stride(), self.listed_TN.stride(0), keys.table.stride(0),
            keys.rows.stride(0), 0 if self.values is None else self.values.rows.stride(0), self.scale,
            self.softcap or 0.0, H=heads, G=group, K=key_heads, D=width, V=value, PAGE=keys.page,
            HEAD_TILE=head_tile, MAIN=main, TAIL=tail, VALUE=max(16, triton.next_power_of_2(value)),
            TILE=tile, PART_TILES=-(-tiles // parts),
            MAX_TILES=triton.next_power_of_2(2 * tiles), PARTS=parts, HAS_SINKS=self.sinks_H is not None,
            HAS_CAP=self.softcap is not None, UPCAST=INTERPRETED, num_warps=num_warps,
            num_stages=num_stages,
        )  # fmt: skip


def sparse_listed(
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
    """``attention.sparse``: (out [T, H, V] in q's dtype, lse [T, H] f32). q is rounded to the records' dtype.

    Chunks are masked or gathered by what was measured on this kind of device (``tiles.CROSSOVER``).
    """
    call = _Call(q_THD, keys, values, listed_TN, sinks_H, scale, value_dim, softcap)
    form = "latent" if values is None else "grouped"
    word = hardware_word(q_THD.device)
    return call.everything(crossover_of(word if word in CROSSOVER else "h200", form))


def sparse_up_to(
    crossover: float, q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor, **options: Any
) -> Any:
    """``attention.sparse``: a chunk of a sequence of up to ``crossover`` times N rows is masked (``sparse_masked``),
    all else is gathered."""
    given = {"sinks_H": None, "value_dim": 0, "softcap": None, **options}
    return _Call(q_THD, keys, values, listed_TN, **given).everything(crossover)


def sparse_masked(q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor, **options: Any) -> Any:
    """``attention.sparse`` with all chunks masked."""
    return sparse_up_to(float("inf"), q_THD, keys, values, listed_TN, **options)
