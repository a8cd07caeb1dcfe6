"""``linear.matmul_fp8_128`` with few rows at the speed of reading the weight; more rows go to Triton."""

from __future__ import annotations

from torch import Tensor

from dayzero.ops.cuda.linear import MOST_ROWS, Weight, check_machine, few_rounded, pack
from dayzero.ops.triton import linear_rounded as tiles
from dayzero.ops.triton.experts_fp8 import quantise
from dayzero.ops.triton.linear_fp8 import Rounded, product

__all__ = ["check_machine", "matmul", "pack"]


def matmul(x_TK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul_fp8_128`` of bf16 x. In a graph, as ``linear.matmul``."""
    if x_TK.numel() > MOST_ROWS * x_TK.shape[-1]:
        return tiles.matmul(x_TK, w_NK, bias_N)
    x = Rounded(*quantise(x_TK.reshape(-1, x_TK.shape[-1])))
    y_TN = few_rounded(x, w_NK, bias_N)
    if y_TN is None:
        y_TN = product(x, w_NK, bias_N, x_TK.dtype)
    return y_TN.view(*x_TK.shape[:-1], w_NK.shape[0])
