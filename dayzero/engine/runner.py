"""The local runner: one process, one device, steps computed where they are asked for.

On a CPU a step is computed inside ``result``: the scheduler has planned the next one by then, and nothing competes with
the operators for the cores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dayzero.blocks.stack import Stack
from dayzero.cache.layout import Layout
from dayzero.cache.views import PoolViews
from dayzero.engine.api import EngineInfo
from dayzero.engine.executor import Late
from dayzero.engine.launch import LaunchSpec, LoadProgress
from dayzero.engine.load import Loaded, load_model
from dayzero.engine.sampler import SlotState, apply_mask, draw, logprobs_of, shape_logits, uniform
from dayzero.engine.slots import Slots
from dayzero.engine.step import NewSlot, Row, RowResult, Step, StepResult, TokenLogprobs
from dayzero.view import StepView

HEAD_ROWS = 128  # rows of logits held at once when every token of a prompt is asked for


@dataclass(slots=True)
class _Queued:
    step: Step
    late: Late | None = None


class LocalRunner:
    """Executor over a recipe's blocks. Not for several threads."""

    def __init__(self, launch: LaunchSpec, progress: LoadProgress | None = None) -> None:
        self._launch, self._progress = launch, progress
        self._loaded: Loaded | None = None
        self._states: dict[int, SlotState] = {}
        self._queue: deque[_Queued] = deque()

    def load(self) -> None:
        """Read weights, allocate the pool. Errors: those of ``open_model``; MachineError when memory does not do."""
        if self._launch.threads is not None:
            torch.set_num_threads(self._launch.threads)
        self._loaded = loaded = load_model(self._launch, self._progress)
        debug = self._launch.config.debug
        self._views = PoolViews(loaded.layout, loaded.num_slabs, poison=debug, checked=debug)
        self._slots = Slots(self._views, self._launch.config.max_running)

    @property
    def _ready(self) -> Loaded:
        assert self._loaded is not None, "load() comes first"
        return self._loaded

    @property
    def layout(self) -> Layout:
        return self._ready.layout

    @property
    def num_slabs(self) -> int:
        return self._ready.num_slabs

    @property
    def info(self) -> EngineInfo:
        return self._ready.info

    @property
    def stack(self) -> Stack:
        return self._ready.stack

    def submit(self, step: Step) -> int:
        self._queue.append(_Queued(step))
        return step.number

    def sample(self, handle: int, late: Late) -> None:
        queued = next(one for one in self._queue if one.step.number == handle)
        assert queued.late is None, f"step {handle} is sampled twice"
        queued.late = late

    def result(self, handle: int) -> StepResult:
        queued = self._queue.popleft()
        assert queued.step.number == handle and queued.late is not None, f"step {handle} is asked for out of order"
        return self._run(queued.step, queued.late)

    def release(self, slot: int) -> None:
        self._states.pop(slot, None)

    def health(self) -> str | None:
        return None if self._loaded is not None else "the model is not loaded yet"

    @torch.inference_mode()
    def _run(self, step: Step, late: Late) -> StepResult:
        began = time.perf_counter()
        for copy in step.before:
            self._views.copy_blocks(copy.group, copy.source, copy.target)
        for new in step.new:
            self._states[new.slot] = self._state(new)
        view = self._slots.view(step)
        before = time.perf_counter()
        hidden_TD = self.stack.forward(view)
        computed = time.perf_counter() - before
        for copy in step.after:
            self._views.copy_blocks(copy.group, copy.source, copy.target)
        rows = self._sample(step, view, hidden_TD, late)
        seconds = time.perf_counter() - began
        return StepResult(step.number, rows, seconds, seconds - computed)

    def _state(self, new: NewSlot) -> SlotState:
        seed = new.params.seed
        if seed is None:  # the same for a request that is preempted and comes back
            seed = _text_seed(f"{self._launch.config.seed}:{new.request_id}")
        stops = tuple(self.info.stop_ids)
        return SlotState(new.request_id, new.params, seed, new.prompt_tokens, stops, list(new.known))

    def _sample(self, step: Step, view: StepView, hidden_TD: Tensor, late: Late) -> tuple[RowResult, ...]:
        """Tokens of the rows that are to have one; log-probabilities of prompts where they are asked for."""
        chosen = [i for i, row in enumerate(step.rows) if row.sample and row.request_id not in late.dropped]
        results = {i: RowResult(row.request_id) for i, row in enumerate(step.rows)}
        if chosen:
            ends = torch.tensor([view.spans[i].first + view.spans[i].count - 1 for i in chosen])
            logits_SV = self.stack.head(hidden_TD[ends])
            for i, result in zip(chosen, self._choose([step.rows[i] for i in chosen], logits_SV, late), strict=True):
                results[i] = result
            self._remember([step.rows[i] for i in chosen], [results[i] for i in chosen])
        for i, row in enumerate(step.rows):
            if row.prompt_logprobs and row.request_id not in late.dropped:
                prompt = self._prompt_logprobs(row, hidden_TD[view.spans[i].rows])
                results[i] = RowResult(row.request_id, results[i].token, results[i].bad, results[i].logprobs, prompt)
        return tuple(results[i] for i in range(len(step.rows)))

    def _remember(self, rows: Sequence[Row], results: Sequence[RowResult]) -> None:
        """A bad row has no token; what its slot remembers is never read, since the request ends."""
        kept = [(row.slot, result.token) for row, result in zip(rows, results, strict=True) if result.token is not None]
        if not kept:
            return
        self._slots.keep([slot for slot, _ in kept], torch.tensor([token for _, token in kept]))
        for slot, token in kept:
            self._states[slot].known.append(token)

    def _choose(self, rows: Sequence[Row], logits_SV: Tensor, late: Late) -> list[RowResult]:
        states = [self._states[row.slot] for row in rows]
        bad_S = (~torch.isfinite(logits_SV.sum(-1)) & logits_SV.isnan().any(-1)).tolist()
        plain = all(not s.changes_logits and s.params.temperature == 0 and s.params.logprobs is None for s in states)
        if plain and not late.masks and not any(bad_S) and not late.refused:
            tokens = self.stack.site.op("sample.greedy", "sample")(logits_SV).tolist()
            return [RowResult(row.request_id, token) for row, token in zip(rows, tokens, strict=True)]
        shaped_SV = logits_SV.clone()
        out = []
        for s, (row, state) in enumerate(zip(rows, states, strict=True)):
            bad = "nan" if bad_S[s] else late.refused.get(row.request_id)
            if bad is None:
                token, bad = self._one(row, state, shaped_SV[s], late)
            out.append(RowResult(row.request_id, None, bad) if bad else self._told(row, state, token, logits_SV[s]))
        return out

    def _one(self, row: Row, state: SlotState, logits_V: Tensor, late: Late) -> tuple[int, str | None]:
        """(token, None), or (0, why there is none). Changes logits in place."""
        shape_logits(logits_V, state, row.index)
        words = late.masks.get(row.request_id)
        if words is not None:
            apply_mask(logits_V, words)
        if bool(logits_V.amax() == float("-inf")):
            return 0, "every token is forbidden here (grammar, logit_bias or min_tokens)"
        return draw(logits_V, state.params, uniform(state.seed, row.index)), None

    def _told(self, row: Row, state: SlotState, token: int, raw_V: Tensor) -> RowResult:
        count = state.params.logprobs
        logs = None if count is None else logprobs_of(raw_V[None], [token], [count])[0]
        return RowResult(row.request_id, token, None, logs)

    def _prompt_logprobs(self, row: Row, hidden_TD: Tensor) -> tuple[TokenLogprobs, ...]:
        """Of the prompt tokens that follow the row's own tokens."""
        state = self._states[row.slot]
        targets = state.known[row.start + 1 : min(row.start + row.count + 1, state.prompt_tokens)]
        count = state.params.prompt_logprobs or 0
        out: list[TokenLogprobs] = []
        for first in range(0, len(targets), HEAD_ROWS):
            some = targets[first : first + HEAD_ROWS]
            logits = self.stack.head(hidden_TD[first : first + len(some)])
            out += logprobs_of(logits, some, [count] * len(some))
        return tuple(out)


def _text_seed(text: str) -> int:
    """FNV-1a: a seed from a name, the same in every process."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & (1 << 64) - 1
    return value
