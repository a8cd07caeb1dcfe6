"""Norms over the last dimension, a few rows a program; all rows of a program stay in registers.

R rows of a program, D width, of any leading shape and strides. Sums are f32 and in one order for a width and number of
rows, with an addition in front or without: what is fused gives the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.rows import FOLLOWS, follow, num_rows_at_once, row_starts, rows_of

__all__ = ["add_rms", "check_machine", "l2", "layer", "rms", "rms_gated", "rms_rows"]

ELEMENTS = 4096  # of a program where rows are short
LONG = 512  # elements that one warp holds


@triton.jit
def rms_rows(
    x_RD, weight, col_D, width, weight_d, eps, narrow: tl.constexpr,
    WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
):  # fmt: skip
    """x / rms(x) * w of f32 rows whose columns from ``width`` on are 0, in f32, before the last rounding."""
    y_RD = x_RD * tl.rsqrt(tl.sum(x_RD * x_RD, axis=1) / width + eps)[:, None]
    if ROUND:
        y_RD = y_RD.to(narrow).to(tl.float32)
    if WEIGHT:
        w_D = tl.load(weight + col_D.to(tl.int64) * weight_d, mask=col_D < width, other=0.0).to(tl.float32)
        y_RD = y_RD * (w_D + 1.0 if OFFSET else w_D)[None, :]
    return y_RD


@triton.jit
def _rms_kernel(
    x, added, weight, out, sums, count, inner, x_a, x_b, x_d, added_inner, added_a, added_b, added_d, weight_d, width,
    eps, ADD: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``norm.rms``; with ADD of x + added, which is stored in ``sums``. out and sums are packed."""
    follow()
    first = tl.program_id(0) * ROWS
    col_D = tl.arange(0, BLOCK)
    x_R, there_R = row_starts(first, count, inner, x_a, x_b, ROWS)
    there_RD = there_R[:, None] & (col_D < width)[None, :]
    x_RD = tl.load(x + x_R[:, None] + col_D.to(tl.int64)[None, :] * x_d, mask=there_RD, other=0.0)
    row_R = (first + tl.arange(0, ROWS)).to(tl.int64)
    place_RD = row_R[:, None] * width + col_D[None, :]
    if ADD:
        a_R, _ = row_starts(first, count, added_inner, added_a, added_b, ROWS)
        a_RD = tl.load(added + a_R[:, None] + col_D.to(tl.int64)[None, :] * added_d, mask=there_RD, other=0.0)
        x_RD = (x_RD.to(tl.float32) + a_RD.to(tl.float32)).to(sums.dtype.element_ty)
        tl.store(sums + place_RD, x_RD, mask=there_RD)
    y_RD = rms_rows(
        x_RD.to(tl.float32), weight, col_D, width, weight_d, eps, out.dtype.element_ty, WEIGHT, OFFSET, ROUND
    )
    tl.store(out + place_RD, y_RD.to(out.dtype.element_ty), mask=there_RD)


