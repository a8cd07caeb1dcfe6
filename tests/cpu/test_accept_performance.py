"""The performance stage finds what is planted: wrong counts, a slower build, hits that save nothing, work not done."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dayzero.acceptance.accept.stage import StageResult
from dayzero.acceptance.load.report import LoadReport
from dayzero.acceptance.stages import perf_floor, perf_load, performance
from dayzero.acceptance.stages.long_known import look, paper_of
from dayzero.console import plain
from dayzero.engine.events import Output
from dayzero.engine.request import NewRequest
from dayzero.hardware import HARDWARE
from tests.cpu.accept_fakes import failed, foreign, named, real, scripted
from tests.paper.server_support import ScriptedEngine, make

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
SMALL = perf_load.Plan(16, 6, (1, 2, 4), 4, 3, 30.0, 30.0, 256, 3)


@dataclass
class Timed(ScriptedEngine):
    """Waits before each token, longer the more requests run; a prompt that it has not seen costs ``cold`` seconds, and
    one it has is found in the cache, up to ``found`` of its tokens, for ``hit`` seconds."""

    step: float = 0.002
    crowd: float = 0.0
    cold: float = 0.0
    hit: float = 0.0
    share: float = 0.75
    known: set[tuple[int, ...]] = field(default_factory=set)

    async def generate(self, request: NewRequest) -> AsyncIterator[Output]:
        seen = tuple(request.prompt) in self.known
        self.known.add(tuple(request.prompt))
        self.cached = int(self.share * len(request.prompt)) if seen else 0
        await asyncio.sleep(self.hit if seen else self.cold)
        async for output in super().generate(request):
            await asyncio.sleep(self.step + self.crowd * len(self.live))
            yield output


def timed(**more: Any) -> Timed:
    return Timed(reply=lambda request: [65] * 200, **more)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(perf_load.PLANS, "quick", SMALL)


def run(engine: ScriptedEngine, folder: Path, baseline: Any = None) -> StageResult:
    with scripted(make(engine), folder, baseline=baseline) as context:
        return performance.run(context)


def record(result: StageResult) -> dict[str, Any]:
    """As record.json holds it."""
    stage = {"name": "performance", "facts": result.facts}
    return {"stages": [{"name": "weights"}, json.loads(json.dumps(plain(stage)))]}


def test_a_sound_server_passes_and_its_numbers_are_facts(tmp_path: Path) -> None:
    result = run(timed(cold=0.08, hit=0.005), tmp_path)
    assert failed(result) == {}, result.findings
    assert [f.verdict for f in named(result, "performance.speed")] == ["pass"] * 3
    assert {f.verdict for f in named(result, "load.tokens")} == {"pass"}
    for kind in ("performance.together", "performance.prefix.hits", "performance.prefix.ttft"):
        assert named(result, kind)[0].verdict == "pass", kind
    for kind in ("load.regression", "performance.roofline"):
        assert named(result, kind)[0].verdict == "not applicable", kind
    assert [one.title.split()[0] for one in result.figures] == ["Latency", "Throughput"]
    assert all(len(series) == 3 for one in result.figures for series in one.data["series"].values())
    assert len(result.samples["TPOT (ms)"]) == 9 and len(result.samples["TTFT of a hit prompt (ms)"]) == 3
    json.dumps([one.data for one in result.figures])


@pytest.mark.slow
def test_a_small_model_passes(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with real("gpt_oss", tmp_path) as context:
        result = performance.run(context)
    assert failed(result) == {}, [f for f in result.findings if f.verdict == "fail"]
    assert {f.verdict for f in named(result, "performance.roofline")} <= {"pass", "note"}


def test_counts_that_are_not_what_was_asked_fail(tmp_path: Path) -> None:
    assert failed(run(ScriptedEngine(reply=lambda request: [65]), tmp_path))["load.tokens"] == "server"


def test_a_slower_server_fails_against_the_record_of_a_faster_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By so much that the noise of a shared machine cannot hide it."""
    monkeypatch.setitem(perf_load.PLANS, "quick", replace(SMALL, levels=(1, 2), output=4, pairs=1))
    before = record(run(timed(), tmp_path))
    again = run(timed(), tmp_path, before)
    assert len(named(again, "load.regression")) == 8
    slower = run(timed(step=0.1), tmp_path, before)
    assert failed(slower)["load.regression"] == "server"
    bad = [f.claim for f in named(slower, "load.regression") if f.verdict == "fail"]
    assert "c=1: mean TPOT is not worse than the baseline" in bad


@pytest.mark.parametrize(
    ("baseline", "said"),
    [
        ({"stages": []}, "no speeds"), ({"stages": [{"name": "performance", "facts": {}}]}, "no speeds"),
        ({"stages": [{"name": "performance", "facts": {"load": {"schema": 1}}}]}, "another form"),
    ],
)  # fmt: skip
def test_a_baseline_that_cannot_be_compared_is_no_pass(tmp_path: Path, baseline: dict[str, Any], said: str) -> None:
    (finding,) = named(run(timed(), tmp_path, baseline), "load.regression")
    assert finding.verdict == "fail" and said in finding.measured


