"""From logits to tokens, row by row, so that an answer never depends on what else is in the batch.

S sampled rows, V vocabulary. A sampled row draws one uniform number from (seed, index of the token) alone: a request
that is preempted, moved or batched otherwise gets the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dayzero.engine.events import Logprobs
from dayzero.engine.request import SamplingParams

NEVER = float("-inf")
MOST = torch.finfo(torch.float32).max
FIRST_CANDIDATES = 1024  # of a nucleus; a flatter distribution is sorted whole
_MASK = (1 << 64) - 1


@dataclass(slots=True)
class SlotState:
    """What sampling knows of one running request. known: prompt ids, then the tokens sampled so far."""

    request_id: str
    params: SamplingParams
    seed: int
    prompt_tokens: int
    stop_ids: tuple[int, ...]
    known: list[int] = field(default_factory=list)

    @property
    def changes_logits(self) -> bool:
        p = self.params
        return bool(
            p.presence_penalty or p.frequency_penalty or p.repetition_penalty != 1.0 or p.logit_bias or p.min_tokens
        )


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) from (seed, index): two rounds of SplitMix64 (Steele, Lea, Flood 2014)."""
    state = (seed * 0x9E3779B97F4A7C15 + index * 0xD1B54A32D192ED03) & _MASK
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        mixed = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        state = mixed ^ (mixed >> 31)
    return (state >> 11) / (1 << 53)


def shape_logits(logits_V: Tensor, slot: SlotState, index: int) -> None:
    """Penalties, biases and the ban on early stops, in place on one row of float32 logits.

    Presence and frequency (OpenAI): minus presence once and frequency times the count, over generated tokens.
    Repetition (CTRL, arXiv 1909.05858): positive logits divided, negative ones multiplied, prompt included.
    """
    p = slot.params
    if p.repetition_penalty != 1.0 and slot.known:
        seen = torch.tensor(slot.known, dtype=torch.int64).unique()
        values = logits_V[seen]
        scaled = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
        logits_V[seen] = scaled.clamp(max=MOST)  # an infinite logit has no softmax
    generated = slot.known[slot.prompt_tokens :]
    if (p.presence_penalty or p.frequency_penalty) and generated:
        ids, counts = torch.tensor(generated, dtype=torch.int64).unique(return_counts=True)
        logits_V[ids] -= p.presence_penalty + p.frequency_penalty * counts.float()
    if p.logit_bias:
        ids = torch.tensor(list(p.logit_bias), dtype=torch.int64)
        logits_V[ids] += torch.tensor(list(p.logit_bias.values()), dtype=torch.float32)
    if index < p.min_tokens:
        logits_V[[i for i in (*slot.stop_ids, *p.stop_token_ids) if i < logits_V.shape[0]]] = NEVER


def apply_mask(logits_V: Tensor, words: bytes) -> None:
    """Forbid tokens whose bit is 0, in place. words: 32-bit little-endian; token i is bit i % 32 of word i // 32."""
    bits = torch.frombuffer(bytearray(words), dtype=torch.uint8)
    allowed = (bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
    allowed_V = allowed.flatten()[: logits_V.shape[0]].bool()
    logits_V[: allowed_V.shape[0]].masked_fill_(~allowed_V, NEVER)
    logits_V[allowed_V.shape[0] :] = NEVER


def draw(logits_V: Tensor, params: SamplingParams, chance: float) -> int:
    """One token of a row of shaped logits. chance: the uniform number to draw with.

    Temperature first, then top-k, top-p and min-p, each over what the one before left; min-p keeps what has at least
    that share of the likeliest token's probability. Ties at a cut go to the lower id.
    """
    if params.temperature == 0:
        return int(logits_V.argmax())
    wide_V = logits_V.double()  # less the largest: divided by a tiny temperature, only the others may become infinite
    scaled_V = (wide_V - wide_V.amax()) / params.temperature
    if not (params.top_k or params.top_p < 1.0 or params.min_p):
        return _pick(torch.softmax(scaled_V, dim=-1), chance)
    ids, shares = _candidates(scaled_V, params)
    return int(ids[_pick(shares, chance)])


def _pick(weights: Tensor, chance: float) -> int:
    """Index of the entry in whose part of the total ``chance`` falls; never one of weight 0."""
    total = weights.cumsum(0)
    at = int(torch.searchsorted(total, chance * float(total[-1]), right=True))
    last = int(weights.nonzero()[-1]) if at >= weights.shape[0] else at
    return min(at, last)


def _candidates(scaled_V: Tensor, params: SamplingParams) -> tuple[Tensor, Tensor]:
    """(ids, probabilities) of what the filters leave, likeliest first."""
    vocab = scaled_V.shape[0]
    norm = float(torch.logsumexp(scaled_V, dim=-1))
    num = min(params.top_k or vocab, vocab)
    values, ids = _largest(scaled_V, min(num, FIRST_CANDIDATES))
    shares = torch.exp(values - norm)
    if shares.shape[0] < num and not _enough(shares, params):
        values, ids = _largest(scaled_V, num)
        shares = torch.exp(values - norm)
    if params.top_k:
        shares = shares / shares.sum()
    if params.top_p < 1.0:
        before = shares.cumsum(0) - shares
        keep = int((before < params.top_p).sum())
        ids, shares = ids[: max(keep, 1)], shares[: max(keep, 1)]
    if params.min_p:
        keep = int((shares >= params.min_p * float(shares[0])).sum())
        ids, shares = ids[: max(keep, 1)], shares[: max(keep, 1)]
    return ids, shares


def _enough(shares: Tensor, params: SamplingParams) -> bool:
    """Whether some filter cuts within these likeliest ones. With top-k, top-p is of what top-k left: not told here."""
    in_nucleus = params.top_p < 1.0 and not params.top_k and float(shares.sum()) >= params.top_p
    return in_nucleus or (params.min_p > 0 and float(shares[-1]) < params.min_p * float(shares[0]))


def _largest(scaled_V: Tensor, num: int) -> tuple[Tensor, Tensor]:
    """(values, ids) of the ``num`` largest, largest first, lower id first on ties."""
    if num == scaled_V.shape[0]:
        values, ids = torch.sort(scaled_V, descending=True, stable=True)
        return values, ids
    least = torch.topk(scaled_V, num).values[-1]
    ids = (scaled_V >= least).nonzero()[:, 0]
    order = torch.sort(scaled_V[ids], descending=True, stable=True).indices[:num]
    return scaled_V[ids[order]], ids[order]


def logprobs_of(raw_SV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Log-probabilities of ``tokens`` [S] under raw (unshaped) logits, with the ``counts[s]`` likeliest of each row."""
    logs_SV = torch.log_softmax(raw_SV.double(), dim=-1)
    out = []
    for logs_V, token, count in zip(logs_SV, tokens, counts, strict=True):
        own = float(logs_V[token])
        rank = int((logs_V > own).sum()) + 1
        top: list[tuple[int, float]] = []
        if count:
            values, ids = _largest(logs_V, min(count, logs_V.shape[0]))
            top = list(zip(ids.tolist(), values.tolist(), strict=True))
        out.append(Logprobs(token, own, rank, top))
    return out
