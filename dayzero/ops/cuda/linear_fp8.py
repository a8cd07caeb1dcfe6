"""Matrix products of more than a few rows with a weight in blocks of 8 bits: by tiles that are widened within the
product, or by torch's library over values that are widened before.

Per number of the weight an H200 takes 3 bytes of 4.2e12 a second to widen it and 2 T of 7.6e14 operations to multiply
it, and 2 T of about 4e14 where it is widened within the product: the two meet near T = 270.

T tokens, K input width, N output width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.decl import Fp8Blocks
from dayzero.ops.triton import linear_fp8 as tiles

MOST_ROWS = 256  # that are multiplied without widening the weight before
SCRATCH = 128 << 20  # bytes that widened rows of the weight may take


def matmul(x_TK: Tensor, weight: Fp8Blocks, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul``. For many rows of x, or others than bf16 ones, ``by_library``."""
    if x_TK.dtype != torch.bfloat16 or x_TK.numel() > MOST_ROWS * x_TK.shape[-1]:
        return by_library(x_TK, weight, bias_N)
    return tiles.product(x_TK, weight, bias_N, x_TK.dtype)


def matmul_f32(x_TK: Tensor, weight: Fp8Blocks, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul_f32``: the weight's values have all bits that f32 has."""
    if x_TK.dtype == torch.bfloat16:
        return tiles.product(x_TK, weight, bias_N, torch.float32)
    return by_library(x_TK.float(), weight, bias_N)


def by_library(x_TK: Tensor, weight: Fp8Blocks, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul`` by torch's library, with the weight's values rounded to x's dtype, once each; some rows of the
    weight at a time, in one scratch."""
    (outputs, inputs), lead = weight.shape, x_TK.shape[:-1]
    x = x_TK.reshape(-1, inputs)
    out = x.new_empty(len(x), outputs)
    most = min(outputs, max(1, SCRATCH // (x.dtype.itemsize * max(1, inputs))))
    scratch_RK = x.new_empty(most, inputs)
    for first in range(0, outputs if len(x) else 0, most):
        rows = slice(first, min(outputs, first + most))
        values_RK = tiles.widen(weight, first, scratch_RK[: rows.stop - first])
        if bias_N is None:
            torch.mm(x, values_RK.T, out=out[:, rows])
        else:
            torch.addmm(bias_N[rows].to(x.dtype), x, values_RK.T, out=out[:, rows])
    return out.view(*lead, outputs)
