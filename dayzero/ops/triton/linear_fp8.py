"""Matrix products with weights in blocks of 8 bits, which stay so until they are in registers.

The weight is the left operand, x the right one: so few rows fill the matrix unit. A code is a bf16 number, exactly;
what 128 columns add up is multiplied by their block's scale in f32. Where tiles of the weight are too few to fill a
chip, K is cut into parts, whose sums are added in the order of the parts.

T tokens, K input width, N output width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.decl import FP8_SIZE as BLOCK
from dayzero.decl import Fp8Blocks
from dayzero.ops.triton.experts_rows import nearest
from dayzero.ops.triton.machine import INTERPRETED, check_machine, num_processors
from dayzero.ops.triton.rows import FOLLOWS, follow
from dayzero.units import ceil_div

__all__ = ["Rounded", "Setting", "check_machine", "product", "setting", "widen"]

_SLOW, _BLOCK = tl.constexpr(INTERPRETED), tl.constexpr(BLOCK)
_ADDED = 512  # numbers of a row that a program adds up
# Four codes become two pairs of bf16 numbers: sign and 7 bits where bf16 has them, which is 2^-120 of the number, if
# need be as a subnormal; the product with 2^120 is exact.
_ASSEMBLY = tl.constexpr("""{
.reg .b32 one, two, most;
prmt.b32 one, $2, $2, 0x9180;
prmt.b32 two, $2, $2, 0xb3a2;
shl.b32 one, one, 4;
shl.b32 two, two, 4;
and.b32 one, one, 0x87f087f0;
and.b32 two, two, 0x87f087f0;
mov.b32 most, 0x7b807b80;
mul.rn.bf16x2 $0, one, most;
mul.rn.bf16x2 $1, two, most;
}""")


class Setting(NamedTuple):
    """Of a launch: rows of x and of the weight in a tile, parts of K, warps a program, stages of its pipeline."""

    rows: int
    high: int
    split: int
    warps: int
    stages: int


def setting(num_rows: int, outputs: int, inputs: int, processors: int) -> Setting:
    """How so many rows are multiplied. A tile is as wide as rows need and 128 rows of the weight high, 64 where x is
    few rows or the weight small; K is cut so that two programs a processor, of at least four blocks each, exist."""
    rows = min(128, max(16, triton.next_power_of_2(num_rows)))
    high = 64 if rows == 16 or (rows <= 64 and outputs <= 64 * processors) else 128
    tiles, blocks = ceil_div(outputs, high) * ceil_div(num_rows, rows), ceil_div(inputs, BLOCK)
    split = max(1, min(2 * processors // tiles, blocks // 4, 8))
    split = ceil_div(blocks, ceil_div(blocks, split))  # no part is empty
    return Setting(rows, high, split, 8 if high == 128 else 4, 3 if high == 128 else 4)


@triton.jit
def _numbers(codes):
    """e4m3 codes, as bytes, in bf16; in f32 where the interpreter multiplies."""
    if _SLOW:
        bits = codes.to(tl.uint32)
        return (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.inline_asm_elementwise(_ASSEMBLY, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def _dot(w, x, FORM: tl.constexpr):
    """FORM 0: w in bf16, 1: in codes, 2: both in codes, which the 8-bit unit multiplies."""
    if _SLOW:  # the interpreter multiplies neither bf16 nor e4m3
        left = w.to(tl.float32) if FORM == 0 else _numbers(w)
        return tl.dot(left, _numbers(x) if FORM == 2 else x.to(tl.float32))
    elif FORM == 0:
        return tl.dot(w, x)
    elif FORM == 1:
        return tl.dot(_numbers(w), x)
    else:
        return tl.dot(w.to(tl.float8e4nv, bitcast=True), x.to(tl.float8e4nv, bitcast=True))


@triton.jit
def _product(
    x, x_scales, behind, codes, scales, bias, out, num_rows, outputs, inputs, x_stride, w_stride, scale_stride,
    FORM: tl.constexpr, EVEN: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of x, tiles of the weight, parts). out [T, N]; unless WHOLE [parts, T, N] in f32, without the bias.
    x_scales: None, or by block of columns, each ``behind`` the one before, and row of x. FORM: of ``_dot``."""
    follow()
    tile, high, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    m, n = tile * ROWS + tl.arange(0, ROWS), high * HIGH + tl.arange(0, HIGH)
    inside, exists = m < num_rows, n < outputs
    blocks = tl.cdiv(inputs, _BLOCK)
    steps = tl.cdiv(blocks, tl.num_programs(2))
    first = part * steps
    at_x = x + m[None, :].to(tl.int64) * x_stride
    at_w = codes + tl.minimum(n, outputs - 1)[:, None].to(tl.int64) * w_stride
    if FORM > 0:
        scales += (high * HIGH // _BLOCK) * scale_stride
    y = tl.zeros((HIGH, ROWS), tl.float32)
    for block in range(first, tl.minimum(first + steps, blocks)):
        k = block * _BLOCK + tl.arange(0, _BLOCK)
        if EVEN:
            w = tl.load(at_w + k[None, :])
            piece = tl.load(at_x + k[:, None], mask=inside[None, :], other=0)
        else:
            w = tl.load(at_w + k[None, :], mask=(k < inputs)[None, :], other=0)
            piece = tl.load(at_x + k[:, None], mask=inside[None, :] & (k < inputs)[:, None], other=0)
        part_y = _dot(w, piece, FORM)
        if x_scales is not None:
            part_y *= tl.load(x_scales + block * behind + m, mask=inside, other=0.0)[None, :]
        y += part_y * tl.load(scales + block) if FORM > 0 else part_y
    if WHOLE and bias is not None:
        y += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)[:, None]
    to = out + (part * num_rows + m)[None, :].to(tl.int64) * outputs + n[:, None]
    tl.store(to, nearest(y, out.dtype.element_ty), mask=exists[:, None] & inside[None, :])