def test_a_baseline_of_another_protocol_is_refused_with_the_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = record(run(timed(), tmp_path))
    monkeypatch.setitem(perf_load.PLANS, "quick", replace(SMALL, output=7))
    (finding,) = named(run(timed(), tmp_path, before), "load.regression")
    assert finding.verdict == "fail" and "output '6', this run '7'" in finding.measured


def test_speeds_of_too_few_whole_runs_are_no_baseline(tmp_path: Path) -> None:
    with scripted(make(timed()), tmp_path) as context:
        server = context.services.shared()
        report, _ = perf_load.measure(server, look(context, server), SMALL, 0, lambda text: None)
    assert {f.verdict for f in performance._speeds(report)} == {"pass"}
    runs = report.levels[1].runs
    runs[0] = msgspec.structs.replace(runs[0], errors=1)
    assert [f.verdict for f in performance._speeds(report)] == ["pass", "note", "pass"]


def test_requests_that_slow_each_other_down_fail(tmp_path: Path) -> None:
    """Four together take longer than four in turn."""
    assert failed(run(timed(step=0.0, crowd=0.012), tmp_path)) == {}
    worse = timed(step=0.001)

    async def crowded(request: NewRequest) -> AsyncIterator[Output]:
        async for output in ScriptedEngine.generate(worse, request):
            await asyncio.sleep(0.004 * len(worse.live) ** 2)
            yield output

    worse.generate = crowded  # type: ignore[method-assign]
    worse.cached = 0
    assert failed(run(worse, tmp_path))["performance.together"] == "scheduler"


def test_one_look_at_a_busy_machine_is_no_fault_of_batching(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What falls is measured once more, and that decides."""
    measure, plans, busy = perf_load.measure, list[perf_load.Plan](), [0]

    def spoilt(server: Any, known: Any, plan: perf_load.Plan, *more: Any) -> Any:
        plans.append(plan)
        report, pairs = measure(server, known, plan, *more)
        for one in report.levels[1:] if len(plans) <= busy[0] else ():
            one.runs[:] = [msgspec.structs.replace(run, output_tok_s=1.0) for run in one.runs]
        return report, pairs

    monkeypatch.setattr(performance, "measure", spoilt)
    for times, found in ((1, {}), (2, {"performance.together": "scheduler"})):
        plans.clear()
        busy[0] = times
        assert failed(run(timed(), tmp_path)) == found
        assert [len(plan.levels) for plan in plans] == [3, 2] and plans[1].pairs == 0


def test_a_cache_that_finds_too_little_fails(tmp_path: Path) -> None:
    assert failed(run(timed(cold=0.08, share=0.2), tmp_path)) == {"performance.prefix.hits": "cache"}


def test_hits_that_save_no_time_fail(tmp_path: Path) -> None:
    assert failed(run(timed(cold=0.08, hit=0.08), tmp_path)) == {"performance.prefix.ttft": "cache"}


def test_prompts_too_quick_to_tell_are_not_judged(tmp_path: Path) -> None:
    (finding,) = named(run(timed(cold=0.002, hit=0.002), tmp_path), "performance.prefix.ttft")
    assert finding.verdict == "not applicable" and "too quick" in finding.measured


def test_a_server_of_another_make_is_measured(tmp_path: Path) -> None:
    with foreign(tmp_path) as context:
        result = performance.run(context)
    assert failed(result).keys() <= {"performance.together"}, result.findings  # nothing is batched there
    assert named(result, "performance.prefix.hits")[0].verdict == "not applicable"
    assert result.facts["load"]["prompts"] == "text"


# --- the roofline


def shares(tmp_path: Path, **rates: float) -> list[Any]:
    paper, why = paper_of(str(CONFIGS / "qwen3_8b.json"), None)
    assert paper is not None, why
    with scripted(make(timed()), tmp_path) as context:
        server = context.services.shared()
        known = look(context, server)
        report, _ = perf_load.measure(server, known, replace(SMALL, pairs=0), 0, lambda text: None)
    assert isinstance(report, LoadReport)
    hardware = replace(HARDWARE["h200"], **rates)
    return perf_floor.findings(perf_floor.shares(report, SMALL, paper, hardware, known), hardware, False)


def test_work_that_was_not_done_is_faster_than_its_floor(tmp_path: Path) -> None:
    """An 8-billion-parameter model in 2 ms a token: fine on an H200, not with a hundredth of its bandwidth."""
    assert {f.verdict for f in shares(tmp_path)} <= {"pass", "note"}
    slow = shares(tmp_path, bandwidth=4.8e10)
    assert {f.verdict for f in slow} == {"note"} and "is it all done" in slow[0].remedy
    assert {f.verdict for f in shares(tmp_path, bandwidth=4.8e14, flops={"bf16": 1e18})} == {"pass"}


def test_rates_of_this_machine_are_measured() -> None:
    found = perf_floor.measured_cpu(HARDWARE["cpu"])
    assert 1e8 < found.bandwidth < 1e13 and 1e8 < found.rate("f32") < 1e15
    assert found.rate("bf16") >= found.rate("f32")
    wide = perf_floor.measured_cpu(replace(HARDWARE["cpu"], features=frozenset({"amx_bf16"})))
    assert wide.rate("bf16") == 16 * wide.rate("f32")
