"""Findings of a load test: counts that are not what was asked, failed requests, and being slower than a baseline."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from dayzero.acceptance.load.figures import Figures, values_of
from dayzero.acceptance.load.noise import ratio_interval
from dayzero.acceptance.load.report import Baseline, LevelReport, LoadReport, machine
from dayzero.errors import UsageError
from dayzero.finding import Finding
from dayzero.units import counted

LEAST_REPEATS = 3  # to measure noise at all; more find smaller changes
DOUBT = 0.05  # chance that unchanged software fails a whole comparison
JUDGED = (("output_tok_s", "output tok/s", +1), ("ttft_p50_ms", "TTFT p50", -1), ("tpot_mean_ms", "mean TPOT", -1),
          ("itl_p99_ms", "inter-token p99", -1))  # fmt: skip
LATE_SHARE = 0.1  # of the median TTFT: a client that is later than this measures itself
REMEDIES = {
    "tokens": "The server does not do the work that was asked; compare its ignore_eos and token counts first.",
    "timeout": "Lower the load, or raise --timeout.",
}


def check_run(report: LoadReport) -> Iterator[Finding]:
    """What the run itself says."""
    for one in report.levels:
        asked = sum(run.requests + run.errors for run in one.runs)
        for kind, (number, first) in sorted(one.errors.items()):
            yield Finding(
                f"load.{'tokens' if kind == 'tokens' else 'errors'}", "server", "fail",
                f"{one.level.name}: {number} of {counted(asked, 'request')} failed ({kind})",
                measured=first, bound="every request answered, with the tokens asked for",
                remedy=REMEDIES.get(kind, "See the server's log."),
            )  # fmt: skip
        if one.short:
            yield Finding(
                "load.tokens", "server", "note", f"{one.level.name}: {asked} requests gave what was asked",
                measured=f"{one.short} answers ended of themselves before", bound="the tokens asked for",
                remedy="The server takes ignore_eos without a word, and does not do it: speeds are of shorter answers.",
            )  # fmt: skip
        elif not one.errors:
            yield Finding("load.tokens", "server", "pass", f"{one.level.name}: {asked} requests gave what was asked")
        yield from _cached(report, one)
        yield from _late(one)


def _cached(report: LoadReport, one: LevelReport) -> Iterator[Finding]:
    """Prompts that the server knew already are not the load that was asked for."""
    share = report.workload.shared_prefix
    for run in one.runs:
        if run.cached_tokens is not None and run.cached_tokens > share * run.requests:
            yield Finding(
                "load.cached", "cache", "note",
                f"{one.level.name}: prompts were found in the server's cache beyond what they share",
                measured=f"{run.cached_tokens} of {run.prompt_tokens} prompt tokens cached",
                bound=f"{share * run.requests} tokens of the shared prefix",
                remedy="Another run used the same seed: give another --seed, or start the server afresh.",
            )  # fmt: skip
            return


def _late(one: LevelReport) -> Iterator[Finding]:
    late = max(run.late_ms for run in one.runs)
    usual = statistics.median(values_of(one.runs, "ttft_p50_ms") or [0.0])
    if one.level.rate is not None and late > LATE_SHARE * usual and usual:
        yield Finding(
            "load.client", "hardware", "note", f"{one.level.name}: the client fell behind the arrivals",
            measured=f"{late:.1f} ms late at worst", bound=f"{LATE_SHARE:.0%} of the median TTFT ({usual:.1f} ms)",
            remedy="Run the client on a machine or cores of its own.",
        )  # fmt: skip


def comparable(report: LoadReport, baseline: Baseline) -> None:
    """UsageError when the two measured different things, or too little to know their noise."""
    ours = {**report.workload.to_json(), "how": report.how, "prompts": report.prompts, "model": report.model}
    theirs = {**baseline.workload, "how": baseline.how, "prompts": baseline.prompts, "model": baseline.model}
    for name in ours.keys() | theirs.keys():
        if name != "seed" and ours.get(name) != theirs.get(name):
            raise UsageError(
                f"--baseline measured {name} {theirs.get(name)!r}, this run {ours.get(name)!r}; measure the same thing."
            )
    repeats = {one.level: len(one.runs) for one in baseline.levels}
    for level in report.levels:
        known = repeats.get(level.level.name, 0)
        if known < LEAST_REPEATS:
            raise UsageError(
                f"--baseline holds {known} repeats of {level.level.name}; its noise is known "
                f"from {LEAST_REPEATS} on: measure it with --repeats {LEAST_REPEATS} or more."
            )


def check_baseline(report: LoadReport, baseline: Baseline, min_change: float) -> Iterator[Finding]:
    """Slower than the baseline, by more than ``min_change`` and beyond the noise of both sets of repeats?

    All figures of all levels are judged together: unchanged software fails with a probability of DOUBT at most, so each
    one is held to DOUBT over their number.
    """
    here = machine()
    if baseline.machine.get("cpu") != here["cpu"] or baseline.machine.get("cpus") != here["cpus"]:
        yield Finding(
            "load.machine", "hardware", "note", "the baseline is from this machine",
            measured=f"{here['cpus']} x {here['cpu']}",
            bound=f"{baseline.machine.get('cpus')} x {baseline.machine.get('cpu')}",
            remedy="Measure the baseline here: speeds of two machines do not compare.",
        )  # fmt: skip
    before = {one.level: one.runs for one in baseline.levels}
    pairs = [(one, before[one.level.name], figure) for one in report.levels for figure in JUDGED]
    for one, runs, (name, words, better) in pairs:
        yield _compare(one, runs, (name, words, better), DOUBT / len(pairs), min_change)


def _compare(
    one: LevelReport, before: list[Figures], figure: tuple[str, str, int], doubt: float, min_change: float
) -> Finding:
    name, words, better = figure
    now, then = values_of(one.runs, name), values_of(before, name)
    if min(len(now), len(then)) < LEAST_REPEATS or min([*now, *then]) <= 0:
        return Finding(
            "load.regression", "server", "fail" if len(then) > len(now) else "note",
            f"{one.level.name}: {words} can be compared", measured=f"{len(now)} values, {len(then)} in the baseline",
            bound=f"{LEAST_REPEATS} each", remedy="Look at the failed requests first.",
        )  # fmt: skip
    ratio = statistics.median(now) / statistics.median(then)
    low, high = ratio_interval(now, then, doubt)
    worse, surely = (ratio, low) if better < 0 else (1 / ratio, 1 / high)
    said = f"{ratio:.3f} of the baseline ({statistics.median(now):.4g} against {statistics.median(then):.4g})"
    noise = f"[{low:.3f}, {high:.3f}] by the spread of {len(now)} and {len(then)} repeats"
    slower = worse > 1 + min_change
    if slower and surely > 1:
        return Finding(
            "load.regression", "server", "fail", f"{one.level.name}: {words} is not worse than the baseline",
            measured=f"{said}, {noise}", bound=f"a change of {min_change:.0%}, or 1 within the interval",
            remedy="Measure both again, one after the other, on an idle machine; then bisect.",
        )  # fmt: skip
    if slower:
        return Finding(
            "load.regression", "server", "note", f"{one.level.name}: {words} may be worse; the noise does not tell",
            measured=f"{said}, {noise}", bound="1 outside of the interval", remedy="More --repeats narrow it.",
        )  # fmt: skip
    return Finding("load.regression", "server", "pass", f"{one.level.name}: {words} {said}, {noise}")
