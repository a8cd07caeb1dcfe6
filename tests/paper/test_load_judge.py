"""What a load test is judged by: counts, failures, and a baseline with noise of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dayzero.acceptance.files import write_json
from dayzero.acceptance.load.figures import NAMES, Figures
from dayzero.acceptance.load.judge import check_baseline, check_run, comparable
from dayzero.acceptance.load.outcome import Outcome
from dayzero.acceptance.load.report import Baseline, LevelReport, LoadReport, machine, read_baseline
from dayzero.acceptance.load.workload import Lengths, Level, LoadRequest, Workload
from dayzero.console import plain
from dayzero.errors import UsageError
from dayzero.finding import Finding, worst

AT_4 = Level(concurrency=4)
NOISE = (1.00, 1.02, 0.99)


def run(factor: float = 1.0, **more: Any) -> Figures:
    """A run in which times are longer and rates lower by ``factor``."""
    values: dict[str, Any] = dict.fromkeys(NAMES, 10.0 * factor)
    values |= dict.fromkeys(("output_tok_s", "total_tok_s", "requests_s"), 100.0 / factor)
    values |= {
        "requests": 8,
        "errors": 0,
        "prompt_tokens": 80,
        "output_tokens": 32,
        "cached_tokens": None,
        "late_ms": 0,
    }
    return Figures(**(values | more))


def report(factors: tuple[float, ...] = NOISE, level: Level = AT_4, **more: Any) -> LoadReport:
    work = Workload(Lengths(10, 10), Lengths(4, 4), **more)
    return LoadReport("T", "m", "http", "ids", work, [LevelReport(level, [run(f) for f in factors])])


def written(folder: Path, one: LoadReport) -> Baseline:
    write_json(folder / "base.json", one)
    assert [path.name for path in folder.iterdir()] == ["base.json"]
    return read_baseline(folder / "base.json")


def by_verdict(findings: list[Finding], verdict: str) -> set[str]:
    return {f.claim for f in findings if f.verdict == verdict}


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    ours = report()
    ours.findings += check_run(ours)
    base = written(tmp_path, ours)
    assert base.levels[0].runs == ours.levels[0].runs and base.levels[0].level == "c=4"
    assert json.loads((tmp_path / "base.json").read_text()) == plain(ours)
    assert base.machine == machine()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"levels": 3}'])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UsageError, match=r"--baseline .*x\.json"):
        read_baseline(tmp_path / "x.json")


def test_a_report_of_another_schema_is_refused(tmp_path: Path) -> None:
    changed = plain(report()) | {"schema": 99}
    (tmp_path / "x.json").write_text(json.dumps(changed))
    with pytest.raises(UsageError, match="schema 99"):
        read_baseline(tmp_path / "x.json")


def test_the_same_again_passes(tmp_path: Path) -> None:
    base = written(tmp_path, report())
    found = list(check_baseline(report((1.01, 0.99, 1.0)), base, 0.03))
    assert len(found) == 4 and worst(found) == "pass"


def test_slower_beyond_the_noise_fails_every_figure_that_is(tmp_path: Path) -> None:
    base = written(tmp_path, report())
    found = list(check_baseline(report(tuple(1.4 * f for f in NOISE)), base, 0.03))
    assert [f.kind for f in found if f.verdict == "fail"] == ["load.regression"] * 4
    faster = list(check_baseline(report(tuple(0.6 * f for f in NOISE)), base, 0.03))
    assert worst(faster) == "pass"


def test_only_the_figure_that_got_worse_fails(tmp_path: Path) -> None:
    base = written(tmp_path, report())
    now = report()
    now.levels[0].runs = [
        msgspec.structs.replace(one, ttft_p50_ms=20.0 * f) for one, f in zip(now.levels[0].runs, NOISE)
    ]
    found = list(check_baseline(now, base, 0.03))
    assert {claim.split(": ")[1].split(" is")[0] for claim in by_verdict(found, "fail")} == {"TTFT p50"}


def test_slower_within_a_large_noise_is_a_note(tmp_path: Path) -> None:
    noisy = (1.0, 1.5, 0.8)
    base = written(tmp_path, report(noisy))
    found = list(check_baseline(report(tuple(1.2 * f for f in noisy)), base, 0.03))
    assert worst(found) == "note" and len(by_verdict(found, "note")) == 4


def test_a_change_too_small_to_matter_passes_however_sure(tmp_path: Path) -> None:
    base = written(tmp_path, report((1.0, 1.0001, 0.9999)))
    slower = report((1.02, 1.0201, 1.0199))
    assert worst(check_baseline(slower, base, 0.03)) == "pass"
    assert worst(check_baseline(slower, base, 0.01)) == "fail"


def test_figures_that_went_missing_fail(tmp_path: Path) -> None:
    base = written(tmp_path, report())
    now = report()
    now.levels[0].runs = [msgspec.structs.replace(one, ttft_p50_ms=None) for one in now.levels[0].runs]
    found = list(check_baseline(now, base, 0.03))
    assert by_verdict(found, "fail") == {"c=4: TTFT p50 can be compared"}


def test_another_machine_is_a_note(tmp_path: Path) -> None:
    base = written(tmp_path, report())
    base.machine = {"cpu": "another", "cpus": 1}
    found = list(check_baseline(report(), base, 0.03))
    assert [f.kind for f in found if f.verdict == "note"] == ["load.machine"]


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        (report(shared_prefix=3), "shared_prefix 0, this run 3"),
        (report(level=Level(concurrency=8)), "holds 0 repeats of c=8"),
        (report(api="chat"), "api 'completions'"),
    ],
)
def test_different_loads_are_not_compared(tmp_path: Path, ours: LoadReport, said: str) -> None:
    base = written(tmp_path, report())
    comparable(report(seed=5), base)  # other tokens are the same load
    with pytest.raises(UsageError, match=said):
        comparable(ours, base)


def test_too_few_repeats_know_no_noise(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds 2 repeats of c=4"):
        comparable(report(), written(tmp_path, report(NOISE[:2])))


def failed(kind: str) -> Outcome:
    return Outcome(LoadRequest([1], 1, 1), 0.0, error=(kind, f"why {kind}"))


def test_failures_fail_by_kind_and_add_up() -> None:
    one = LevelReport(Level(concurrency=1))
    one.add(run(requests=6, errors=2), [failed("tokens"), failed("timeout")])
    one.add(run(requests=7, errors=1), [failed("tokens")])
    full = report()
    full.levels = [one]
    found = list(check_run(full))
    assert {(f.kind, f.verdict, f.measured) for f in found} == {
        ("load.tokens", "fail", "why tokens"), ("load.errors", "fail", "why timeout"),
    }  # fmt: skip
    assert by_verdict(found, "fail") == {
        "c=1: 2 of 16 requests failed (tokens)",
        "c=1: 1 of 16 requests failed (timeout)",
    }


def test_prompts_found_in_the_cache_are_noted() -> None:
    full = report(shared_prefix=5)
    full.levels[0].runs = [run(cached_tokens=40)]
    assert worst(check_run(full)) == "pass"  # 8 requests share 5 tokens
    full.levels[0].runs = [run(cached_tokens=41)]
    assert [f.kind for f in check_run(full) if f.verdict == "note"] == ["load.cached"]


def test_a_client_that_falls_behind_is_noted_in_an_open_loop() -> None:
    full = report(level=Level(rate=9.0))
    full.levels[0].runs = [run(late_ms=0.5)]
    assert worst(check_run(full)) == "pass"
    full.levels[0].runs = [run(late_ms=1.5)]
    assert [f.kind for f in check_run(full) if f.verdict == "note"] == ["load.client"]
