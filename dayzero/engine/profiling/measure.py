"""Measuring steps of a model: as a server would run them, and once more with every operator looked at."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dayzero.arch.spec import ModelSpec
from dayzero.blocks.site import Bind
from dayzero.engine.build import executor_of
from dayzero.engine.expert_choice import Choices, Evenness
from dayzero.engine.graphs import count_launches, hold_back
from dayzero.engine.launch import LaunchSpec, LoadProgress, kind_of
from dayzero.engine.profiling.hooks import Hooks, Key
from dayzero.engine.profiling.work import Work
from dayzero.engine.runner import LocalRunner
from dayzero.engine.step_driver import StepDriver, Taken
from dayzero.errors import UsageError
from dayzero.planner.detect import detect

SEED = 23
WARM_STEPS = 2
MOST_STEPS, LEAST_STEPS = 16, 3
ENOUGH_SECONDS = 2.0  # of whole steps; then LEAST_STEPS are enough
LOOKED_AT = 3  # steps whose operators are timed
HOLD_SECONDS = 0.15  # a device is kept busy for so long that the host can ask for a whole step meanwhile
ANSWER_TOKENS = WARM_STEPS + 2 * MOST_STEPS + LOOKED_AT + 8


@dataclass(frozen=True, slots=True)
class Phase:
    """What is measured. decode: ``rows`` requests of ``tokens`` tokens of context, one more token each; else the prompt
    of one request, ``tokens`` tokens in one step."""

    decode: bool
    rows: int
    tokens: int

    @property
    def name(self) -> str:
        if self.decode:
            return f"decode, batch {self.rows}, context {self.tokens:,}"
        return f"prefill, {self.tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class Measured:
    """tokens: of a step. step_seconds: a whole step as served, one after another; device_seconds: what of that the
    device was busy with; medians of num_steps. looked_at_seconds: an eager step whose operators were timed, the middle
    one of some: on a CPU from end to end, else the device's time. times: (seconds, calls) of each operator in that
    step. works: of each operator's calls in one step. launches: kernels of an eager step, None where they cannot be
    counted; replays: recorded pieces of a step as served, 0 where it was not recorded. evenness: of the choice of
    experts."""

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


@dataclass(frozen=True, slots=True)
class _LookedAt:
    seconds: float
    times: dict[Key, tuple[float, int]]


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
            # Those whose prompts are done first decode while the last ones are still computed.
            step = max(1, self._config.max_step_tokens - phase.rows)
            meanwhile = 2 * phase.rows + -(-phase.rows * phase.tokens // step)
            driver.add(driver.random_prompts(phase.rows, phase.tokens, SEED), ANSWER_TOKENS + meanwhile)
            _until_decoding(driver, phase.rows)

            def one() -> Taken:
                taken = driver.turn()
                assert taken is not None and taken.decodes and len(taken.step.rows) == phase.rows
                return taken

            for _ in range(WARM_STEPS):
                one()
            if self.runner.overlaps:  # an eager step runs kernels that a replayed one does not
                self._eager(one)
            return self._measured(phase, one, told, driver if self.runner.overlaps else None)

    def _prefill(self, phase: Phase, told: Callable[[str], None]) -> Measured:
        with self._driver() as driver:
            prompts = iter(driver.random_prompts(MOST_STEPS + LOOKED_AT + 3, phase.tokens, SEED + 1))

            def one() -> Taken:
                driver.add([next(prompts)], 1)
                taken = driver.turn()
                assert taken is not None and taken.step.num_tokens == phase.tokens, "a prompt was cut"
                return taken

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
        self, phase: Phase, one: Callable[[], Taken], told: Callable[[str], None], ahead: StepDriver | None
    ) -> Measured:
        told("whole steps")
        taken: list[Taken] = []
        whole: list[float] = []
        looked: list[_LookedAt] = []
        if ahead is not None:
            taken, whole = _ahead_of_results(ahead)
        while ahead is None and not _enough(whole):
            began = time.perf_counter()
            taken.append(one())
            whole.append(time.perf_counter() - began)
            if len(looked) < LOOKED_AT:  # by turns, so that what else the machine does falls on both alike
                looked.append(self._look(one))
        while len(looked) < LOOKED_AT:
            told("operators")
            looked.append(self._look(one))
        told("work of operators")
        works, evenness = self._counted(one)
        launches = count_launches(self.hardware.target, lambda: self._eager(one))
        device = [step.result.seconds - step.result.host_seconds for step in taken]
        middle = sorted(looked, key=lambda one: one.seconds)[LOOKED_AT // 2]
        return Measured(
            phase,
            taken[-1].step.num_tokens,
            num_steps=len(whole),
            step_seconds=statistics.median(whole),
            device_seconds=min(statistics.median(device), statistics.median(whole)),
            looked_at_seconds=middle.seconds,
            times=middle.times,
            works=works,
            launches=launches,
            replays=float(taken[-1].result.facts.get("graph_replays", 0.0)),
            evenness=evenness,
        )

    def _look(self, one: Callable[[], Taken]) -> _LookedAt:
        """An eager step whose operators are timed."""
        hold_back(self.hardware.target, HOLD_SECONDS)
        with self._hooks.looking("time"):
            began = time.perf_counter()
            result = self._eager(one).result
            seconds = time.perf_counter() - began
        if self.hardware.target != "cpu":
            seconds = result.seconds - result.host_seconds
        return _LookedAt(seconds, self._hooks.take_times())

    def _counted(self, one: Callable[[], Taken]) -> tuple[Mapping[Key, Sequence[Work]], Evenness | None]:
        assert self.choices is not None
        self.choices.listening = True
        try:
            with self._hooks.looking("work"):
                self._eager(one)
        finally:
            self.choices.listening = False
        return self._hooks.take_works(), self.choices.take()

    def _eager(self, one: Callable[[], Taken]) -> Taken:
        self.runner.eagerly = True
        try:
            return one()
        finally:
            self.runner.eagerly = False


def _until_decoding(driver: StepDriver, rows: int) -> None:
    taken = driver.turn()
    while taken is not None and not (taken.decodes and len(taken.step.rows) == rows):
        taken = driver.turn()
    assert taken is not None, "answers ended before all prompts were computed"


def _ahead_of_results(driver: StepDriver) -> tuple[list[Taken], list[float]]:
    """Steps with the next one begun before their results are waited for, and the seconds from end to end."""
    driver.turn_ahead()
    taken: list[Taken] = []
    seconds: list[float] = []
    rows = 0
    before = time.perf_counter()
    while not _enough(seconds):
        step = driver.turn_ahead()
        assert step is not None and step.decodes, "answers ended while they were measured"
        rows = rows or len(step.step.rows)
        assert len(step.step.rows) == rows, "some answers ended while they were measured"
        now = time.perf_counter()
        taken.append(step)
        seconds.append(now - before)
        before = now
    driver.land()
    return taken, seconds


def _enough(seconds: Sequence[float]) -> bool:
    return len(seconds) >= MOST_STEPS or (len(seconds) >= LEAST_STEPS and sum(seconds) >= ENOUGH_SECONDS)
