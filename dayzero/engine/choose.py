"""Choosing the tokens of a step's rows: what every executor does with logits, whatever made them.

S sampled rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dayzero.decl import OpUse
from dayzero.engine.events import Logprobs
from dayzero.engine.executor import Late
from dayzero.engine.packed import put
from dayzero.engine.sampler import SlotState, apply_mask, draw, logprobs_of, shape_logits, uniform
from dayzero.engine.step import NewSlot, Row, RowResult
from dayzero.ops.sample import draw as draw_rows
from dayzero.ops.sample import greedy, shape

HEAD_ROWS = 128  # rows of logits held at once when every token of a prompt is asked for
FORBIDDEN = "every token is forbidden here (grammar, logit_bias or min_tokens)"
GREEDY, DRAW, SHAPE = USES = tuple(OpUse(f"sample.{word}", "sample") for word in ("greedy", "draw", "shape"))
_ALL = (1 << 64) - 1


class SampleOps(NamedTuple):
    """Operators by the contracts ``sample.greedy``, ``sample.draw`` and ``sample.shape``."""

    greedy: Callable[[Tensor], Tensor]
    draw: Callable[..., Tensor]
    shape: Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Best:
    """The likeliest token of each row [S] int64, V where there is none, and whether its logits are no numbers [S] bool;
    the tokens are in ``newest`` already."""

    tokens_S: Tensor
    bad_S: Tensor


class Choice(Protocol):
    """Tokens that have been asked for."""

    def results(self) -> list[RowResult]:
        """One for each row, in order; once. On an accelerator what was asked for before it must have ended."""


class Chooser:
    """What sampling knows of each slot. stop_ids: of the model. seed: of requests that bring none.

    ops: ``sample.greedy``, ``draw`` and ``shape`` as they are bound. newest [max_running + 1] int64: the last token of
    each slot, for rows whose input is still in flight when they are scheduled; the last place is for rows that pad a
    step. on_device: draw where the logits are, as far as that can be done without asking the host; else row by row.
    """

    def __init__(
        self,
        stop_ids: Sequence[int],
        seed: int,
        max_running: int,
        ops: SampleOps | None = None,
        *,
        device: str = "cpu",
        on_device: bool = False,
    ) -> None:
        self._stop_ids, self._seed, self._on_device = tuple(stop_ids), seed, on_device
        self.ops = ops or SampleOps(greedy.body, draw_rows.body, shape.body)
        self._states: dict[int, SlotState] = {}
        self.newest = torch.zeros(max_running + 1, dtype=torch.int64, device=device)
        self.host_rows = 0  # sampled row by row since ``take_counts``

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

    def take_counts(self) -> dict[str, float]:
        """Rows that were sampled one by one, on the host, since the last call."""
        count, self.host_rows = self.host_rows, 0
        return {"host_sampled_rows": float(count)}

    def choose(self, rows: Sequence[Row], logits_SV: Tensor, late: Late, best: Best | None = None) -> Choice:
        """Ask for a token for each row, or why there is none. logits: float32, not changed; best: what is known of
        them. A row with a NaN or a positive infinity, which has no softmax either, is bad.

        The results of the step before must have been taken: penalties look at all tokens of a request.
        """
        states = [self._states[row.slot] for row in rows]
        told = any(row.request_id in late.masks or row.request_id in late.refused for row in rows)
        if not told and not any(state.needs_host or state.params.temperature for state in states):
            return self._likeliest(rows, states, logits_SV, best)
        if self._on_device and not any(state.needs_host for state in states):
            return self._drawn(rows, states, logits_SV, late)
        return self._each(rows, states, logits_SV, late)

    def _likeliest(
        self, rows: Sequence[Row], states: Sequence[SlotState], logits_SV: Tensor, best: Best | None
    ) -> Choice:  # fmt: skip
        if best is None:
            best = Best(self.ops.greedy(logits_SV), no_numbers(logits_SV))
            slots = put(logits_SV.device, slots=np.array([row.slot for row in rows], np.int64))["slots"]
            self.newest.index_copy_(0, slots, best.tokens_S.clamp(max=logits_SV.shape[1] - 1))
        return _Asked(rows, states, to_host(best.tokens_S), to_host(best.bad_S), {}, logits_SV.shape[1])

    def _drawn(self, rows: Sequence[Row], states: Sequence[SlotState], logits_SV: Tensor, late: Late) -> Choice:
        placed, vocab = put(logits_SV.device, **_options(rows, states, late, logits_SV.shape[1])), logits_SV.shape[1]
        shaped_SV = logits_SV
        if "allowed" in placed:
            shaped_SV = _masked(self.ops.shape, logits_SV, placed["allowed"])
        names = ("temperature", "top_k", "top_p", "min_p", "seed", "index")
        tokens_S = self.ops.draw(shaped_SV, *(placed[name] for name in names))
        self.newest.index_copy_(0, placed["slots"], tokens_S.clamp(max=vocab - 1))
        return _Asked(rows, states, to_host(tokens_S), to_host(no_numbers(logits_SV)), late.refused, vocab)

    def _each(self, rows: Sequence[Row], states: Sequence[SlotState], logits_SV: Tensor, late: Late) -> Choice:
        bad_S = no_numbers(logits_SV).tolist()
        self.host_rows += len(rows)
        logits_SV = logits_SV.cpu()  # what follows looks at single numbers
        shaped_SV, out = logits_SV.clone(), []
        for s, (row, state) in enumerate(zip(rows, states, strict=True)):
            bad = "nan" if bad_S[s] else late.refused.get(row.request_id)
            token = 0
            if bad is None:
                token, bad = _one(row, state, shaped_SV[s], late)
            out.append(RowResult(row.request_id, None, bad) if bad else _told(row, state, token, logits_SV[s]))
        # A bad row has no token; what its slot remembers is never read, since the request ends.
        kept = [(row.slot, result.token) for row, result in zip(rows, out, strict=True) if result.token is not None]
        if kept:
            slots, tokens = np.array(kept, np.int64).T
            placed = put(self.newest.device, slots=slots, tokens=tokens)
            self.newest.index_copy_(0, placed["slots"], placed["tokens"])
        return _Known(states, out)

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


@dataclass(frozen=True, slots=True)
class _Known:
    """Results that are there."""

    states: Sequence[SlotState]
    found: list[RowResult]

    def results(self) -> list[RowResult]:
        for state, result in zip(self.states, self.found, strict=True):
            if result.token is not None:
                state.known.append(result.token)
        return self.found


@dataclass(frozen=True, slots=True)
class _Asked:
    """Results on their way to the host. refused: request id -> why its grammar allows nothing."""

    rows: Sequence[Row]
    states: Sequence[SlotState]
    tokens_S: Tensor
    bad_S: Tensor
    refused: Mapping[str, str]
    vocab: int

    def results(self) -> list[RowResult]:
        out = []
        for row, token, bad in zip(self.rows, self.tokens_S.tolist(), self.bad_S.tolist(), strict=True):
            why = "nan" if bad else self.refused.get(row.request_id)
            if why is None and token >= self.vocab:
                why = FORBIDDEN
            out.append(RowResult(row.request_id, None if why else token, why))
        return _Known(self.states, out).results()


def no_numbers(logits_SV: Tensor) -> Tensor:
    """[S] bool: whether a row holds a NaN or a positive infinity. The largest of a row with a NaN is NaN."""
    return ~(logits_SV.amax(-1) < math.inf)


def to_host(value: Tensor) -> Tensor:
    """A copy of ``value`` on the host; from an accelerator it is there once what was asked of that so far has ended."""
    return value.to("cpu", non_blocking=True, copy=True)


def _options(
    rows: Sequence[Row], states: Sequence[SlotState], late: Late, vocab: int
) -> dict[str, np.ndarray]:  # fmt: skip
    """What ``sample.draw`` takes of each row, and the words of masks where there is one."""
    params = [state.params for state in states]
    out: dict[str, np.ndarray] = {
        "slots": np.array([row.slot for row in rows], np.int64),
        "temperature": np.array([p.temperature for p in params], np.float64),
        "top_k": np.array([p.top_k for p in params], np.int64),
        "top_p": np.array([p.top_p for p in params], np.float64),
        "min_p": np.array([p.min_p for p in params], np.float64),
        "seed": np.array([state.seed & _ALL for state in states], np.uint64).view(np.int64),
        "index": np.array([row.index for row in rows], np.int64),
    }
    masks = [late.masks.get(row.request_id) for row in rows]
    if any(mask is not None for mask in masks):
        words = -(-vocab // 32)
        allowed = np.full((len(rows), words), -1, np.int32)
        for s, mask in enumerate(masks):
            if mask is not None:
                given = np.frombuffer(mask, "<i4")[:words]
                allowed[s] = 0  # what lies behind the words of a mask is forbidden
                allowed[s, : len(given)] = given
        out["allowed"] = allowed
    return out


def _masked(shaped: Callable[..., Tensor], logits_SV: Tensor, allowed_SW: Tensor) -> Tensor:
    """``sample.shape`` with masks alone."""
    rows, device = logits_SV.shape[0], logits_SV.device
    none_S0 = torch.empty(rows, 0, dtype=torch.int64, device=device)
    flat_S3 = torch.zeros(rows, 3, device=device)
    flat_S3[:, 0] = 1.0
    return shaped(
        logits_SV, none_S0, torch.zeros(rows, dtype=torch.int64, device=device), flat_S3, none_S0, none_S0.float(),
        none_S0, allowed_SW,
    )  # fmt: skip


def _one(row: Row, state: SlotState, logits_V: Tensor, late: Late) -> tuple[int, str | None]:
    """(token, None), or (0, why there is none). Changes logits in place."""
    shape_logits(logits_V, state, row.index)
    words = late.masks.get(row.request_id)
    if words is not None:
        apply_mask(logits_V, words)
    if bool(logits_V.amax() == float("-inf")):
        return 0, FORBIDDEN
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
