"""Stage 6: how fast. Latency and throughput against concurrency, hits of the prefix cache, roofline, regression."""

from __future__ import annotations

import statistics
from dataclasses import replace
from typing import Any

from dayzero.acceptance.accept.stage import Context, Figure, Stage, StageResult
from dayzero.acceptance.load.figures import medians
from dayzero.acceptance.load.judge import LEAST_REPEATS, check_run
from dayzero.acceptance.load.outcome import Outcome
from dayzero.acceptance.load.report import LevelReport, LoadReport
from dayzero.acceptance.load.target import check_loopback
from dayzero.acceptance.load.wire import Address
from dayzero.acceptance.stages import perf_floor
from dayzero.acceptance.stages.long_known import Known, look, option
from dayzero.acceptance.stages.perf_load import PLANS, Plan, measure, plan_for, regression
from dayzero.console import plain
from dayzero.errors import MachineError, UsageError
from dayzero.finding import Finding
from dayzero.hardware import Hardware
from dayzero.planner.detect import detect

GAIN = 0.9  # a hit's TTFT over a cold one's: a hit that saves less than a tenth saves nothing
TELLING_SECONDS = 0.05  # cold; what is shorter is mostly not the prompt
SPREAD = 0.9  # of one request's throughput that several together must reach


def run(context: Context) -> StageResult:
    """Errors: those of starting a server."""
    server = context.services.shared()
    known = look(context, server, PLANS[context.profile].timeout)
    if not known.exact:
        why = "the server refuses ignore_eos, so how long an answer gets is the model's to say, and no speed is held"
        claim = "requests of one length are answered at each concurrency"
        return StageResult((Finding("performance.load", "server", "not applicable", claim, measured=why),))
    plan = plan_for(context.profile, known)
    with context.progress("load") as bar:
        report, pairs = measure(server, known, plan, context.seed, bar.note)
    together = _together(report)
    if together.verdict == "fail":  # one look at a busy machine is no fault
        best = max(report.levels[1:], key=_output).level.concurrency or 1
        few = replace(plan, levels=(plan.levels[0], best), repeats=LEAST_REPEATS, pairs=0)
        with context.progress("load, again") as bar:
            together = _together(measure(server, known, few, context.seed + 1, bar.note)[0])
    found = [*check_run(report), *_speeds(report), together]
    found += [_hits(known, pairs, plan), _hit_speed(pairs), *regression(report, context.baseline)]
    drawn, device = curves(report), _device(context)
    if known.paper is None:
        found.append(perf_floor.not_applicable(f"there is no plan: {known.why_no_paper}"))
    elif isinstance(device, str):
        found.append(perf_floor.not_applicable(device))
    else:
        measured = device.target == "cpu"
        hardware = perf_floor.measured_cpu(device) if measured else device
        shares = perf_floor.shares(report, plan, known.paper, hardware, known)
        found += perf_floor.findings(shares, hardware, measured)
        drawn += [perf_floor.figure(shares)] if shares else []
    return StageResult(tuple(found), tuple(drawn), {"load": plain(report)}, _samples(report, pairs))


def _speeds(report: LoadReport) -> list[Finding]:
    """A speed alone is a fact, which nothing can be held to: a first acceptance passes with it. What can be amiss is
    that it was not measured well enough for the next one to be held against."""
    out = []
    for one in report.levels:
        middle = medians(one.runs)
        said = [f"{word} {middle[key]:.4g} {unit}" for word, key, unit in _SAID if middle[key] is not None]
        whole = sum(run.errors == 0 and bool(run.output_tok_s) for run in one.runs)
        good = whole >= LEAST_REPEATS
        out.append(
            Finding(
                "performance.speed", "server", "pass" if good else "note",
                f"{one.level.name}: speed is measured often enough to be a baseline",
                measured=f"{', '.join(said)}; {whole} of {len(one.runs)} runs without an error",
                bound=f"{LEAST_REPEATS} runs; the speed itself is held to nothing but a --baseline",
                remedy="" if good else "See why requests failed; a later acceptance cannot be held against this one.",
            )
        )  # fmt: skip
    return out


_SAID = (("TTFT p50", "ttft_p50_ms", "ms"), ("p99", "ttft_p99_ms", "ms"), ("TPOT", "tpot_mean_ms", "ms"),
         ("output", "output_tok_s", "tok/s"))  # fmt: skip


def _output(one: LevelReport) -> float:
    """Output tokens a second, the median of all runs."""
    return medians(one.runs)["output_tok_s"] or 0.0


def _together(report: LoadReport) -> Finding:
    """Batching that costs more than it brings is a scheduler's fault."""
    rates = [(one.level.name, _output(one)) for one in report.levels]
    (_, alone), (name, most) = rates[0], max(rates[1:], key=lambda rate: rate[1])
    good = most >= SPREAD * alone and most > 0
    return Finding(
        "performance.together", "scheduler", "pass" if good else "fail",
        "requests that run together are answered no slower in sum than one after the other",
        measured=f"{most:.4g} output tok/s at {name}, {alone:.4g} alone", bound=f"{SPREAD:.0%} of alone",
        remedy="" if good else "Something is done once for each request: see engine_host_share in /metrics.",
    )  # fmt: skip


