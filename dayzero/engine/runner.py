"""The local runner: one process, one device, steps computed where they are asked for.

On a CPU a step is computed inside ``result``: the scheduler has planned the next one by then, and nothing competes with
the operators for the cores.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dayzero.blocks.stack import Stack
from dayzero.cache.layout import Layout
from dayzero.cache.views import PoolViews
from dayzero.engine.api import EngineInfo
from dayzero.engine.choose import Chooser
from dayzero.engine.executor import Late
from dayzero.engine.images import Images
from dayzero.engine.launch import LaunchSpec, LoadProgress
from dayzero.engine.load import Loaded, load_model
from dayzero.engine.slots import Slots
from dayzero.engine.step import RowResult, Step, StepResult
from dayzero.ops.records import codec_of
from dayzero.view import StepView


@dataclass(slots=True)
class _Queued:
    step: Step
    late: Late | None = None


class LocalRunner:
    """Executor over a recipe's blocks. Not for several threads."""

    overlaps = False  # computes inside ``result``

    def __init__(self, launch: LaunchSpec, progress: LoadProgress | None = None) -> None:
        self._launch, self._progress = launch, progress
        self._loaded: Loaded | None = None
        self._queue: deque[_Queued] = deque()

    def load(self) -> None:
        """Read weights, allocate the pool. Errors: those of ``open_model``; MachineError when memory does not do."""
        if self._launch.threads is not None:
            torch.set_num_threads(self._launch.threads)
        self._loaded = loaded = load_model(self._launch, self._progress)
        debug = self._launch.config.debug
        self._views = PoolViews(
            loaded.layout, loaded.num_slabs, device=loaded.device, poison=debug, checked=debug, codec_of=codec_of
        )
        best = loaded.stack.site.op("sample.greedy", "sample")
        config = self._launch.config
        self._chooser = Chooser(loaded.info.stop_ids, config.seed, config.max_running, best, loaded.device)
        self._slots = Slots(self._views, self._chooser.newest)
        tower = loaded.stack.spec.vision
        self._images = Images(tower, self._encode, config.image_cache_bytes) if tower is not None else None

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
        self._chooser.release(slot)
        if self._images is not None:
            self._images.release(slot)

    def _encode(self, pixels_YXC: Tensor) -> Tensor:
        return self.stack.encode_image(pixels_YXC.to(self._ready.device))

    def health(self) -> str | None:
        return None if self._loaded is not None else "the model is not loaded yet"

    @torch.inference_mode()
    def _run(self, step: Step, late: Late) -> StepResult:
        began = time.perf_counter()
        for copy in step.before:
            self._views.copy_blocks(copy.group, copy.source, copy.target)
        for new in step.new:
            self._chooser.begin(new)
        view = self._slots.view(step)
        before = time.perf_counter()
        if self._images is not None:
            for new in step.new:
                self._images.begin(new)
            view = self._images.placed(step, view)
        hidden_TD = self.stack.forward(view)
        computed = time.perf_counter() - before
        for copy in step.after:
            self._views.copy_blocks(copy.group, copy.source, copy.target)
        rows = self._sample(step, view, hidden_TD, late)
        seconds = time.perf_counter() - began
        facts = self._ready.experts.take_counts()
        facts |= self._images.take_counts() if self._images is not None else {}
        return StepResult(step.number, rows, seconds, seconds - computed, facts)

    def _sample(self, step: Step, view: StepView, hidden_TD: Tensor, late: Late) -> tuple[RowResult, ...]:
        """Tokens of the rows that are to have one; log-probabilities of prompts where they are asked for.

        A row with a token whose hidden state is NaN is bad, sampled or not: what it wrote into the cache is no number
        either, and others would find it there.
        """
        bad = _rows_with_nan(view, hidden_TD)
        wanted = [i for i, row in enumerate(step.rows) if row.request_id not in late.dropped]
        results = {i: RowResult(row.request_id, bad="nan" if i in bad else None) for i, row in enumerate(step.rows)}
        chosen = [i for i in wanted if step.rows[i].sample and i not in bad]
        if chosen:
            ends = [view.spans[i].first + view.spans[i].count - 1 for i in chosen]
            logits_SV = self.stack.head(hidden_TD[torch.tensor(ends, device=hidden_TD.device)])
            sampled = self._chooser.choose([step.rows[i] for i in chosen], logits_SV, late)
            results.update(zip(chosen, sampled, strict=True))
        for i in wanted:
            row = step.rows[i]
            if row.prompt_logprobs and i not in bad:
                prompt = self._chooser.prompt_logprobs(row, hidden_TD[view.spans[i].rows], self.stack.head)
                results[i] = replace(results[i], prompt=prompt)
        return tuple(results[i] for i in range(len(step.rows)))


def _rows_with_nan(view: StepView, hidden_TD: Tensor) -> frozenset[int]:
    if not bool(hidden_TD.isnan().any()):
        return frozenset()
    bad_T = hidden_TD.isnan().any(-1)
    return frozenset(i for i, span in enumerate(view.spans) if bool(bad_T[span.rows].any()))
