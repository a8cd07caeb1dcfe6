"""``moe.route`` on a GPU: one program a token, scores in f64 rounded to f32 as in the reference, ties to the lower id.

T tokens, E experts, N chosen experts a token, S pieces of the logits' sums. A program is one warp, which finds the
largest of some numbers with one instruction; it holds the experts as [groups, experts of a group], padded to powers of
two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.moe import SCORES
from dayzero.ops.router import Choosing
from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.rows import FOLLOWS, follow

__all__ = ["check_machine", "choose", "route"]

_LEAST, _MOST = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)


def route(
    logits_TE: Tensor,
    top_k: int,
    *,
    score: str,
    bias_E: Tensor | None = None,
    groups: tuple[int, int] = (1, 1),
    renormalise: bool = True,
    scale: float = 1.0,
    eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """``moe.route`` in one launch. Logits are finite; with groups, top_k is at most the experts of the groups kept."""
    return choose(logits_TE[None], Choosing(top_k, score, groups, renormalise, scale, eps), None, bias_E, exact=True)


def choose(
    pieces_STE: Tensor, choosing: Choosing, logit_bias_E: Tensor | None, select_bias_E: Tensor | None, *, exact: bool
) -> tuple[Tensor, Tensor]:
    """``moe.route`` of the pieces' sum, in their order, and of the logits' own bias, which may be of any float type.
    exact: scores are made in f64, which takes longer than all else; f32 is as exact as logits that are sums in f32."""
    top_k, score, (num_groups, kept), renormalise, scale, eps = choosing
    dtypes = {x.dtype for x in (pieces_STE, select_bias_E) if x is not None}
    if score not in SCORES or dtypes != {torch.float32}:
        raise ValueError(f"routing needs f32 logits and bias and a score of {SCORES}, not {score!r}, {dtypes}")
    pieces, num_tokens, num_experts = pieces_STE.shape
    ids_TN = torch.empty(num_tokens, top_k, dtype=torch.int64, device=pieces_STE.device)
    weights_TN = torch.empty(num_tokens, top_k, dtype=torch.float32, device=pieces_STE.device)
    if ids_TN.numel() == 0:
        return ids_TN, weights_TN
    wide = num_experts // num_groups
    biases = (logit_bias_E, select_bias_E)
    _route[num_tokens,](
        pieces_STE, *biases, ids_TN, weights_TN, *pieces_STE.stride(),
        *(0 if bias is None else bias.stride(0) for bias in biases), num_groups, wide, scale, eps, SCORE=score,
        ADDED=logit_bias_E is not None, BIAS=select_bias_E is not None, KEPT=kept if num_groups > 1 else 0,
        RENORMALISE=renormalise, CHOSEN=top_k, PLACES=triton.next_power_of_2(top_k),
        GROUPS=triton.next_power_of_2(num_groups), WIDE=triton.next_power_of_2(wide), PIECES=pieces,
        REAL=tl.float64 if exact else tl.float32, num_warps=1, **FOLLOWS,
    )  # fmt: skip
    return ids_TN, weights_TN


@triton.jit
def _key(value):
    """int32 that is larger for a larger f32 and the same for 0 and -0; above ``_LEAST`` for all but a NaN."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _score(logit, top, total, SCORE: tl.constexpr, REAL: tl.constexpr):
    """Score in f32 of logits f32, by way of REAL; top and total are of all experts' powers, for a softmax."""
    if SCORE == "sigmoid":
        return (1.0 / (1.0 + tl.exp(-logit.to(REAL)))).to(tl.float32)
    if SCORE == "softmax":
        return (tl.exp(logit.to(REAL) - top) / total).to(tl.float32)
    return logit


