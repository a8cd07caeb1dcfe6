"""The gated delta rule from chunk to chunk: a kernel per (slice of value columns, head, sequence).

C tokens of a chunk, K key width, V value width, H heads, N chunks, R sequences. What ``delta_chunk_local`` wrote is
read, see there; per chunk  u = t v + w S;  o = qd S + a u;  S <- diag(last) S + kd^T u.

Everything is held transposed, values first: S^T and u^T then are first operands of the matrix unit straight from the
registers they were accumulated in, and never pass through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def accumulate(a, b, acc, NARROW: tl.constexpr):
    """acc + a @ b: bf16 operands, or f32 ones to within 2^-20."""
    if NARROW:
        return tl.dot(a.to(tl.bfloat16), b, acc=acc)
    else:
        return tl.dot(a, b, acc=acc, input_precision="tf32x3")


@triton.jit
def scan(
    v_ptr, w_ptr, qd_ptr, kd_ptr, t_ptr, a_ptr, last_ptr, old_ptr, new_ptr, states_ptr, out_ptr,
    starts_ptr, chunks_ptr, slots_ptr, start_ptr, num_tokens, num_chunks,
    v_t, v_h, v_c, out_t, out_h, slot_stride, slots_stride,
    HEADS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    SPAN: tl.constexpr, RAGGED: tl.constexpr, OLD: tl.constexpr, STATES: tl.constexpr, NARROW: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (slices of V, H, R). A sequence's states [H, K, V] lie at old_ptr and new_ptr + slots[r] * slot_stride; the
    new one is not written for a negative slot.

    RAGGED: sequence r has the tokens starts[r]..starts[r + 1] and the chunks chunks[r]..chunks[r + 1]; otherwise there
    is one run of num_tokens, cut every SPAN tokens. OLD: there is a state before (of sequence r if start[r] > 0).
    STATES: states[n // chunks in SPAN] is written behind every SPAN tokens.
    """
    head, r = tl.program_id(1), tl.program_id(2)
    per: tl.constexpr = (SPAN + C - 1) // C
    if RAGGED:
        begin, end = tl.load(starts_ptr + r), tl.load(starts_ptr + r + 1)
        n_first, n_end = tl.load(chunks_ptr + r), tl.load(chunks_ptr + r + 1)
        if n_first == n_end:
            return
        slot = tl.load(slots_ptr + r * slots_stride).to(tl.int64)
    else:
        begin, end, n_first, n_end = 0, num_tokens, 0, num_chunks
        slot = tl.zeros([], dtype=tl.int64)
    rows = tl.arange(0, C)
    keys = tl.arange(0, KP)
    vals = tl.program_id(0) * BV + tl.arange(0, BV)
    inside_head = keys[None, :] * V + vals[:, None]
    state_at = head.to(tl.int64) * (K * V) + inside_head
    state_in = (keys < K)[None, :] & (vals < V)[:, None]
    s = tl.zeros([BV, KP], dtype=tl.float32)
    if OLD:
        known = state_in
        if RAGGED:
            known = state_in & (tl.load(start_ptr + r) > 0) & (slot >= 0)
        s = tl.load(old_ptr + slot * slot_stride + state_at, mask=known, other=0.0)
    for n in tl.range(n_first, n_end, num_stages=STAGES):
        nth = n - n_first
        if SPAN == C:
            first = begin + nth * C
            last = tl.minimum(first + C, end)
        else:
            first = (nth // per) * SPAN + (nth % per) * C
            last = tl.minimum(tl.minimum(first + C, (nth // per + 1) * SPAN), end)
        block = (n * HEADS + head).to(tl.int64)
        tile = block * (C * KP) + rows[:, None] * KP + keys[None, :]
        square = block * (C * C) + rows[:, None] * C + rows[None, :]
        token = (first + rows).to(tl.int64)
        live = (token < last)[:, None] & (vals < V)[None, :]
        v = tl.load(v_ptr + token[:, None] * v_t + head * v_h + vals[None, :] * v_c, mask=live, other=0.0)
        v = v if NARROW else v.to(tl.float32)
        t = tl.load(t_ptr + square)
        w = tl.load(w_ptr + tile)
        qd = tl.load(qd_ptr + tile)
        a = tl.load(a_ptr + square)
        kd = tl.load(kd_ptr + tile)
        decay = tl.load(last_ptr + block * KP + keys)
        zero = tl.zeros([BV, C], dtype=tl.float32)
        u = accumulate(tl.trans(v), tl.trans(t), zero, NARROW)
        low = s.to(tl.bfloat16) if NARROW else s
        u = accumulate(low, tl.trans(w), u, NARROW)
        o = accumulate(low, tl.trans(qd), zero, NARROW)
        u = u.to(tl.bfloat16) if NARROW else u
        o = accumulate(u, tl.trans(a), o, NARROW)
        s = accumulate(u, kd, s * decay[None, :], NARROW)
        at = out_ptr + token[None, :] * out_t + head * out_h + vals[:, None]
        tl.store(at, o.to(out_ptr.dtype.element_ty), mask=(token < last)[None, :] & (vals < V)[:, None])
        if STATES:
            if (nth % per == per - 1) | (n == n_end - 1):
                at_end = ((nth // per) * HEADS + head).to(tl.int64) * (K * V)
                tl.store(states_ptr + at_end + inside_head, s, mask=state_in)
    tl.store(new_ptr + slot * slot_stride + state_at, s, mask=state_in & (slot >= 0))
