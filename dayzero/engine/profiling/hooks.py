"""Operators that are looked at while they run: how long each call takes, or what it had to do. Installed by a profile
alone; and where it looks at nothing, a call costs one branch more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from dayzero.arch.spec import ModelSpec
from dayzero.blocks.site import Bind
from dayzero.engine.graphs import Mark
from dayzero.engine.profiling.work import Call, Counter, Work
from dayzero.ops.contract import CONTRACTS

# Their references are other operators in turn, and a block that finds one bound runs those, as they are bound.
COMPOSED = frozenset({"cache.write_latent", "residual.add_norm", "residual.attn_mix_norm"})

Key = tuple[str, str]  # contract, site


@dataclass(frozen=True, slots=True)
class _Span:
    key: Key
    began: Mark
    ended: Mark


class Hooks:
    """``watch`` of a runner. device: where it runs."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._looking: Literal["", "time", "work"] = ""
        self._spans: list[_Span] = []
        self._works: dict[Key, list[Work]] = {}
        self._counter: Counter | None = None

    def watch(self, spec: ModelSpec, bind: Bind) -> Bind:
        """``bind``, with every operator looked at."""
        self._counter = Counter(spec)

        def bound(contract: str, site: str) -> Callable[..., Any]:
            function = bind(contract, site)
            declared = CONTRACTS.get(contract)
            if contract in COMPOSED and declared is not None and function is declared.body:
                return function
            return self._hooked((contract, site), function)

        return bound

    def _hooked(self, key: Key, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not self._looking:
                return function(*args, **kwargs)
            if self._looking == "work":
                out = function(*args, **kwargs)
                assert self._counter is not None
                self._works.setdefault(key, []).append(self._counter.work(Call(*key, args, kwargs, out)))
                return out
            began = Mark(self._device)
            out = function(*args, **kwargs)
            self._spans.append(_Span(key, began, Mark(self._device)))
            return out

        return run

    @contextmanager
    def looking(self, at: Literal["time", "work"]) -> Any:
        """Within, calls are timed, or their work is counted (which waits for the device)."""
        self._looking = at
        try:
            yield
        finally:
            self._looking = ""

    def take_times(self) -> dict[Key, tuple[float, int]]:
        """(seconds, calls) of each operator since the last time. Waits for the device."""
        spans, self._spans = self._spans, []
        out: dict[Key, tuple[float, int]] = {}
        for span in spans:
            span.ended.wait()
            seconds, calls = out.get(span.key, (0.0, 0))
            out[span.key] = (seconds + span.ended.seconds_since(span.began), calls + 1)
        return out

    def take_works(self) -> dict[Key, list[Work]]:
        """Of each operator, its calls since the last time."""
        works, self._works = self._works, {}
        return works
