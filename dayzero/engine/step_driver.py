"""Steps of requests of one's own through a loaded executor, one at a time: for what is measured before, or instead of,
serving. The scheduler is the engine's, so a step is one that a server would compute."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dayzero.engine.config import EngineConfig
from dayzero.engine.executor import Late
from dayzero.engine.launch import LoadedExecutor
from dayzero.engine.request import Image, NewRequest, SamplingParams
from dayzero.engine.scheduler import Scheduler
from dayzero.engine.step import Step, StepResult
from dayzero.errors import MachineError


@dataclass(frozen=True, slots=True)
class Taken:
    """A step and what came of it."""

    step: Step
    result: StepResult

    @property
    def decodes(self) -> bool:
        """Whether every row has one token, which is sampled."""
        return all(row.count == 1 and row.sample for row in self.step.rows)


class StepDriver:
    """Owns the executor's steps until ``close``. masks: of requests by id, as grammars give them."""

    def __init__(self, executor: LoadedExecutor, config: EngineConfig) -> None:
        self._executor = executor
        info = executor.info
        self._vocab = info.vocab
        self._scheduler = Scheduler(executor.layout, executor.num_slabs, config, (), info.max_model_len)
        self._ahead: Step | None = None
        self._count = 0
        self.masks: Mapping[str, bytes] = {}

    def add(self, prompts: Sequence[Sequence[int]], answer_tokens: int) -> None:
        """Take requests whose answers are greedy and run to their length. Errors: as ``ask``."""
        for prompt in prompts:
            self.ask(prompt, SamplingParams(temperature=0.0, max_tokens=answer_tokens, ignore_eos=True))

    def ask(self, prompt: Sequence[int], params: SamplingParams, media: Sequence[Image] = ()) -> str:
        """Take a request; its id. MachineError for one that pool or model cannot hold."""
        request = NewRequest(id=f"step-{self._count}", prompt=list(prompt), params=params, media=list(media))
        self._count += 1
        refused = self._scheduler.add(request)
        if refused is not None:
            why = refused.error[1] if refused.error else "it cannot be held"
            raise MachineError(f"{len(prompt)} tokens and {params.max_tokens} more cannot be run: {why}.")
        return request.id

    def random_prompts(self, count: int, tokens: int, seed: int) -> list[list[int]]:
        """Prompts of ids drawn evenly from the vocabulary; no two begin alike."""
        draw = random.Random(seed)
        return [[draw.randrange(self._vocab) for _ in range(tokens)] for _ in range(count)]

    def turn(self) -> Taken | None:
        """One whole step, begun and ended; None when nothing is left."""
        assert self._ahead is None, "a step is in flight"
        begun = self._begin()
        if begun is None:
            return None
        self._sample(begun)
        return self.land()

    def turn_ahead(self) -> Taken | None:
        """As an engine that runs ahead: the next step is begun before the result of the one in flight is waited for,
        which is given back. None at first, and when nothing is left."""
        begun = self._begin()
        taken = self.land()
        if begun is not None:
            self._sample(begun)
        return taken

    def land(self) -> Taken | None:
        """End the step in flight, if there is one."""
        before, self._ahead = self._ahead, None
        return None if before is None else self._end(before)

    def _begin(self) -> Step | None:
        step = self._scheduler.schedule()
        self._release()
        for out in self._scheduler.take_outputs():
            if out.error:
                raise MachineError(f"A request ended before its answer did: {out.error[1]}.")
        if step is not None:
            self._executor.submit(step)
        return step

    def _sample(self, step: Step) -> None:
        """From here on ``step`` is in flight: one whose sampling fails has no result."""
        self._executor.sample(step.number, Late(self.masks))
        self._ahead = step

    def _end(self, step: Step) -> Taken:
        result = self._executor.result(step.number)
        self._scheduler.commit(result)
        self._release()
        return Taken(step, result)

    def close(self) -> None:
        """End what is left; its slots and blocks are free."""
        self.land()
        for request_id in self._scheduler.live_ids():
            self._scheduler.abort(request_id)
        self._release()

    def _release(self) -> None:
        for slot in self._scheduler.take_released():
            self._executor.release(slot)
