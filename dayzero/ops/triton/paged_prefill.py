"""``attention.paged``: rows of one token by ``paged_decode``, chunks here, a block of queries at a time.

R rows, T tokens, H query heads, K key heads, G = H/K, D key width, V value width, M queries of a block, L keys of a
tile. A block holds the G heads that share a key head for a few tokens in a row (all M rows read the same keys), or some
of the G heads of one token where there are many. All rows of a step are one launch: which row a block belongs to is
found on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.paged_decode import (
    LN_2,
    LOG2_E,
    Shape,
    capped,
    decode,
    product,
    record_of,
    records_of,
    shape_of,
    widened_e4m3,
)
from dayzero.view import Paged

__all__ = ["check_machine", "chunked", "paged"]

SMALL_WINDOW = 512  # up to which most tiles of keys are seen in part only, so that small ones are faster
LEAST_ROWS = 64  # that a program looks through for its own: fewer would take as long, and kernels of their own


@triton.jit
def _steps(
    top, total, acc, q1, q2, own_M, keys, values, key_scales, value_scales, pages, from_place, to_place, end, k,
    key_block, key_row, key_head, value_block, value_row, value_head,
    key_scale_block, key_scale_row, value_scale_block, value_scale_row, scale, softcap, window,
    D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, PAGE: tl.constexpr,
    TILE: tl.constexpr, LATENT: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles of keys from one place to another, both a tile's beginning. MASKED: some may not be seen by all."""
    d1, v = tl.arange(0, D1), tl.arange(0, VP)
    element = q1.dtype
    PAGE_HOLDS_TILE: tl.constexpr = PAGE % TILE == 0
    for tile in range(from_place, to_place, TILE):
        at_L = tile + tl.arange(0, TILE)
        if PAGE_HOLDS_TILE:
            block = tl.load(pages + tile // PAGE).to(tl.int64)
            inside_L = tile % PAGE + tl.arange(0, TILE)
            key_L = keys + block * key_block + k * key_head + inside_L * key_row
        else:
            key_L = keys + record_of(pages, tl.minimum(at_L, end - 1), key_block, key_row, PAGE) + k * key_head
        # A record behind the row's end may hold anything, and 0 * NaN is NaN.
        if MASKED:
            k1 = tl.load(key_L[:, None] + d1[None], mask=(at_L < end)[:, None] & (d1[None] < D), other=0)
        elif D1 > D:
            k1 = tl.load(key_L[:, None] + d1[None], mask=d1[None] < D, other=0)
        else:
            k1 = tl.load(key_L[:, None] + d1[None])
        if FP8:
            k1 = widened_e4m3(k1, element)
        s = product(q1, tl.trans(k1))
        if D2 > 0:
            d2 = D1 + tl.arange(0, D2)
            if MASKED:
                k2 = tl.load(key_L[:, None] + d2[None], mask=(at_L < end)[:, None] & (d2[None] < D), other=0)
            elif D1 + D2 > D:
                k2 = tl.load(key_L[:, None] + d2[None], mask=d2[None] < D, other=0)
            else:
                k2 = tl.load(key_L[:, None] + d2[None])
            if FP8:
                k2 = widened_e4m3(k2, element)
            s += product(q2, tl.trans(k2))
        if FP8:
            at = record_of(pages, tl.minimum(at_L, end - 1), key_scale_block, key_scale_row, PAGE) + k
            s *= tl.load(key_scales + at, mask=at_L < end, other=0.0)[None]
        if SOFTCAP:
            s = capped(s * scale, softcap, True)
        else:
            s = s * (scale * LOG2_E)
        if MASKED:
            seen = at_L[None] <= own_M[:, None]
            if WINDOW:
                seen &= at_L[None] > own_M[:, None] - window
            s = tl.where(seen, s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = higher
        if MASKED:
            safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        top = higher
        if LATENT:
            v1 = k1
        else:
            if PAGE_HOLDS_TILE:
                value_L = values + block * value_block + k * value_head + inside_L * value_row
            else:
                value_L = (
                    values + record_of(pages, tl.minimum(at_L, end - 1), value_block, value_row, PAGE)
                    + k * value_head
                )  # fmt: skip
            if MASKED:
                v1 = tl.load(value_L[:, None] + v[None], mask=(at_L < end)[:, None] & (v[None] < V), other=0)
            elif VP > V:
                v1 = tl.load(value_L[:, None] + v[None], mask=v[None] < V, other=0)
            else:
                v1 = tl.load(value_L[:, None] + v[None])
            if FP8:
                v1 = widened_e4m3(v1, element)
                at = record_of(pages, tl.minimum(at_L, end - 1), value_scale_block, value_scale_row, PAGE) + k
                p *= tl.load(value_scales + at, mask=at_L < end, other=0.0)[None]
        acc += product(p.to(element), v1)
    return top, total, acc


@triton.jit(do_not_specialize=["num_rows", "num_blocks"])  # else compiled anew for 1 and for multiples of 16
def _chunks(
    q, keys, values, key_scales, value_scales, table, first, query_start, start, sinks, out, lse,
    q_token, q_head, key_block, key_row, key_head, value_block, value_row, value_head,
    key_scale_block, key_scale_row, value_scale_block, value_scale_row, table_row,
    scale, softcap, window, num_rows, num_heads, num_blocks,
    G: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr, TOKENS: tl.constexpr, BLOCK_G: tl.constexpr,
    ROWS: tl.constexpr, LATENT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """TOKENS tokens of one row times BLOCK_G heads of one key head. ROWS: rows of the step, up to a power of two."""
    NUM_G: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    # Late blocks see the most keys; they begin first.
    number = num_blocks - 1 - tl.program_id(1)
    k = tl.program_id(0) // NUM_G
    r_R = tl.arange(0, ROWS)
    begin_R = tl.load(query_start + r_R, mask=r_R < num_rows, other=0)
    count_R = tl.load(query_start + r_R + 1, mask=r_R < num_rows, other=0) - begin_R
    blocks_R = tl.where(count_R > 1, tl.cdiv(count_R, TOKENS), 0)
    behind_R = tl.cumsum(blocks_R, 0)
    row = tl.sum((behind_R <= number).to(tl.int32), 0)
    if row >= num_rows:
        return
    number -= tl.sum(tl.where(r_R < row, blocks_R, 0), 0)
    token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - token
    begin = tl.load(first + row)
    place = tl.load(start + row) - begin + number * TOKENS  # of the block's first token

    m = tl.arange(0, BLOCK_M)
    g_M = tl.program_id(0) % NUM_G * BLOCK_G + m % BLOCK_G
    token_M = number * TOKENS + m // BLOCK_G
    real_M = (g_M < G) & (token_M < count) & (m < TOKENS * BLOCK_G)
    own_M = place + tl.minimum(m // BLOCK_G, TOKENS - 1)
    h_M = k * G + g_M
    d1 = tl.arange(0, D1)
    q_row = q + (token + token_M).to(tl.int64)[:, None] * q_token + h_M[:, None] * q_head
    element = q.dtype.element_ty if FP8 else keys.dtype.element_ty
    q1 = tl.load(q_row + d1[None], mask=real_M[:, None] & (d1[None] < D), other=0.0).to(element)
    q2 = q1
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_row + d2[None], mask=real_M[:, None] & (d2[None] < D), other=0.0).to(element)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VP], tl.float32)
    end = tl.minimum(place + TOKENS, tl.load(start + row) - begin + count)
    pages = table + row.to(tl.int64) * table_row
    low = end * 0
    inner = end * 0
    if WINDOW:
        low = tl.maximum(place - window + 1, 0) // TILE * TILE
        inner = tl.maximum(tl.cdiv(place + TOKENS - window, TILE) * TILE, low)
    diagonal = tl.maximum((place + 1) // TILE * TILE, low)  # tiles before it are seen by all queries of the block
    if WINDOW:
        inner = tl.minimum(inner, diagonal)
        top, total, acc = _steps(
            top, total, acc, q1, q2, own_M, keys, values, key_scales, value_scales, pages, low, inner, end, k,
            key_block, key_row, key_head, value_block, value_row, value_head,
        key_scale_block, key_scale_row, value_scale_block, value_scale_row, scale, softcap, window,
            D, D1, D2, V, VP, PAGE, TILE, LATENT, WINDOW, SOFTCAP, FP8, True,
        )  # fmt: skip
    top, total, acc = _steps(
        top, total, acc, q1, q2, own_M, keys, values, key_scales, value_scales, pages, inner, diagonal, end, k,
        key_block, key_row, key_head, value_block, value_row, value_head,
        key_scale_block, key_scale_row, value_scale_block, value_scale_row, scale, softcap, window,
        D, D1, D2, V, VP, PAGE, TILE, LATENT, WINDOW, SOFTCAP, FP8, False,
    )  # fmt: skip
    top, total, acc = _steps(
        top, total, acc, q1, q2, own_M, keys, values, key_scales, value_scales, pages, diagonal, end, end, k,
        key_block, key_row, key_head, value_block, value_row, value_head,
        key_scale_block, key_scale_row, value_scale_block, value_scale_row, scale, softcap, window,
        D, D1, D2, V, VP, PAGE, TILE, LATENT, WINDOW, SOFTCAP, FP8, True,
    )  # fmt: skip
    if SINKS:
        sink = tl.load(sinks + h_M, mask=real_M, other=0.0).to(tl.float32) * LOG2_E
        higher = tl.maximum(top, sink)
        shrink = tl.exp2(top - higher)
        total = total * shrink + tl.exp2(sink - higher)
        acc = acc * shrink[:, None]
        top = higher
    v = tl.arange(0, VP)
    at = (token + token_M).to(tl.int64) * num_heads + h_M
    result = (acc / tl.where(total == 0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * V + v[None], result, mask=real_M[:, None] & (v[None] < V))
    tl.store(lse + at, (top + tl.log2(total)) * LN_2, mask=real_M)


@dataclass(frozen=True, slots=True)
class Tuning:
    """block: queries (tokens times heads) at once; tile: keys at once."""

    block: int
    tile: int
    warps: int
    stages: int


def tuning_of(shape: Shape, window: int | None) -> Tuning:
    """By widths and window alone: a row's result must not depend on the rows beside it."""
    width = max(shape.d1 + shape.d2, shape.value_padded)
    if width > 256:
        return Tuning(block=64, tile=64, warps=8, stages=1)
    narrow = width > 192 or (window is not None and window <= SMALL_WINDOW)
    return Tuning(block=64, tile=32 if narrow else 64, warps=4, stages=5)


def chunked(
    q_THD: Tensor, keys: Paged, values: Paged | None, out_THV: Tensor, lse_TH: Tensor, shape: Shape,
    options: dict[str, Any], tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """Write out and lse of all rows that have several tokens."""
    window, sinks_H, softcap = options["window"], options["sinks_H"], options["softcap"]
    tuning = tuning or tuning_of(shape, window)
    num_rows, heads = keys.start.shape[0], q_THD.shape[1]
    block_g = min(shape.group, tuning.block)
    tokens = tuning.block // block_g
    num_blocks = sum(-(-span.count // tokens) for span in keys.spans if span.count > 1)
    held = records_of(keys)
    held_values = held if values is None else records_of(values)
    _chunks[(shape.key_heads * -(-shape.group // block_g), num_blocks)](
        q_THD, held.rows, held_values.rows, held.scales, held_values.scales, keys.table, keys.first, keys.query_start,
        keys.start, lse_TH if sinks_H is None else sinks_H, out_THV, lse_TH, q_THD.stride(0), q_THD.stride(1),
        *held.strides, *held_values.strides, *held.scale_strides, *held_values.scale_strides, keys.table.stride(0),
        options["scale"], softcap or 1.0, window or 0, num_rows, heads, num_blocks,
        G=shape.group, D=shape.width, D1=shape.d1, D2=shape.d2, V=shape.value_width, VP=shape.value_padded,
        PAGE=shape.page, TILE=tuning.tile, BLOCK_M=tuning.block, TOKENS=tokens, BLOCK_G=block_g,
        ROWS=triton.next_power_of_2(max(LEAST_ROWS, num_rows)), LATENT=shape.latent, WINDOW=window is not None,
        SINKS=sinks_H is not None, SOFTCAP=softcap is not None, FP8=shape.fp8, num_warps=tuning.warps,
        num_stages=tuning.stages,
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
    """``attention.paged``: (out [T, H, V] in q's dtype, lse [T, H] f32). Products take q in the records' dtype; records
    in ``kv_fp8`` are widened to q's, exactly, and their scales multiply logits and weights.

    Where every row has one token, only shapes decide what is launched: such a step can be captured in a graph.
    ValueError for pages that are no power of two, and for latent values whose width is none.
    """
    shape = shape_of(q_THD, keys, values, value_dim)
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    out_THV = q_THD.new_empty(*q_THD.shape[:2], shape.value_width)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
    if q_THD.shape[0] == 0:
        return out_THV, lse_TH
    sinks_H = None if sinks_H is None else sinks_H.contiguous()
    options: dict[str, Any] = {"scale": scale, "window": window, "sinks_H": sinks_H, "softcap": softcap}
    if any(span.count == 1 for span in keys.spans):
        decode(q_THD, keys, values, out_THV, lse_TH, shape, options)
    if any(span.count > 1 for span in keys.spans):
        chunked(q_THD, keys, values, out_THV, lse_TH, shape, options)
    return out_THV, lse_TH
