"""A tile of rows times some rows of its expert's matrices, whatever these are stored in.

Weights are the left operand (64 rows of the output, or 128), activations the right one: so a handful of rows fills the
matrix unit, and weights of 4 and 8 bits go from memory through registers into the product, never stored wider.

K inner dimension of a product, R rows (out) of a matrix.
"""

from __future__ import annotations

import triton
import triton.language as tl

from dayzero.ops.triton.fp8_tiles import HALF, widened_bytes
from dayzero.ops.triton.machine import INTERPRETED
from dayzero.ops.triton.mxfp4 import COLUMNS, ROWS, row_places, widened, word_places

_SLOW = tl.constexpr(INTERPRETED)
_TILE, _WIDE = tl.constexpr(ROWS), tl.constexpr(COLUMNS)
_WORDS = tl.constexpr(ROWS * COLUMNS // 8)
_HALF = tl.constexpr(HALF)


@triton.jit
def _times(left, right, total):
    if _SLOW:  # the interpreter multiplies no bf16
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total)


@triton.jit
def _rows_of(x, columns, inside, K: tl.constexpr, EVEN: tl.constexpr):
    """A piece of the right operand [columns, rows], zero beyond K. Rows that are none are not read: were it some row in
    their place, all programs would read that one, and wait for each other."""
    if EVEN:
        return tl.load(x, mask=inside[None, :], other=0.0)
    return tl.load(x, mask=inside[None, :] & (columns < K)[:, None], other=0.0)


@triton.jit
def _plain_piece(w, rows, columns, R, K: tl.constexpr, EVEN: tl.constexpr):
    """A piece of a plain matrix; rows beyond R are any numbers when K is even, as they are not stored."""
    at = w + rows[:, None].to(tl.int64) * K + columns[None, :]
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(rows < R)[:, None] & (columns < K)[None, :], other=0.0)


