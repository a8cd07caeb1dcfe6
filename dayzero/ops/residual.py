"""How a layer's output joins the stream.

T tokens, H model width, B bank rows, N parallel streams.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.bounds import CAST_FIRST, ELEMENTWISE, RESIDUAL
from dayzero.ops.contract import contract
from dayzero.ops.linear import product_f64
from dayzero.ops.norm import inverse_rms, rms

_NORM = {"offset": (False, True), "scale_in": ("f32", "dtype")}


@contract("residual.add", bound=ELEMENTWISE)
def add(stream_TH: Tensor, out_TH: Tensor) -> Tensor:
    """stream + out, added in f32, in the stream's dtype."""
    return (stream_TH.float() + out_TH.float()).to(stream_TH.dtype)


@contract("residual.add_norm", bound=CAST_FIRST, traits=_NORM, composed=True)
def add_norm(
    stream_TH: Tensor, out_TH: Tensor, weight_H: Tensor, *, eps: float, offset: bool = False, scale_in: str = "f32"
) -> tuple[Tensor, Tensor]:
    """(``residual.add`` of stream and out, ``norm.rms`` of that sum as it is stored), both [T, H] in the stream's
    dtype: one site, so that the sum need not be read again. Equal to the two in turn, bit for bit."""
    sum_TH = add.body(stream_TH, out_TH)
    return sum_TH, rms.body(sum_TH, weight_H, eps=eps, offset=offset, scale_in=scale_in)


@contract("residual.attn_mix", bound=RESIDUAL)
def attn_mix(
    partial_TH: Tensor, bank_BTH: Tensor, norm_weight_H: Tensor, proj_weight_H: Tensor, *, eps: float
) -> Tensor:
    """Attention over depth (Attention Residuals, Kimi K3): [T, H] in partial's dtype.

    Sources are the B bank rows, oldest first, then the running sum. score_i = rms(source_i) . (norm * proj), without
    a gamma on the key and without a 1/sqrt(H); the softmax over sources weighs the sources as they are, not normed.
    norm and proj are multiplied in f32: a product rounded to bf16 changes results visibly. proj may be [1, H].
    B = 0 returns partial. Sources are read where they are, one at a time: a mix happens twice a layer, and a bank of
    a long chunk is larger than everything else a layer holds.
    """
    query_H = (norm_weight_H.float() * proj_weight_H.float().reshape(-1)).double()
    sources = (*bank_BTH, partial_TH)
    scores_ST = torch.stack([((s.float() * inverse_rms(s, eps)).double() * query_H).sum(-1) for s in sources])
    mixed_TH = torch.zeros(partial_TH.shape, dtype=torch.float64, device=partial_TH.device)
    for share_T, source_TH in zip(torch.softmax(scores_ST, dim=0), sources, strict=True):
        mixed_TH += share_T[:, None] * source_TH.double()
    return mixed_TH.to(partial_TH.dtype)


@contract("residual.attn_mix_norm", bound=RESIDUAL, traits=_NORM, composed=True)
def attn_mix_norm(
    partial_TH: Tensor,
    bank_BTH: Tensor,
    norm_weight_H: Tensor,
    proj_weight_H: Tensor,
    weight_H: Tensor,
    *,
    eps: float,
    offset: bool = False,
    scale_in: str = "f32",
) -> Tensor:
    """``norm.rms`` with ``weight`` of ``residual.attn_mix`` of the others, both with ``eps``: equal to the two in turn,
    bit for bit, without storing the mixture. [T, H] in partial's dtype."""
    mixed_TH = attn_mix.body(partial_TH, bank_BTH, norm_weight_H, proj_weight_H, eps=eps)
    return rms.body(mixed_TH, weight_H, eps=eps, offset=offset, scale_in=scale_in)


@contract("residual.streams_enter", bound=RESIDUAL)
def streams_enter(
    streams_TNH: Tensor,
    fn: Tensor,
    base: Tensor,
    scale_3: Tensor,
    *,
    norm_eps: float,
    mix_eps: float,
    iterations: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Manifold-constrained hyper-connections, on the way in (mHC, arXiv 2512.24880; DeepSeek V4).

    fn [(2+N)N, N*H] and base [(2+N)N] hold pre (N), post (N) and comb (N*N, row-major); scale one factor each.
    With m = fn @ rms(flattened streams):  pre = sigmoid(m s_0 + b) + mix_eps;  post = 2 sigmoid(m s_1 + b);
    comb = softmax over the last dimension of (m s_2 + b) + mix_eps, then columns, then ``iterations`` - 1 times rows
    and columns divided by (their sum + mix_eps) (Sinkhorn-Knopp).
    Returns (x [T, H] = sum_n pre_n stream_n in the streams' dtype, post [T, N] f32, comb [T, N, N] f32).
    """
    num = streams_TNH.shape[1]
    flat = streams_TNH.flatten(1).float()
    mixes = product_f64(flat * inverse_rms(flat, norm_eps), fn)
    scale = scale_3.double().repeat_interleave(torch.tensor([num, num, num * num], device=scale_3.device))
    pre, post, comb = (mixes * scale + base.double()).split([num, num, num * num], dim=-1)
    comb = torch.softmax(comb.unflatten(-1, (num, num)), dim=-1) + mix_eps
    comb = comb / (comb.sum(-2, keepdim=True) + mix_eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + mix_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + mix_eps)
    x_TH = ((torch.sigmoid(pre) + mix_eps)[..., None] * streams_TNH.double()).sum(1)
    return x_TH.to(streams_TNH.dtype), 2 * torch.sigmoid(post).float(), comb.float()


@contract("residual.streams_leave", bound=RESIDUAL)
def streams_leave(streams_TNH: Tensor, out_TH: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """stream_k <- post_k * out + sum_j comb[j, k] stream_j: comb is used transposed. In the streams' dtype."""
    mixed_TNH = comb_TNN.double().transpose(1, 2) @ streams_TNH.double()
    return (post_TN.double()[..., None] * out_TH.double()[:, None] + mixed_TNH).to(streams_TNH.dtype)


@contract("residual.streams_close", bound=RESIDUAL, traits={"collapse": ("sigmoid", "mean")})
def streams_close(
    streams_TNH: Tensor,
    head: tuple[Tensor, Tensor, Tensor] | None = None,
    *,
    norm_eps: float = 0.0,
    mix_eps: float = 0.0,
) -> Tensor:
    """One stream [T, H] at the end. head None: the mean (GLM-5.3-Flash). head = (fn [N, N*H], base [N], scale [1]):
    sum_n (sigmoid(fn @ rms(flattened) * scale + base) + mix_eps)_n stream_n (DeepSeek V4)."""
    if head is None:
        return streams_TNH.double().mean(1).to(streams_TNH.dtype)
    fn, base, scale = head
    flat = streams_TNH.flatten(1).float()
    mixes = product_f64(flat * inverse_rms(flat, norm_eps), fn) * scale.double() + base.double()
    return ((torch.sigmoid(mixes) + mix_eps)[..., None] * streams_TNH.double()).sum(1).to(streams_TNH.dtype)
