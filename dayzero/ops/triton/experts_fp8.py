"""``moe.experts_fp8_128`` on a GPU: as ``moe.experts`` there, with three launches more, which
round the rows of both products to e4m3 and give each place its token's scales.

Codes of e4m3, of rows and of matrices, are multiplied as the bf16 numbers that they are, and sums over 128 columns by
the scales in f32.
The 8-bit unit would be no help: its own sums keep about 14 bits, and an error of 0.4 % before the second rounding to
e4m3 is 2 % after it, as much as the contract allows.

T tokens, N chosen a token, D model width, I intermediate width, E experts, K inner dimension, B = ceil(K / 128).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.experts import Given, arranged, pack
from dayzero.ops.triton.experts_matmul import Biases, down_product, gate_up
from dayzero.ops.triton.experts_rows import OVERLAP, Sorted, begun, combine, nearest
from dayzero.ops.triton.machine import INTERPRETED, check_machine
from dayzero.ops.triton.mxfp4 import COLUMNS
from dayzero.units import ceil_div

__all__ = ["check_machine", "experts", "pack"]

BEHIND = 128  # places behind the last whose scales a tile reads, at most
LARGEST, LEAST_AMAX = 448.0, 1e-4  # of e4m3; of a block's largest magnitude, as in the reference
_BEHIND, _LARGEST, _LEAST = tl.constexpr(BEHIND), tl.constexpr(LARGEST), tl.constexpr(LEAST_AMAX)
_SLOW = tl.constexpr(INTERPRETED)


def experts(
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    gate_EID: Given,
    up_EID: Given,
    down_EDI: Given,
    activation: Mapping[str, Any],
    biases: Biases = None,
) -> Tensor:
    """``moe.experts_fp8_128`` in bf16. Stacks are best laid out once, by ``pack``; those that are packed are laid out
    here in each call. A token's sum runs over n in ascending order."""
    gate, up, down = pack(gate_EID), pack(up_EID), pack(down_EDI)
    if ids_TN.numel() == 0 or len(gate) == 0:
        return torch.zeros_like(x_TD, memory_format=torch.contiguous_format)
    by_expert, first, second = arranged("a8", ids_TN, gate, down)
    codes_TD, scales = quantise(x_TD)
    hidden = gate_up(codes_TD, gate, up, by_expert, activation, biases, first, by_place(scales, by_expert))
    codes, scales = quantise(hidden)
    y_SD = down_product(codes, down, by_expert, biases, second, scales)
    return combine(y_SD, by_expert, weights_TN, x_TD.dtype)


def quantise(x_TK: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """(the codes of ``experts_fp8.to_fp8_128`` [T, K], as bf16 or as they are, its scales f32 [B, T + BEHIND],
    undefined behind the last row), in one launch."""
    num_rows, inner = x_TK.shape
    blocks = ceil_div(inner, COLUMNS)
    codes = torch.empty(num_rows, inner, dtype=dtype, device=x_TK.device)
    scales = torch.empty(blocks, num_rows + BEHIND, dtype=torch.float32, device=x_TK.device)
    rows = 4 if num_rows <= 64 else 16
    _quantise[ceil_div(num_rows, rows), blocks](
        x_TK, codes, scales, *x_TK.stride(), inner, num_rows, ROWS=rows, num_warps=4, **OVERLAP
    )
    return codes, scales


@triton.jit
def _nearest_e4m3(x):
    """The f32 nearest to x that e4m3 holds, ties to even."""
    if _SLOW:  # the interpreter cuts off
        bits = x.to(tl.int32, bitcast=True)
        kept = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
        steps = 12582912.0 / 512.0  # 1.5 * 2^23 steps of 2^-9: adding them rounds to whole steps
        return tl.where(tl.abs(x) < 0.015625, (x + steps) - steps, kept)
    return x.to(tl.float8e4nv).to(tl.float32)


@triton.jit
def _quantise(x, codes, scales, stride, step, K, num_rows, ROWS: tl.constexpr):
    begun()
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    block = tl.program_id(1)
    column = block * 128 + tl.arange(0, 128)[None, :]
    here = (row < num_rows) & (column < K)
    x = tl.load(x + row * stride + column * step, mask=here, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), _LEAST), tl.full((ROWS,), _LARGEST, tl.float32))[:, None]
    y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    y = tl.where(y > _LARGEST, _LARGEST, tl.where(y < -_LARGEST, -_LARGEST, y))  # a NaN stays one, as in the reference
    tl.store(codes + row * K + column, nearest(_nearest_e4m3(y), codes.dtype.element_ty), mask=here)
    tl.store(scales + block * (num_rows + _BEHIND) + row, scale, mask=row < num_rows)


def by_place(scales: Tensor, by_expert: Sorted) -> Tensor:
    """f32 [B, T N + BEHIND] of scales [B, T + BEHIND] of tokens: of each place its token's, in one launch."""
    blocks, slots = len(scales), by_expert.num_slots
    out = torch.empty(blocks, slots + BEHIND, dtype=torch.float32, device=scales.device)
    _spread[ceil_div(slots, 256), blocks](
        scales, out, by_expert.order, by_expert.ends, by_expert.num_experts, slots, scales.stride(0),
        PER=by_expert.chosen, ONE=by_expert.one, num_warps=4, **OVERLAP,
    )  # fmt: skip
    return out


@triton.jit
def _spread(scales, out, order, ends, num_experts, slots, stride, PER: tl.constexpr, ONE: tl.constexpr):
    begun()
    block = tl.program_id(1)
    place = tl.program_id(0) * 256 + tl.arange(0, 256)
    if ONE:
        here = place < slots
        token = tl.zeros((256,), tl.int32)
    else:
        here = place < tl.load(ends + num_experts - 1)
        token = tl.load(order + place, mask=here, other=0) // PER
    scale = tl.load(scales + block * stride + token, mask=here)
    tl.store(out + block * (slots + _BEHIND) + place, scale, mask=here)
