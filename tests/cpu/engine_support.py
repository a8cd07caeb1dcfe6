"""An engine in this process, driven turn by turn: requests arrive and are aborted at chosen turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from dayzero.blocks.stack import Forms, Stack
from dayzero.cache.layout import Layout
from dayzero.cache.manager import CacheManager
from dayzero.engine.build import engine_loop
from dayzero.engine.choose import Best, Choice
from dayzero.engine.config import EngineConfig
from dayzero.engine.events import Abort, Logprobs, Output, Submit
from dayzero.engine.executor import Late
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.request import NewRequest, SamplingParams
from dayzero.engine.runner import LocalRunner
from dayzero.engine.step import Row

REFERENCE = (("*", "reference"),)
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@dataclass
class Answer:
    """Everything that came for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] | None = None
    finish: str | None = None
    stop_id: int | None = None
    cached: int | None = None
    error: tuple[str, str] | None = None
    logits: list[Tensor] = field(default_factory=list)  # [V] float32 behind each token, where an engine records them

    def take(self, output: Output) -> None:
        assert self.finish is None, f"{output.id}: an output behind the last one"
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.finish, self.stop_id, self.error = output.finish, output.stop_id, output.error
        if output.cached is not None:
            assert self.cached is None
            self.cached = output.cached
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = (self.prompt_logprobs or []) + output.prompt_logprobs


class Engine:
    """A loop over the local runner, one turn at a time. Debug checks are on.

    forms: which of several equal forms the blocks compute in. record: keep the logits of every sampled token, on the
    CPU.
    """

    def __init__(
        self,
        source: object,
        *,
        recipe: str | None = None,
        forms: Forms | None = None,
        record: bool = False,
        device: str = "cpu",
        **config: Any,
    ) -> None:
        options = {"dtype": "float32", "bindings": REFERENCE, "debug": True, "pool_bytes": 8 << 20, "run_ahead": True}
        launch = LaunchSpec(
            source=str(source), recipe=recipe, device=device, config=EngineConfig(**{**options, **config})
        )
        self.runner = LocalRunner(launch)
        self.runner.load()
        if forms is not None:
            assert launch.config.bindings == REFERENCE, "forms are chosen for stacks of references"
            loaded = self.runner._ready
            stack = Stack(loaded.model.spec, loaded.model.loader.load, forms=forms)
            self.runner._loaded = replace(loaded, stack=stack)
        self._logits: dict[str, dict[int, Tensor]] = {}
        if record:
            self._record()
        self.loop = engine_loop(launch, self.runner)
        self.manager = self.loop._scheduler.manager

    def _record(self) -> None:
        chooser = self.runner._chooser
        choose = chooser.choose

        def recording(rows: Sequence[Row], logits_SV: Tensor, late: Late, best: Best | None = None) -> Choice:
            for row, logits_V in zip(rows, logits_SV, strict=True):
                self._logits.setdefault(row.request_id, {})[row.index] = logits_V.cpu().clone()
            return choose(rows, logits_SV, late, best)

        chooser.choose = recording  # type: ignore[method-assign]

    def run(
        self,
        requests: Sequence[NewRequest],
        *,
        arrive: Mapping[str, int] | None = None,
        abort: Mapping[str, int] | None = None,
    ) -> dict[str, Answer]:
        """Serve all of them to the end. arrive, abort: request id -> turn; by default all arrive at once."""
        arrive, abort = arrive or {}, abort or {}
        answers = {request.id: Answer() for request in requests}
        self._logits.clear()
        for turn in range(100_000):
            due = [request for request in requests if arrive.get(request.id, 0) == turn]
            if due:
                self.loop.take(Submit(due))
            ids = [name for name, at in abort.items() if at == turn and answers[name].finish is None]
            if ids:
                self.loop.take(Abort(ids))
            batch = self.loop.turn(wait=True)
            for output in batch.outputs if batch else ():
                answers[output.id].take(output)
            if all(answer.finish for answer in answers.values()) and not self.loop.busy:
                for name, answer in answers.items():
                    rows = self._logits.get(name, {})
                    answer.logits = [rows[i] for i in range(len(answer.tokens)) if i in rows]
                return answers
        raise AssertionError(f"not done: {[name for name, answer in answers.items() if not answer.finish]}")

    def one(self, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> Answer:
        """One request alone."""
        return self.run([ask("one", prompt, params, **more)])["one"]


def least_slabs(layout: Layout, tokens: int) -> int:
    """Slabs of the least pool in which a sequence of that many tokens is served, with its state and a snapshot."""
    least = max(1, len(layout.token_groups)) + -(-2 * layout.state_footprint // layout.slab_bytes)
    return next(n for n in range(least, 10_000) if CacheManager(layout, n).why_never(tokens) is None)


def ask(name: str, prompt: Sequence[int], params: SamplingParams = GREEDY, **more: Any) -> NewRequest:
    return NewRequest(id=name, prompt=list(prompt), params=params, **more)


def prompt_ids(count: int, seed: int, vocab: int = 500) -> list[int]:
    """Random token ids from 3 on (the first few are special)."""
    return torch.randint(3, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
