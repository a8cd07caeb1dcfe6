"""Drives a Scheduler and a Machine as the engine's loop does, and keeps what each request was told."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from dayzero.cache.layout import Layout, lay_out
from dayzero.decl import CacheNeed
from dayzero.engine.config import EngineConfig
from dayzero.engine.events import Output
from dayzero.engine.request import NewRequest, SamplingParams
from dayzero.engine.scheduler import Scheduler
from dayzero.engine.step import Step
from tests.paper.step_machine import VOCAB, Machine

STOP_IDS = frozenset({3, 4})


def needs(kind: str) -> list[CacheNeed]:
    """Small models: ``dense``, ``window`` (half see 5 tokens), ``hybrid`` (states of two shapes), ``mixed``."""

    def rows(layer: int, window: int | None = None, width: int = 24) -> CacheNeed:
        return CacheNeed(f"layers.{layer}.mixer.kv", (width,), "bf16", "kv_bf16", window=window)

    def state(layer: int, width: int) -> CacheNeed:
        return CacheNeed(f"layers.{layer}.mixer.state", (width,), "f32", "state_f32", unit="state")

    return {
        "dense": [rows(0), rows(1)],
        "window": [rows(0), rows(1, 5), rows(2), rows(3, 5)],
        "hybrid": [state(0, 900), state(1, 900), state(2, 333), rows(3)],
        "mixed": [state(0, 500), rows(1, 9), rows(2), state(3, 500)],
    }[kind]


def layout_of(kind: str, page_tokens: int = 4) -> Layout:
    return lay_out(needs(kind), dtype="bf16", page_tokens=page_tokens)


def request(
    name: str, prompt: Sequence[int], *, priority: int = 0, arrival: float = 0.0, **options: object
) -> NewRequest:
    leader, salt = options.pop("leader", None), options.pop("salt", None)
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **options})  # type: ignore[arg-type]
    return NewRequest(
        id=name, prompt=list(prompt), params=params, priority=priority, arrival=arrival, leader=leader, salt=salt
    )


class Driver:
    """ahead: schedule one step ahead of results; else each result is awaited first."""

    def __init__(
        self, layout: Layout, num_slabs: int, *, max_model_len: int = 400, ahead: bool = True, **config: object
    ) -> None:
        config = {"page_tokens": layout.page_tokens, "max_step_tokens": 64, "max_running": 8, "debug": True, **config}
        self.config = EngineConfig(**config)  # type: ignore[arg-type]
        self.now = 1000.0
        self.scheduler = Scheduler(
            layout, num_slabs, self.config, STOP_IDS, max_model_len, clock=lambda: self.now, fingerprint=b"test"
        )
        self.machine = Machine(layout, num_slabs, depth=2 if ahead else 1)
        self.ahead = ahead
        self.flying: Step | None = None
        self.requests: dict[str, NewRequest] = {}
        self.outputs: dict[str, list[Output]] = {}
        self.order: list[str] = []  # requests in the order of their first row

    def add(self, new: NewRequest) -> None:
        self.requests[new.id] = new
        self.outputs[new.id] = []
        output = self.scheduler.add(new)
        self._take([] if output is None else [output])

    def abort(self, name: str) -> None:
        output = self.scheduler.abort(name)
        self._take([] if output is None else [output])

    def turn(self, between: Callable[[str], None] = lambda point: None) -> bool:
        """One turn of the loop; ``between`` is called at each point where messages might come. False: nothing to do."""
        self.now += 1.0
        between("before schedule")
        step = self.scheduler.schedule()
        for slot in self.scheduler.take_released():
            self.machine.release(slot)
        if step is not None:
            self.order += [new.request_id for new in step.new if new.request_id not in self.order]
            self.machine.submit(step)
        between("submitted")
        if not self.ahead and step is not None:
            self.machine.sample(step.number, self.scheduler.dropped)
            self._commit(step, between)
            return True
        done, self.flying = self.flying, step
        if done is not None:
            self._commit(done, between)
        elif step is None:
            self._take(self.scheduler.take_outputs())
        if step is not None:
            self.machine.sample(step.number, self.scheduler.dropped)
            between("sampled")
        return done is not None or step is not None

    def run(self, limit: int = 5000) -> None:
        """Until nothing is left to do."""
        for _ in range(limit):
            if not self.turn():
                return
        raise AssertionError(f"not done after {limit} turns: {self.scheduler.live_ids()}")

    def _commit(self, step: Step, between: Callable[[str], None]) -> None:
        result = self.machine.result(step.number)
        between("computed")
        self._take(self.scheduler.commit(result))
        between("committed")

    def _take(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            told = self.outputs[output.id]
            assert not told or told[-1].finish is None, f"{output.id}: told more after its finish"
            assert output.tokens or output.finish, f"{output.id}: an empty output"
            assert (output.cached is None) == bool(told) or output.finish in ("abort", "error")
            told.append(output)

    # --- what came out --------------------------------------------------------------------------------------------

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.tokens]

    def finish(self, name: str) -> str | None:
        return self.outputs[name][-1].finish if self.outputs[name] else None

    def check_answer(self, name: str) -> None:
        """The request came to what it comes to alone, cold and in one piece."""
        new = self.requests[name]
        expected, finish = self.machine.model.answer(new.prompt, new.params, STOP_IDS)
        assert (self.tokens(name), self.finish(name)) == (expected, finish), f"{name}: {self.outputs[name][-1]}"
        if new.params.logprobs is not None:
            assert [p.token for o in self.outputs[name] for p in o.logprobs] == expected
        if new.params.prompt_logprobs is not None:
            got = self.outputs[name][0].prompt_logprobs
            assert got is not None
            assert [item.logprob for item in got] == self.machine.model.prompt_logprobs(new.prompt)

    def check_part(self, name: str) -> None:
        """An aborted request was told the beginning of its answer."""
        new = self.requests[name]
        expected, _ = self.machine.model.answer(new.prompt, new.params, STOP_IDS)
        tokens = self.tokens(name)
        assert tokens == expected[: len(tokens)]

    def check_idle(self) -> None:
        """Nothing runs, waits or is held, and what was computed again was counted."""
        scheduler = self.scheduler
        assert not scheduler.live_ids() and scheduler.num_running == scheduler.num_waiting == 0
        assert scheduler.num_in_flight == 0 and scheduler.schedule() is None
        assert scheduler.usage() == 0.0
        for slot in scheduler.take_released():
            self.machine.release(slot)
        assert not self.machine.slots, "a slot was not released"
        assert scheduler.counters()["recomputed_tokens"] == self.machine.num_again
        assert scheduler.counters()["stuck"] == 0


def prompt(length: int, seed: int = 0) -> list[int]:
    """Ids that differ between seeds and repeat nothing at page boundaries."""
    return [(7 * i + 13 * seed + i * i) % VOCAB for i in range(length)]
