"""Rotary position embedding: angles once a token, shared by the heads of a program.

T tokens, H heads, D head width, F frequencies (2F dimensions of a head are rotated), N heads of a program.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.machine import INTERPRETED, check_machine
from dayzero.ops.triton.rows import FOLLOWS, follow

__all__ = ["apply", "check_machine", "grid"]

ELEMENTS = 4096  # of a program
_ALONE = tl.constexpr(INTERPRETED)
_QUARTER, _INVERSE_QUARTER = tl.constexpr(1.5707963267948966), tl.constexpr(0.6366197723675814)


@triton.jit
def _widened(x):
    """f32 numbers in f64. The compiler, where it knows a widening, has threads exchange the narrow numbers, and then
    make all that follows of them over and over; of an instruction that it is given it knows nothing."""
    if _ALONE:
        return x.to(tl.float64)
    return tl.inline_asm_elementwise("cvt.f64.f32 $0, $1;", "=d,f", [x], dtype=tl.float64, is_pure=True, pack=1)


@triton.jit
def cos_sin(angle):
    """(cos, sin) of f32 angles of any size, within 2^-23: quarter turns are taken off in f64, what is left, up to an
    eighth either way, needs f32 only. The library's functions bring along what any size would need in f32; here a warp
    has little else to do. Polynomials: sinf and cosf of the Cephes library."""
    wide = _widened(angle)
    quarters = tl.floor(wide * _INVERSE_QUARTER + 0.5)
    x = (wide - quarters * _QUARTER).to(tl.float32)
    number = quarters.to(tl.int64).to(tl.int32)
    square = x * x
    sin = x + x * square * (-1.6666654611e-1 + square * (8.3321608736e-3 + square * -1.9515295891e-4))
    high = 4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5)
    cos = 1.0 - 0.5 * square + square * square * high
    odd = (number & 1) != 0
    cos, sin = tl.where(odd, sin, cos), tl.where(odd, cos, sin)
    return tl.where(((number + 1) & 2) != 0, -cos, cos), tl.where((number & 2) != 0, -sin, sin)


@triton.jit
def _turned_store(x_NP, y_NP, cos_P, sin_P, x_d, f_P, there_NP, num, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Load, turn and store the pairs of some heads. x_NP, y_NP: [N, 1] pointers to where a head's 2F begin."""
    if HALF:
        one_P, two_P = f_P, f_P + num
        a_NP = tl.load(x_NP + one_P.to(tl.int64)[None, :] * x_d, mask=there_NP, other=0.0).to(tl.float32)
        b_NP = tl.load(x_NP + two_P.to(tl.int64)[None, :] * x_d, mask=there_NP, other=0.0).to(tl.float32)
        kind = y_NP.dtype.element_ty
        tl.store(y_NP + one_P[None, :], (a_NP * cos_P[None, :] - b_NP * sin_P[None, :]).to(kind), mask=there_NP)
        tl.store(y_NP + two_P[None, :], (b_NP * cos_P[None, :] + a_NP * sin_P[None, :]).to(kind), mask=there_NP)
    else:
        kind = y_NP.dtype.element_ty
        col_Q = tl.arange(0, 2 * PAIRS)
        there_NQ = (tl.max(there_NP.to(tl.int32), axis=1) > 0)[:, None] & (col_Q < 2 * num)[None, :]
        both_NQ = tl.load(x_NP + col_Q.to(tl.int64)[None, :] * x_d, mask=there_NQ, other=0.0).to(tl.float32)
        a_NP, b_NP = tl.split(tl.reshape(both_NQ, (both_NQ.shape[0], PAIRS, 2)))
        a_NP, b_NP = (
            a_NP * cos_P[None, :] - b_NP * sin_P[None, :],
            b_NP * cos_P[None, :] + a_NP * sin_P[None, :],
        )
        turned_NQ = tl.reshape(tl.join(a_NP, b_NP), (both_NQ.shape[0], 2 * PAIRS))
        tl.store(y_NP + col_Q[None, :], turned_NQ.to(kind), mask=there_NQ)


@triton.jit
def _apply_kernel(
    x, positions, frequencies, y, x_t, x_h, x_d, axis_stride, position_t, f_stride, heads, width, begin, num, factor,
    sign, height, breadth, HALF: tl.constexpr, AXES: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr,
):  # fmt: skip
    """height, breadth: frequencies of the second and third axis. REST: dimensions that are only copied, padded."""
    follow()
    token = tl.program_id(0).to(tl.int64)
    head_N = tl.program_id(1) * N + tl.arange(0, N)
    f_P = tl.arange(0, PAIRS)
    freq_P = tl.load(frequencies + f_P * f_stride, mask=f_P < num, other=0.0).to(tl.float32)
    if AXES == 3:
        tall, broad = (f_P % 3 == 1) & (f_P < 3 * height), (f_P % 3 == 2) & (f_P < 3 * breadth)
        axis_P = tl.where(tall, 1, tl.where(broad, 2, 0)).to(tl.int64)
        place_P = tl.load(positions + axis_P * axis_stride + token * position_t)
    else:
        place_P = tl.load(positions + token * position_t)
    cos_P, sin_P = cos_sin(place_P.to(tl.float32) * freq_P)
    cos_P, sin_P = cos_P * factor, sin_P * (factor * sign)
    x_N1 = x + token * x_t + (head_N.to(tl.int64) * x_h)[:, None]
    y_N1 = y + token * heads * width + (head_N.to(tl.int64) * width)[:, None]
    there_NP = (head_N < heads)[:, None] & (f_P < num)[None, :]
    _turned_store(x_N1 + begin * x_d, y_N1 + begin, cos_P, sin_P, x_d, f_P, there_NP, num, HALF=HALF, PAIRS=PAIRS)
    if REST:
        at_R = tl.arange(0, REST)
        col_R = tl.where(begin > 0, at_R, 2 * num + at_R)  # what is rotated lies at one end
        rest_NR = (head_N < heads)[:, None] & (at_R < width - 2 * num)[None, :]
        kept_NR = tl.load(x_N1 + col_R.to(tl.int64)[None, :] * x_d, mask=rest_NR, other=0.0)
        tl.store(y_N1 + col_R[None, :], kept_NR, mask=rest_NR)


