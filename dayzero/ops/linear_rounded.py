"""Linear layers whose inputs are rounded to e4m3 with a scale for each token and 128 columns (fp8_128): W8A8 where
weights have 8 bits, as publishers of such weights multiply them. Another contract than ``linear.matmul``: what the
rounding costs is a quantisation error, not a bound.

T tokens, K input width, N output width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.bounds import MATMUL_FP8
from dayzero.ops.contract import contract
from dayzero.ops.experts_fp8 import rounded_to_fp8_128
from dayzero.ops.linear import Weight, product_f64


@contract("linear.matmul_fp8_128", bound=MATMUL_FP8, traits={"bias": (False, True)})
def matmul_fp8_128(x_TK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul`` with x rounded by ``experts_fp8.to_fp8_128``; weights are as they are."""
    y_TN = product_f64(rounded_to_fp8_128(x_TK, torch.float64), w_NK)
    return (y_TN if bias_N is None else y_TN + bias_N.double()).to(x_TK.dtype)
