"""Operators that are looked at while they run: how long each call takes, or what it had to do. Installed by a profile
alone; and where it looks at nothing, a call costs one branch more."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from dayzero.arch.spec import ModelSpec
from dayzero.blocks.site import Bind
from dayzero.engine.graphs import Mark
from dayzero.engine.profiling.device_time import RANGE, DeviceTimes
from dayzero.engine.profiling.work import Call, Counter, Work
from dayzero.ops.contract import CONTRACTS

Key = tuple[str, str]  # contract, site
Times = dict[Key, tuple[float, int]]  # seconds, calls
Look = Literal["time", "ranges", "work"]


@dataclass(frozen=True, slots=True)
class _Span:
    key: Key
    began: Mark
    ended: Mark


class Hooks:
    """``watch`` of a runner. device: where it runs."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._looking: Look | None = None
        self._spans: list[_Span] = []
        self._ranges: list[Key] = []
        self._works: dict[Key, list[Work]] = {}
        self._counter: Counter | None = None

    def watch(self, spec: ModelSpec, bind: Bind) -> Bind:
        """``bind``, with every operator looked at."""
        self._counter = Counter(spec)

        def bound(contract: str, site: str) -> Callable[..., Any]:
            function = bind(contract, site)
            declared = CONTRACTS.get(contract)
            if declared is not None and declared.composed and function is declared.body:
                return function
            return self._hooked((contract, site), function)

        return bound

    def _hooked(self, key: Key, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._looking is None:
                return function(*args, **kwargs)
            if self._looking == "ranges":
                self._ranges.append(key)
                with torch.profiler.record_function(f"{RANGE}{len(self._ranges) - 1}"):
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
    def looking(self, at: Look) -> Any:
        """Within, calls are timed by marks before and behind them, are ranges of a trace, or their work is counted
        (which waits for the device)."""
        self._looking = at
        try:
            yield
        finally:
            self._looking = None

    def take_ranges(self, found: DeviceTimes) -> Times:
        """(seconds of kernels, calls) of each operator since the last time. found: of the trace that was taken."""
        ranges, self._ranges = self._ranges, []
        out: Times = {}
        for number, key in enumerate(ranges):
            seconds, calls = out.get(key, (0.0, 0))
            out[key] = (seconds + found.by_range.get(number, 0.0), calls + 1)
        return out

    def forget_ranges(self) -> None:
        """Where nobody recorded the device."""
        self._ranges = []

    def take_times(self) -> Times:
        """(seconds, calls) of each operator since the last time. Waits for the device."""
        spans, self._spans = self._spans, []
        out: Times = {}
        for span in spans:
            span.ended.wait()
            seconds, calls = out.get(span.key, (0.0, 0))
            out[span.key] = (seconds + span.ended.seconds_since(span.began), calls + 1)
        return out

    def take_works(self) -> dict[Key, list[Work]]:
        """Of each operator, its calls since the last time."""
        works, self._works = self._works, {}
        return works
