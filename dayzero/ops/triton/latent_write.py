"""Rows of latent attention in one launch, from the projection to the cache: norm, turn, codes and scales, stores.

T tokens, R latent width, P shared key width, F frequencies. A program makes one token's row. Everything is rounded
where the separate operators round, sums and cosines run in f64 as there, and nothing is fused into one rounding (fp
fusion is off), so that the bytes are the reference's. The f64 units of the chip have half of its f32 rate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from dayzero.ops.latent_write import LatentNorm, Turn
from dayzero.ops.records import RowCodec
from dayzero.ops.triton.cache_write import bf16_bits, store_scales, tile_codes, to_bf16
from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.rows import FOLLOWS, follow

__all__ = ["check_machine", "write_latent"]

TILE = 128


@triton.jit
def rounded(x, like):
    """f32 numbers rounded to the elements of the pointer ``like``, as f32."""
    if like.dtype.element_ty == tl.bfloat16:
        x = to_bf16(x)
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def store_row(rows, at, x, mask, BYTES: tl.constexpr):
    """f32 numbers at elements ``at`` behind ``rows``; BYTES: ``rows`` points to bytes, ``at`` counts bf16 numbers."""
    if BYTES:
        tl.store(rows.to(tl.pointer_type(tl.int16), bitcast=True) + at, bf16_bits(x), mask=mask)
    else:
        if rows.dtype.element_ty == tl.bfloat16:
            x = to_bf16(x)
        tl.store(rows + at, x.to(rows.dtype.element_ty), mask=mask)


@triton.jit
def shared_key(
    key, rows, at, positions, frequencies, token, axis_stride, key_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM: tl.constexpr, PAIRS: tl.constexpr, BEGIN: tl.constexpr,
    HALF: tl.constexpr, FACTOR: tl.constexpr, AXES: tl.constexpr, HEIGHT: tl.constexpr, BREADTH: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """key[0:WIDTH], 2 * NUM of it from BEGIN on turned, to rows[at:]."""
    if NUM > 0:
        f = tl.arange(0, PAIRS)
        there = f < NUM
        if AXES == 3:
            tall, broad = (f % 3 == 1) & (f < 3 * HEIGHT), (f % 3 == 2) & (f < 3 * BREADTH)
            axis = tl.where(tall, 1, tl.where(broad, 2, 0)).to(tl.int64)
            place = tl.load(positions + axis * axis_stride + token)
        else:
            place = tl.load(positions + token)
        angle = (place.to(tl.float32) * tl.load(frequencies + f, mask=there, other=0.0)).to(tl.float64)
        cos, sin = (tl.cos(angle) * FACTOR).to(tl.float32), (tl.sin(angle) * FACTOR).to(tl.float32)
        one = BEGIN + (f if HALF else 2 * f)
        two = one + (NUM if HALF else 1)
        a = tl.load(key + one * key_stride, mask=there, other=0.0).to(tl.float32)
        b = tl.load(key + two * key_stride, mask=there, other=0.0).to(tl.float32)
        store_row(rows, at + one, rounded(a * cos - b * sin, key), there, BYTES)
        store_row(rows, at + two, rounded(b * cos + a * sin, key), there, BYTES)
    if WIDTH > 2 * NUM:
        column = tl.arange(0, BLOCK)
        rest = (column < WIDTH) & ((column < BEGIN) | (column >= BEGIN + 2 * NUM))
        store_row(
            rows, at + column, tl.load(key + column * key_stride, mask=rest, other=0.0).to(tl.float32), rest, BYTES
        )


@triton.jit
def _latent_kernel(
    kv, weight, positions, frequencies, rows, blocks, offsets, token_stride, element_stride, axis_stride, block_stride,
    RANK: tl.constexpr, EPS: tl.constexpr, ROUND_FIRST: tl.constexpr, TILES: tl.constexpr, BYTES: tl.constexpr,
    KIND: tl.constexpr, SCALES_AT: tl.constexpr, SCALE_BYTES: tl.constexpr, PLAIN_AT: tl.constexpr,
    ROW: tl.constexpr, END: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, NUM: tl.constexpr,
    PAIRS: tl.constexpr, BEGIN: tl.constexpr, HALF: tl.constexpr, FACTOR: tl.constexpr, AXES: tl.constexpr,
    HEIGHT: tl.constexpr, BREADTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ROW: elements of a row of ``rows``, bytes where BYTES; block_stride too. END: where its last pad begins."""
    follow()
    token = tl.program_id(0).to(tl.int64)
    begin = tl.load(blocks + token) * block_stride + tl.load(offsets + token) * ROW
    source = kv + token * token_stride
    tile, column = tl.arange(0, TILES), tl.arange(0, COLUMNS)
    element = tile[:, None] * COLUMNS + column[None, :]
    mask = element < RANK
    x = tl.load(source + element * element_stride, mask=mask, other=0.0).to(tl.float32)
    wide = x.to(tl.float64)
    mean = tl.sum(tl.sum(wide * wide, axis=1), axis=0) / RANK
    y = x * (1.0 / tl.sqrt(mean + EPS)).to(tl.float32)
    if ROUND_FIRST:
        y = rounded(y, kv)
    y = rounded(y * tl.load(weight + element, mask=mask, other=0.0).to(tl.float32), kv)
    key = source + RANK * element_stride
    if BYTES:
        codes, scale = tile_codes(y, KIND)
        tl.store(rows + begin + element, codes, mask=mask)
        store_scales(rows, begin + SCALES_AT + tile * 4, scale, KIND, tile * COLUMNS < RANK)
        at = (begin + PLAIN_AT) // 2
        if SCALES_AT > RANK or ROW > END:
            pad = tl.arange(0, 16)
            zeros = tl.zeros((16,), tl.uint8)
            tl.store(rows + begin + RANK + pad, zeros, mask=pad < SCALES_AT - RANK)
            tl.store(rows + begin + END + pad, zeros, mask=pad < ROW - END)
    else:
        store_row(rows, begin + element, y, mask, False)
        at = begin + RANK
    shared_key(
        key, rows, at, positions, frequencies, token, axis_stride, element_stride, WIDTH, BLOCK, NUM, PAIRS, BEGIN,
        HALF, FACTOR, AXES, HEIGHT, BREADTH, BYTES,
    )  # fmt: skip


