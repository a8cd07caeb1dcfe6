"""Choosing a token: the likeliest, or one drawn from what temperature and filters leave, row by row.

T or S rows of logits, V vocabulary, L known tokens of a row, B biased and C banned ids of a row, W words of a mask.
What a row gets depends on nothing beside it, so that an answer never depends on what else is in the batch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dayzero.ops.bounds import ELEMENTWISE, EXACT
from dayzero.ops.contract import contract

FIRST_CANDIDATES = 1024  # of a nucleus; a flatter distribution is sorted whole
MOST = torch.finfo(torch.float32).max
_MASK = (1 << 64) - 1


@contract("sample.greedy", bound=EXACT)
def greedy(logits_TV: Tensor) -> Tensor:
    """Id of the largest logit of each row [T] int64; the lowest id on ties. A NaN in a row gives V, no token."""
    best_T1 = logits_TV.amax(-1, keepdim=True)
    ids_V = torch.arange(logits_TV.shape[-1], device=logits_TV.device)
    return torch.where(logits_TV == best_T1, ids_V, logits_TV.shape[-1]).amin(-1)


@contract("sample.draw", bound=EXACT)
def draw(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    index_S: Tensor,
) -> Tensor:
    """A token of each row of shaped f32 logits [S] int64; V, no token, for a row with a NaN or +inf, or all -inf.

    temperature, top_p, min_p f64; top_k, seed, index int64. A row draws with ``uniform(seed, index)`` alone. See
    ``draw_row``.
    """
    out, vocab = [], logits_SV.shape[1]
    for s, logits_V in enumerate(logits_SV):
        top = float(logits_V.amax())
        if not -math.inf < top < math.inf:  # the largest of a row with a NaN is NaN
            out.append(vocab)
            continue
        chance = uniform(int(seed_S[s]), int(index_S[s]))
        filters = (int(top_k_S[s]), float(top_p_S[s]), float(min_p_S[s]))
        out.append(draw_row(logits_V, float(temperature_S[s]), filters, chance))
    return torch.tensor(out, dtype=torch.int64, device=logits_SV.device)


@contract("sample.shape", bound=ELEMENTWISE)
def shape(
    logits_SV: Tensor,
    ids_SL: Tensor,
    prompt_S: Tensor,
    penalties_S3: Tensor,
    bias_ids_SB: Tensor,
    bias_SB: Tensor,
    banned_SC: Tensor,
    allowed_SW: Tensor | None = None,
) -> Tensor:
    """f32 logits with penalties, biases, bans and masks of each row [S, V] f32; nothing is read back by the host.

    ids: what a row knows, prompt first, then its own tokens; below 0 pads, anywhere. prompt: how many of the L places
    belong to the prompt. penalties f32: repetition, presence, frequency. Repetition (CTRL, arXiv 1909.05858): of every
    token known, positive logits are divided and negative ones multiplied. Presence and frequency (OpenAI): minus
    presence once and frequency times the count, of own tokens. Then bias is added to bias_ids (below 0: none; each id
    once), banned ids (below 0 or from V on: none) become -inf, and so do tokens whose bit in ``allowed`` is 0: int32
    words, token i is bit i % 32 of word i // 32, and what lies behind the words is forbidden.
    """
    rows, vocab = logits_SV.shape
    own_L = torch.arange(ids_SL.shape[1], device=ids_SL.device)
    repetition, presence, frequency = (penalties_S3[:, i : i + 1] for i in range(3))
    seen_SV = _counts(ids_SL, torch.ones_like(ids_SL), vocab) > 0
    count_SV = _counts(ids_SL, (own_L >= prompt_S[:, None]).long(), vocab)
    scaled_SV = torch.where(logits_SV > 0, logits_SV / repetition, logits_SV * repetition).clamp(max=MOST)
    y_SV = torch.where(seen_SV & (repetition != 1.0), scaled_SV, logits_SV)  # an infinite logit has no softmax
    y_SV = torch.where(count_SV > 0, y_SV - (presence + frequency * count_SV.float()), y_SV)
    y_SV = torch.cat((y_SV, y_SV.new_zeros(rows, 1)), dim=1)  # a column that takes what is no token
    y_SV.scatter_add_(1, torch.where(bias_ids_SB < 0, vocab, bias_ids_SB), bias_SB)
    y_SV.scatter_(1, torch.where((banned_SC < 0) | (banned_SC >= vocab), vocab, banned_SC), -math.inf)
    y_SV = y_SV[:, :vocab]
    if allowed_SW is None:
        return y_SV
    place_V = torch.arange(vocab, device=ids_SL.device)
    word_SV = allowed_SW[:, (place_V // 32).clamp(max=allowed_SW.shape[1] - 1)]
    inside_V = place_V < 32 * allowed_SW.shape[1]
    return y_SV.masked_fill(~(((word_SV >> (place_V % 32)) & 1).bool() & inside_V), -math.inf)


def _counts(ids_SL: Tensor, weight_SL: Tensor, vocab: int) -> Tensor:
    """[S, V] int64: the sum of the weights of each id."""
    out_SV = torch.zeros(ids_SL.shape[0], vocab + 1, dtype=torch.int64, device=ids_SL.device)
    return out_SV.scatter_add_(1, torch.where(ids_SL < 0, vocab, ids_SL), weight_SL)[:, :vocab]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from (seed, index): two rounds of SplitMix64 (Steele, Lea, Flood 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        state = mixed ^ (mixed >> 31)
    return (state >> 11) / (1 << 53)


def draw_row(logits_V: Tensor, temperature: float, filters: tuple[int, float, float], chance: float) -> int:
    """One token of a row of shaped logits. filters: top-k (0: none), top-p (1: none), min-p (0: none). chance: the
    uniform number to draw with; temperature 0 takes the likeliest.

    Temperature first, then top-k, top-p and min-p, each over what the one before left; min-p keeps what has at least
    that share of the likeliest token's probability. Ties at a cut go to the lower id. Without filters ``chance`` runs
    along the ids, with any along what is left, likeliest first.
    """
    top_k, top_p, min_p = filters
    if temperature == 0:
        return int(logits_V.argmax())
    wide_V = logits_V.double()  # less the largest: divided by a tiny temperature, only the others may become infinite
    scaled_V = (wide_V - wide_V.amax()) / temperature
    if not (top_k or top_p < 1.0 or min_p):
        return _pick(torch.softmax(scaled_V, dim=-1), chance)
    ids, shares = _candidates(scaled_V, top_k, top_p, min_p)
    return int(ids[_pick(shares, chance)])


def _pick(weights: Tensor, chance: float) -> int:
    """Index of the entry in whose part of the total ``chance`` falls; never one of weight 0."""
    total = weights.cumsum(0)
    at = int(torch.searchsorted(total, chance * float(total[-1]), right=True))
    last = int(weights.nonzero()[-1]) if at >= weights.shape[0] else at
    return min(at, last)


def _candidates(scaled_V: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """(ids, probabilities) of what the filters leave, likeliest first."""
    vocab = scaled_V.shape[0]
    norm = float(torch.logsumexp(scaled_V, dim=-1))
    num = min(top_k or vocab, vocab)
    values, ids = largest(scaled_V, min(num, FIRST_CANDIDATES))
    shares = torch.exp(values - norm)
    # Whether some filter cuts within these likeliest ones. With top-k, top-p is of what top-k left: not told here.
    in_nucleus = top_p < 1.0 and not top_k and float(shares.sum()) >= top_p
    enough = in_nucleus or (min_p > 0 and float(shares[-1]) < min_p * float(shares[0]))
    if shares.shape[0] < num and not enough:
        values, ids = largest(scaled_V, num)
        shares = torch.exp(values - norm)
    if top_k:
        shares = shares / shares.sum()
    if top_p < 1.0:
        before = shares.cumsum(0) - shares
        keep = int((before < top_p).sum())
        ids, shares = ids[: max(keep, 1)], shares[: max(keep, 1)]
    if min_p:
        keep = int((shares >= min_p * float(shares[0])).sum())
        ids, shares = ids[: max(keep, 1)], shares[: max(keep, 1)]
    return ids, shares


def largest(scaled_V: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the ``num`` largest, largest first, lower id first on ties."""
    if num == scaled_V.shape[0]:
        values, ids = torch.sort(scaled_V, descending=True, stable=True)
        return values, ids
    least = torch.topk(scaled_V, num).values[-1]
    ids = (scaled_V >= least).nonzero()[:, 0]
    order = torch.sort(scaled_V[ids], descending=True, stable=True).indices[:num]
    return scaled_V[ids[order]], ids[order]