@triton.jit
def _add(parts, bias, out, num_rows, outputs, PARTS: tl.constexpr, STEP: tl.constexpr):
    """Grid (T, steps of a row): out [T, N] of the sums in parts [PARTS, T, N], and the bias."""
    follow()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * STEP + tl.arange(0, STEP)
    exists = n < outputs
    y = tl.zeros((STEP,), tl.float32)
    for part in tl.static_range(PARTS):
        y += tl.load(parts + (part * num_rows + row) * outputs + n, mask=exists, other=0.0)
    if bias is not None:
        y += tl.load(bias + n, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, nearest(y, out.dtype.element_ty), mask=exists)


class Rounded(NamedTuple):
    """x [T, K] as codes and f32 scales by block of columns and row, [B, T or more]: a value is their product. codes: of
    e4m3, or the bf16 numbers that they are."""

    codes: Tensor
    scales: Tensor


def product(
    x_TK: Tensor | Rounded, weight: Tensor | Fp8Blocks, bias_N: Tensor | None, dtype: torch.dtype,
    how: Setting | None = None,
) -> Tensor:  # fmt: skip
    """x @ weight^T + bias [..., N] in ``dtype``; bf16 x; the weight's rows lie packed. how: None: by ``setting``."""
    outputs, inputs = weight.shape
    codes, scales = (weight.codes, weight.scales) if isinstance(weight, Fp8Blocks) else (weight, None)
    given, x_scales = x_TK if isinstance(x_TK, Rounded) else (x_TK, None)
    x, lead = given.reshape(-1, inputs), given.shape[:-1]
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, form = x.shape[0], 0 if scales is None else 1 if x.dtype == torch.bfloat16 else 2
    out = torch.empty(rows, outputs, dtype=dtype, device=x.device)
    if out.numel():
        how = how or setting(rows, outputs, inputs, num_processors(x.device))
        split = how.split
        parts = out if split == 1 else torch.empty(split, rows, outputs, dtype=torch.float32, device=x.device)
        if form == 2:
            x = x.view(torch.uint8)
        if form:
            codes = codes.view(torch.uint8)
        _product[ceil_div(rows, how.rows), ceil_div(outputs, how.high), split](
            x, x_scales, 0 if x_scales is None else x_scales.stride(0), codes, scales, bias_N, parts, rows, outputs,
            inputs, x.stride(0), codes.stride(0), 0 if scales is None else scales.stride(0), FORM=form,
            EVEN=inputs % BLOCK == 0, WHOLE=split == 1, ROWS=how.rows, HIGH=how.high, num_warps=how.warps,
            num_stages=how.stages, **FOLLOWS,
        )  # fmt: skip
        if split > 1:
            _add[rows, ceil_div(outputs, _ADDED)](
                parts, bias_N, out, rows, outputs, PARTS=split, STEP=_ADDED, num_warps=4, **FOLLOWS
            )
    return out.view(*lead, outputs)


@triton.jit
def _widen(
    codes, scales, out, outputs, inputs, w_stride, scale_stride, first, HIGH: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Grid (tiles of rows, tiles of columns): out [rows from ``first`` on, K] = code * scale."""
    follow()
    row, k = tl.program_id(0) * HIGH + tl.arange(0, HIGH), tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    n = row + first
    there = (n < outputs)[:, None] & (k < inputs)[None, :]
    w = tl.load(codes + n[:, None].to(tl.int64) * w_stride + k[None, :], mask=there, other=0)
    block = (n // _BLOCK)[:, None] * scale_stride + (k // _BLOCK)[None, :]
    y = _numbers(w).to(tl.float32) * tl.load(scales + block, mask=there, other=0.0)
    tl.store(out + row[:, None].to(tl.int64) * inputs + k[None, :], nearest(y, out.dtype.element_ty), mask=there)


def widen(weight: Fp8Blocks, first: int, out_RK: Tensor) -> Tensor:
    """``out`` filled with the values of the weight's rows from ``first`` on, rounded to its dtype."""
    (outputs, inputs), high, wide = weight.shape, 16, 512
    codes, rows = weight.codes.view(torch.uint8), len(out_RK)
    assert out_RK.is_contiguous() and first + rows <= outputs, "rows of the weight, in one piece"
    _widen[ceil_div(rows, high), ceil_div(inputs, wide)](
        codes, weight.scales, out_RK, first + rows, inputs, codes.stride(0), weight.scales.stride(0), first,
        HIGH=high, WIDE=wide, num_warps=4, **FOLLOWS,
    )  # fmt: skip
    return out_RK
