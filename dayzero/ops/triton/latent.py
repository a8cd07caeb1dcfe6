"""The projections around absorbed latent attention: one small product for each head, W_UK before it and W_UV behind it.

T tokens, H heads, K inner width, N output width, S further numbers of a query that all heads share and that are copied.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.machine import INTERPRETED, check_machine

__all__ = ["check_machine", "queries_into_latent", "values_out_of_latent"]


# Else compiled anew for multiples of 16: of a step's tokens, those of some rows may be projected alone.
@triton.jit(do_not_specialize_on_alignment=["num_tokens"])
def _project(
    x, w, out, num_tokens, x_t, x_h, x_k, w_h, w_k, w_n, out_t, out_h,
    K: tl.constexpr, N: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out[t, h, :N] = x[t, h, :K] w[h]; the S numbers behind the K go behind the N."""
    t = tl.program_id(2).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    h = tl.program_id(1).to(tl.int64)
    real_T = t < num_tokens
    x_T, out_T = x + t * x_t + h * x_h, out + t * out_t + h * out_h
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for begin in range(0, K, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        x_TK = tl.load(x_T[:, None] + k[None] * x_k, mask=real_T[:, None] & (k < K)[None], other=0.0)
        w_KN = tl.load(w + h * w_h + k[:, None] * w_k + n[None] * w_n, mask=(k < K)[:, None] & (n < N)[None], other=0.0)
        x_TK = x_TK.to(w.dtype.element_ty)
        if UPCAST:
            x_TK, w_KN = x_TK.to(tl.float32), w_KN.to(tl.float32)
        acc = tl.dot(x_TK, w_KN, acc, input_precision="ieee")
    tl.store(out_T[:, None] + n[None], acc.to(out.dtype.element_ty), mask=real_T[:, None] & (n < N)[None])
    if S > 0:
        if tl.program_id(0) == 0:
            s = tl.arange(0, SP)
            mask = real_T[:, None] & (s < S)[None]
            shared = tl.load(x_T[:, None] + (K + s)[None] * x_k, mask=mask, other=0.0)
            tl.store(out_T[:, None] + (N + s)[None], shared.to(out.dtype.element_ty), mask=mask)


def _run(x_THK: Tensor, w_HKN: Tensor, out_THN: Tensor, shared: int) -> None:
    (tokens, heads), (_, inner, outer) = x_THK.shape[:2], w_HKN.shape
    if tokens == 0:
        return
    few = tokens <= 64
    block_t = max(16, triton.next_power_of_2(tokens)) if few else 128
    block_n = min(128, max(16, triton.next_power_of_2(outer)))
    _project[(triton.cdiv(outer, block_n), heads, triton.cdiv(tokens, block_t))](
        x_THK, w_HKN, out_THN, tokens, *x_THK.stride(), *w_HKN.stride(), *out_THN.stride()[:2],
        K=inner, N=outer, S=shared, SP=triton.next_power_of_2(max(shared, 1)), BLOCK_T=block_t, BLOCK_N=block_n,
        BLOCK_K=min(64, max(16, triton.next_power_of_2(inner))), UPCAST=INTERPRETED, num_warps=4 if few else 8,
        num_stages=4 if few else 3,
    )  # fmt: skip


def queries_into_latent(q_THD: Tensor, w_uk_HNR: Tensor) -> Tensor:
    """``latent.queries`` of bf16 numbers: sums in f32, which is what is returned."""
    nope, rank = w_uk_HNR.shape[1:]
    shared = q_THD.shape[2] - nope
    out_THC = q_THD.new_empty(*q_THD.shape[:2], rank + shared, dtype=torch.float32)
    _run(q_THD, w_uk_HNR, out_THC, shared)
    return out_THC


def values_out_of_latent(out_THR: Tensor, w_uv_HVR: Tensor, dtype: torch.dtype) -> Tensor:
    """``latent.values`` of bf16 matrices: the sums of attention are rounded to bf16 first, products summed in f32."""
    out_THV = out_THR.new_empty(*out_THR.shape[:2], w_uv_HVR.shape[1], dtype=dtype)
    _run(out_THR, w_uv_HVR.transpose(1, 2), out_THV, 0)
    return out_THV
