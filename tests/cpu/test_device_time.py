"""Kernels go to the operator that asked for them: by hand, and through a profile whose device is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_profile import REFERENCE, bench_of, report_of, twin

from dayzero.acceptance.profile.show import show_phase
from dayzero.console import Console
from dayzero.engine.profiling import measure
from dayzero.engine.profiling.device_time import RANGE, device_times
from dayzero.engine.profiling.hooks import Hooks
from dayzero.engine.profiling.measure import Bench, Phase

Event = dict[str, Any]


def op(number: int, begin: float, length: float) -> Event:
    return {"cat": "user_annotation", "name": f"{RANGE}{number}", "ts": begin, "dur": length, "args": {}}


def launch(correlation: int, when: float, cat: str = "cuda_runtime") -> Event:
    return {"cat": cat, "name": "launch", "ts": when, "dur": 3, "args": {"correlation": correlation}}


def kernel(correlation: int, begin: float, length: float, cat: str = "kernel") -> Event:
    return {"cat": cat, "name": "k", "ts": begin, "dur": length, "args": {"correlation": correlation, "stream": 7}}


# --- by hand --------------------------------------------------------------------------------------------------------


def test_a_kernel_goes_to_the_innermost_range_around_its_launch() -> None:
    found = device_times([
        kernel(3, 500, 30), op(0, 0, 100), op(1, 20, 40), op(2, 100, 50), launch(1, 10), launch(2, 30, "cuda_driver"),
        launch(3, 70), launch(4, 120), kernel(1, 400, 10), kernel(2, 420, 20), kernel(4, 600, 40, "gpu_memcpy"),
    ])  # fmt: skip
    assert found is not None
    assert found.by_range == pytest.approx({0: 40e-6, 1: 20e-6, 2: 40e-6}), "when it ran does not matter"
    assert (found.outside, found.launches) == (0.0, 4)
    assert found.total == pytest.approx(100e-6) and found.busy == pytest.approx(100e-6)


def test_what_no_operator_asked_for_is_told_apart() -> None:
    events = [
        op(0, 0, 10), op(1, 50, 10), launch(1, 5), launch(2, 30), launch(3, 70), kernel(1, 200, 1), kernel(2, 300, 2),
        kernel(3, 400, 4), kernel(9, 500, 8), {"cat": "user_annotation", "name": "else", "ts": 0, "dur": 99},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]  # fmt: skip
    found = device_times(events)
    assert found is not None
    assert found.by_range == pytest.approx({0: 1e-6})
    assert found.outside == pytest.approx(14e-6), "between ranges, behind them, and one whose launch is not there"


def test_what_another_thread_asks_for_is_no_operators() -> None:
    """Experts are read by threads of their own while the main one has an operator's range open."""
    here, there = {"pid": 1, "tid": 1}, {"pid": 1, "tid": 2}
    found = device_times([
        op(0, 0, 100) | here, launch(1, 10) | here, launch(2, 20) | there, launch(3, 30) | here, kernel(1, 200, 1),
        kernel(2, 300, 2, "gpu_memcpy"), kernel(3, 400, 4), op(1, 15, 10) | there, launch(4, 40) | there,
        kernel(4, 500, 8),
    ])  # fmt: skip
    assert found is not None and found.by_range == pytest.approx({0: 5e-6, 1: 2e-6})
    assert found.outside == pytest.approx(8e-6)


def test_kernels_of_one_graph_and_kernels_that_overlap() -> None:
    found = device_times([
        op(4, 0, 10), launch(1, 2), kernel(1, 100, 10), kernel(1, 105, 10), kernel(1, 120, 5), kernel(1, 101, 2),
    ])  # fmt: skip
    assert found is not None
    assert found.by_range == pytest.approx({4: 27e-6}), "one launch has many kernels"
    assert found.busy == pytest.approx(20e-6), "and where they run at once the device is busy once"


def test_a_trace_without_a_device_is_none() -> None:
    assert device_times([]) is None
    assert device_times([op(0, 0, 10), launch(1, 2)]) is None


def test_a_trace_of_a_gpu() -> None:
    """As an H200 and torch 2.11 gave it. Range 0: a product, range 1 with a Triton kernel, an addition. Then a product
    by two in no range; range 2: a copy from the host; 3: nothing; 4: a graph of a product and an addition."""
    events = json.loads((Path(__file__).parents[1] / "data" / "device_trace.json").read_text())
    found = device_times(events)
    assert found is not None and found.launches == 7
    assert found.by_range == pytest.approx({0: 60.928e-6, 1: 1.984e-6, 2: 79.103e-6, 4: 62.207e-6}, rel=1e-3)
    assert found.outside == pytest.approx(3.425e-6, rel=1e-3) and found.busy == pytest.approx(found.total, rel=1e-3)


