"""Latent attention without positions, and the index that says which tokens it sees.

Letters: B sequences, L tokens of each, H heads, K size of a head's key, M sampled rows, X heads of the index.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

ROWS_AT_ONCE = 1024


class Index(NamedTuple):
    """q [B, L, X, K], k [B, L, K], weights [B, L, X] (with the factor X^-1/2)."""

    q: Tensor
    k: Tensor
    weights: Tensor


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention. q, k [B, L, H, K], v [B, L, H, V]; outputs like v."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def sparse(q: Tensor, k: Tensor, v: Tensor, index: Index, top_k: int) -> Tensor:
    """Each token sees the ``top_k`` earlier ones (itself included) that its index scores highest."""
    outs = []
    for number in range(len(q)):
        seen = visible(Index(*(part[number : number + 1] for part in index)), top_k)
        q_one, k_one, v_one = (x[number : number + 1].transpose(1, 2) for x in (q, k, v))
        outs.append(F.scaled_dot_product_attention(q_one, k_one, v_one, attn_mask=seen[:, None]))
    return torch.cat(outs).transpose(1, 2)


@torch.no_grad()
def visible(index: Index, top_k: int) -> Tensor:
    """bool [B, L, L]."""
    length = index.q.shape[1]
    seen = []
    for first in range(0, length, ROWS_AT_ONCE):
        rows = torch.arange(first, min(first + ROWS_AT_ONCE, length), device=index.q.device)
        scores = index_scores(Index(index.q[:, rows], index.k, index.weights[:, rows]))
        later = torch.arange(length, device=rows.device) > rows[:, None]
        seen.append(largest(scores.masked_fill(later, -math.inf), top_k))
    return torch.cat(seen, 1)


def index_scores(index: Index) -> Tensor:
    """[B, rows, L]: sum over the index's heads of w ReLU(q k size^-1/2). index.q and weights: those of the rows."""
    scores = torch.zeros((), dtype=index.q.dtype, device=index.q.device)
    for head in range(index.q.shape[2]):
        dots = index.q[:, :, head] @ index.k.transpose(1, 2) * index.k.shape[2] ** -0.5
        scores = scores + index.weights[:, :, head, None] * dots.clamp_min(0)
    return scores


def largest(scores: Tensor, count: int) -> Tensor:
    """bool: the ``count`` largest of each row that are not -inf, of equals those that come first."""
    least = scores.topk(min(count, scores.shape[-1]), -1).values[..., -1:]
    above, equal = scores > least, scores == least
    room = count - above.sum(-1, keepdim=True)
    return (above | (equal & (equal.cumsum(-1) <= room))) & (scores > -math.inf)


def index_loss(q: Tensor, k: Tensor, index: Index, rows: Tensor) -> Tensor:
    """KL from the attention (mean over heads) to the softmax of the index's scores, mean over sampled rows [B, M].

    The attention is the teacher and gets no gradient; the caller hands in an index whose inputs get none either.
    """
    picked = torch.arange(len(rows), device=rows.device)[:, None], rows
    later = torch.arange(q.shape[1], device=rows.device) > rows[..., None]  # [B, M, L]
    with torch.no_grad():
        logits = torch.einsum("bmhk,blhk->bhml", q[picked], k) * q.shape[3] ** -0.5
        share = torch.softmax(logits.float().masked_fill(later[:, None], -math.inf), -1).mean(1)
    scores = index_scores(Index(index.q[picked], index.k, index.weights[picked])).float()
    told = torch.log_softmax(scores.masked_fill(later, -math.inf), -1)
    terms = share * (share.clamp_min(1e-9).log() - told.masked_fill(later, 0.0))
    return terms.sum(-1).mean()
