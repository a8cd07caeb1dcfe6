"""The local runner: one process, one device.

On an accelerator a step is asked for where it is submitted, and nothing is waited for before its result is. On a CPU it
is computed inside ``result``: the scheduler has planned the next one by then, and nothing competes with the operators
for the cores.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from dayzero.blocks.stack import Stack
from dayzero.cache.layout import Layout
from dayzero.cache.views import PoolViews
from dayzero.engine.api import EngineInfo
from dayzero.engine.buckets import table_widths
from dayzero.engine.choose import Best, Choice, Chooser, to_host
from dayzero.engine.executor import Late
from dayzero.engine.graphs import Mark
from dayzero.engine.images import Images
from dayzero.engine.launch import LaunchSpec, LoadProgress, RecordProgress
from dayzero.engine.load import Loaded, Watch, load_model
from dayzero.engine.packed import put
from dayzero.engine.recorded import Recorded, sample_ops
from dayzero.engine.slots import Slots, spans_of
from dayzero.engine.step import RowResult, Step, StepResult
from dayzero.engine.warm import warm_up
from dayzero.errors import MachineError
from dayzero.ops.records import codec_of
from dayzero.units import counted


@dataclass(slots=True)
class _Computed:
    """What a step's forward pass was asked for. rows: numbers of those that are to be sampled; logits [S, V] of them.

    best: what is known of those, in a recorded step. lost: bool [T], whether a token's hidden state is no number, on
    its way to the host. hidden [T, D]: where log-probabilities of prompts are wanted.
    """

    rows: list[int]
    logits_SV: Tensor | None
    best: Best | None
    lost_T: Tensor
    hidden_TD: Tensor | None
    facts: Mapping[str, float]
    began: Mark
    ended: Mark


@dataclass(slots=True)
class _Flight:
    """A step between its submission and its result. chosen: numbers of its rows that are being sampled."""

    step: Step
    began: float
    late: Late | None = None
    computed: _Computed | None = None
    chosen: list[int] = field(default_factory=list)
    choice: Choice | None = None
    choosing: Mark | None = None  # where the device began to choose; None where the host did
    sampled: Mark | None = None


class LocalRunner:
    """Executor over a recipe's blocks. Not for several threads."""

    overlaps = False  # as of ``load``: whether a submitted step is computed while the host goes on
    watch: Watch | None = None  # set before ``load`` by who wants to see operators run
    eagerly = False  # set: no recorded step is replayed

    def __init__(self, launch: LaunchSpec, progress: LoadProgress | None = None) -> None:
        self._launch, self._progress = launch, progress
        self._loaded: Loaded | None = None
        self._queue: deque[_Flight] = deque()
        self._recorded: Recorded | None = None

    def load(self) -> None:
        """Read weights, allocate the pool, record steps, and on an accelerator compute some. Errors: those of
        ``open_model``; MachineError when memory does not do."""
        if self._launch.threads is not None:
            torch.set_num_threads(self._launch.threads)
        try:
            self._loaded = loaded = load_model(self._launch, self._progress, self.watch)
        except torch.OutOfMemoryError as error:
            raise MachineError(
                "The device has no room for the weights and a step: take a larger one, or a smaller --max-running."
            ) from error
        config, recording = self._launch.config, loaded.recording
        self._views = PoolViews(
            loaded.layout, loaded.num_slabs, device=loaded.device, poison=config.debug, checked=config.debug,
            codec_of=codec_of, scratch_tokens=config.max_running if recording.how else 0,
        )  # fmt: skip
        self.overlaps = loaded.device == "cuda"
        self._at_once = self.overlaps or config.graphs == "static"
        self._chooser = Chooser(
            loaded.info.stop_ids, config.seed, config.max_running, sample_ops(loaded.stack), device=loaded.device,
            on_device=loaded.draws_on_device or config.graphs == "static",
        )  # fmt: skip
        self._slots = Slots(self._views, self._chooser.newest)
        tower = loaded.stack.spec.vision
        self._images = Images(tower, self._encode, config.image_cache_bytes) if tower is not None else None
        self._record(loaded)
        if self.overlaps:
            self._warm_up()
        if loaded.experts.residency is None:  # else experts are read through the same memory later on
            loaded.model.loader.rest()

    def _warm_up(self) -> None:
        loaded = self._ready
        began = time.perf_counter()
        try:
            steps = warm_up(self, self._launch.config, sparingly=loaded.experts.residency is not None)
        except torch.OutOfMemoryError as error:
            raise MachineError(
                f"The device has no room for a step of {self._launch.config.max_step_tokens:,} tokens beside weights "
                "and pool: give --pool-bytes less, or a smaller --max-step-tokens."
            ) from error
        row = ("warm-up", f"{counted(steps, 'step')} in {time.perf_counter() - began:.1f} s")
        self._loaded = replace(loaded, info=msgspec.structs.replace(loaded.info, table=[*loaded.info.table, row]))

    def _record(self, loaded: Loaded) -> None:
        """Record steps, where the plan says so; say in the start table what came of it."""
        config, recording = self._launch.config, loaded.recording
        row = f"off: {'; '.join(recording.why)}"
        if recording.how:
            widths = table_widths(loaded.layout, config, loaded.info.max_model_len)
            self._recorded = Recorded(loaded.stack, self._views, self._chooser, config, widths, recording)
            if isinstance(self._progress, RecordProgress):
                self._recorded.record(self._progress.recording)
            else:
                self._recorded.record()
            row = self._recorded.row(loaded.graph_bytes)
        info = msgspec.structs.replace(loaded.info, table=[*loaded.info.table, ("graphs", row)])
        self._loaded = replace(loaded, info=info)

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
        assert not self._queue or self._queue[-1].late is not None, "the step before is not sampled yet"
        flight = _Flight(step, time.perf_counter())
        if self._at_once:
            flight.computed = self._compute(step)
        self._queue.append(flight)
        return step.number

    def sample(self, handle: int, late: Late) -> None:
        flight = self._queue[-1]
        assert flight.step.number == handle and flight.late is None, f"step {handle} is sampled twice"
        self._queue.pop()  # until it is sampled: a step for which that fails is forgotten
        flight.late = late
        if self._at_once:
            self._sample(flight, late)
        self._queue.append(flight)

    def result(self, handle: int) -> StepResult:
        flight = self._queue.popleft()
        late = flight.late
        assert flight.step.number == handle and late is not None, f"step {handle} is asked for out of order"
        if not self._at_once:
            flight.began = time.perf_counter()
            flight.computed = self._compute(flight.step)
            self._sample(flight, late)
        return self._result(flight, late)

    def release(self, slot: int) -> None:
        self._chooser.release(slot)
        if self._images is not None:
            self._images.release(slot)

    def _encode(self, pixels_YXC: Tensor) -> Tensor:
        return self.stack.encode_image(pixels_YXC.to(self._ready.device))

    def health(self) -> str | None:
        return None if self._loaded is not None else "the model is not loaded yet"

    # --- the forward pass

    @torch.inference_mode()
    def _compute(self, step: Step) -> _Computed:
        for copy in step.before:
            self._views.copy_blocks(copy.group, copy.source, copy.target)
        for new in step.new:
            self._chooser.begin(new)
            if self._images is not None:
                self._images.begin(new)
        why = self._why_eager(step)
        computed = self._eager(step, why) if why else self._replayed(step)
        for copy in step.after:
            self._views.copy_blocks(copy.group, copy.source, copy.target)
        return computed

    def _why_eager(self, step: Step) -> str:
        if self._recorded is None or self.eagerly:
            return "off"
        why = self._recorded.why_eager(step)
        image = not why and self._images is not None and self._images.stands_in(step)
        return "image" if image else why

    def _eager(self, step: Step, why: str) -> _Computed:
        rows, spans = [i for i, row in enumerate(step.rows) if row.sample], spans_of(step.rows)
        ends = np.array([spans[i].first + spans[i].count - 1 for i in rows], np.int64)
        view, placed = self._slots.view_with(step, {"ends": ends})
        began = self._mark()
        if self._images is not None:
            view = self._images.placed(step, view)
        hidden_TD = self.stack.forward(view)
        logits_SV = self.stack.head(hidden_TD[placed["ends"]]) if rows else None
        facts, wanted = {f"eager_steps_{why}": 1.0}, any(row.prompt_logprobs for row in step.rows)
        lost_T = to_host(hidden_TD.isnan().any(-1))
        return _Computed(rows, logits_SV, None, lost_T, hidden_TD if wanted else None, facts, began, self._mark())

    def _replayed(self, step: Step) -> _Computed:
        assert self._recorded is not None
        began = self._mark()
        positions = None
        if self._images is not None and self._recorded.axes == 3:
            positions = self._images.positions(step)
        ran = self._recorded.run(step, positions)
        rows = [i for i, row in enumerate(step.rows) if row.sample]
        return _Computed(rows, ran.logits_BV, ran.best, to_host(ran.lost_B), None, ran.facts, began, self._mark())

    def _mark(self) -> Mark:
        return Mark(self._ready.device)

    # --- sampling, and what came of it

    @torch.inference_mode()
    def _sample(self, flight: _Flight, late: Late) -> None:
        """Ask for tokens of the rows that are to have one."""
        computed, rows = flight.computed, flight.step.rows
        assert computed is not None
        flight.chosen = [i for i in computed.rows if rows[i].request_id not in late.dropped]
        if flight.chosen:
            assert computed.logits_SV is not None
            # Logits of a recorded step are those of all its rows.
            known = computed.rows if computed.best is None else range(len(rows))
            choosing, by_host = self._mark(), self._chooser.host_rows
            logits_SV, best = _picked(computed.logits_SV, computed.best, known, flight.chosen)
            flight.choice = self._chooser.choose([rows[i] for i in flight.chosen], logits_SV, late, best)
            if self.overlaps and self._chooser.host_rows == by_host:
                flight.choosing = choosing
        flight.sampled = self._mark()

    @torch.inference_mode()
    def _result(self, flight: _Flight, late: Late) -> StepResult:
        """A row with a token whose hidden state is NaN is bad, sampled or not: what it wrote into the cache is no
        number either, and others would find it there."""
        step, computed, sampled = flight.step, flight.computed, flight.sampled
        assert computed is not None and sampled is not None
        sampled.wait()
        found = flight.choice.results() if flight.choice else []
        if len(found) == len(step.rows):
            results = found
        else:
            results = [RowResult(row.request_id) for row in step.rows]
            for i, one in zip(flight.chosen, found, strict=True):
                results[i] = one
        lost_T = computed.lost_T.numpy()
        if computed.hidden_TD is not None or lost_T.any():
            self._look_at_rows(flight, late, lost_T, results)
        seconds = time.perf_counter() - flight.began
        on_device = computed.ended.seconds_since(computed.began)
        if flight.choosing is not None:
            on_device += sampled.seconds_since(flight.choosing)
        on_device = min(seconds, on_device)
        facts = {**computed.facts, **self._chooser.take_counts(), **self._ready.experts.take_counts()}
        facts |= self._images.take_counts() if self._images is not None else {}
        return StepResult(step.number, tuple(results), seconds, seconds - on_device, facts)

    def _look_at_rows(self, flight: _Flight, late: Late, lost_T: np.ndarray, results: list[RowResult]) -> None:
        """Put into ``results`` which rows went bad, and log-probabilities of prompts."""
        step, computed = flight.step, flight.computed
        assert computed is not None
        for i, (row, span) in enumerate(zip(step.rows, spans_of(step.rows), strict=True)):
            if lost_T[span.rows].any():
                results[i] = RowResult(row.request_id, bad="nan")
            elif row.prompt_logprobs and row.request_id not in late.dropped:
                assert computed.hidden_TD is not None
                prompt = self._chooser.prompt_logprobs(row, computed.hidden_TD[span.rows], self.stack.head)
                results[i] = replace(results[i], prompt=prompt)


def _picked(
    logits_SV: Tensor, best: Best | None, known: Sequence[int], wanted: Sequence[int]
) -> tuple[Tensor, Best | None]:
    """Logits of the rows ``wanted``, of those of the rows ``known``."""
    if list(known) == list(wanted):
        return logits_SV, best
    place = {row: at for at, row in enumerate(known)}
    at = put(logits_SV.device, at=np.array([place[row] for row in wanted], np.int64))["at"]
    return logits_SV[at], None if best is None else Best(best.tokens_S[at], best.bad_S[at])
