"""What acts on each number alone: gated activations, the gate of attention, the sum of a residual, and the merge of
attentions over disjoint keys.

R rows of any leading shape and strides, D width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.activation import KINDS
from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.rows import FOLLOWS, follow, rows_of

__all__ = ["add", "check_machine", "gate", "gelu", "glu", "merge"]

BLOCK = 2048
_WORDS = {"silu": (), "gelu_tanh": (), "clamped": ("limit", "alpha"), "silu_clamped": ("limit",),
          "situ": ("beta", "linear_beta")}  # fmt: skip


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh_parts(x):
    """(numerator, denominator) of tanh, within a few 2^-24: by its series near 0, where 1 - exp(-2x) would cancel."""
    square = x * x
    series = 62.0 / 2835.0 + square * (-1382.0 / 155925.0)
    series = x + x * square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * series)))
    fall = tl.exp(-2.0 * tl.abs(x))
    far = tl.where(x < 0, fall - 1.0, 1.0 - fall)
    return tl.where(tl.abs(x) < 0.3, series * (1.0 + fall), far), 1.0 + fall


@triton.jit
def gelu_of(x, TANH: tl.constexpr):
    if TANH:  # 0.5 (1 + tanh(z)) = sigmoid(2z)
        return x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def glu_of(g, u, limit, alpha, beta, linear_beta, KIND: tl.constexpr):
    """act(g) * u of f32 numbers; KIND numbers ``ops.activation.KINDS``. A NaN stays one."""
    if KIND == 2 or KIND == 3:
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
    if KIND == 1:
        return gelu_of(g, True) * u
    if KIND == 2:
        return g * sigmoid(alpha * g) * (u + 1.0)
    if KIND == 4:
        g_above, g_below = tanh_parts(g / beta)
        u_above, u_below = tanh_parts(u / linear_beta)
        # One division: there are few of them a cycle. exp(-g) may be infinite, and then the quotient is 0.
        return (beta * g_above) * (linear_beta * u_above) / (g_below * u_below * (1.0 + tl.exp(-g)))
    return g * sigmoid(g) * u


@triton.jit
def _pairs_kernel(
    one, two, out, one_inner, one_a, one_b, one_d, two_inner, two_a, two_b, two_d, width, limit, alpha, beta,
    linear_beta, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """KIND below 5: glu; 5: one + two; 6: one * sigmoid(two); 7 and 8: gelu of ``one``, exact and by tanh."""
    follow()
    blocks = tl.cdiv(width, BLOCK)
    row = tl.program_id(0) // blocks
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    start = (row // one_inner).to(tl.int64) * one_a + (row % one_inner).to(tl.int64) * one_b
    x = tl.load(one + start + col.to(tl.int64) * one_d, mask=col < width, other=0.0).to(tl.float32)
    if KIND >= 7:
        y = gelu_of(x, KIND == 8)
    else:
        start = (row // two_inner).to(tl.int64) * two_a + (row % two_inner).to(tl.int64) * two_b
        z = tl.load(two + start + col.to(tl.int64) * two_d, mask=col < width, other=0.0).to(tl.float32)
        if KIND == 5:
            y = x + z
        elif KIND == 6:
            y = x * sigmoid(z)
        else:
            y = glu_of(x, z, limit, alpha, beta, linear_beta, KIND)
    tl.store(out + row.to(tl.int64) * width + col, y.to(out.dtype.element_ty), mask=col < width)


def _pairs(one: Tensor, two: Tensor, kind: int, constants: tuple[float, float, float, float] = (0, 0, 0, 0)) -> Tensor:
    out = torch.empty(one.shape, dtype=one.dtype, device=one.device)
    if out.numel():
        first, second = rows_of(one), rows_of(two)
        block = min(BLOCK, max(128, triton.next_power_of_2(first.width)))
        _pairs_kernel[(first.num * triton.cdiv(first.width, block),)](
            first.x, second.x, out, *first[1:], *second[1:], first.width, *(float(c) for c in constants),
            KIND=kind, BLOCK=block, num_warps=max(1, block // 512), **FOLLOWS,
        )  # fmt: skip
    return out


def glu(
    gate_TI: Tensor,
    up_TI: Tensor,
    *,
    kind: str = "silu",
    limit: float = 0.0,
    alpha: float = 0.0,
    beta: float = 0.0,
    linear_beta: float = 0.0,
) -> Tensor:
    """``activation.glu``, packed."""
    given = {"limit": limit, "alpha": alpha, "beta": beta, "linear_beta": linear_beta}
    if kind not in _WORDS or {word for word, value in given.items() if value} != set(_WORDS[kind]):
        raise ValueError(f"activation {kind!r} got {given}; kinds and their constants are {_WORDS}")
    return _pairs(gate_TI, up_TI, KINDS.index(kind), (limit, alpha, beta, linear_beta))


def gelu(x: Tensor, *, form: str) -> Tensor:
    """``activation.gelu``, packed."""
    if form not in ("erf", "tanh"):
        raise ValueError(f"form is 'erf' or 'tanh', not {form!r}")
    return _pairs(x, x, 7 if form == "erf" else 8)


def add(stream_TH: Tensor, out_TH: Tensor) -> Tensor:
    """``residual.add``, packed."""
    return _pairs(stream_TH, out_TH, 5)


def gate(out_THV: Tensor, gate_T: Tensor) -> Tensor:
    """``attention.gate``, packed. gate: [T, H], [T, H, V] or [T, H*V]."""
    if gate_T.numel() == out_THV.numel():
        return _pairs(out_THV, gate_T.unflatten(-1, out_THV.shape[1:]) if gate_T.dim() == 2 else gate_T, 6)
    if tuple(gate_T.shape) != tuple(out_THV.shape[:2]):
        raise ValueError(f"a gate of {tuple(gate_T.shape)} fits neither channels nor heads of {tuple(out_THV.shape)}")
    return _pairs(out_THV, gate_T[..., None].expand(out_THV.shape), 6)


@triton.jit
def _merge_kernel(
    outs, lses, out, lse, parts, heads, width, out_p, out_t, out_h, out_v, lse_p, lse_t, lse_h,
    PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    row = tl.program_id(0).to(tl.int64)
    token, head = row // heads, row % heads
    part_P = tl.arange(0, PARTS).to(tl.int64)
    col_V = tl.arange(0, BLOCK)
    lse_P = tl.load(lses + part_P * lse_p + token * lse_t + head * lse_h, mask=part_P < parts, other=float("-inf"))
    lse_P = lse_P.to(tl.float32)
    top = tl.max(lse_P, axis=0)
    safe = tl.where(top == float("-inf"), 0.0, top)
    share_P = tl.exp(lse_P - safe)
    total = tl.sum(share_P, axis=0)
    tl.store(lse + row, safe + tl.log(total))
    share_P = share_P / tl.where(total == 0.0, 1.0, total)
    place_PV = (part_P * out_p)[:, None] + (token * out_t + head * out_h) + col_V.to(tl.int64)[None, :] * out_v
    there_PV = (part_P < parts)[:, None] & (col_V < width)[None, :]
    some_PV = tl.load(outs + place_PV, mask=there_PV, other=0.0).to(tl.float32)
    mixed_V = tl.sum(share_P[:, None] * some_PV, axis=0)
    tl.store(out + row * width + col_V, mixed_V.to(out.dtype.element_ty), mask=col_V < width)


def merge(out_PTHV: Tensor, lse_PTH: Tensor) -> tuple[Tensor, Tensor]:
    """``attention.merge``: all parts of a row in one program."""
    parts, tokens, heads, width = out_PTHV.shape
    out = torch.empty(tokens, heads, width, dtype=out_PTHV.dtype, device=out_PTHV.device)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=out_PTHV.device)
    if lse.numel():
        _merge_kernel[(tokens * heads,)](
            out_PTHV, lse_PTH, out, lse, parts, heads, width, *out_PTHV.stride(), *lse_PTH.stride(),
            PARTS=triton.next_power_of_2(max(parts, 1)), BLOCK=triton.next_power_of_2(max(width, 1)), num_warps=2,
            **FOLLOWS,
        )  # fmt: skip
    return out, lse
