"""Cache rows written where they belong in one launch: as plain elements, or as e4m3 codes with scales.

T tokens, W elements of a token, C codes, G tiles of a token (one scale each), P tokens of a page. A program writes some
tiles of consecutive tokens: it reads the token's place, the values once, and stores codes and scale; programs share
nothing, so that the order they run in does not matter. Every number is made as ``ops/records`` makes it, bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from dayzero.decl import PackedRow
from dayzero.ops.records import RowCodec
from dayzero.ops.triton.machine import INTERPRETED, check_machine
from dayzero.ops.triton.rows import FOLLOWS, follow

__all__ = ["check_machine", "write"]

_ELEMENTS = 2048  # of a program where there are enough tokens to fill the device
_FEW_TOKENS = 256  # up to here a program takes one token's tiles, for as many programs as there are
_SLOW = tl.constexpr(INTERPRETED)  # the interpreter cuts narrow numbers off; here they are rounded by whole numbers


@triton.jit
def to_bf16(x):
    """bf16 of any float, nearest, ties to even."""
    if _SLOW and x.dtype == tl.float32:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        bits = tl.where(x != x, 0x7FC0, nearest).to(tl.int16)
        return bits.to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def bf16_bits(x):
    """int16 bits of f32 numbers as bf16; every NaN is the same one."""
    return tl.where(x != x, 0x7FC0, to_bf16(x).to(tl.int16, bitcast=True)).to(tl.int16)


@triton.jit
def _plain_kernel(
    values, rows, blocks, offsets, num_tokens, token_stride, element_stride, block_stride,
    WIDTH: tl.constexpr, TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rows [N, P, W] <- values [T, W]; block_stride in elements."""
    follow()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    there = token < num_tokens
    block = tl.load(blocks + token, mask=there, other=0)
    offset = tl.load(offsets + token, mask=there, other=0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = there[:, None] & (column < WIDTH)[None, :]
    source = values + token.to(tl.int64)[:, None] * token_stride + column[None, :] * element_stride
    target = rows + (block * block_stride + offset * WIDTH)[:, None] + column[None, :]
    x = tl.load(source, mask=mask)
    if rows.dtype.element_ty == tl.bfloat16:
        x = to_bf16(x)
    tl.store(target, x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def e4m3_code(x):
    """uint8 codes of f32 numbers, nearest, ties to even, no larger than 448; 0x7F for NaN. As the chip converts."""
    if not _SLOW:
        return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    kept = tl.minimum(tl.maximum(x, -448.0), 448.0)
    bits = kept.to(tl.int32, bitcast=True)
    sign, size = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes count multiples of 2^-9: the sum with 1.5 * 2^14, whose last bit stands for 2^-9, rounds so.
    small = ((tl.abs(kept) + 24576.0).to(tl.int32, bitcast=True)) & 0xFF
    code = tl.where(size < (121 << 23), small, normal) | sign
    return tl.where(x != x, 0x7F, code).to(tl.uint8)


@triton.jit
def tile_scale(largest, KIND: tl.constexpr):
    """f32 scales of tiles by their largest magnitudes, f32. KIND: of the scale."""
    scale = tl.div_rn(tl.maximum(largest, 1e-4), 448.0)
    if KIND != "f32":  # one step of the exponent up where any bit of the mantissa is set
        scale = (((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) << 23).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def tile_codes(x, KIND: tl.constexpr):
    """(uint8 codes [R, B], f32 scales [R]) of tiles [R, B] in f32, zeros behind a short one. KIND: of the scale."""
    size = tl.abs(x)
    if _SLOW:
        size = tl.where(x == x, size, 0.0)  # the chip's maximum leaves NaN out
    scale = tile_scale(tl.max(size, axis=1), KIND)
    return e4m3_code(x * tl.div_rn(1.0, scale)[:, None]), scale


@triton.jit
def store_scales(rows, at, scale, KIND: tl.constexpr, mask):
    """Scales at byte offsets ``at`` behind ``rows``, a pointer to bytes."""
    if KIND == "e8m0":
        tl.store(rows + at, (scale.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(rows.to(tl.pointer_type(tl.float32), bitcast=True) + at // 4, scale, mask=mask)


@triton.jit
def _packed_kernel(
    values, rows, blocks, offsets, num_tokens, token_stride, element_stride, block_stride,
    CODES: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, KIND: tl.constexpr, PLAIN: tl.constexpr,
    PLANAR: tl.constexpr, PAGE: tl.constexpr, SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr,
    PLAIN_AT: tl.constexpr, ROW_BYTES: tl.constexpr,
    COUNT: tl.constexpr, BLOCK: tl.constexpr, PLAIN_BLOCK: tl.constexpr,
):  # fmt: skip
    """rows: bytes; block_stride in bytes. COUNT tiles a program, BLOCK >= TILE elements each."""
    follow()
    number = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    token, tile = number // TILES, number % TILES
    there = token < num_tokens
    block = tl.load(blocks + token, mask=there, other=0)
    offset = tl.load(offsets + token, mask=there, other=0)
    source = values + token.to(tl.int64) * token_stride
    column = tl.arange(0, BLOCK)
    element = tile[:, None] * TILE + column[None, :]
    mask = there[:, None] & (column < TILE)[None, :] & (element < CODES)
    x = tl.load(source[:, None] + element * element_stride, mask=mask, other=0.0).to(tl.float32)
    codes, scale = tile_codes(x, KIND)
    if PLANAR:
        begin = block * block_stride + offset * CODES
        scales_at = block * block_stride + PAGE * CODES + offset * SCALE_BYTES
    else:
        begin = block * block_stride + offset * ROW_BYTES
        scales_at = begin + SCALES_AT
    tl.store(rows + begin[:, None] + element, codes, mask=mask)
    store_scales(rows, scales_at + tile * (SCALE_BYTES // TILES), scale, KIND, there)
    if not PLANAR:
        first = there & (tile == 0)
        column = tl.arange(0, PLAIN_BLOCK)
        mask = first[:, None] & (column < PLAIN)[None, :]
        rest = tl.load(source[:, None] + (CODES + column)[None, :] * element_stride, mask=mask).to(tl.float32)
        plain = rows.to(tl.pointer_type(tl.int16), bitcast=True) + (begin + PLAIN_AT)[:, None] // 2
        tl.store(plain + column[None, :], bf16_bits(rest), mask=mask)
        column = tl.arange(0, 16)
        if SCALES_AT > CODES:
            mask = first[:, None] & (column < SCALES_AT - CODES)[None, :]
            tl.store(rows + (begin + CODES)[:, None] + column[None, :], tl.zeros((COUNT, 16), tl.uint8), mask=mask)
        if ROW_BYTES > PLAIN_AT + 2 * PLAIN:
            mask = first[:, None] & (column < ROW_BYTES - PLAIN_AT - 2 * PLAIN)[None, :]
            end = (begin + PLAIN_AT + 2 * PLAIN)[:, None]
            tl.store(rows + end + column[None, :], tl.zeros((COUNT, 16), tl.uint8), mask=mask)


def write(
    values_TS: Tensor, rows: Tensor, blocks_T: Tensor, offsets_T: Tensor, codec: RowCodec | None = None
) -> None:  # fmt: skip
    """``cache.write``, one launch; none without tokens."""
    if values_TS.shape[0] == 0:
        return
    values_TW = values_TS.flatten(1)
    assert blocks_T.is_contiguous() and offsets_T.is_contiguous(), "places are packed numbers"
    if codec is None:
        _write_plain(values_TW, rows.flatten(2), blocks_T, offsets_T)
    else:
        _write_packed(values_TW, rows, blocks_T, offsets_T, codec.row)


def _write_plain(values_TW: Tensor, rows_NPW: Tensor, blocks_T: Tensor, offsets_T: Tensor) -> None:
    num_tokens, width = values_TW.shape
    assert rows_NPW.stride()[1:] == (width, 1), f"rows of a block are not packed: {rows_NPW.stride()}"
    block, tokens = min(1024, next_power_of_2(width)), 1
    if num_tokens > _FEW_TOKENS:
        even = width & -width  # the largest power of two in it: no thread is left without elements
        block = min(512, even) if even >= 64 else block
        tokens = max(1, _ELEMENTS // block)
    _plain_kernel[cdiv(num_tokens, tokens), cdiv(width, block)](
        values_TW, rows_NPW, blocks_T, offsets_T, num_tokens, *values_TW.stride(), rows_NPW.stride(0),
        WIDTH=width, TOKENS=tokens, BLOCK=block, num_warps=_warps(tokens * block), **FOLLOWS,
    )  # fmt: skip


def _write_packed(values_TW: Tensor, rows: Tensor, blocks_T: Tensor, offsets_T: Tensor, row: PackedRow) -> None:
    assert rows.dtype == torch.uint8 and rows.stride()[1:] == (row.num_bytes, 1) and rows.stride(0) % 4 == 0, (
        f"rows of {rows.dtype} with strides {rows.stride()} are no {row.record}"
    )
    block = next_power_of_2(row.tile)
    tiles = next_power_of_2(row.num_scales)
    count = tiles if values_TW.shape[0] <= _FEW_TOKENS else max(tiles, _ELEMENTS // block)
    _packed_kernel[(cdiv(values_TW.shape[0] * row.num_scales, count),)](
        values_TW, rows, blocks_T, offsets_T, values_TW.shape[0], *values_TW.stride(), rows.stride(0),
        CODES=row.num_codes, TILE=row.tile, TILES=row.num_scales, KIND=row.scale, PLAIN=row.plain, PLANAR=row.planar,
        PAGE=rows.shape[1], SCALES_AT=row.scales_at, SCALE_BYTES=row.scale_bytes, PLAIN_AT=row.plain_at,
        ROW_BYTES=row.num_bytes, COUNT=count, BLOCK=block, PLAIN_BLOCK=max(16, next_power_of_2(row.plain)),
        num_warps=_warps(count * block), **FOLLOWS,
    )  # fmt: skip


def _warps(elements: int) -> int:
    """Warps of a program that has 16 elements, the widest load, for each thread."""
    return max(1, min(8, next_power_of_2(cdiv(elements, 512))))
