"""``linear.matmul_fp8_128`` on a GPU: x is rounded in one launch, and multiplied in another one.

Few rows are multiplied as the bf16 numbers that their codes are, which is exact: reading the weight takes as long. More
rows are multiplied by the 8-bit unit, whose own sums keep about 14 bits, over 128 columns each.

T tokens, K input width, N output width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.decl import Fp8Blocks
from dayzero.ops.fp8_blocks import packed_rows
from dayzero.ops.triton.experts_fp8 import quantise
from dayzero.ops.triton.linear_fp8 import Rounded, product
from dayzero.ops.triton.machine import check_machine

__all__ = ["check_machine", "matmul", "pack"]

MOST_WIDENED = 128  # rows, up to which reading the weight takes longer than multiplying it in bf16
_E4M3 = torch.float8_e4m3fn


def pack(w_NK: Tensor | Fp8Blocks) -> Tensor | Fp8Blocks:
    """The weight with rows in one piece: see ``fp8_blocks.packed_rows``."""
    return packed_rows(w_NK) if isinstance(w_NK, Fp8Blocks) else w_NK.contiguous()


def matmul(x_TK: Tensor, w_NK: Tensor | Fp8Blocks, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul_fp8_128`` of bf16 x."""
    x = x_TK.reshape(-1, x_TK.shape[-1])
    unit8 = isinstance(w_NK, Fp8Blocks) and len(x) > MOST_WIDENED and x.shape[-1] % 16 == 0
    y = product(Rounded(*quantise(x, _E4M3 if unit8 else torch.bfloat16)), w_NK, bias_N, x.dtype)
    return y.view(*x_TK.shape[:-1], w_NK.shape[0])
