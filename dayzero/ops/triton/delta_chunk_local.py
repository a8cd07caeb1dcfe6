"""What a chunk of the gated delta rule computes without knowing the state: a kernel per (head, chunk).

C tokens of a chunk, K key width, V value width, H heads, N chunks; G the running sum of the log-decay g in the chunk.
Written for each (chunk, head), in one block each, ready to be copied into shared memory:
  w [C, K]  = -T beta e^G k         t [C, C] = T diag(beta), T = (I + A)^-1, A_ij = beta_i k_i.k_j e^(G_i - G_j), j < i
  qd [C, K] = e^G q                 a [C, C] = q_i.k_j e^(G_i - G_j), j <= i
  kd [C, K] = e^(G_last - G) k      last [K] = e^G_last (f32)
so that ``delta_chunk_scan`` is left with  u = t v + w S;  o = qd S + a u;  S <- diag(last) S + kd^T u.

Exponents. A pair (i, j) belongs to the level l of the highest bit in which i and j differ: i lies in the upper half of
a block of 2^(l+1) rows, j in its lower half. Both are decayed to the boundary of the halves: row i by the sum of g from
the boundary to i, row j by the sum behind j up to the boundary. Both are <= 0 whatever the decay is, so nothing can
overflow, and all pairs of one level come out of one matrix product. The sums are products of g with a 0/1 matrix, which
the matrix unit takes.

(I + A)^-1 grows the same way: with T right inside the blocks of 2^l rows and B the part of A of level l, T - T B T is
right inside those of 2^(l+1). For beta <= 2 no entry of T exceeds 2: |k_i^T prod (I - beta k k^T) e^g k_j| <= 1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LEAST_G = tl.constexpr(-1000.0)  # e^-1000 is 0 in any type; below it f16 would come to its largest number
LEAST_EXPONENT = tl.constexpr(-117.0)  # base 2: 2^117 of a unit vector is within f32 and bf16, as is 2^-117
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def product(a, b, NARROW: tl.constexpr):
    """a @ b in f32: f16 operands, or f32 ones to within 2^-20."""
    if NARROW:
        return tl.dot(a.to(tl.float16), b.to(tl.float16))
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def chunk_place(n, num_tokens, first_ptr, count_ptr, C: tl.constexpr, SPAN: tl.constexpr, RAGGED: tl.constexpr):
    """(first token, number of tokens) of chunk n: from tables, or of one run cut every SPAN tokens."""
    if RAGGED:
        return tl.load(first_ptr + n), tl.load(count_ptr + n)
    else:
        per: tl.constexpr = (SPAN + C - 1) // C
        inside = (n % per) * C
        first = (n // per) * SPAN + inside
        return first, tl.minimum(tl.minimum(SPAN - inside, C), num_tokens - first)


@triton.jit
def unit_rows(ptrs, mask, NARROW: tl.constexpr):
    """Rows divided by sqrt(sum x^2 + eps)."""
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    x = x * tl.rsqrt(tl.sum(x * x, axis=1) + L2_EPS)[:, None]
    return x.to(tl.float16) if NARROW else x


@triton.jit
def log_decay(x, a_log, lower, GATE: tl.constexpr):
    """``recurrence.gate_softplus`` (GATE = 1) or ``gate_bounded`` (2) of x = z + bias."""
    rate = tl.exp(a_log)
    if GATE == 1:
        y = tl.exp(-tl.abs(x))
        return -rate * (tl.maximum(x, 0.0) + tl.where(y < 1e-3, y - 0.5 * y * y, tl.log(1.0 + y)))
    else:
        return lower / (1.0 + tl.exp(-rate * x))


@triton.jit
def update_rate(ptrs, mask, GATE: tl.constexpr):
    """beta, given as it is or (with a gate) before its sigmoid; 0 outside."""
    beta = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, tl.sigmoid(beta), 0.0) if GATE else beta


@triton.jit
def pairs(q, k, g, sums_ptr, masks_ptr, C: tl.constexpr, LEVELS: tl.constexpr, NARROW: tl.constexpr):
    """(k_i.k_j e^(G_i - G_j) for j < i, q_i.k_j e^(G_i - G_j) for j <= i), level by level; zeros elsewhere."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    kk = tl.zeros([C, C], dtype=tl.float32)
    qk = tl.where(i == j, tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)[:, None], 0.0)
    for level in tl.range(LEVELS, num_stages=1):
        at = level * (C * C) + i * C + j
        e = tl.exp2(product(tl.load(sums_ptr + at), g, NARROW)).to(k.dtype)
        decayed = k * e
        here = tl.load(masks_ptr + at)
        kk += here * product(decayed, tl.trans(decayed), NARROW)
        qk += here * product(q * e, tl.trans(decayed), NARROW)
    return kk, qk


