"""Plain torch on an NVIDIA GPU: the libraries that come with it (cuBLAS, its attention kernels).

Letters as in the references. Answers of a row may depend in the last bits on how many rows come with it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.errors import MachineError

LONGEST = 4096  # inputs that one sum of a matrix unit runs over


def check_machine() -> None:
    """Raise MachineError without a GPU, or where f32 products may run in TF32, which has 10 bits."""
    if not torch.cuda.is_available():
        raise MachineError("variants of torch's CUDA libraries need a GPU, and torch sees none; bind others")
    if torch.get_float32_matmul_precision() != "highest":
        raise MachineError("f32 products may run in TF32 here; leave torch's float32_matmul_precision at 'highest'")


def matmul(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul`` by cuBLAS: sums in f32, one rounding."""
    return F.linear(x_TK, w_NK.to(x_TK.dtype), None if bias_N is None else bias_N.to(x_TK.dtype))


def matmul_f32(x_TK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul_f32`` by cuBLAS. Two narrow operands of one type are multiplied as they are: their products are
    exact in f32, in which they are added and given out; anything else is widened first.

    Errors of a matrix unit grow with the length of its sum, not with the root of it: on an H200 2.4e-6, 4.4e-6 and
    7.9e-6 were measured at K = 2304, 4096 and 7168. So a longer sum is made of pieces."""
    if x_TK.dtype != w_NK.dtype or x_TK.dtype not in (torch.bfloat16, torch.float16) or not x_TK.numel():
        return F.linear(x_TK.float(), w_NK.float(), None if bias_N is None else bias_N.float())
    x = x_TK.reshape(-1, x_TK.shape[-1])
    parts = zip(x.split(LONGEST, dim=1), w_NK.split(LONGEST, dim=1), strict=True)
    y = functools.reduce(torch.Tensor.add_, (torch.mm(a, w.T, out_dtype=torch.float32) for a, w in parts))
    return (y if bias_N is None else y + bias_N.float()).view(*x_TK.shape[:-1], w_NK.shape[0])


def grouped(x_TGK: Tensor, w_GNK: Tensor) -> Tensor:
    """``linear.grouped`` by a batched product."""
    return torch.bmm(x_TGK.transpose(0, 1), w_GNK.to(x_TGK.dtype).transpose(1, 2)).transpose(0, 1)


def attention_full(q_NHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """``attention.full`` of bf16 numbers by torch's flash kernel, heads padded with zeros to a width it takes."""
    width = q_NHK.shape[2]
    if q_NHK.shape[0] == 0:
        return torch.empty_like(q_NHK), q_NHK.new_zeros(q_NHK.shape[:2], dtype=torch.float32)
    q, k, v = (F.pad(x, (0, -width % 8)).transpose(0, 1)[None] for x in (q_NHK, k_MHK, v_MHK))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out[0].transpose(0, 1)[..., :width], lse[0].T
