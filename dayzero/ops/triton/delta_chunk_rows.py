"""What stands around the chunked delta rule in a step of packed rows: where chunks lie, short convolutions and their
windows, the gated output norm.

T tokens of the step, R rows of more than one token, N chunks of C tokens, W taps, G key heads, H value heads. A row's
tokens are cut into chunks of C from its first on; no chunk holds tokens of two rows.

The convolutions of q, k and v and their windows are one launch. A thread owns a few channels side by side and goes from
token to token, so that a channel's taps and last inputs stay in registers and every input is read once.
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
def _sigmoid(x):
    """1 / (1 + e^-x), with the square of an inverse root in place of a division: one instruction for several. 1 + e^-x
    is at least 1, and may be infinite."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _newest_taps(taps_ptr, cols, inside, W: tl.constexpr, BC: tl.constexpr):
    """Taps W - 4 .. W - 1 of each channel, [BC] each; zeros for those that are not there."""
    if W == 4:  # side by side: one load of four numbers a channel
        places = cols[:, None] * 4 + tl.arange(0, 4)[None, :]
        taps = tl.load(taps_ptr + places, mask=inside[:, None], other=0.0).to(tl.float32)
        even, odd = tl.split(taps.reshape(BC, 2, 2))
        first, third = tl.split(even)
        second, fourth = tl.split(odd)
    else:
        last = taps_ptr + cols * W + (W - 1)
        first = tl.load(last - 3, mask=inside & (W > 3), other=0.0).to(tl.float32)
        second = tl.load(last - 2, mask=inside & (W > 2), other=0.0).to(tl.float32)
        third = tl.load(last - 1, mask=inside & (W > 1), other=0.0).to(tl.float32)
        fourth = tl.load(last, mask=inside, other=0.0).to(tl.float32)
    return first, second, third, fourth


@triton.jit
def _seen(x_ptr, window_ptr, at, x_t, inside, kept, goes_on, W: tl.constexpr):
    """The inputs at token ``at`` of the chunk. Those of a token before it are the row's or, where the row does not go
    on from another chunk, in its window; zeros where none is kept. x_ptr, window_ptr: channels of token 0, entry 0."""
    if goes_on | (at >= 0):
        x = tl.load(x_ptr + at * x_t, mask=inside, other=0.0).to(tl.float32)
    else:
        x = tl.load(window_ptr + (at + (W - 1)), mask=inside & kept, other=0.0).to(tl.float32)
    return x