@triton.jit
def _layer_kernel(
    x, weight, bias, out, count, inner, x_a, x_b, x_d, weight_d, bias_d, width, eps,
    WEIGHT: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    follow()
    first = tl.program_id(0) * ROWS
    col_D = tl.arange(0, BLOCK)
    inside_D = col_D < width
    x_R, there_R = row_starts(first, count, inner, x_a, x_b, ROWS)
    there_RD = there_R[:, None] & inside_D[None, :]
    x_RD = tl.load(x + x_R[:, None] + col_D.to(tl.int64)[None, :] * x_d, mask=there_RD, other=0.0).to(tl.float32)
    centred_RD = tl.where(there_RD, x_RD - (tl.sum(x_RD, axis=1) / width)[:, None], 0.0)
    y_RD = centred_RD * tl.rsqrt(tl.sum(centred_RD * centred_RD, axis=1) / width + eps)[:, None]
    if WEIGHT:
        y_RD *= tl.load(weight + col_D.to(tl.int64) * weight_d, mask=inside_D, other=0.0).to(tl.float32)[None, :]
    if BIAS:
        y_RD += tl.load(bias + col_D.to(tl.int64) * bias_d, mask=inside_D, other=0.0).to(tl.float32)[None, :]
    row_R = (first + tl.arange(0, ROWS)).to(tl.int64)
    tl.store(out + row_R[:, None] * width + col_D[None, :], y_RD.to(out.dtype.element_ty), mask=there_RD)


@triton.jit
def _gated_kernel(
    x, gate, weight, out, count, inner, x_a, x_b, x_d, gate_inner, gate_a, gate_b, gate_d, weight_d, width, eps,
    GATED: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """GATED: ``norm.rms_gated``; else ``norm.l2``: a sum in the root, no weight and no gate."""
    follow()
    first = tl.program_id(0) * ROWS
    col_D = tl.arange(0, BLOCK)
    x_R, there_R = row_starts(first, count, inner, x_a, x_b, ROWS)
    there_RD = there_R[:, None] & (col_D < width)[None, :]
    x_RD = tl.load(x + x_R[:, None] + col_D.to(tl.int64)[None, :] * x_d, mask=there_RD, other=0.0).to(tl.float32)
    square_R = tl.sum(x_RD * x_RD, axis=1)
    if GATED:
        g_R, _ = row_starts(first, count, gate_inner, gate_a, gate_b, ROWS)
        g_RD = tl.load(gate + g_R[:, None] + col_D.to(tl.int64)[None, :] * gate_d, mask=there_RD, other=0.0)
        g_RD = g_RD.to(tl.float32)
        w_D = tl.load(weight + col_D.to(tl.int64) * weight_d, mask=col_D < width, other=0.0).to(tl.float32)
        y_RD = x_RD * tl.rsqrt(square_R / width + eps)[:, None] * w_D[None, :]
        y_RD *= (g_RD if SILU else 1.0) / (1.0 + tl.exp(-g_RD))
    else:
        y_RD = x_RD * tl.rsqrt(square_R + eps)[:, None]
    row_R = (first + tl.arange(0, ROWS)).to(tl.int64)
    tl.store(out + row_R[:, None] * width + col_D[None, :], y_RD.to(out.dtype.element_ty), mask=there_RD)


def _shape(count: int, width: int) -> tuple[tuple[int, ...], dict[str, Any]]:
    """(grid, options) of a kernel over so many rows. How a row is summed follows from its width alone: a long one has a
    program of its own, of short ones each has the same lanes of a warp, however many there are."""
    block = triton.next_power_of_2(width)
    if block >= LONG:
        return (count,), {"ROWS": 1, "BLOCK": block, "num_warps": min(16, block // LONG), **FOLLOWS}
    rows = num_rows_at_once(count, block, ELEMENTS)
    warps = max(1, rows * block // LONG)
    return (triton.cdiv(count, rows),), {"ROWS": rows, "BLOCK": block, "num_warps": warps, **FOLLOWS}


def _rms(
    x: Tensor, added: Tensor | None, weight_D: Tensor | None, eps: float, offset: bool, scale_in: str
) -> tuple[Tensor, Tensor]:
    if scale_in not in ("f32", "dtype"):
        raise ValueError(f"scale_in is 'f32' or 'dtype', not {scale_in!r}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = out if added is None else torch.empty_like(out)
    if out.numel() == 0:
        return sums, out
    rows, other = rows_of(x), rows_of(x if added is None else added)
    weight = x if weight_D is None else weight_D
    grid, options = _shape(rows.num, rows.width)
    _rms_kernel[grid](
        rows.x, other.x, weight, out, sums, rows.num, *rows[1:], *other[1:], weight.stride(-1), rows.width, eps,
        ADD=added is not None, WEIGHT=weight_D is not None, OFFSET=offset, ROUND=scale_in == "dtype", **options,
    )  # fmt: skip
    return sums, out


def rms(
    x: Tensor, weight_D: Tensor | None = None, *, eps: float, offset: bool = False, scale_in: str = "f32"
) -> Tensor:
    """``norm.rms``: the same shape, packed."""
    return _rms(x, None, weight_D, eps, offset, scale_in)[1]


def add_rms(
    stream_TH: Tensor, out_TH: Tensor, weight_H: Tensor, *, eps: float, offset: bool = False, scale_in: str = "f32"
) -> tuple[Tensor, Tensor]:
    """``residual.add_norm``: (stream + out, its norm), both packed. Bit for bit what ``rms`` makes of the sum."""
    return _rms(stream_TH, out_TH, weight_H, eps, offset, scale_in)


def layer(x: Tensor, weight_D: Tensor | None = None, bias_D: Tensor | None = None, *, eps: float) -> Tensor:
    """``norm.layer``: the same shape, packed."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, weight, bias = rows_of(x), x if weight_D is None else weight_D, x if bias_D is None else bias_D
    grid, options = _shape(rows.num, rows.width)
    _layer_kernel[grid](
        rows.x, weight, bias, out, rows.num, *rows[1:], weight.stride(-1), bias.stride(-1), rows.width, eps,
        WEIGHT=weight_D is not None, BIAS=bias_D is not None, **options,
    )  # fmt: skip
    return out


def _gated(x: Tensor, gate: Tensor | None, weight_D: Tensor, eps: float, silu: bool) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    rows, other = rows_of(x), rows_of(x if gate is None else gate)
    grid, options = _shape(rows.num, rows.width)
    _gated_kernel[grid](
        rows.x, other.x, weight_D, out, rows.num, *rows[1:], *other[1:], weight_D.stride(-1), rows.width, eps,
        GATED=gate is not None, SILU=silu, **options,
    )  # fmt: skip
    return out


def rms_gated(x: Tensor, gate: Tensor, weight_D: Tensor, *, eps: float, act: str) -> Tensor:
    """``norm.rms_gated``: the same shape, packed."""
    if act not in ("silu", "sigmoid"):
        raise ValueError(f"act is 'silu' or 'sigmoid', not {act!r}")
    return _gated(x, gate, weight_D, eps, act == "silu")


def l2(x: Tensor, *, eps: float = 1e-6) -> Tensor:
    """``norm.l2``: the same shape, packed."""
    return _gated(x, None, x, eps, False)
