"""Captured recordings over a graph that a CPU can keep: operators as they were called, called again on the same
tensors. What stands in for CUDA is the graph alone: pieces, their order and their memory are the engine's own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dayzero.engine.fixed import hidden_spans
from dayzero.engine.graphs import WARM_RUNS, Captured, Memory, capturing


class Calls(TorchDispatchMode):
    """Keeps calls instead of their results: while it is on, outputs hold garbage, as in a capture."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[Callable[..., Any], Any, Any, list[Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        held = [one.clone() for one in inputs]
        out = func(*args, **(kwargs or {}))
        outputs = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        self.kept.append((func, args, kwargs or {}, outputs))
        for one, before in zip(inputs, held, strict=True):
            one.copy_(before)  # nothing is computed while a graph is captured
        known = {one.untyped_storage().data_ptr() for one in inputs}
        for one in outputs:
            if one.untyped_storage().data_ptr() not in known and one.is_floating_point():
                one.fill_(torch.nan)
        return out


class Graph:
    """As ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.calls = Calls()

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert pool == "pool" and capture_error_mode == "thread_local"
        self.calls.__enter__()

    def capture_end(self) -> None:
        self.calls.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.calls.kept:
            made = [one for one in tree_leaves(func(*args, **kwargs)) if isinstance(one, Tensor)]
            for old, new in zip(outputs, made, strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(wait_stream=lambda other: None, synchronize=lambda: None)
    free = iter((1000, 900))
    for name, value in {
        "CUDAGraph": Graph, "graph_pool_handle": lambda: "pool", "Stream": lambda: stream, "synchronize": lambda: None,
        "current_stream": lambda: stream, "stream": lambda one: nullcontext(), "empty_cache": lambda: None,
        "mem_get_info": lambda: (next(free), 0),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)


def test_one_piece_follows_its_inputs() -> None:
    x, y, runs = torch.ones(4), torch.zeros(4), []

    def work(spans: object, on_host: object, beside: object) -> None:
        runs.append(len(spans))  # type: ignore[arg-type]
        y.copy_((x * 2).relu() + 1)

    memory = Memory()
    with capturing(memory):
        recording = Captured(work, hidden_spans(3), memory)
    assert memory.num_bytes == 100 and recording.num_pieces == 1 and runs == [3] * (WARM_RUNS + 1)
    for value in (5.0, -3.0):
        x.fill_(value)
        recording.run(())
        assert y.tolist() == [max(2 * value, 0) + 1] * 4
    assert len(runs) == WARM_RUNS + 1, "the work itself is not called again"


def test_the_host_works_between_pieces_with_what_the_device_holds_then() -> None:
    x, y = torch.ones(4), torch.zeros(4)
    looked: list[float] = []

    def host(value: Tensor) -> Tensor:
        looked.append(float(value.sum()))
        return torch.full_like(value, looked[-1])

    def work(spans: object, on_host: Any, beside: object) -> None:
        twice = x * 2
        summed = on_host(lambda: host(twice), twice)
        again = on_host(lambda: host(summed + 1), summed)
        y.copy_(again + twice)

    memory = Memory()
    with capturing(memory):
        recording = Captured(work, (), memory)
    assert recording.num_pieces == 3 and looked == [], "nothing of the host's runs while it is captured"
    for value in (1.0, 5.0):
        x.fill_(value)
        recording.run(())
        assert y.tolist() == [4 * (8 * value + 1) + 2 * value] * 4
    assert looked == [8.0, 36.0, 40.0, 164.0]


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Any) -> None:
        self.log.append(f"{self.name} waits for {getattr(other, 'name', 'others')}")

    def synchronize(self) -> None:
        self.log.append("captured from here on")


def two_streams(monkeypatch: pytest.MonkeyPatch) -> tuple[Memory, list[str]]:
    log: list[str] = []
    end = Graph.capture_end
    monkeypatch.setattr(Graph, "capture_end", lambda self: (log.append("end"), end(self))[1])
    monkeypatch.setattr(torch.cuda, "stream", lambda one: nullcontext(log.append(f"on {one.name}")))
    return Memory("pool", Stream("main", log), Stream("side", log)), log


@pytest.mark.parametrize("streams", [1, 2])
def test_what_runs_beside_a_piece_ends_with_it(monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    """The longer work is cut by the host, twice; the shorter one belongs to what comes before the first cut."""
    memory, log = two_streams(monkeypatch)
    x, y = torch.ones(4), torch.zeros(4)

    def work(spans: object, on_host: Any, beside: Any) -> None:
        twice = x * 2

        def long() -> Tensor:
            summed = on_host(lambda: torch.full_like(x, float(twice.sum())), twice)
            return on_host(lambda: summed + 1, summed) * 10

        y.copy_(sum(beside(long, lambda: twice + 5)))

    recording = Captured(work, (), memory, streams)
    assert recording.num_pieces == 3 and recording.num_forks == streams - 1
    for value in (1.0, 5.0):
        x.fill_(value)
        recording.run(())
        assert y.tolist() == [10 * (8 * value + 1) + 2 * value + 5] * 4
    fork = ["side waits for main", "on side", "main waits for side"] if streams == 2 else []
    captured = log[log.index("captured from here on") + 1 :]
    assert captured == [*fork, "end", "end", "end"], "a graph ends with its streams joined"


def test_the_host_is_not_asked_for_anything_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, _ = two_streams(monkeypatch)
    x = torch.ones(4)

    def work(spans: object, on_host: Any, beside: Any) -> None:
        beside(lambda: x + 1, lambda: on_host(lambda: x, x))

    with pytest.raises(AssertionError, match="cannot be done aside"):
        Captured(work, (), memory)


def test_work_that_fails_ends_its_capture() -> None:
    def work(spans: object, on_host: object, beside: object) -> None:
        if torch.utils._python_dispatch._get_current_dispatch_mode() is not None:
            raise ValueError("in the capture")

    with pytest.raises(ValueError, match="in the capture"):
        Captured(work, (), Memory())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