def write_latent(
    kv_TC: Tensor,
    rows: Tensor,
    blocks_T: Tensor,
    offsets_T: Tensor,
    codec: RowCodec | None,
    norm: LatentNorm,
    turn: Turn | None = None,
) -> None:
    """``cache.write_latent``; no launch without tokens."""
    num_tokens, width = kv_TC.shape
    if num_tokens == 0:
        return
    rank = norm.weight_R.shape[0]
    shared = width - rank
    assert norm.weight_R.is_contiguous() and blocks_T.is_contiguous() and offsets_T.is_contiguous()
    columns = min(TILE, next_power_of_2(rank))
    _latent_kernel[(num_tokens,)](
        kv_TC, norm.weight_R, *_places(turn, norm.weight_R), rows, blocks_T, offsets_T, *kv_TC.stride(),
        0 if turn is None else turn.positions.stride(0), rows.stride(0),
        RANK=rank, EPS=norm.eps, ROUND_FIRST=norm.scale_in == "dtype",
        TILES=next_power_of_2(-(-rank // columns)), **_row(rows, codec, width), WIDTH=shared,
        BLOCK=next_power_of_2(max(1, shared)), **_turning(turn, shared), COLUMNS=columns, num_warps=1,
        enable_fp_fusion=False, **FOLLOWS,
    )  # fmt: skip


def _row(rows: Tensor, codec: RowCodec | None, width: int) -> dict[str, object]:
    """How a row lies, for the kernel."""
    if codec is None:
        assert rows.shape[2:] == (width,) and rows.stride()[1:] == (width, 1), f"no packed rows: {rows.stride()}"
        return {"BYTES": False, "KIND": "f32", "SCALES_AT": 0, "SCALE_BYTES": 0, "PLAIN_AT": 0, "ROW": width, "END": 0}
    row = codec.row
    assert not row.planar and rows.dtype == torch.uint8 and rows.stride()[1:] == (row.num_bytes, 1), rows.stride()
    assert rows.stride(0) % 4 == 0 and row.tile == TILE
    return {
        "BYTES": True, "KIND": row.scale, "SCALES_AT": row.scales_at, "SCALE_BYTES": row.scale_bytes,
        "PLAIN_AT": row.plain_at, "ROW": row.num_bytes, "END": row.plain_at + 2 * row.plain,
    }  # fmt: skip


def _places(turn: Turn | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    """(positions, frequencies); without a turn anything that is a tensor, which is not read."""
    if turn is None:
        return unused, unused
    assert turn.positions.stride(-1) == 1 and turn.inv_freq_F.is_contiguous() and turn.inv_freq_F.dtype == torch.float32
    return turn.positions, turn.inv_freq_F


def _turning(turn: Turn | None, shared: int) -> dict[str, object]:
    num = 0 if turn is None else turn.inv_freq_F.shape[0]
    _, height, breadth = (turn.sections if turn is not None else None) or (0, 0, 0)
    return {
        "NUM": num, "PAIRS": next_power_of_2(max(1, num)),
        "BEGIN": shared - 2 * num if turn is not None and turn.part == "last" else 0,
        "HALF": turn is not None and turn.style == "half", "FACTOR": 1.0 if turn is None else turn.factor,
        "AXES": 1 if turn is None else 3 if turn.positions.dim() == 2 else 1, "HEIGHT": height, "BREADTH": breadth,
    }  # fmt: skip