@triton.jit
def _kept_groups(choice, exists, within, group, KEPT: tl.constexpr):
    """Which groups [GROUPS, 1] have the KEPT largest sums of their two best. choice, exists, within: [GROUPS, WIDE]."""
    low = tl.where(exists, choice, float("-inf"))
    first = tl.max(low, 1)
    at = tl.min(tl.where(exists & (low == first[:, None]), within, _MOST), 1)
    second = tl.max(tl.where(within == at[:, None], float("-inf"), low), 1)
    count = tl.sum(exists.to(tl.int32), 1)
    strength = first + tl.where(count == 1, 0.0, second)
    number = tl.max(group, 1)
    keys = tl.where(count > 0, _key(strength), _LEAST)
    kept = tl.zeros(keys.shape, tl.int1)
    for _ in tl.static_range(KEPT):
        best = tl.max(keys, 0)
        taken = number == tl.min(tl.where(keys == best, number, _MOST), 0)
        kept = kept | taken
        keys = tl.where(taken, _LEAST, keys)
    return kept[:, None]


@triton.jit
def _logits(pieces, added, number, there, piece_stride, step, added_step, ADDED: tl.constexpr, PIECES: tl.constexpr):
    """f32 logits of some experts, -inf where there is none: the same numbers whichever are asked for together."""
    logit = tl.load(pieces + number * step, mask=there, other=float("-inf"))
    for piece in tl.static_range(1, PIECES):
        logit += tl.load(pieces + piece * piece_stride + number * step, mask=there, other=0.0)
    if ADDED:
        logit += tl.load(added + number * added_step, mask=there, other=0.0).to(tl.float32)
    return logit


@triton.jit
def _route(
    pieces, added, bias, ids, weights, piece_stride, stride, step, added_step, bias_step, num_groups, wide, scale, eps,
    SCORE: tl.constexpr, ADDED: tl.constexpr, BIAS: tl.constexpr, KEPT: tl.constexpr, RENORMALISE: tl.constexpr,
    CHOSEN: tl.constexpr, PLACES: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr, PIECES: tl.constexpr,
    REAL: tl.constexpr,
):  # fmt: skip
    follow()
    token = tl.program_id(0).to(tl.int64)
    group = tl.broadcast_to(tl.arange(0, GROUPS)[:, None], (GROUPS, WIDE))
    within = tl.broadcast_to(tl.arange(0, WIDE)[None, :], (GROUPS, WIDE))
    exists = (group < num_groups) & (within < wide)
    number = group * wide + within
    own = pieces + token * stride
    logit = _logits(own, added, number, exists, piece_stride, step, added_step, ADDED, PIECES)
    top, total = tl.zeros((), REAL), tl.zeros((), REAL)
    if SCORE == "softmax":
        top += tl.max(tl.max(logit, 1), 0).to(REAL)
        total += tl.sum(tl.sum(tl.exp(logit.to(REAL) - top), 1), 0)
    choice = _score(logit, top, total, SCORE, REAL)
    if BIAS:
        choice += tl.load(bias + number * bias_step, mask=exists, other=0.0)
    if KEPT > 0:
        choice = tl.where(_kept_groups(choice, exists, within, group, KEPT), choice, float("-inf"))
    keys = tl.reshape(tl.where(exists, _key(choice), _LEAST), (GROUPS * WIDE,))
    number = tl.reshape(number, (GROUPS * WIDE,))
    place = tl.arange(0, PLACES)
    chosen = tl.zeros((PLACES,), tl.int32)
    for n in tl.static_range(CHOSEN):
        best = tl.max(keys, 0)
        at = tl.min(tl.where(keys == best, number, _MOST), 0)
        chosen = tl.where(place == n, at, chosen)
        keys = tl.where(number == at, _LEAST, keys)
    real = place < CHOSEN
    logit = _logits(own, added, chosen, real, piece_stride, step, added_step, ADDED, PIECES)
    if SCORE == "softmax_topk":
        wider = logit.to(REAL)
        powers = tl.exp(wider - tl.max(wider, 0))
        weight = (powers / tl.sum(powers, 0)).to(tl.float32)
    else:
        weight = tl.where(real, _score(logit, top, total, SCORE, REAL), 0.0)
        if RENORMALISE:
            weight = tl.div_rn(weight, tl.broadcast_to(tl.sum(weight, 0) + eps, weight.shape))
    tl.store(ids + token * CHOSEN + place, chosen.to(tl.int64), mask=real)
    tl.store(weights + token * CHOSEN + place, weight * scale, mask=real)
