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
from dayzero.ops.sample import FIRST_CANDIDATES, MOST, draw_row, largest, uniform

__all__ = [
    "FIRST_CANDIDATES", "SlotState", "apply_mask", "draw", "logprobs_of", "shape_logits", "uniform",
]  # fmt: skip

NEVER = float("-inf")


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

    @property
    def needs_host(self) -> bool:
        """Whether its rows are sampled on the host: what it changes in logits, or wants of them, is not yet made for
        devices."""
        return self.changes_logits or self.params.logprobs is not None


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
    """One token of a row of shaped logits: ``ops.sample.draw_row``. chance: the uniform number to draw with."""
    return draw_row(logits_V, params.temperature, (params.top_k, params.top_p, params.min_p), chance)


def logprobs_of(raw_SV: Tensor, tokens: Sequence[int], counts: Sequence[int]) -> list[Logprobs]:
    """Log-probabilities of ``tokens`` [S] under raw (unshaped) logits, with the ``counts[s]`` likeliest of each row."""
    logs_SV = torch.log_softmax(raw_SV.double(), dim=-1)
    out = []
    for logs_V, token, count in zip(logs_SV, tokens, counts, strict=True):
        own = float(logs_V[token])
        rank = int((logs_V > own).sum()) + 1
        top: list[tuple[int, float]] = []
        if count:
            values, ids = largest(logs_V, min(count, logs_V.shape[0]))
            top = list(zip(ids.tolist(), values.tolist(), strict=True))
        out.append(Logprobs(token, own, rank, top))
    return out
