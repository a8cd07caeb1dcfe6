"""What stands around the chunked delta rule in a step of packed rows: where chunks lie, short convolutions and their
windows, the gated output norm.

T tokens of the step, R rows of more than one token, C tokens of a chunk, W taps, G or H heads. A row's tokens are cut
into chunks of C from its first on; no chunk holds tokens of two rows.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def plan(
    starts_ptr, chunks_ptr, first_ptr, count_ptr, row_ptr, num_rows,
    ROWS: tl.constexpr, C: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (R). From starts [R + 1], where rows begin: chunks [R + 1], the number of each row's first chunk; of each
    chunk its first token, how many it has, and its row. ROWS: a power of two >= R."""
    r = tl.program_id(0)
    rows = tl.arange(0, ROWS)
    known = rows < num_rows
    length = tl.load(starts_ptr + rows + 1, mask=known, other=0) - tl.load(starts_ptr + rows, mask=known, other=0)
    num = (length + C - 1) // C
    before = tl.sum(tl.where(rows < r, num, 0))
    tl.store(chunks_ptr + r, before)
    begin = tl.load(starts_ptr + r)
    end = tl.load(starts_ptr + r + 1)
    own = (end - begin + C - 1) // C
    if r == num_rows - 1:
        tl.store(chunks_ptr + num_rows, before + own)
    for n in range(0, own, STEP):
        nth = n + tl.arange(0, STEP)
        inside = nth < own
        tl.store(first_ptr + before + nth, begin + nth * C, mask=inside)
        tl.store(count_ptr + before + nth, tl.minimum(end - begin - nth * C, C), mask=inside)
        tl.store(row_ptr + before + nth, r + nth * 0, mask=inside)


@triton.jit
def _tap(taps_ptr, cols, channels, tap: tl.constexpr, W: tl.constexpr):
    return tl.load(taps_ptr + cols * W + tap, mask=cols < channels, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _store_silu(y_ptr, acc, first, rows, cols, channels, inside):
    at_y = (first + rows).to(tl.int64)[:, None] * channels + cols[None, :]
    tl.store(y_ptr + at_y, (acc * tl.sigmoid(acc)).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def convolve(
    x_ptr, taps_ptr, window_ptr, y_ptr, first_ptr, count_ptr, row_ptr, starts_ptr, start_ptr, table_ptr,
    x_t, x_c, block_stride, table_stride, channels,
    W: tl.constexpr, C: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (slices of channels, N). y[t] = silu(sum over taps j of taps[:, j] x[t - (W - 1) + j]), in y's dtype;
    what lies before a row is its window, or zeros where the row is at the start of its sequence."""
    n = tl.program_id(1)
    first, count, r = tl.load(first_ptr + n), tl.load(count_ptr + n), tl.load(row_ptr + n)
    rows = tl.arange(0, C)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    begin = tl.load(starts_ptr + r)
    block = tl.load(table_ptr + r * table_stride).to(tl.int64)
    known = (tl.load(start_ptr + r) > 0) & (block >= 0) & (first == begin)
    inside = (rows < count)[:, None] & (cols < channels)[None, :]
    acc = tl.zeros([C, BC], dtype=tl.float32)
    if (first > begin) & (count == C):  # most chunks: all that a token needs is there, and one place follows another
        before, here = x_ptr + (first - (W - 1)).to(tl.int64) * x_t, (cols < channels)[None, :]
        for tap in tl.static_range(W):
            x = tl.load(before + (rows + tap)[:, None] * x_t + cols[None, :] * x_c, mask=here, other=0.0)
            acc += x.to(tl.float32) * _tap(taps_ptr, cols, channels, tap, W)
        _store_silu(y_ptr, acc, first, rows, cols, channels, here)
        return
    for tap in tl.static_range(W):
        at = first + rows - (W - 1 - tap)
        given = inside & (at >= begin)[:, None]
        x = tl.load(x_ptr + at[:, None].to(tl.int64) * x_t + cols[None, :] * x_c, mask=given, other=0.0)
        x = x.to(tl.float32)
        if tap < W - 1 and known:
            kept = (at - begin + (W - 1))[:, None] + cols[None, :] * (W - 1)
            old = inside & (at < begin)[:, None]
            x += tl.load(window_ptr + block * block_stride + kept, mask=old, other=0.0).to(tl.float32)
        acc += x * _tap(taps_ptr, cols, channels, tap, W)
    _store_silu(y_ptr, acc, first, rows, cols, channels, inside)


@triton.jit
def keep_windows(
    x_ptr, window_ptr, starts_ptr, start_ptr, table_ptr, x_t, x_c, block_stride, table_stride, channels,
    W: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Grid (slices of channels, R). The last W - 1 inputs of each row, its window before included, replace the window.

    A thread reads what it will write over before it does: a window's new entry s is its old entry s + length or later.
    """
    r = tl.program_id(1)
    cols = tl.program_id(0) * BC + tl.arange(0, BC)
    block = tl.load(table_ptr + r * table_stride).to(tl.int64)
    if block < 0:
        return
    begin = tl.load(starts_ptr + r)
    end = tl.load(starts_ptr + r + 1)
    if begin == end:
        return
    inside = cols < channels
    known = inside & (tl.load(start_ptr + r) > 0)
    kept_ptr = window_ptr + block * block_stride + cols * (W - 1)
    for s in tl.static_range(W - 1):
        at = end - (W - 1) + s
        if at >= begin:
            new = tl.load(x_ptr + at.to(tl.int64) * x_t + cols * x_c, mask=inside, other=0.0)
            new = new.to(window_ptr.dtype.element_ty)
        else:
            new = tl.load(kept_ptr + (at - begin + (W - 1)), mask=known, other=0.0)
        tl.store(kept_ptr + s, new, mask=inside)


@triton.jit
def norm_gate(
    o_ptr, gate_ptr, weight_ptr, num_pairs, gate_t, gate_c, eps,
    HEADS: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BM: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """Grid (slices of token-head pairs). o [T, H, V] becomes o / rms(o) * weight * act(gate)."""
    pair = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    cols = tl.arange(0, VP)
    inside = (pair < num_pairs)[:, None] & (cols < V)[None, :]
    o_ptrs = o_ptr + pair[:, None] * V + cols[None, :]
    o = tl.load(o_ptrs, mask=inside, other=0.0).to(tl.float32)
    at = (pair // HEADS)[:, None] * gate_t + ((pair % HEADS)[:, None] * V + cols[None, :]) * gate_c
    gate = tl.load(gate_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
    o = o * tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None] * weight[None, :]
    act = tl.sigmoid(gate) * gate if SILU else tl.sigmoid(gate)
    tl.store(o_ptrs, (o * act).to(o_ptr.dtype.element_ty), mask=inside)