@triton.jit
def calm_pairs(q, k, g, sums_ptr, masks_ptr, C: tl.constexpr, LEVELS: tl.constexpr, NARROW: tl.constexpr):
    """``pairs`` where no sum of g over C / 4 tokens is below LEAST_EXPONENT: the highest level, and all others at once.

    In a block of C / 2 rows every row is decayed to its middle, with a positive exponent where it has to be.
    """
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    at = (LEVELS - 1) * (C * C) + i * C + j
    e = tl.exp2(product(tl.load(sums_ptr + at), g, NARROW)).to(k.dtype)
    decayed = k * e
    here = tl.load(masks_ptr + at)
    kk = here * product(decayed, tl.trans(decayed), NARROW)
    qk = here * product(q * e, tl.trans(decayed), NARROW)
    e = product(tl.load(sums_ptr + at + 3 * C * C), g, NARROW)  # of row j of a pair; of row i the opposite
    later = (k * tl.exp2(-e)).to(tl.bfloat16 if NARROW else tl.float32)
    asked = (q * tl.exp2(-e)).to(tl.bfloat16 if NARROW else tl.float32)
    earlier = tl.trans((k * tl.exp2(e)).to(tl.bfloat16 if NARROW else tl.float32))
    near = (i ^ j) < C // 2
    if NARROW:
        kk = tl.where(near & (i > j), tl.dot(later, earlier), kk)
        qk = tl.where(near & (i >= j), tl.dot(asked, earlier), qk)
    else:
        kk = tl.where(near & (i > j), tl.dot(later, earlier, input_precision="tf32x3"), kk)
        qk = tl.where(near & (i >= j), tl.dot(asked, earlier, input_precision="tf32x3"), qk)
    return kk, qk


@triton.jit
def inverse(a, masks_ptr, C: tl.constexpr, LEVELS: tl.constexpr, NARROW: tl.constexpr):
    """(I + a)^-1 of a strictly lower a [C, C]."""
    i = tl.arange(0, C)[:, None]
    j = tl.arange(0, C)[None, :]
    t = tl.where(i == j, 1.0, 0.0) - a * tl.load(masks_ptr + i * C + j)
    for level in tl.range(1, LEVELS, num_stages=1):
        here = tl.load(masks_ptr + level * (C * C) + i * C + j)
        between = product(a * here, t, NARROW)
        t -= product(t, between, NARROW)
    return t


