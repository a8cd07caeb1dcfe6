"""The gated delta rule token by token in Triton, from the projections to the input of the output projection.

R rows, T tokens, H value heads, G key heads, K key width, V value width, W taps. Four launches: the convolutions of q,
k and v, with keys and queries divided by their lengths, into float32; then the rule with its gates and the output norm,
a program a row and value head, the state in registers. Made for rows of one token; longer rows are right, and slow.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.triton.machine import check_machine

__all__ = ["check_machine", "recurrent"]

L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _input(x, windows, token, channels, inside, kept, W: tl.constexpr, x_row):
    """What a convolution reads at ``token`` of the row: the row's projections or, before them, its window."""
    new = tl.load(x + token * x_row + channels, mask=inside & (token >= 0), other=0.0).to(tl.float32)
    old = tl.load(windows + channels * (W - 1) + token + W - 1, mask=inside & kept & (token < 0), other=0.0)
    return new + old.to(tl.float32)


@triton.jit
def _convolve(
    x, x_row, taps, windows, window_block, table, table_row, query_start, start, out, first_row, scale,
    C: tl.constexpr, BC: tl.constexpr, W: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """One head of one row: out [T, heads, C] f32, silu of the convolution rounded to the dtype of x, and with NORMED
    times scale over its length. The window is moved on in place."""
    row, head = first_row + tl.program_id(0), tl.program_id(1)
    block = tl.load(table + row * table_row).to(tl.int64)
    begin = tl.load(query_start + row).to(tl.int64)
    count = tl.load(query_start + row + 1) - begin.to(tl.int32)
    kept, written = (tl.load(start + row) > 0) & (block >= 0), (block >= 0) & (count > 0)
    in_c = tl.arange(0, BC)
    inside, channels = in_c < C, head * C + in_c
    own, window = x + begin * x_row, windows + tl.maximum(block, 0) * window_block
    token = 0
    while token < count:  # a range over a tensor is nothing that the interpreter can walk
        y = tl.zeros((BC,), dtype=tl.float32)
        for tap in tl.static_range(W):
            weight = tl.load(taps + channels * W + tap, mask=inside, other=0.0)
            y += weight * _input(own, window, token - (W - 1) + tap, channels, inside, kept, W, x_row)
        y = (y * tl.sigmoid(y)).to(x.dtype.element_ty).to(tl.float32)
        if NORMED:
            y *= tl.rsqrt(tl.sum(y * y) + L2_EPS) * scale
        tl.store(out + ((begin + token) * tl.num_programs(1) + head) * C + in_c, y, mask=inside)
        token += 1
    tl.debug_barrier()  # every thread has read the window before one writes it
    for entry in tl.static_range(W - 1):  # a later entry becomes an earlier one, so go upwards
        value = _input(own, window, count - (W - 1) + entry, channels, inside, kept, W, x_row)
        tl.store(window + channels * (W - 1) + entry, value.to(windows.dtype.element_ty), mask=inside & written)


@triton.jit
def _log_decay(z, rate, lower, BOUNDED: tl.constexpr):
    if BOUNDED:
        g = lower * tl.sigmoid(rate * z)
    else:
        g = -rate * (tl.maximum(z, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(z))))
    return g


@triton.jit
def _decay(z, dt_bias, rate, lower, channels, inside, PER_HEAD: tl.constexpr, BOUNDED: tl.constexpr):
    """e^g, of each channel or one alone; z and dt_bias point to the head's."""
    if PER_HEAD:
        decay = tl.exp(_log_decay(tl.load(z).to(tl.float32) + tl.load(dt_bias), rate, lower, BOUNDED))
    else:
        shifted = tl.load(z + channels, mask=inside, other=0.0).to(tl.float32)
        shifted += tl.load(dt_bias + channels, mask=inside, other=0.0)
        decay = tl.exp(_log_decay(shifted, rate, lower, BOUNDED))[:, None]
    return decay


@triton.jit
def _normed(o, gate, norm, eps, channels, inside, V: tl.constexpr, SILU: tl.constexpr):
    """The gated output norm of o; gate points to the head's."""
    o *= tl.rsqrt(tl.sum(o * o) / V + eps) * tl.load(norm + channels, mask=inside, other=0.0)
    raw = tl.load(gate + channels, mask=inside, other=0.0).to(tl.float32)
    o *= tl.sigmoid(raw)
    if SILU:
        o *= raw
    return o