def test_calls_of_an_operator_are_summed_over_the_ranges_of_a_step() -> None:
    hooks = Hooks("cuda")
    bound = hooks.watch(report_spec(), lambda contract, site: lambda x: x)
    with hooks.looking("ranges"):
        for site in ("a", "b", "a"):
            assert bound("norm.rms", site)(3) == 3
    found = device_times([op(0, 0, 1), op(2, 4, 1), launch(1, 0), launch(2, 4), kernel(1, 9, 5), kernel(2, 20, 7)])
    assert found is not None
    times = hooks.take_ranges(found)
    assert times == {("norm.rms", "a"): (pytest.approx(12e-6), 2), ("norm.rms", "b"): (0.0, 1)}
    assert hooks.take_ranges(found) == {}


def report_spec() -> Any:
    from test_profile import bench_spec

    return bench_spec()


# --- through a profile ----------------------------------------------------------------------------------------------

KERNEL_SECONDS, OWN_KERNELS = 1e-3, 3  # of each operator, and how many nobody launched in one


def made_up(device: str, work: Callable[[], object]) -> list[Event]:
    """A trace with the host's real ranges, and a kernel for each of them."""
    assert device == "cuda"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        work()
    ranges = [event for event in seen.events() or () if event.name.startswith(RANGE)]
    events: list[Event] = []
    for i, event in enumerate(ranges):
        events.append(op(int(event.name[len(RANGE) :]), event.time_range.start, event.time_range.elapsed_us()))
        events += [launch(i + 1, event.time_range.start + 1e-3), kernel(i + 1, 2000.0 * i, KERNEL_SECONDS * 1e6)]
    return events + [kernel(0, 2000.0 * i + 1e9, KERNEL_SECONDS * 1e6) for i in range(OWN_KERNELS)]


def on_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace: Callable[..., list[Event]]) -> Bench:
    bench = bench_of(twin("qwen3_8b", tmp_path), REFERENCE)
    bench.hardware = replace(bench.hardware, target="cuda")
    monkeypatch.setattr(measure, "traced", trace)
    return bench


@pytest.mark.parametrize("phase", [Phase(True, 2, 16), Phase(False, 1, 32)], ids=lambda phase: phase.name)
def test_a_profile_takes_times_from_kernels(
    phase: Phase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    bench = on_a_device(tmp_path, monkeypatch, made_up)
    measured = bench.measure(phase)
    calls = sum(count for _, count in measured.times.values())
    assert measured.timed == "kernels" and measured.times.keys() == measured.works.keys()
    assert all(seconds == pytest.approx(count * KERNEL_SECONDS) for seconds, count in measured.times.values())
    assert {count for _, count in measured.times.values()} == {len(works) for works in measured.works.values()}
    assert measured.looked_at_seconds == pytest.approx((calls + OWN_KERNELS / 3) * KERNEL_SECONDS)
    assert measured.launches == calls + 1
    assert measured.busy_seconds == pytest.approx(OWN_KERNELS * KERNEL_SECONDS), "of a step as served: no ranges"
    report = report_of(bench, measured)
    assert report.accounted == pytest.approx(calls / (calls + 1))
    assert report.idle_share == pytest.approx(max(0.0, 1 - 3e-3 / measured.step_seconds))
    show_phase(report, Console())
    out = capsys.readouterr().out
    assert "kernels of an eager step" in out and "idle " in out and "CUPTI" not in out
    assert json.loads(json.dumps(report.to_json()["timed_by"])) == "kernels"


def test_without_a_record_of_kernels_marks_are_taken_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def silent(device: str, work: Callable[[], object]) -> list[Event]:
        work()
        return []

    held: list[float] = []
    monkeypatch.setattr(measure, "hold_back", lambda device, seconds: held.append(seconds))
    bench = on_a_device(tmp_path, monkeypatch, silent)
    measured = bench.measure(Phase(True, 2, 16))
    assert measured.timed == "marks" and measured.busy_seconds is None and measured.launches is None
    assert len(held) == measure.LOOKED_AT and all(seconds > 0 for seconds in held), "as long as a step took"
    assert measured.times.keys() == measured.works.keys()
    assert all(count == len(measured.works[key]) for key, (_, count) in measured.times.items())
    show_phase(report_of(bench, measured), Console())
    out = capsys.readouterr().out
    assert "CUPTI" in out and "idle" not in out
