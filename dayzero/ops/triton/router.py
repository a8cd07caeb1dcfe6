"""``moe.matmul_route`` on a GPU in two launches: the product in pieces of its sum, and the choice, which adds them up.

T tokens, D model width, E experts, M tokens and N experts of a program, K numbers of a piece, S pieces. How a sum is
divided follows from D alone, so that a token's logits are the same whatever comes with it, as long as that is no more
than ``MOST_TOKENS``: beyond, torch's library multiplies. A program of the product has all of its weights on their way
before the kernel ahead has made x: in a graph they have been there all along.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from dayzero.ops.router import Choosing
from dayzero.ops.triton.machine import INTERPRETED, check_machine
from dayzero.ops.triton.route import choose, route
from dayzero.ops.triton.rows import FOLLOWS, follow
from dayzero.ops.vendor import torch_cuda

__all__ = ["check_machine", "matmul_route"]

MOST_TOKENS = 512  # from here on the pieces would be more to write than the product is to read
MOST_PIECES = 16
EXPERTS = 32  # of a program
_SLOW = tl.constexpr(INTERPRETED)  # the interpreter multiplies no bf16 tiles


@triton.jit(do_not_specialize=["early", "count"])
def _product(x, w, pieces, x_t, w_e, count, experts, width, early, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """pieces [S, T, E] f32 <- products of x and w over K numbers each. early: weights may be read ahead of all else."""
    piece = tl.program_id(1)
    token_M = tl.program_id(0) * M + tl.arange(0, M)
    expert_N = tl.program_id(2) * N + tl.arange(0, N)
    at_K = piece * K + tl.arange(0, K)
    there_NK = (expert_N < experts)[:, None] & (at_K < width)[None, :]
    from_NK = w + expert_N.to(tl.int64)[:, None] * w_e + at_K[None, :]
    if early:
        w_NK = tl.load(from_NK, mask=there_NK, other=0.0)
        follow()
    else:
        follow()
        w_NK = tl.load(from_NK, mask=there_NK, other=0.0)
    there_MK = (token_M < count)[:, None] & (at_K < width)[None, :]
    x_MK = tl.load(x + token_M.to(tl.int64)[:, None] * x_t + at_K[None, :], mask=there_MK, other=0.0)
    if _SLOW:
        x_MK, w_NK = x_MK.to(tl.float32), w_NK.to(tl.float32)
    sum_MN = tl.dot(x_MK, tl.trans(w_NK))
    to_MN = pieces + ((piece * count + token_M) * experts)[:, None] + expert_N[None, :]
    tl.store(to_MN, sum_MN, mask=(token_M < count)[:, None] & (expert_N < experts)[None, :])


def matmul_route(
    x_TD: Tensor,
    w_ED: Tensor,
    choosing: Choosing,
    *,
    logit_bias_E: Tensor | None = None,
    select_bias_E: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``moe.matmul_route`` of bf16 numbers; more tokens and other numbers go through torch's library."""
    (count, width), experts = x_TD.shape, w_ED.shape[0]
    narrow = w_ED.stride(1) == 1 and x_TD.dtype == w_ED.dtype == torch.bfloat16
    if not narrow or not 0 < count <= MOST_TOKENS:
        logits_TE = torch_cuda.matmul_f32(x_TD, w_ED, logit_bias_E)
        return route(
            logits_TE, choosing.top_k, score=choosing.score, bias_E=select_bias_E, groups=choosing.groups,
            renormalise=choosing.renormalise, scale=choosing.scale, eps=choosing.eps,
        )  # fmt: skip
    x_TD = x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()
    wide = max(64, next_power_of_2(cdiv(width, MOST_PIECES)))
    pieces_STE = torch.empty(cdiv(width, wide), count, experts, dtype=torch.float32, device=x_TD.device)
    tokens = 16 if count <= 16 else 32
    _product[cdiv(count, tokens), pieces_STE.shape[0], cdiv(experts, EXPERTS)](
        x_TD, w_ED, pieces_STE, x_TD.stride(0), w_ED.stride(0), count, experts, width,
        int(not INTERPRETED and torch.cuda.is_current_stream_capturing()), M=tokens, N=EXPERTS, K=wide, num_warps=4,
        **FOLLOWS,
    )  # fmt: skip
    return choose(pieces_STE, choosing, logit_bias_E, select_bias_E, exact=False)