@triton.jit
def _recurrent(
    q, k, v, z, beta, gate, z_row, beta_row, gate_row, a_log, dt_bias, norm, state, state_block,
    table, table_row, query_start, start, out, first_row, lower, eps, GROUP: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    PER_HEAD: tl.constexpr, BOUNDED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """One value head of one row. q and k [T, G, K] have their lengths already."""
    row, head, heads = first_row + tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    key, keys = head // GROUP, heads // GROUP
    block = tl.load(table + row * table_row).to(tl.int64)
    begin = tl.load(query_start + row).to(tl.int64)
    count = tl.load(query_start + row + 1) - begin.to(tl.int32)
    kept, written = (tl.load(start + row) > 0) & (block >= 0), (block >= 0) & (count > 0)
    in_k, in_v = tl.arange(0, BK), tl.arange(0, BV)
    k_inside, v_inside = in_k < K, in_v < V
    places, inside = in_k[:, None] * V + in_v[None, :], k_inside[:, None] & v_inside[None, :]
    own_state = state + tl.maximum(block, 0) * state_block + head.to(tl.int64) * (K * V)
    s = tl.load(own_state + places, mask=inside & kept, other=0.0)
    rate = tl.exp(tl.load(a_log + head))
    width: tl.constexpr = 1 if PER_HEAD else K
    token = 0
    while token < count:
        at = begin + token
        y_q = tl.load(q + (at * keys + key) * K + in_k, mask=k_inside, other=0.0)
        y_k = tl.load(k + (at * keys + key) * K + in_k, mask=k_inside, other=0.0)
        y_v = tl.load(v + (at * heads + head) * V + in_v, mask=v_inside, other=0.0)
        s *= _decay(
            z + at * z_row + head * width, dt_bias + head * width, rate, lower, in_k, k_inside, PER_HEAD, BOUNDED
        )
        strength = tl.sigmoid(tl.load(beta + at * beta_row + head).to(tl.float32))
        update = strength * (y_v - tl.sum(s * y_k[:, None], 0))
        o = tl.sum(s * y_q[:, None], 0) + update * tl.sum(y_q * y_k)
        s += y_k[:, None] * update[None, :]
        o = o.to(out.dtype.element_ty).to(tl.float32)
        o = _normed(o, gate + at * gate_row + head * V, norm, eps, in_v, v_inside, V, SILU)
        tl.store(out + (at * heads + head) * V + in_v, o.to(out.dtype.element_ty), mask=v_inside)
        token += 1
    tl.store(own_state + places, s, mask=inside & written)


def recurrent(
    out_THV: Tensor, raw: Raw, weights: Weights, kept: Kept, rows: range, *, eps: float, act: str,
    lower: float | None = None,
) -> None:  # fmt: skip
    """The given rows of ``kept``: out [T, H, V] of them is written, states and windows are replaced."""
    if not rows:
        return
    heads, key_width, value_width = kept.state_NHKV.shape[1:]
    floats = [getattr(weights, name) for name in Weights.__slots__]
    assert all(x.is_contiguous() for x in floats), "parameters are packed"
    where = (kept.table_R, kept.table_R.stride(0), kept.query_start, kept.start)
    made = []
    for x_TC, taps_CW, windows_NCS, width, scale in (
        (raw.q_TC, weights.q_taps_CW, kept.q_NCS, key_width, key_width**-0.5),
        (raw.k_TC, weights.k_taps_CW, kept.k_NCS, key_width, 1.0),
        (raw.v_TC, weights.v_taps_CW, kept.v_NCS, value_width, None),
    ):
        x = _packed(x_TC)
        y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _convolve[(len(rows), x.shape[1] // width)](
            x, x.stride(0), taps_CW, windows_NCS, windows_NCS.stride(0), *where, y, rows.start, scale or 1.0, C=width,
            BC=triton.next_power_of_2(width), W=taps_CW.shape[1], NORMED=scale is not None,
            num_warps=4 if width > 64 else 1,
        )  # fmt: skip
        made.append(y)
    z, beta, gate = _packed(raw.z), _packed(raw.beta_TH), _packed(raw.gate_TC)
    _recurrent[(len(rows), heads)](
        *made, z, beta, gate, z.stride(0), beta.stride(0), gate.stride(0), weights.a_log_H, weights.dt_bias,
        weights.norm_V, kept.state_NHKV, kept.state_NHKV.stride(0), *where, out_THV, rows.start, lower or 0.0, eps,
        GROUP=heads // (made[0].shape[1] // key_width), K=key_width, V=value_width,
        BK=triton.next_power_of_2(key_width), BV=triton.next_power_of_2(value_width), PER_HEAD=raw.z.dim() == 2,
        BOUNDED=lower is not None, SILU=act == "silu", num_warps=8 if key_width * value_width > 4096 else 4,
    )  # fmt: skip


def _packed(x: Tensor) -> Tensor:
    """x with its values of one token beside one another."""
    flat = x.flatten(1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()
