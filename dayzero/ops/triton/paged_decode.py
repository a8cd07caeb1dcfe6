"""Attention of rows of one token over their pages: split over the keys, merged by log-sum-exp. Two launches.

R rows, T tokens, H query heads, K key heads, G = H/K, D key width, V value width, S splits, N blocks, C = D of latent
rows, which are one key head that begins with its values. A *place* is a position less that of a row's first record.

How a row is split follows from its own length alone, so that its result does not depend on the rows beside it: at most
SPLITS parts of at least LEAST keys. Nothing here depends on a length that only the host knows: the grid comes from the
table's width, and programs behind the end of a row leave at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dayzero.ops.records import RowCodec
from dayzero.ops.triton.machine import INTERPRETED
from dayzero.view import Paged

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN_2: tl.constexpr = tl.constexpr(0.6931471805599453)
HEADS_IN_FP8 = "kv_fp8"  # a record: one f32 scale for each token and head
_UPCAST: tl.constexpr = tl.constexpr(INTERPRETED)  # the interpreter multiplies no bf16


@triton.jit
def product(a, b):
    """a @ b with sums in float32."""
    if _UPCAST:
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b)


@triton.jit
def capped(s, softcap, SOFTCAP: tl.constexpr):
    """Logits in base 2 from those in base e."""
    if SOFTCAP:
        s = softcap * (1 - 2 / (1 + tl.exp2(s * (2 * LOG2_E / softcap))))
    return s * LOG2_E


@triton.jit
def widened_e4m3(code, element: tl.constexpr):
    """e4m3 codes, uint8, as ``element``, which holds them exactly."""
    if _UPCAST:  # numpy has no such type: the code's fields are those of a float32 that is 2^120 times smaller
        bits = (code & 0x7F).to(tl.int32)
        value = (bits << 20).to(tl.float32, bitcast=True) * 1329227995784915872903807060280344576.0
        value = tl.where(bits == 0x7F, float("nan"), value)
        return tl.where(code >= 128, -value, value).to(element)
    return code.to(tl.float8e4nv, bitcast=True).to(element)


@triton.jit
def record_of(table, place, stride_block, stride_row, PAGE: tl.constexpr):
    """Offsets of records at places of one row, int64."""
    block = tl.load(table + place // PAGE).to(tl.int64)
    return block * stride_block + (place % PAGE) * stride_row


@triton.jit
def _split(
    q, keys, values, key_scales, value_scales, table, first, query_start, start, sinks, out, lse, parts, part_lses,
    q_token, q_head, key_block, key_row, key_head, value_block, value_row, value_head,
    key_scale_block, key_scale_row, value_scale_block, value_scale_row, table_row,
    scale, softcap, window, num_heads, max_splits,
    G: tl.constexpr, D: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr, VP: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, BLOCK_G: tl.constexpr, SPLITS: tl.constexpr, LEAST: tl.constexpr,
    LATENT: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one row, for up to BLOCK_G query heads that share a key head. FP8: records are e4m3 codes
    with a scale for each token and head."""
    if OVERLAP:
        gdc_launch_dependents()  # the merge may be brought up; it waits for all of this grid
    NUM_G: tl.constexpr = (G + BLOCK_G - 1) // BLOCK_G
    k = tl.program_id(0) // NUM_G
    row = tl.program_id(1)
    split = tl.program_id(2)
    token, behind = tl.load(query_start + row), tl.load(query_start + row + 1)
    end = tl.load(start + row) + 1 - tl.load(first + row)
    if behind - token != 1:
        return
    low = end * 0
    if WINDOW:
        low = tl.maximum(end - window, 0)
    PAGE_HOLDS_TILE: tl.constexpr = PAGE % TILE == 0
    lowest = low
    if PAGE_HOLDS_TILE:
        lowest = low // TILE * TILE
    size = tl.maximum(LEAST, tl.cdiv(tl.cdiv(end - lowest, SPLITS), TILE) * TILE)
    num_splits = tl.maximum(tl.cdiv(end - lowest, size), 1)
    if split >= num_splits:
        return

    g_M = tl.program_id(0) % NUM_G * BLOCK_G + tl.arange(0, BLOCK_G)
    h_M = k * G + g_M
    real_M = g_M < G
    d1 = tl.arange(0, D1)
    q_row = q + token.to(tl.int64) * q_token + h_M[:, None] * q_head
    element = q.dtype.element_ty if FP8 else keys.dtype.element_ty
    q1 = tl.load(q_row + d1[None], mask=real_M[:, None] & (d1[None] < D), other=0.0).to(element)
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(q_row + d2[None], mask=real_M[:, None] & (d2[None] < D), other=0.0).to(element)
    v = tl.arange(0, VP)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, VP], tl.float32)
    pages = table + row.to(tl.int64) * table_row
    from_place = lowest + split * size
    to_place = tl.minimum(from_place + size, end)
    for tile in range(from_place, to_place, TILE):
        at_L = tile + tl.arange(0, TILE)
        seen_L = (at_L >= low) & (at_L < to_place)
        if PAGE_HOLDS_TILE:
            block = tl.load(pages + tile // PAGE).to(tl.int64)
            inside_L = tile % PAGE + tl.arange(0, TILE)
            key_L = keys + block * key_block + k * key_head + inside_L * key_row
        else:
            key_L = keys + record_of(pages, tl.minimum(at_L, end - 1), key_block, key_row, PAGE) + k * key_head
        k1 = tl.load(key_L[:, None] + d1[None], mask=seen_L[:, None] & (d1[None] < D), other=0)
        if FP8:
            k1 = widened_e4m3(k1, element)
        s = product(q1, tl.trans(k1))
        if D2 > 0:
            k2 = tl.load(key_L[:, None] + d2[None], mask=seen_L[:, None] & (d2[None] < D), other=0)
            if FP8:
                k2 = widened_e4m3(k2, element)
            s += product(q2, tl.trans(k2))
        if FP8:
            at = record_of(pages, tl.minimum(at_L, end - 1), key_scale_block, key_scale_row, PAGE) + k
            s *= tl.load(key_scales + at, mask=seen_L, other=0.0)[None]
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
            v1 = tl.load(value_L[:, None] + v[None], mask=seen_L[:, None] & (v[None] < V), other=0)
            if FP8:
                v1 = widened_e4m3(v1, element)
        s = tl.where(seen_L[None], capped(s * scale, softcap, SOFTCAP), float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(p, 1)
        if FP8:
            at = record_of(pages, tl.minimum(at_L, end - 1), value_scale_block, value_scale_row, PAGE) + k
            p *= tl.load(value_scales + at, mask=seen_L, other=0.0)[None]
        acc = acc * shrink[:, None] + product(p.to(element), v1)
        top = higher

    if num_splits == 1:
        if SINKS:
            sink = tl.load(sinks + h_M, mask=real_M, other=0.0).to(tl.float32) * LOG2_E
            higher = tl.maximum(top, sink)
            shrink = tl.exp2(top - higher)
            total = total * shrink + tl.exp2(sink - higher)
            acc = acc * shrink[:, None]
            top = higher
        place = token.to(tl.int64) * num_heads + h_M
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        tl.store(out + place[:, None] * V + v[None], result, mask=real_M[:, None] & (v[None] < V))
        tl.store(lse + place, (top + tl.log2(total)) * LN_2, mask=real_M)
    else:
        total = tl.where(total == 0, 1.0, total)
        place = (row.to(tl.int64) * num_heads + h_M) * max_splits + split
        tl.store(parts + place[:, None] * V + v[None], acc / total[:, None], mask=real_M[:, None] & (v[None] < V))
        tl.store(part_lses + place, top + tl.log2(total), mask=real_M)


@triton.jit
def _merge(
    first, query_start, start, sinks, out, lse, parts, part_lses, window, num_heads, max_splits,
    V: tl.constexpr, VP: tl.constexpr, PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr,
    LEAST: tl.constexpr, WINDOW: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """The parts of one head of one row. Lengths and splits as in ``_split``."""
    if OVERLAP:
        gdc_wait()  # in every program: what comes behind this grid relies on the other one's end too
    h, row = tl.program_id(0), tl.program_id(1)
    token, behind = tl.load(query_start + row), tl.load(query_start + row + 1)
    end = tl.load(start + row) + 1 - tl.load(first + row)
    if behind - token != 1:
        return
    lowest = end * 0
    if WINDOW:
        lowest = tl.maximum(end - window, 0)
    if PAGE % TILE == 0:
        lowest = lowest // TILE * TILE
    size = tl.maximum(LEAST, tl.cdiv(tl.cdiv(end - lowest, SPLITS), TILE) * TILE)
    num_splits = tl.maximum(tl.cdiv(end - lowest, size), 1)
    if num_splits == 1:
        return
    s, v = tl.arange(0, SPLITS), tl.arange(0, VP)
    place = (row.to(tl.int64) * num_heads + h) * max_splits
    lse_S = tl.load(part_lses + place + s, mask=s < num_splits, other=float("-inf"))
    top = tl.max(lse_S, 0)
    if SINKS:
        sink = tl.load(sinks + h).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    weight_S = tl.exp2(lse_S - top)
    total = tl.sum(weight_S, 0)
    if SINKS:
        total += tl.exp2(sink - top)
    acc = tl.zeros([VP], tl.float32)
    for one in range(num_splits):
        weight = tl.exp2(tl.load(part_lses + place + one) - top)
        acc += weight * tl.load(parts + (place + one) * V + v, mask=v < V, other=0.0)
    place = token.to(tl.int64) * num_heads + h
    tl.store(out + place * V + v, (acc / total).to(out.dtype.element_ty), mask=v < V)
    tl.store(lse + place, (top + tl.log2(total)) * LN_2)


@dataclass(frozen=True, slots=True)
class Shape:
    """What both kernels of a call are specialised on. d1 + d2: key width in powers of two, the rest masked."""

    key_heads: int
    group: int
    width: int
    d1: int
    d2: int
    value_width: int
    latent: bool
    page: int
    fp8: bool = False

    @property
    def value_padded(self) -> int:
        return max(16, triton.next_power_of_2(self.value_width))


def shape_of(q_THD: Tensor, keys: Paged, values: Paged | None, value_dim: int) -> Shape:
    """ValueError for what the kernels cannot read."""
    fp8 = keys.record == HEADS_IN_FP8
    if (values is None and fp8) or keys.record not in ("", HEADS_IN_FP8):
        raise ValueError(f"records {keys.record!r}; these kernels read plain ones, and heads in {HEADS_IN_FP8}")
    page, (key_heads, width) = keys.page, keys.shape
    heads = q_THD.shape[1]
    latent = values is None
    value_width = value_dim if values is None else values.shape[-1]
    if q_THD.shape[2] != width or heads % key_heads or (latent and not 0 < value_dim <= width):
        raise ValueError(f"queries {tuple(q_THD.shape)} do not fit keys {keys.shape}")
    if page < 8 or page & (page - 1):
        raise ValueError(f"pages of {page} records; these kernels take powers of two from 8 on")
    if latent:
        d1 = value_width
        if d1 & (d1 - 1) or d1 < 16:
            raise ValueError(f"latent values of width {d1}; these kernels take powers of two from 16 on")
        d2 = 0 if width == d1 else max(16, triton.next_power_of_2(width - d1))
    else:
        d1 = max(16, 1 << (width.bit_length() - 1))
        d2 = 0 if width <= d1 else max(16, triton.next_power_of_2(width - d1))
    return Shape(key_heads, heads // key_heads, width, d1, d2, value_width, latent, page, fp8)


class Records(NamedTuple):
    """A need's records for a kernel. rows [N, page, heads, width]: elements, or codes as uint8. scales [N, page, heads]
    f32 of codes; of plain elements the rows again, which nobody reads."""

    rows: Tensor
    scales: Tensor

    @property
    def strides(self) -> tuple[int, ...]:
        return self.rows.stride()[:3]

    @property
    def scale_strides(self) -> tuple[int, ...]:
        return self.scales.stride()[:2]


def records_of(paged: Paged) -> Records:
    """Views of the pool."""
    if paged.codec is None:
        return Records(paged.rows, paged.rows)
    assert isinstance(paged.codec, RowCodec)
    codes, scales, _ = paged.codec.parts(paged.rows)
    return Records(codes.unflatten(-1, paged.shape), scales.view(torch.float32))


@dataclass(frozen=True, slots=True)
class Tuning:
    """tile: keys at once; splits, least: at most so many parts, of at least so many keys."""

    tile: int
    block_g: int
    splits: int
    least: int
    warps: int
    stages: int


def tuning_of(shape: Shape, num_rows: int) -> Tuning:
    """block_g alone follows from the number of rows; it does not change a result."""
    if shape.latent and shape.d1 >= 256:
        if num_rows * shape.group <= 512:
            return Tuning(tile=64, block_g=16, splits=16, least=256, warps=4, stages=2)
        return Tuning(tile=64, block_g=min(64, max(16, triton.next_power_of_2(shape.group))), splits=16, least=256,
                      warps=8, stages=2)  # fmt: skip
    block_g = max(16, min(64, triton.next_power_of_2(shape.group)))
    wide = shape.d1 + shape.d2 > 128
    return Tuning(tile=32 if wide else 64, block_g=block_g, splits=16, least=256, warps=4, stages=5)


def decode(
    q_THD: Tensor, keys: Paged, values: Paged | None, out_THV: Tensor, lse_TH: Tensor, shape: Shape,
    options: dict[str, Any], tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """Write out and lse of all rows that have one token; other rows are left alone. options: scale, window, sinks_H,
    softcap."""
    num_rows, heads = keys.start.shape[0], q_THD.shape[1]
    tuning = tuning or tuning_of(shape, num_rows)
    window, sinks_H, softcap = options["window"], options["sinks_H"], options["softcap"]
    longest = keys.table.shape[1] * shape.page
    if isinstance(window, int):
        longest = min(longest, window + tuning.tile)
    max_splits = max(1, min(tuning.splits, -(-longest // tuning.least)))
    parts = q_THD.new_empty(num_rows, heads, max_splits if max_splits > 1 else 0, shape.value_width,
                            dtype=torch.float32)  # fmt: skip
    part_lses = torch.empty(parts.shape[:3], dtype=torch.float32, device=q_THD.device)
    held = records_of(keys)
    held_values = held if values is None else records_of(values)
    sinks = lse_TH if sinks_H is None else sinks_H
    flags = {"WINDOW": window is not None, "SINKS": sinks_H is not None}
    same = {"V": shape.value_width, "VP": shape.value_padded, "PAGE": shape.page, "TILE": tuning.tile,
            "SPLITS": tuning.splits, "LEAST": tuning.least}  # fmt: skip
    grid = (shape.key_heads * -(-shape.group // tuning.block_g), num_rows, max_splits)
    _split[grid](
        q_THD, held.rows, held_values.rows, held.scales, held_values.scales, keys.table, keys.first, keys.query_start,
        keys.start, sinks, out_THV, lse_TH, parts, part_lses, q_THD.stride(0), q_THD.stride(1), *held.strides,
        *held_values.strides, *held.scale_strides, *held_values.scale_strides, keys.table.stride(0), options["scale"],
        softcap or 1.0, window or 0, heads, max_splits,
        G=shape.group, D=shape.width, D1=shape.d1, D2=shape.d2, BLOCK_G=tuning.block_g, LATENT=shape.latent,
        SOFTCAP=softcap is not None, FP8=shape.fp8, OVERLAP=max_splits > 1 and not INTERPRETED, num_warps=tuning.warps,
        num_stages=tuning.stages, **same, **flags,
    )  # fmt: skip
    if max_splits > 1:
        _merge[(heads, num_rows)](
            keys.first, keys.query_start, keys.start, sinks, out_THV, lse_TH, parts, part_lses, window or 0, heads,
            max_splits, OVERLAP=not INTERPRETED, num_warps=min(4, max(1, shape.value_padded // 128)), **same, **flags,
            **({} if INTERPRETED else {"launch_pdl": True}),
        )  # fmt: skip