@triton.jit
def local_channel(
    q_ptr, k_ptr, g_ptr, beta_ptr, w_ptr, qd_ptr, kd_ptr, t_ptr, a_ptr, last_ptr, sums_ptr, masks_ptr,
    a_log_ptr, bias_ptr, first_ptr, count_ptr, num_tokens,
    q_t, q_h, q_c, k_t, k_h, k_c, g_t, g_h, g_c, beta_t, beta_h, scale, lower,
    GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, SPAN: tl.constexpr,
    RAGGED: tl.constexpr, GATE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Decay of each channel. Grid (H, N). KP, C: powers of two >= 16; LEVELS = log2 C."""
    head, n = tl.program_id(0), tl.program_id(1)
    first, count = chunk_place(n, num_tokens, first_ptr, count_ptr, C, SPAN, RAGGED)
    if count <= 0:
        return
    rows = tl.arange(0, C)
    cols = tl.arange(0, KP)
    token = (first + rows).to(tl.int64)
    inside = (rows < count)[:, None] & (cols < K)[None, :]
    key_head = head // GROUP
    q = unit_rows(q_ptr + token[:, None] * q_t + key_head * q_h + cols[None, :] * q_c, inside, NARROW)
    k = unit_rows(k_ptr + token[:, None] * k_t + key_head * k_h + cols[None, :] * k_c, inside, NARROW)
    g = tl.load(g_ptr + token[:, None] * g_t + head * g_h + cols[None, :] * g_c, mask=inside, other=0.0)
    if GATE:
        bias = tl.load(bias_ptr + head * K + cols, mask=cols < K, other=0.0).to(tl.float32)
        g = log_decay(g.to(tl.float32) + bias[None, :], tl.load(a_log_ptr + head).to(tl.float32), lower, GATE)
        g = tl.where(inside, g, 0.0)
    g = tl.maximum(g.to(tl.float32), LEAST_G) * LOG2_E

    block = n.to(tl.int64) * tl.num_programs(0) + head
    tl.store(last_ptr + block * KP + cols, tl.exp2(tl.sum(g, axis=0)))
    calm = tl.min(tl.min(g, axis=1), axis=0) * (C // 4) > LEAST_EXPONENT
    g = g.to(tl.float16) if NARROW else g
    i = rows[:, None]
    j = rows[None, :]
    square = i * C + j
    if calm:
        kk, qk = calm_pairs(q, k, g, sums_ptr, masks_ptr, C, LEVELS, NARROW)
    else:
        kk, qk = pairs(q, k, g, sums_ptr, masks_ptr, C, LEVELS, NARROW)
    tl.store(a_ptr + block * (C * C) + square, (qk * scale).to(a_ptr.dtype.element_ty))
    beta = update_rate(beta_ptr + token * beta_t + head * beta_h, rows < count, GATE)
    t = inverse(kk * beta[:, None], masks_ptr, C, LEVELS, NARROW) * beta[None, :]
    tl.store(t_ptr + block * (C * C) + square, t.to(t_ptr.dtype.element_ty))
    tile = block * (C * KP) + rows[:, None] * KP + cols[None, :]
    before = tl.exp2(product(tl.load(sums_ptr + LEVELS * (C * C) + square), g, NARROW))
    tl.store(qd_ptr + tile, (q * (before * scale)).to(qd_ptr.dtype.element_ty))
    tl.store(w_ptr + tile, (-product(t, k * before, NARROW)).to(w_ptr.dtype.element_ty))
    behind = tl.exp2(product(tl.load(sums_ptr + (LEVELS + 1) * (C * C) + square), g, NARROW))
    tl.store(kd_ptr + tile, (k * behind).to(kd_ptr.dtype.element_ty))


@triton.jit
def local_head(
    q_ptr, k_ptr, g_ptr, beta_ptr, w_ptr, qd_ptr, kd_ptr, t_ptr, a_ptr, last_ptr, sums_ptr, masks_ptr,
    a_log_ptr, bias_ptr, first_ptr, count_ptr, num_tokens,
    q_t, q_h, q_c, k_t, k_h, k_c, g_t, g_h, g_c, beta_t, beta_h, scale, lower,
    GROUP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, SPAN: tl.constexpr,
    RAGGED: tl.constexpr, GATE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """One decay a head: e^(G_i - G_j) is one matrix for all channels. Arguments as of ``local_channel``; g_c unused."""
    head, n = tl.program_id(0), tl.program_id(1)
    first, count = chunk_place(n, num_tokens, first_ptr, count_ptr, C, SPAN, RAGGED)
    if count <= 0:
        return
    rows = tl.arange(0, C)
    cols = tl.arange(0, KP)
    token = (first + rows).to(tl.int64)
    inside = (rows < count)[:, None] & (cols < K)[None, :]
    key_head = head // GROUP
    q = unit_rows(q_ptr + token[:, None] * q_t + key_head * q_h + cols[None, :] * q_c, inside, NARROW)
    k = unit_rows(k_ptr + token[:, None] * k_t + key_head * k_h + cols[None, :] * k_c, inside, NARROW)
    g = tl.load(g_ptr + token * g_t + head * g_h, mask=rows < count, other=0.0).to(tl.float32)
    if GATE:
        a_log = tl.load(a_log_ptr + head).to(tl.float32)
        g = log_decay(g + tl.load(bias_ptr + head).to(tl.float32), a_log, lower, GATE)
        g = tl.where(rows < count, g, 0.0)
    beta = update_rate(beta_ptr + token * beta_t + head * beta_h, rows < count, GATE)
    g = g * LOG2_E
    i = rows[:, None]
    j = rows[None, :]
    # Sums of g over (j, i] and behind i, each a sum of its own: differences of running sums would cancel.
    total = tl.cumsum(g, axis=0)
    behind = tl.exp2(tl.sum(tl.where(j > i, g[None, :], 0.0), axis=1))
    before = tl.exp2(total)

    block = n.to(tl.int64) * tl.num_programs(0) + head
    tile = block * (C * KP) + rows[:, None] * KP + cols[None, :]
    tl.store(last_ptr + block * KP + cols, tl.exp2(tl.sum(g, axis=0) + tl.zeros([KP], dtype=tl.float32)))
    tl.store(kd_ptr + tile, (k * behind[:, None]).to(kd_ptr.dtype.element_ty))
    tl.store(qd_ptr + tile, (q * (before * scale)[:, None]).to(qd_ptr.dtype.element_ty))
    between = tl.exp2(tl.minimum(total[:, None] - total[None, :], 0.0))
    kk = tl.where(i > j, product(k, tl.trans(k), NARROW) * between, 0.0) * beta[:, None]
    qk = tl.where(i >= j, product(q, tl.trans(k), NARROW) * between, 0.0)
    square = block * (C * C) + i * C + j
    tl.store(a_ptr + square, (qk * scale).to(a_ptr.dtype.element_ty))
    t = inverse(kk, masks_ptr, C, LEVELS, NARROW)
    seen = k * (before * beta)[:, None]
    tl.store(w_ptr + tile, (-product(t, seen, NARROW)).to(w_ptr.dtype.element_ty))
    tl.store(t_ptr + square, (t * beta[None, :]).to(t_ptr.dtype.element_ty))