@triton.jit
def _store_silu(y_ptr, t, channels, inside, older, a, b, c, d, taps, W: tl.constexpr):
    """y[t] from the inputs a, b, c, d of the tokens t - 3 .. t and what older ones add."""
    y = older
    if W > 3:
        y += a * taps[0]
    if W > 2:
        y += b * taps[1]
    if W > 1:
        y += c * taps[2]
    y += d * taps[3]
    tl.store(y_ptr + t * channels, (y * _sigmoid(y)).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _older(x_ptr, window_ptr, taps_ptr, cols, t, x_t, inside, kept, goes_on, W: tl.constexpr, BC: tl.constexpr):
    """What the taps before the newest four add at token t, [BC]."""
    y = tl.zeros([BC], dtype=tl.float32)
    for tap in tl.static_range(W - 4):
        x = _seen(x_ptr, window_ptr, t - (W - 1) + tap, x_t, inside, kept, goes_on, W)
        y += x * tl.load(taps_ptr + cols * W + tap, mask=inside, other=0.0).to(tl.float32)
    return y


@triton.jit
def _four_tokens(x_ptr, t, x_t, inside):
    d = tl.load(x_ptr + t * x_t, mask=inside, other=0.0)
    e = tl.load(x_ptr + (t + 1) * x_t, mask=inside, other=0.0)
    f = tl.load(x_ptr + (t + 2) * x_t, mask=inside, other=0.0)
    g = tl.load(x_ptr + (t + 3) * x_t, mask=inside, other=0.0)
    return d, e, f, g


@triton.jit
def _walk(
    x_ptr, taps_ptr, window_ptr, y_ptr, x_t, x_c, channels, part, count, kept, goes_on, W: tl.constexpr,
    BC: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """BC channels of a chunk, four tokens at a time, which are read while the four before are convolved. x_ptr, y_ptr:
    token 0 of the chunk; window_ptr: the row's."""
    cols = part * BC + tl.arange(0, BC)
    inside = (cols < channels) | EVEN
    x_ptr += cols * x_c
    y_ptr += cols
    window_ptr += cols * (W - 1)
    taps = _newest_taps(taps_ptr, cols, inside, W, BC)
    none = tl.zeros([BC], dtype=tl.float32)
    a, b, c = none, none, none
    if W > 3:
        a = _seen(x_ptr, window_ptr, -3, x_t, inside, kept, goes_on, W)
    if W > 2:
        b = _seen(x_ptr, window_ptr, -2, x_t, inside, kept, goes_on, W)
    if W > 1:
        c = _seen(x_ptr, window_ptr, -1, x_t, inside, kept, goes_on, W)
    whole, nothing = count // 4 * 4, none.to(x_ptr.dtype.element_ty)
    next_d, next_e, next_f, next_g = nothing, nothing, nothing, nothing
    if whole > 0:
        next_d, next_e, next_f, next_g = _four_tokens(x_ptr, 0, x_t, inside)
    for t in range(0, whole, 4):
        d, e, f, g = next_d.to(tl.float32), next_e.to(tl.float32), next_f.to(tl.float32), next_g.to(tl.float32)
        ahead = tl.minimum(t + 4, whole - 4)  # so that none lies behind the chunk
        next_d, next_e, next_f, next_g = _four_tokens(x_ptr, ahead, x_t, inside)
        old_0, old_1, old_2, old_3 = none, none, none, none
        if W > 4:
            old_0 = _older(x_ptr, window_ptr, taps_ptr, cols, t, x_t, inside, kept, goes_on, W, BC)
            old_1 = _older(x_ptr, window_ptr, taps_ptr, cols, t + 1, x_t, inside, kept, goes_on, W, BC)
            old_2 = _older(x_ptr, window_ptr, taps_ptr, cols, t + 2, x_t, inside, kept, goes_on, W, BC)
            old_3 = _older(x_ptr, window_ptr, taps_ptr, cols, t + 3, x_t, inside, kept, goes_on, W, BC)
        _store_silu(y_ptr, t, channels, inside, old_0, a, b, c, d, taps, W)
        _store_silu(y_ptr, t + 1, channels, inside, old_1, b, c, d, e, taps, W)
        _store_silu(y_ptr, t + 2, channels, inside, old_2, c, d, e, f, taps, W)
        _store_silu(y_ptr, t + 3, channels, inside, old_3, d, e, f, g, taps, W)
        a, b, c = e, f, g
    for t in range(whole, count):
        d = tl.load(x_ptr + t * x_t, mask=inside, other=0.0).to(tl.float32)
        old = none
        if W > 4:
            old = _older(x_ptr, window_ptr, taps_ptr, cols, t, x_t, inside, kept, goes_on, W, BC)
        _store_silu(y_ptr, t, channels, inside, old, a, b, c, d, taps, W)
        a, b, c = b, c, d


@triton.jit
def _keep_window(
    x_ptr, window_ptr, x_t, x_c, channels, part, length, known, W: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr
):
    """The last W - 1 inputs of a row of ``length`` tokens, its window before included, replace the window. x_ptr: the
    row's first token. An entry is read before any that lies behind it is written: it becomes an earlier one."""
    cols = part * BC + tl.arange(0, BC)
    inside = (cols < channels) | EVEN
    x_ptr += cols * x_c
    window_ptr += cols * (W - 1)
    for entry in tl.static_range(W - 1):
        at = length - (W - 1) + entry
        if at >= 0:
            new = tl.load(x_ptr + at.to(tl.int64) * x_t, mask=inside, other=0.0).to(window_ptr.dtype.element_ty)
        else:
            new = tl.load(window_ptr + (at + (W - 1)), mask=inside & known, other=0.0)
        tl.debug_barrier()  # every thread has read it, and the convolution has read what it needs
        tl.store(window_ptr + entry, new, mask=inside)


@triton.jit
def _convolve_part(
    x_ptr, taps_ptr, window_ptr, y_ptr, x_t, x_c, window_block, channels, part, row, W: tl.constexpr, BC: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """row: (first token and number of tokens of the chunk, begin and end of its row, the row's block, its position)."""
    first, count, begin, end, block, start = row
    known = (start > 0) & (block >= 0)
    window_ptr += tl.maximum(block, 0) * window_block
    x_first, y_first = x_ptr + first.to(tl.int64) * x_t, y_ptr + first.to(tl.int64) * channels
    _walk(x_first, taps_ptr, window_ptr, y_first, x_t, x_c, channels, part, count, known, first > begin, W, BC, EVEN)
    if (first == begin) & (block >= 0):
        _keep_window(x_first, window_ptr, x_t, x_c, channels, part, end - begin, known, W, BC, EVEN)


@triton.jit
def convolve(
    q_ptr, k_ptr, v_ptr, q_taps_ptr, k_taps_ptr, v_taps_ptr, q_window_ptr, k_window_ptr, v_window_ptr,
    q_out_ptr, k_out_ptr, v_out_ptr, first_ptr, count_ptr, row_ptr, starts_ptr, start_ptr, table_ptr,
    q_t, q_c, k_t, k_c, v_t, v_c, q_block, k_block, v_block, table_stride, keys, values,
    W: tl.constexpr, BC: tl.constexpr, EVEN: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (parts of BC channels of q, then of k, then of v; N). out[t] = silu(sum over taps j of taps[:, j]
    x[t - (W - 1) + j]), packed [T, channels] in its dtype; what lies before a row is its window, or zeros where the row
    is at the start of its sequence. q_t, k_t, v_t: elements / UNIT from token to token. keys, values: channels of q and
    of k, and of v. EVEN: both are multiples of BC.

    Windows are replaced by the programs of a row's first chunk, the only ones that read them. W - 1 <= C.
    """
    n = tl.program_id(1)
    r = tl.load(row_ptr + n)
    begin, end = tl.load(starts_ptr + r), tl.load(starts_ptr + r + 1)
    block = tl.load(table_ptr + r * table_stride).to(tl.int64)
    row = (tl.load(first_ptr + n), tl.load(count_ptr + n), begin, end, block, tl.load(start_ptr + r))
    part, parts = tl.program_id(0), tl.cdiv(keys, BC)
    if part < parts:
        _convolve_part(
            q_ptr, q_taps_ptr, q_window_ptr, q_out_ptr, q_t * UNIT, q_c, q_block, keys, part, row, W, BC, EVEN
        )
    elif part < 2 * parts:
        part -= parts
        _convolve_part(
            k_ptr, k_taps_ptr, k_window_ptr, k_out_ptr, k_t * UNIT, k_c, k_block, keys, part, row, W, BC, EVEN
        )
    else:
        part -= 2 * parts
        _convolve_part(
            v_ptr, v_taps_ptr, v_window_ptr, v_out_ptr, v_t * UNIT, v_c, v_block, values, part, row, W, BC, EVEN
        )


@triton.jit
def norm_gate(
    o_ptr, gate_ptr, weight_ptr, num_tokens, gate_t, gate_c, eps,
    HEADS: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, BH: tl.constexpr, BT: tl.constexpr, SILU: tl.constexpr,
    UNIT: tl.constexpr,
):  # fmt: skip
    """Grid (parts of BT tokens * parts of BH heads). o [T, H, V] becomes o / rms(o) * weight * act(gate). gate_t:
    elements / UNIT from token to token."""
    gate_t *= UNIT
    parts: tl.constexpr = (HEADS + BH - 1) // BH
    pairs, cols = tl.arange(0, BT * BH), tl.arange(0, VP)
    token, head = pairs // BH, tl.program_id(0) % parts * BH + pairs % BH
    first = (tl.program_id(0) // parts).to(tl.int64) * BT
    inside = ((token < num_tokens - first) & (head < HEADS))[:, None] & (cols < V)[None, :]
    o_ptrs = o_ptr + first * (HEADS * V) + (token * (HEADS * V) + head * V)[:, None] + cols[None, :]
    o = tl.load(o_ptrs, mask=inside, other=0.0).to(tl.float32)
    at = (token * gate_t)[:, None] + (head[:, None] * V + cols[None, :]) * gate_c
    gate = tl.load(gate_ptr + first * gate_t + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + cols, mask=cols < V, other=0.0).to(tl.float32)
    o = o * tl.rsqrt(tl.sum(o * o, axis=1) / V + eps)[:, None] * weight[None, :]
    act = _sigmoid(gate) * gate if SILU else _sigmoid(gate)
    tl.store(o_ptrs, (o * act).to(o_ptr.dtype.element_ty), mask=inside)
