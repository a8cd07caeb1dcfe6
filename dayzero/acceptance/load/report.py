"""The report of a load test, as it is shown, written and read back as a baseline. Paper."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dayzero import __version__
from dayzero.acceptance.load.figures import Figures, medians, spreads
from dayzero.acceptance.load.outcome import Outcome
from dayzero.acceptance.load.workload import Level, Workload
from dayzero.console import Console
from dayzero.errors import UsageError
from dayzero.finding import Finding, Verdict, worst

SCHEMA = 1
COLUMNS = ("level", "ttft ms p50/p90/p99", "tpot ms mean/p50/p99", "itl ms p50/p99", "out tok/s", "all tok/s", "req/s",
           "errors")  # fmt: skip


@dataclass
class LevelReport:
    """runs: one a repeat. errors: kind -> (how many, the first one's sentence), short: answers that ended of themselves
    (see ``Outcome``), over all repeats."""

    level: Level
    runs: list[Figures] = field(default_factory=list)
    errors: dict[str, tuple[int, str]] = field(default_factory=dict)
    short: int = 0

    def add(self, figures: Figures, outcomes: Sequence[Outcome]) -> None:
        self.runs.append(figures)
        self.short += sum(out.short for out in outcomes)
        counts = Counter(out.error[0] for out in outcomes if out.error is not None)
        firsts = {out.error[0]: out.error[1] for out in reversed(outcomes) if out.error is not None}
        for kind, number in counts.items():
            before, text = self.errors.get(kind, (0, firsts[kind]))
            self.errors[kind] = (before + number, text)

    def to_json(self) -> dict[str, Any]:
        return {
            "level": self.level.name,
            "median": medians(self.runs),
            "spread": spreads(self.runs),
            "runs": msgspec.to_builtins(self.runs),
            "errors": {kind: {"count": number, "first": text} for kind, (number, text) in self.errors.items()},
        }


@dataclass
class LoadReport:
    """target: what was loaded. how: http or in-process. prompts: ids or text. start_seconds, first_token_seconds: from
    starting the server to ready, and to the first token of the first request; None for one that ran already.
    expert_choice: of made weights, how evenly experts are chosen (``engine.expert_choice``)."""

    target: str
    model: str
    how: str
    prompts: str
    workload: Workload
    levels: list[LevelReport]
    start_seconds: float | None = None
    first_token_seconds: float | None = None
    expert_choice: Mapping[str, Any] | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "dayzero": __version__,
            "machine": machine(),
            "target": self.target,
            "model": self.model,
            "how": self.how,
            "prompts": self.prompts,
            "workload": self.workload.to_json(),
            "start_seconds": self.start_seconds,
            "first_token_seconds": self.first_token_seconds,
            "expert_choice": self.expert_choice,
            "levels": self.levels,
            "findings": self.findings,
            "verdict": self.verdict,
        }


class BaselineLevel(msgspec.Struct):
    level: str
    runs: list[Figures]


class Baseline(msgspec.Struct):
    """What is read back of a report that --out wrote."""

    schema: int
    machine: dict[str, Any]
    how: str
    prompts: str
    model: str
    workload: dict[str, Any]
    levels: list[BaselineLevel]


def read_baseline(path: Path) -> Baseline:
    """UsageError for a file that is not a report of this version."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Baseline)
    except msgspec.DecodeError as error:
        raise UsageError(f"--baseline {path}: not a report that --out wrote: {error}.") from error
    if found.schema != SCHEMA:
        raise UsageError(f"--baseline {path}: schema {found.schema}; this version reads {SCHEMA}. Measure it again.")
    return found


def machine() -> dict[str, Any]:
    """What a speed depends on besides the software."""
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return {"cpu": name, "cpus": os.cpu_count(), "system": platform.system(), "python": platform.python_version()}


def show(report: LoadReport, console: Console) -> None:
    """For a person: one row a level (medians of the repeats), what they mean, the findings."""
    work = report.workload
    console.headline(report.verdict, f"{report.target} serving {report.model}, {report.how}", report.findings)
    shared = f", {work.shared_prefix} of them shared" if work.shared_prefix else ""
    console.line(
        f"{work.prompt} prompt tokens ({report.prompts}{shared}), {work.output} answer tokens, {work.api}, "
        f"seed {work.seed}"
    )
    if report.start_seconds is not None:
        first = report.first_token_seconds
        console.line(f"ready after {report.start_seconds:.2f} s" + (f", first token {first:.2f} s" if first else ""))
    if report.expert_choice is not None:
        console.line(f"experts of made weights are chosen {report.expert_choice['share']:.0%} as evenly as they can be")
    console.table("", COLUMNS, [_row(one) for one in report.levels])
    repeats = max(len(one.runs) for one in report.levels)
    if repeats > 1:
        rows = [(one.level.name, *(_share(spreads(one.runs), name) for name, _ in SPREADS)) for one in report.levels]
        console.table(f"medians of {repeats} repeats; they differed by", ("level", *(n for _, n in SPREADS)), rows)
    console.findings(report.findings, report.verdict)


SPREADS = (
    ("ttft_p50_ms", "ttft p50"),
    ("tpot_mean_ms", "tpot mean"),
    ("itl_p99_ms", "itl p99"),
    ("output_tok_s", "tok/s"),
)


def _share(spread: dict[str, float], name: str) -> str:
    return f"{spread[name]:.1%}" if name in spread else "-"


def _row(one: LevelReport) -> list[object]:
    middle = medians(one.runs)

    def joined(*names: str) -> str:
        return " / ".join("-" if middle[name] is None else f"{middle[name]:.1f}" for name in names)

    return [
        one.level.name,
        joined("ttft_p50_ms", "ttft_p90_ms", "ttft_p99_ms"),
        joined("tpot_mean_ms", "tpot_p50_ms", "tpot_p99_ms"),
        joined("itl_p50_ms", "itl_p99_ms"),
        f"{middle['output_tok_s']:.1f}",
        f"{middle['total_tok_s']:.1f}",
        f"{middle['requests_s']:.2f}",
        sum(run.errors for run in one.runs),
    ]