def _hits(known: Known, pairs: list[tuple[Outcome, Outcome]], plan: Plan) -> Finding:
    """The server's own word for what it found in its cache."""
    claim = f"a prompt of {plan.prefix} tokens that is asked again comes from the prefix cache"
    told = [again.cached_tokens for _, again in pairs if again.error is None and again.cached_tokens is not None]
    short = known.page is not None and plan.prefix < 2 * known.page
    if not told or not known.prefix_cache or short:
        why = "the prefix cache is off" if not known.prefix_cache else "the prompt is shorter than two pages"
        why = why if short or not known.prefix_cache else "the server does not say what it found"
        return Finding("performance.prefix.hits", "cache", "not applicable", claim, measured=why)
    least = min(told)
    good = 2 * least >= plan.prefix
    return Finding(
        "performance.prefix.hits", "cache", "pass" if good else "fail", claim,
        measured=f"{least} tokens at least", bound=f"half of {plan.prefix}",
        remedy="" if good else "See why a hit is short in the log; hybrids need a snapshot: --snapshot-tokens.",
    )  # fmt: skip


def _hit_speed(pairs: list[tuple[Outcome, Outcome]]) -> Finding:
    """A hit that is claimed must save time."""
    claim = "the first token of a prompt in the cache comes sooner than from scratch"
    good = [(a, b) for a, b in pairs if a.error is None and b.error is None and b.cached_tokens]
    if not good:
        why = "no prompt was found in the cache, by the server's own word"
        return Finding("performance.prefix.ttft", "cache", "not applicable", claim, measured=why)
    cold, hit = (statistics.median(pair[i].ttft for pair in good) for i in (0, 1))
    said = f"{1e3 * hit:.4g} ms instead of {1e3 * cold:.4g} ms (median of {len(good)})"
    if cold < TELLING_SECONDS:
        why = f"{said}: prompts of this length are too quick to tell"
        return Finding("performance.prefix.ttft", "cache", "not applicable", claim, measured=why)
    saves = hit < GAIN * cold
    return Finding(
        "performance.prefix.ttft", "cache", "pass" if saves else "fail", claim, measured=said,
        bound=f"{GAIN:.0%} of the cold time",
        remedy="" if saves else "The server counts hits, and computes the prompt all the same.",
    )  # fmt: skip


def _device(context: Context) -> Hardware | str:
    """What the server runs on, or why that is not known."""
    if context.subject.url is not None:
        try:
            check_loopback(Address.parse(context.subject.url))
        except UsageError as error:
            return f"the server's device is not known: {error}"
    asked = option(context.subject.serve, "--device")
    try:
        hardware, devices = detect("cpu" if asked == "cpu" else "auto")
    except MachineError as error:
        return str(error)
    if context.subject.url is not None and hardware.target != "cpu" and devices > 1:
        return f"this machine has {devices} devices, and the server does not say how many it uses"
    return hardware


def curves(report: LoadReport) -> list[Figure]:
    """Latencies and throughput against concurrency."""
    x = [one.level.value for one in report.levels]
    middle = [medians(one.runs) for one in report.levels]
    names = {"TTFT p50": "ttft_p50_ms", "TTFT p99": "ttft_p99_ms", "TPOT": "tpot_mean_ms", "gap p99": "itl_p99_ms"}
    times = {word: [row[key] for row in middle] for word, key in names.items()}
    rates = {"output": [row["output_tok_s"] for row in middle], "prompt and output": [r["total_tok_s"] for r in middle]}
    return [
        Figure(
            "curves", title, {"x": x, "series": series, "bounds": {}}, "requests at once", unit, log_x=True, log_y=log
        )
        for title, series, unit, log in (
            ("Latency against concurrency", times, "ms", True),
            ("Throughput against concurrency", rates, "tokens a second", False),
        )
    ]


def _samples(report: LoadReport, pairs: list[tuple[Outcome, Outcome]]) -> dict[str, dict[str, Any]]:
    """One value a level and repeat, and one a prompt."""
    out: dict[str, dict[str, Any]] = {}
    for word, key, unit in _SAID:
        out[f"{word} ({unit})"] = {
            f"{one.level.name}, repeat {i}": value
            for one in report.levels
            for i, figures in enumerate(one.runs)
            if (value := getattr(figures, key)) is not None
        }
    for which, name in enumerate(("cold", "hit")):
        told = {f"prompt {i}": 1e3 * pair[which].ttft for i, pair in enumerate(pairs) if pair[which].error is None}
        out[f"TTFT of a {name} prompt (ms)"] = told
    return {name: values for name, values in out.items() if values}


STAGE = Stage("performance", "Performance", frozenset({"service"}), run)
