"""Measuring steps of a model: as a server would run them, and once more with every operator looked at."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from dayzero.arch.spec import ModelSpec
from dayzero.blocks.site import Bind
from dayzero.engine.build import executor_of
from dayzero.engine.expert_choice import Choices, Evenness
from dayzero.engine.graphs import hold_back, traced
from dayzero.engine.launch import LaunchSpec, LoadProgress, kind_of
from dayzero.engine.profiling.device_time import DeviceTimes, device_times
from dayzero.engine.profiling.hooks import Hooks, Key, Times
from dayzero.engine.profiling.work import Work
from dayzero.engine.runner import LocalRunner
from dayzero.engine.step_driver import StepDriver, Taken
from dayzero.errors import UsageError
from dayzero.planner.detect import detect
from dayzero.units import ceil_div

SEED = 23
WARM_STEPS = 2
MOST_STEPS, LEAST_STEPS = 16, 3
ENOUGH_SECONDS = 2.0  # of whole steps; then LEAST_STEPS are enough
LOOKED_AT = 3  # steps whose operators are timed
LONG_STEP = 0.3  # seconds; of a longer one, one is enough on a device
ANSWER_TOKENS = WARM_STEPS + 2 * MOST_STEPS + 3 * LOOKED_AT + 8

# How operators were timed: a device's own record of its kernels; marks in the device's work before and behind a call,
# where it keeps none; the host's clock, where the host is the device.
Timed = Literal["kernels", "marks", "clock"]


@dataclass(frozen=True, slots=True)
class Phase:
    """What is measured. decode: ``rows`` requests of ``tokens`` tokens of context, one more token each; else the prompt
    of one request, ``tokens`` tokens in one step, or in several where a step of the engine takes fewer."""

    decode: bool
    rows: int
    tokens: int

    @property
    def name(self) -> str:
        if self.decode:
            return f"decode, batch {self.rows}, context {self.tokens:,}"
        return f"prefill, {self.tokens:,} tokens"

    def answer_tokens(self, step_tokens: int) -> int:
        """What each request answers beside its ``tokens`` where a step has at most ``step_tokens`` in all."""
        if not self.decode:
            return 1
        # Those whose prompts are done first decode while the last ones are still computed.
        meanwhile = 2 * self.rows + ceil_div(self.rows * self.tokens, max(1, step_tokens - self.rows))
        return ANSWER_TOKENS + meanwhile


@dataclass(frozen=True, slots=True)
class Measured:
    """tokens: of a step; the steps of a prompt count as one. step_seconds: a whole step as served, one after another;
    device_seconds: what of that the device was at work on it; medians of num_steps. looked_at_seconds: an eager step
    whose operators were timed: all its kernels, or the device's time from end to end, or on a CPU the clock's, as
    ``timed`` says. times: (seconds, calls) of each operator in that step. works: of each operator's calls in one step.
    launches: kernels and copies of an eager step, None where nobody counts them; replays: recorded pieces of a step as
    served, 0 where it was not recorded. evenness: of the choice of experts. busy_seconds: of a step as served, in which
    any kernel ran; None where nobody recorded them. context: tokens behind each row of the steps, the mean: more than
    the phase asks for where rows decoded on while the prompts of others were computed."""

    phase: Phase
    tokens: int
    num_steps: int
    step_seconds: float
    device_seconds: float
    looked_at_seconds: float
    times: Mapping[Key, tuple[float, int]]
    works: Mapping[Key, Sequence[Work]]
    launches: int | None
    replays: float
    evenness: Evenness | None
    timed: Timed = "clock"
    busy_seconds: float | None = None
    context: float = 0.0


@dataclass(frozen=True, slots=True)
class _LookedAt:
    seconds: float
    times: Times
    timed: Timed
    launches: int | None = None


Steps = tuple[Taken, ...]  # of one measurement: a step, or all of one prompt


class Bench:
    """A loaded model whose steps are measured. Errors of making one: those of loading it; UsageError for an executor
    that runs no recipe."""

    def __init__(self, launch: LaunchSpec, progress: LoadProgress) -> None:
        executor = executor_of(launch, progress)
        if not isinstance(executor, LocalRunner):
            raise UsageError("a profile looks at operators, which need a recipe; leave --upstream out.")
        self.hardware, _ = detect(kind_of(launch.device))
        self.runner, self._config = executor, launch.config
        self._hooks = Hooks(self.hardware.target)
        executor.watch = self._watched
        self.choices: Choices | None = None
        executor.load()

    def _watched(self, spec: ModelSpec, bind: Bind) -> Bind:
        self.choices = Choices(spec)
        return self.choices.bind(self._hooks.watch(spec, bind))

    def measure(self, phase: Phase, told: Callable[[str], None] = lambda what: None) -> Measured:
        """Run and look at one phase. told: what is being done. MachineError where pool or model cannot hold it."""
        return self._decode(phase, told) if phase.decode else self._prefill(phase, told)

    # --- phases

    def _decode(self, phase: Phase, told: Callable[[str], None]) -> Measured:
        with self._driver() as driver:
            told("computing the context")
            answers = phase.answer_tokens(self._config.max_step_tokens)
            driver.add(driver.random_prompts(phase.rows, phase.tokens, SEED), answers)
            _until_decoding(driver, phase.rows)

            def one() -> Steps:
                taken = driver.turn()
                assert taken is not None and taken.decodes and len(taken.step.rows) == phase.rows
                return (taken,)

            for _ in range(WARM_STEPS):
                one()
            if self.runner.overlaps:  # an eager step runs kernels that a replayed one does not
                self._eager(one)
            return self._measured(phase, one, told, driver if self.runner.overlaps else None)

    def _prefill(self, phase: Phase, told: Callable[[str], None]) -> Measured:
        with self._driver() as driver:
            prompts = iter(driver.random_prompts(MOST_STEPS + 3 * LOOKED_AT + 3, phase.tokens, SEED + 1))

            def one() -> Steps:
                driver.add([next(prompts)], 1)
                taken: list[Taken] = []
                while sum(done.step.num_tokens for done in taken) < phase.tokens:
                    done = driver.turn()
                    assert done is not None, "a prompt was cut"
                    taken.append(done)
                return tuple(taken)

            told("warming up")
            one()
            return self._measured(phase, one, told, None)

    @contextmanager
    def _driver(self) -> Iterator[StepDriver]:
        driver = StepDriver(self.runner, self._config)
        try:
            yield driver
        finally:
            driver.close()

    def _measured(
        self, phase: Phase, one: Callable[[], Steps], told: Callable[[str], None], ahead: StepDriver | None
    ) -> Measured:
        told("whole steps")
        taken: list[Steps] = []
        whole: list[float] = []
        looked: list[_LookedAt] = []
        by_turns = self.hardware.target == "cpu"  # so that what else the machine does falls on both alike
        if ahead is not None:
            taken, whole = _ahead_of_results(ahead)
        while ahead is None and not _enough(whole):
            began = time.perf_counter()
            taken.append(one())
            whole.append(time.perf_counter() - began)
            if by_turns and len(looked) < LOOKED_AT:
                looked.append(self._look(one))
        told("operators")
        step = statistics.median(whole)
        found = _middle_of(looked) if by_turns else self._look_at_device(one, LOOKED_AT if step < LONG_STEP else 1)
        busy = self._busy(one) if found.timed == "kernels" else None
        told("work of operators")
        works, evenness = self._counted(one)
        device = [sum(done.result.seconds - done.result.host_seconds for done in steps) for steps in taken]
        return Measured(
            phase,
            sum(done.step.num_tokens for done in taken[-1]),
            num_steps=len(whole),
            step_seconds=step,
            device_seconds=min(statistics.median(device), step),
            looked_at_seconds=found.seconds,
            times=found.times,
            works=works,
            launches=found.launches,
            replays=sum(float(done.result.facts.get("graph_replays", 0.0)) for done in taken[-1]),
            evenness=evenness,
            timed=found.timed,
            busy_seconds=busy,
            context=statistics.fmean(row.start for steps in taken for done in steps for row in done.step.rows),
        )

    def _look(self, one: Callable[[], Steps]) -> _LookedAt:
        """An eager step whose operators are timed by marks."""
        began = time.perf_counter()
        with self._hooks.looking("time"):
            steps = self._eager(one)
        seconds = time.perf_counter() - began
        if self.hardware.target == "cpu":
            return _LookedAt(seconds, self._hooks.take_times(), "clock")
        seconds = sum(done.result.seconds - done.result.host_seconds for done in steps)
        return _LookedAt(seconds, self._hooks.take_times(), "marks")

    def _look_at_device(self, one: Callable[[], Steps], steps: int) -> _LookedAt:
        """The mean of so many eager steps by their kernels; where nobody records those, one of some by marks."""

        def several() -> None:
            with self._hooks.looking("ranges"):
                for _ in range(steps):
                    self._eager(one)

        found = device_times(traced(self.hardware.target, several))
        if found is None:
            self._hooks.forget_ranges()
            return _middle_of([self._held_back(one) for _ in range(LOOKED_AT)])
        times = {key: (sum_ / steps, calls // steps) for key, (sum_, calls) in self._hooks.take_ranges(found).items()}
        return _LookedAt(found.total / steps, times, "kernels", round(found.launches / steps))

    def _held_back(self, one: Callable[[], Steps]) -> _LookedAt:
        """``_look``, with the device kept from it for as long as a whole step takes, so that the host is ahead."""
        began = time.perf_counter()
        self._eager(one)
        hold_back(self.hardware.target, time.perf_counter() - began)
        return self._look(one)

    def _busy(self, one: Callable[[], Steps]) -> float:
        """Seconds in which any kernel of a step as served ran."""
        found: DeviceTimes | None = device_times(traced(self.hardware.target, one))
        return 0.0 if found is None else found.busy

    def _counted(self, one: Callable[[], Steps]) -> tuple[Mapping[Key, Sequence[Work]], Evenness | None]:
        assert self.choices is not None
        self.choices.listening = True
        try:
            with self._hooks.looking("work"):
                self._eager(one)
        finally:
            self.choices.listening = False
        return self._hooks.take_works(), self.choices.take()

    def _eager(self, one: Callable[[], Steps]) -> Steps:
        self.runner.eagerly = True
        try:
            return one()
        finally:
            self.runner.eagerly = False


def _middle_of(looked: Sequence[_LookedAt]) -> _LookedAt:
    """The one that took neither longest nor shortest."""
    return sorted(looked, key=lambda one: one.seconds)[len(looked) // 2]


def _until_decoding(driver: StepDriver, rows: int) -> None:
    taken = driver.turn()
    while taken is not None and not (taken.decodes and len(taken.step.rows) == rows):
        taken = driver.turn()
    assert taken is not None, "answers ended before all prompts were computed"


def _ahead_of_results(driver: StepDriver) -> tuple[list[Steps], list[float]]:
    """Steps with the next one begun before their results are waited for, and the seconds from end to end."""
    driver.turn_ahead()
    taken: list[Steps] = []
    seconds: list[float] = []
    rows = 0
    before = time.perf_counter()
    while not _enough(seconds):
        step = driver.turn_ahead()
        assert step is not None and step.decodes, "answers ended while they were measured"
        rows = rows or len(step.step.rows)
        assert len(step.step.rows) == rows, "some answers ended while they were measured"
        now = time.perf_counter()
        taken.append((step,))
        seconds.append(now - before)
        before = now
    driver.land()
    return taken, seconds


def _enough(seconds: Sequence[float]) -> bool:
    return len(seconds) >= MOST_STEPS or (len(seconds) >= LEAST_STEPS and sum(seconds) >= ENOUGH_SECONDS)