@triton.jit
def _byte_sums(
    at, one, two, one_blocks, two_blocks, scales, behind, inside, expert, high, split, tall, K: tl.constexpr,
    TWO: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, ROWS: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """``sums_of`` of matrices in blocks of 8 bits: those of each 128 columns are multiplied by the block's scale, and
    by the rows' own."""
    g = tl.zeros((HIGH, ROWS), tl.float32)
    u = tl.zeros((HIGH, ROWS), tl.float32)
    half = tl.arange(0, _WIDE // 2)
    wide: tl.constexpr = (K + _WIDE - 1) // _WIDE
    STEPS: tl.constexpr = (wide + SPLIT - 1) // SPLIT
    TALL: tl.constexpr = HIGH // _TILE
    words = (expert * tall + high * TALL) * wide * (2 * _HALF) + word_places(wide * (2 * _HALF), TALL)
    block = (expert * (tall // 2) + high * HIGH // 128) * wide
    for k in range(STEPS):
        step = split * STEPS + k
        columns = half + step * _WIDE
        left = _rows_of(at + columns[:, None], columns, inside, K, EVEN)
        columns += _WIDE // 2
        right = _rows_of(at + columns[:, None], columns, inside, K, EVEN)
        step = step if SPLIT == 1 else tl.minimum(step, wide - 1)
        word = words + step * (2 * _HALF)
        own, other = tl.load(one_blocks + block + step), tl.load(two_blocks + block + step)  # early: they take a while
        if scales is not None:
            scale = tl.load((scales + step * behind) + tl.arange(0, ROWS))[None, :]
        a = widened_bytes(tl.load(one + word), TALL)
        b = widened_bytes(tl.load(one + word + _HALF), TALL)
        y = _times(b, right, _times(a, left, tl.zeros((HIGH, ROWS), tl.float32))) * own
        g += y if scales is None else y * scale
        if TWO:
            a = widened_bytes(tl.load(two + word), TALL)
            b = widened_bytes(tl.load(two + word + _HALF), TALL)
            y = _times(b, right, _times(a, left, tl.zeros((HIGH, ROWS), tl.float32))) * other
            u += y if scales is None else y * scale
    return g, u


@triton.jit
def sums_of(
    at, one, two, one_exponents, two_exponents, one_shifts, two_shifts, scales, behind, inside, expert, high, split, R,
    tall, K: tl.constexpr, TWO: tl.constexpr, BITS: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    ROWS: tl.constexpr, HIGH: tl.constexpr, DEEP: tl.constexpr,
):  # fmt: skip
    """HIGH rows of matrix ``one`` of the expert, and of ``two`` where TWO, times the rows at ``at`` [1, ROWS]; of the
    ``split``-th part of K where that is SPLIT parts. Steps beyond K read the last one and multiply it by zeros. BITS:
    of a code, 0 for plain matrices; of 8 bits ``one_exponents`` are the scales of blocks.

    scales: None, or where those of the tile's rows begin: sums within 128 columns are multiplied by them, each block's
    ``behind`` the one before."""
    g = tl.zeros((HIGH, ROWS), tl.float32)
    u = tl.zeros((HIGH, ROWS), tl.float32)
    if BITS == 8:
        g, u = _byte_sums(
            at, one, two, one_exponents, two_exponents, scales, behind, inside, expert, high, split, tall, K, TWO, EVEN,
            SPLIT, ROWS, HIGH,
        )  # fmt: skip
    elif BITS == 4:
        half = tl.arange(0, _WIDE // 2)
        wide: tl.constexpr = (K + _WIDE - 1) // _WIDE
        STEPS: tl.constexpr = (wide + SPLIT - 1) // SPLIT
        TALL: tl.constexpr = HIGH // _TILE
        first = (expert * tall + high * TALL) * wide
        words = first * _WORDS + word_places(wide * _WORDS, TALL)
        places = first * _TILE + row_places(wide * _TILE, TALL)
        for k in range(STEPS):
            step = split * STEPS + k
            columns = half + step * _WIDE
            left = _rows_of(at + columns[:, None], columns, inside, K, EVEN)
            columns += _WIDE // 2
            right = _rows_of(at + columns[:, None], columns, inside, K, EVEN)
            step = step if SPLIT == 1 else tl.minimum(step, wide - 1)
            word, place = words + step * _WORDS, places + step * _TILE
            a, b = widened(tl.load(one + word), tl.load(one_exponents + place), TALL)
            if scales is None:
                g = _times(b, right, _times(a, left, g))
            else:
                scale = tl.load((scales + step * behind) + tl.arange(0, ROWS))[None, :]
                g += _times(b, right, _times(a, left, tl.zeros((HIGH, ROWS), tl.float32))) * scale
            if TWO:
                a, b = widened(tl.load(two + word), tl.load(two_exponents + place), TALL)
                if scales is None:
                    u = _times(b, right, _times(a, left, u))
                else:
                    u += _times(b, right, _times(a, left, tl.zeros((HIGH, ROWS), tl.float32))) * scale
        g *= tl.load(one_shifts + expert)
        if TWO:
            u *= tl.load(two_shifts + expert)
    else:
        deep = tl.arange(0, DEEP)
        rows = tl.minimum(high * HIGH + tl.arange(0, HIGH), R - 1)
        PIECES: tl.constexpr = ((K + DEEP - 1) // DEEP + SPLIT - 1) // SPLIT
        for k in range(PIECES):
            columns = deep + (split * PIECES + k) * DEEP
            piece = _rows_of(at + columns[:, None], columns, inside, K, EVEN)
            a = _plain_piece(one + expert * R * K, rows, columns, R, K, EVEN)
            if scales is None:
                g = _times(a, piece, g)
            else:
                block = (split * PIECES + k) * DEEP // _WIDE
                scale = tl.load((scales + block * behind) + tl.arange(0, ROWS))[None, :]
                g += _times(a, piece, tl.zeros((HIGH, ROWS), tl.float32)) * scale
            if TWO:
                b = _plain_piece(two + expert * R * K, rows, columns, R, K, EVEN)
                if scales is None:
                    u = _times(b, piece, u)
                else:
                    u += _times(b, piece, tl.zeros((HIGH, ROWS), tl.float32)) * scale
    return g, u
