"""Times on an accelerator: CUDA graphs of rotated calls, and the ceilings of the same run.

A call that is timed alone mostly tells how fast Python launches; so all calls of a round are captured into one graph,
each on buffers of its own, which together do not fit into the L2 cache.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

L2_BYTES = 60 << 20  # of the largest cache among the devices this runs on (H100, H200)
CACHE_TIMES = 3  # buffers of a round together exceed the L2 cache by so much

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of one call: median of the rounds, and half the distance of their quartiles."""

    seconds: float
    spread: float


def num_rotated(num_bytes: int, most: int = 64) -> int:
    """How many sets of buffers of so many bytes each a round needs; at least two."""
    return max(2, min(most, -(-CACHE_TIMES * L2_BYTES // max(num_bytes, 1))))


def graph_of(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """All calls, one after another, in one graph. They are run twice before, so that kernels are compiled and tuned."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            for call in calls:
                call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def measured(sides: Mapping[str, Sequence[Call]], *, rounds: int = 9, least_seconds: float = 0.01) -> dict[str, Time]:
    """Time of one call of each side, the sides' rounds interleaved. A round replays its graph for ``least_seconds``."""
    graphs = {name: graph_of(calls) for name, calls in sides.items()}
    repeats = {name: max(1, round(least_seconds / max(_replayed(graph, 2), 1e-7))) for name, graph in graphs.items()}
    seen: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, graph in graphs.items():
            seen[name].append(_replayed(graph, repeats[name]) / len(sides[name]))
    return {name: _time_of(values) for name, values in seen.items()}


def _replayed(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    """Seconds of one replay, the mean of so many behind one that is not counted."""
    graph.replay()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3 / repeats


def _time_of(values: Sequence[float]) -> Time:
    if len(values) < 2:
        return Time(values[0], 0.0)
    quartiles = statistics.quantiles(values, n=4)
    return Time(statistics.median(values), (quartiles[2] - quartiles[0]) / 2)


def ceilings() -> dict[str, float]:
    """What this device reaches now: ``copy`` bytes/s, read and written counted; ``bf16`` and ``e4m3`` FLOP/s of an
    8192^3 product of random numbers, ``e4m3`` with one scale a tensor."""
    source = torch.randint(0, 255, (2 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    found = {"copy": 2 * source.numel() / _best_alone(lambda: target.copy_(source))}
    num = 8192
    a, b = (torch.randn(num, num, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found["bf16"] = 2 * num**3 / _best(lambda: a @ b.T)
    if torch.cuda.get_device_capability() >= (8, 9):
        one = torch.ones((), device="cuda")
        a8, b8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn)
        found["e4m3"] = 2 * num**3 / _best(lambda: torch._scaled_mm(a8, b8.T, one, one, out_dtype=torch.bfloat16))
    return found


def _best_alone(call: Call) -> float:
    """Seconds of a long call that is not captured: in a graph a copy goes to the copy engine, which is slower."""
    call()
    seconds = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(seconds)


def _best(call: Call) -> float:
    return measured({"one": [call]}, rounds=7)["one"].seconds
