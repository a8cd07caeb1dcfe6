"""Kimi delta attention: the recurrence token by token, and the same in chunks that a GPU can do at once.

Per head, state S [K, V]:  S <- diag(e^g) S;  u = b (v - S' k);  S <- S + k u';  o = S' q.   (arXiv 2510.26692)

Chunks. With G the running sum of g inside a chunk, A_ij = b_i sum_c k_i k_j e^(G_i - G_j) for j < i and
T = (1 + A)^-1 diag(b):  U = T V - T (e^G K) S,  o = (e^G Q) S + tril(Q K') U, and the chunk maps its state by
S <- P S + R with P = diag(e^G_last) - Kd' T (e^G K), R = Kd' T V, Kd = e^(G_last - G) K. These maps are composed
pairwise over all chunks of all sequences at once; a chunk that begins a sequence has P = 0, which cuts the chain.

Exponents. e^(G_i - G_j) becomes a product of matrices only around a reference between i and j. Each run of 16 rows has
its own, the sum before its first row: rows are then at most 1 and columns at most e^80 (g > -5), which float32 holds.

Letters: N tokens, n chunks, C tokens of a chunk, H heads, K and V sizes of a head.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

CHUNK, SUB = 64, 16


def recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One sequence, step by step. q, k, g [N, H, K], v [N, H, V], beta [N, H]; outputs [N, H, V]."""
    state = q.new_zeros(q.shape[1], k.shape[2], v.shape[2])
    outs = []
    for t in range(len(q)):
        state = state * g[t].exp()[:, :, None]
        u = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][:, :, None] * u[:, None]
        outs.append(torch.einsum("hkv,hk->hv", state, q[t]))
    return torch.stack(outs)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, first: Tensor) -> Tensor:
    """Many sequences one after another, each of whole chunks. first: bool [n], chunks that begin one.

    Shapes as in ``recurrence``; float32 or float64, and nothing here may be rounded to less.
    """
    count = len(q) // CHUNK
    q, k, v, g = (x.unflatten(0, (count, CHUNK)).transpose(1, 2) for x in (q, k, v, g))  # [n, H, C, K]
    beta = beta.unflatten(0, (count, CHUNK)).transpose(1, 2)[..., None]
    total = g.cumsum(2)
    scores, between = decayed_products(q, k, g, total, beta)
    solved = inverse(between) * beta.transpose(2, 3)  # T
    grown = total.exp()
    u, w = solved @ v, solved @ (grown * k)
    last = total[:, :, -1:]
    kept = (k * (last - total).exp()).transpose(2, 3)
    step = torch.diag_embed(last[:, :, 0].exp()) - kept @ w
    step = torch.where(first[:, None, None, None], 0, step)
    ends = compose(step.flatten(0, 1), (kept @ u).flatten(0, 1), q.shape[1]).unflatten(0, (count, -1))
    begins = torch.cat((torch.zeros_like(ends[:1]), ends[:-1]))
    begins = torch.where(first[:, None, None, None], 0, begins)
    out = (q * grown) @ begins + scores @ (u - w @ begins)
    return out.transpose(1, 2).flatten(0, 1)


def decayed_products(q: Tensor, k: Tensor, g: Tensor, total: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """(q_i k_j e^(G_i - G_j) for j <= i, b_i k_i k_j e^(G_i - G_j) for j < i), both [n, H, C, C], 0 elsewhere."""
    parts = CHUNK // SUB
    reference = (total - g)[:, :, ::SUB]  # [n, H, parts, K]: the sum before each run's first row
    rows = (total.unflatten(2, (parts, SUB)) - reference[:, :, :, None]).exp()
    exponent = reference[:, :, :, None] - total[:, :, None]  # [n, H, parts, C, K]
    place = torch.arange(CHUNK, device=q.device)
    beyond = place[None] >= (torch.arange(parts, device=q.device)[:, None] + 1) * SUB
    columns = torch.where(beyond[:, :, None], -math.inf, exponent).exp() * k[:, :, None]
    columns = columns.transpose(3, 4)
    scores = ((q.unflatten(2, (parts, SUB)) * rows) @ columns).flatten(2, 3)
    between = ((k.unflatten(2, (parts, SUB)) * rows) @ columns).flatten(2, 3)
    earlier = place[:, None] > place[None]
    same = place[:, None] >= place[None]
    return torch.where(same, scores, 0), torch.where(earlier, between, 0) * beta


class _Inverse(torch.autograd.Function):
    """(1 + A)^-1 of strictly lower triangular matrices [..., C, C]."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, below: Tensor) -> Tensor:
        """Blocks of 8 by the finite series (1 - A)(1 + A^2)(1 + A^4), whose terms stay small; then pairs of blocks."""
        size = 8
        count = below.shape[-1] // size
        one = torch.eye(size, dtype=below.dtype, device=below.device)
        cut = below.unflatten(-1, (count, size)).unflatten(-3, (count, size)).transpose(-2, -3)  # [.., i, j, 8, 8]
        own = torch.diagonal(cut, dim1=-4, dim2=-3).movedim(-1, -3)
        square = own @ own
        done = (one - own) @ (one + square)
        done = done @ (one + square @ square)
        while count > 1:
            left, right = done[..., 0::2, :, :], done[..., 1::2, :, :]
            count, size = count // 2, size * 2
            cut = below.unflatten(-1, (count, size)).unflatten(-3, (count, size)).transpose(-2, -3)
            own = torch.diagonal(cut, dim1=-4, dim2=-3).movedim(-1, -3)
            corner = own[..., size // 2 :, : size // 2]
            lower = -(right @ corner @ left)
            upper = torch.cat((left, torch.zeros_like(left)), -1)
            done = torch.cat((upper, torch.cat((lower, right), -1)), -2)
        out = done[..., 0, :, :]
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:  # type: ignore[override]
        (out,) = ctx.saved_tensors  # type: ignore[attr-defined]
        turned = out.transpose(-1, -2)
        return -(turned @ grad @ turned).tril(-1)


def inverse(below: Tensor) -> Tensor:
    """(1 + A)^-1 for strictly lower triangular A [..., C, C], C a power of two of at least 8."""
    return _Inverse.apply(below)


def compose(step: Tensor, add: Tensor, heads: int) -> Tensor:
    """S_i = step_i S_(i-1) + add_i for each of the ``heads`` interleaved chains, S before the first being 0.

    step [n H, K, K], add [n H, K, V], by chunk and then by head. Neighbours are joined to one map, the half as long
    chain is solved, and every second state follows from the one before: in all three products a chunk.
    """
    count = len(step) // heads
    if count == 1:
        return add
    if count % 2:
        zero_step, zero_add = torch.zeros_like(step[:heads]), torch.zeros_like(add[:heads])
        return compose(torch.cat((step, zero_step)), torch.cat((add, zero_add)), heads)[: count * heads]
    steps, adds = (x.unflatten(0, (count // 2, 2, heads)) for x in (step, add))
    step_a, step_b = (steps[:, i].flatten(0, 1) for i in (0, 1))
    add_a, add_b = (adds[:, i].flatten(0, 1) for i in (0, 1))
    state_b = compose(step_b @ step_a, torch.baddbmm(add_b, step_b, add_a), heads)
    before = torch.cat((torch.zeros_like(state_b[:heads]), state_b[:-heads]))
    state_a = torch.baddbmm(add_a, step_a, before)
    pairs = torch.stack((state_a.unflatten(0, (-1, heads)), state_b.unflatten(0, (-1, heads))), 1)
    return pairs.flatten(0, 2)
