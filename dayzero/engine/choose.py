"""Choosing the tokens of a step's rows: what every executor does with logits, whatever made them.

S sampled rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dayzero.engine.events import Logprobs
from dayzero.engine.executor import Late
from dayzero.engine.sampler import SlotState, apply_mask, draw, logprobs_of, shape_logits, uniform
from dayzero.engine.step import NewSlot, Row, RowResult
from dayzero.ops.sample import greedy

HEAD_ROWS = 128  # rows of logits held at once when every token of a prompt is asked for


class Chooser:
    """What sampling knows of each slot. stop_ids: of the model. seed: of requests that bring none.

    best: ``sample.greedy`` as it is bound. newest [max_running] int64: the last token of each slot, for rows whose
    input is still in flight when they are scheduled.
    """

    def __init__(
        self,
        stop_ids: Sequence[int],
        seed: int,
        max_running: int,
        best: Callable[[Tensor], Tensor] = greedy,
        device: str = "cpu",
    ) -> None:
        self._stop_ids, self._seed, self._best = tuple(stop_ids), seed, best
        self._states: dict[int, SlotState] = {}
        self.newest = torch.zeros(max_running, dtype=torch.int64, device=device)

    def begin(self, new: NewSlot) -> None:
        """``new.slot`` belongs to this request from now on."""
        seed = new.params.seed
        if seed is None:  # the same for a request that is preempted and comes back
            seed = _text_seed(f"{self._seed}:{new.request_id}")
        self._states[new.slot] = SlotState(
            new.request_id, new.params, seed, new.prompt_tokens, self._stop_ids, list(new.known)
        )

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)

    def choose(self, rows: Sequence[Row], logits_SV: Tensor, late: Late) -> list[RowResult]:
        """A token for each row, or why there is none. logits: float32, not changed. A row with a NaN or a positive
        infinity, which has no softmax either, is bad."""
        states = [self._states[row.slot] for row in rows]
        bad_S = (~(logits_SV.amax(-1) < math.inf)).tolist()  # the largest of a row with a NaN is NaN
        plain = all(not s.changes_logits and s.params.temperature == 0 and s.params.logprobs is None for s in states)
        if plain and not late.masks and not any(bad_S) and not late.refused:
            tokens = self._best(logits_SV).tolist()
            out = [RowResult(row.request_id, token) for row, token in zip(rows, tokens, strict=True)]
        else:
            out = self._each(rows, states, logits_SV, bad_S, late)
        self._remember(rows, out)
        return out

    def _each(
        self, rows: Sequence[Row], states: Sequence[SlotState], logits_SV: Tensor, bad_S: Sequence[bool], late: Late
    ) -> list[RowResult]:
        logits_SV = logits_SV.cpu()  # what follows looks at single numbers
        shaped_SV, out = logits_SV.clone(), []
        for s, (row, state) in enumerate(zip(rows, states, strict=True)):
            bad = "nan" if bad_S[s] else late.refused.get(row.request_id)
            token = 0
            if bad is None:
                token, bad = _one(row, state, shaped_SV[s], late)
            out.append(RowResult(row.request_id, None, bad) if bad else _told(row, state, token, logits_SV[s]))
        return out

    def _remember(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        """A bad row has no token; what its slot remembers is never read, since the request ends."""
        kept = [(row.slot, result.token) for row, result in zip(rows, results, strict=True) if result.token is not None]
        if not kept:
            return
        slots, tokens = torch.tensor(kept, device=self.newest.device).unbind(1)
        self.newest[slots] = tokens
        for slot, token in kept:
            self._states[slot].known.append(token)

    def prompt_logprobs(self, row: Row, hidden_TD: Tensor, head: Callable[[Tensor], Tensor]) -> tuple[Logprobs, ...]:
        """Of the prompt tokens that follow the row's own tokens. hidden: of the row's tokens; head: to logits."""
        state = self._states[row.slot]
        targets = state.known[row.start + 1 : min(row.start + row.count + 1, state.prompt_tokens)]
        count = state.params.prompt_logprobs or 0
        out: list[Logprobs] = []
        for first in range(0, len(targets), HEAD_ROWS):
            some = targets[first : first + HEAD_ROWS]
            out += logprobs_of(head(hidden_TD[first : first + len(some)]).cpu(), some, [count] * len(some))
        return tuple(out)


def _one(row: Row, state: SlotState, logits_V: Tensor, late: Late) -> tuple[int, str | None]:
    """(token, None), or (0, why there is none). Changes logits in place."""
    shape_logits(logits_V, state, row.index)
    words = late.masks.get(row.request_id)
    if words is not None:
        apply_mask(logits_V, words)
    if bool(logits_V.amax() == float("-inf")):
        return 0, "every token is forbidden here (grammar, logit_bias or min_tokens)"
    return draw(logits_V, state.params, uniform(state.seed, row.index)), None


def _told(row: Row, state: SlotState, token: int, raw_V: Tensor) -> RowResult:
    count = state.params.logprobs
    logs = None if count is None else logprobs_of(raw_V[None], [token], [count])[0]
    return RowResult(row.request_id, token, None, logs)


def _text_seed(text: str) -> int:
    """FNV-1a: a seed from a name, the same in every process."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & (1 << 64) - 1
    return value