def apply(
    x_THD: Tensor,
    positions: Tensor,
    inv_freq_F: Tensor,
    *,
    style: str,
    part: str = "first",
    factor: float = 1.0,
    sections: tuple[int, int, int] | None = None,
    inverse: bool = False,
) -> Tensor:
    """``rope.apply``, packed. Angles are f32 products as in the reference, their cosines within 2^-23."""
    if style not in ("half", "interleaved") or part not in ("first", "last"):
        raise ValueError(f"style is 'half' or 'interleaved' and part 'first' or 'last', not {style!r} and {part!r}")
    if positions.dim() == 2 and sections is None:
        raise ValueError("positions [3, T] need sections, the number of frequencies of time, height and width")
    (tokens, heads, width), num = x_THD.shape, inv_freq_F.shape[0]
    if 2 * num > width:
        raise ValueError(f"{2 * num} dimensions cannot be rotated in a head of {width}")
    y_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    if y_THD.numel() == 0:
        return y_THD
    at_once = max(1, min(triton.next_power_of_2(heads), ELEMENTS // triton.next_power_of_2(width)))
    rest, inv_freq_F = width - 2 * num, inv_freq_F.to(x_THD.device)
    _apply_kernel[(tokens, triton.cdiv(heads, at_once))](
        x_THD, positions, inv_freq_F, y_THD, *x_THD.stride(), positions.stride(0), positions.stride(-1),
        inv_freq_F.stride(0), heads, width, 0 if part == "first" else rest, num, factor, -1.0 if inverse else 1.0,
        sections[1] if sections else 0, sections[2] if sections else 0,
        HALF=style == "half", AXES=positions.dim() + (positions.dim() == 2), N=at_once,
        PAIRS=triton.next_power_of_2(num), REST=triton.next_power_of_2(rest) if rest else 0,
        num_warps=4 if at_once * width >= 1024 else 1, **FOLLOWS,
    )  # fmt: skip
    return y_THD


@triton.jit
def _grid_kernel(
    x, frequencies, y, x_n, x_h, x_d, f_stride, heads, width, num, columns, HALF: tl.constexpr,
    ROW_FIRST: tl.constexpr, N: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    follow()
    patch = tl.program_id(0)
    head_N = tl.program_id(1) * N + tl.arange(0, N)
    f_P = tl.arange(0, PAIRS)
    index_P = f_P % num if HALF else f_P // 2
    of_first_P = f_P < num if HALF else f_P % 2 == 0
    row, column = patch // columns, patch % columns
    place_P = tl.where(of_first_P == ROW_FIRST, row, column).to(tl.float32)
    freq_P = tl.load(frequencies + index_P * f_stride, mask=f_P < 2 * num, other=0.0).to(tl.float32)
    cos_P, sin_P = cos_sin(place_P * freq_P)
    x_N1 = x + patch.to(tl.int64) * x_n + (head_N.to(tl.int64) * x_h)[:, None]
    y_N1 = y + patch.to(tl.int64) * heads * width + (head_N.to(tl.int64) * width)[:, None]
    there_NP = (head_N < heads)[:, None] & (f_P < 2 * num)[None, :]
    _turned_store(x_N1, y_N1, cos_P, sin_P, x_d, f_P, there_NP, 2 * num, HALF=HALF, PAIRS=PAIRS)


def grid(x_NHK: Tensor, inv_freq_F: Tensor, *, columns: int, style: str, first: str) -> Tensor:
    """``rope.grid``, packed."""
    if style not in ("half", "interleaved") or first not in ("row", "column"):
        raise ValueError(f"style is 'half' or 'interleaved' and first 'row' or 'column', not {style!r} and {first!r}")
    (count, heads, width), num = x_NHK.shape, inv_freq_F.shape[0]
    if width != 4 * num or count % columns:
        raise ValueError(f"{count} patches in {columns} columns, heads of {width}, {num} frequencies")
    y_NHK = torch.empty(x_NHK.shape, dtype=x_NHK.dtype, device=x_NHK.device)
    if y_NHK.numel() == 0:
        return y_NHK
    at_once = max(1, min(triton.next_power_of_2(heads), ELEMENTS // triton.next_power_of_2(width)))
    inv_freq_F = inv_freq_F.to(x_NHK.device)
    _grid_kernel[(count, triton.cdiv(heads, at_once))](
        x_NHK, inv_freq_F, y_NHK, *x_NHK.stride(), inv_freq_F.stride(0), heads, width, num, columns,
        HALF=style == "half", ROW_FIRST=first == "row", N=at_once, PAIRS=triton.next_power_of_2(2 * num), num_warps=4,
        **FOLLOWS,
    )  # fmt: skip
    return y_NHK
