"""The load of the performance stage: the same seeded requests as ``dayzero bench``, at several concurrencies."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from dayzero.acceptance.accept.stage import Profile, RunningServer
from dayzero.acceptance.load.drive import run_level
from dayzero.acceptance.load.figures import figures
from dayzero.acceptance.load.judge import LEAST_REPEATS, check_baseline, comparable
from dayzero.acceptance.load.outcome import Driver, Outcome
from dayzero.acceptance.load.report import Baseline, LevelReport, LoadReport
from dayzero.acceptance.load.streamed import Body, HttpDriver
from dayzero.acceptance.load.wire import Address, Pool
from dayzero.acceptance.load.workload import (
    IdPrompts,
    Lengths,
    Level,
    LoadRequest,
    Prompt,
    Prompts,
    Workload,
    requests,
)
from dayzero.acceptance.stages.long_known import Known, limit_of
from dayzero.errors import UsageError
from dayzero.finding import Finding

MIN_CHANGE = 0.05  # slower by less than this is no regression
WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked. seconds: after which no further repeat is begun, once there are enough to know the noise."""

    prompt: int
    output: int
    levels: tuple[int, ...]
    requests: int | None
    repeats: int
    seconds: float
    timeout: float
    prefix: int  # tokens of the prompts that are asked twice
    pairs: int  # of them


PLANS: dict[Profile, Plan] = {
    "quick": Plan(64, 16, (1, 2, 4), 4, 3, 45.0, 120.0, 256, 3),
    "release-day": Plan(512, 64, (1, 4, 16, 64), None, 3, 1800.0, 600.0, 2048, 5),
    "long": Plan(1024, 128, (1, 2, 4, 8, 16, 32, 64, 128), None, 5, 7200.0, 1200.0, 8192, 10),
}


def plan_for(profile: Profile, known: Known) -> Plan:
    """The profile's plan, with lengths that fit into the server's limit."""
    plan, limit = PLANS[profile], limit_of(known) or 1 << 30
    prompt, output = min(plan.prompt, limit // 2), max(2, min(plan.output, limit // 4))
    return replace(plan, prompt=max(1, prompt), output=output, prefix=min(plan.prefix, limit - 2))


class LooseText:
    """Prompts for a server that takes no ids: words, whose tokens only the server counts. Implements Prompts."""

    kind = "text"

    def __init__(self, known: Known) -> None:
        self._known = known

    def make(self, rng: random.Random, num_tokens: int) -> tuple[Prompt, int | None]:
        return self._known.prompt(rng, num_tokens), None


def prompts_for(known: Known, seed: int) -> Prompts:
    return IdPrompts(known.vocab, 0, seed) if known.ids else LooseText(known)


class Opened:
    """A connection pool and a driver over it, for one event loop."""

    def __init__(self, server: RunningServer, known: Known, timeout: float) -> None:
        self._pool = Pool(Address.parse(server.address), dict(server.headers))
        body = Body(known.asker.api, server.model, known.ids, usual=known.asker.usual)
        self.driver: Driver = HttpDriver(self._pool, body, timeout, held=known.own)

    def __enter__(self) -> Opened:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.close()


def measure(
    server: RunningServer, known: Known, plan: Plan, seed: int, told: Callable[[str], None]
) -> tuple[LoadReport, list[tuple[Outcome, Outcome]]]:
    """The report of all levels, and pairs of one prompt asked from scratch and again."""
    return asyncio.run(_measure(server, known, plan, seed, told))


async def _measure(
    server: RunningServer, known: Known, plan: Plan, seed: int, told: Callable[[str], None]
) -> tuple[LoadReport, list[tuple[Outcome, Outcome]]]:
    workload = Workload(
        Lengths(plan.prompt, plan.prompt), Lengths(plan.output, plan.output), num_requests=plan.requests, seed=seed
    )
    prompts = prompts_for(known, seed)
    levels = [LevelReport(Level(concurrency=number)) for number in plan.levels]
    report = LoadReport(server.address, server.model, "http", prompts.kind, workload, levels)
    with Opened(server, known, plan.timeout) as opened:
        first = requests(workload, Level(concurrency=1), f"warm-up of acceptance {seed}", prompts)
        for number in range(WARM_UPS):
            await opened.driver.ask(first[number % len(first)])
        began = time.monotonic()
        for repeat in range(plan.repeats):
            if repeat >= LEAST_REPEATS and time.monotonic() - began > plan.seconds:
                break
            for one in levels:
                told(f"{one.level.name}, repeat {repeat + 1} of {plan.repeats}")
                asked = requests(workload, one.level, f"acceptance {repeat}", prompts)
                done = await run_level(opened.driver, one.level, asked)
                one.add(figures(done), done.outcomes)
        told("prompts asked twice")
        pairs = await _pairs(opened.driver, prompts, plan, seed)
    return report, pairs


async def _pairs(driver: Driver, prompts: Prompts, plan: Plan, seed: int) -> list[tuple[Outcome, Outcome]]:
    rng, out = random.Random(f"{seed} prefix pairs"), []
    for _ in range(plan.pairs):
        prompt, counted = prompts.make(rng, plan.prefix)
        request = LoadRequest(prompt, counted, 1)
        out.append((await driver.ask(request), await driver.ask(request)))
    return out


def regression(report: LoadReport, record: Mapping[str, Any] | None) -> list[Finding]:
    """Against the load of an earlier record: slower beyond the noise of both fails."""
    claim = "no speed is worse than in the baseline"
    if record is None:
        why = "no baseline was given: --baseline RECORD holds speeds against an earlier acceptance"
        return [Finding("load.regression", "server", "not applicable", claim, measured=why)]
    try:
        baseline = _baseline_of(record)
        comparable(report, baseline)
    except UsageError as error:
        return [
            Finding(
                "load.regression", "server", "fail", claim, measured=f"they cannot be compared: {error}",
                bound="the same load, often enough to know its noise",
                remedy="Accept the earlier version again with the same profile, seed and server options.",
            )
        ]  # fmt: skip
    return list(check_baseline(report, baseline, MIN_CHANGE))


def _baseline_of(record: Mapping[str, Any]) -> Baseline:
    stages = record.get("stages")
    named = [s for s in stages if isinstance(s, dict) and s.get("name") == "performance"] if stages else []
    load = (named[0].get("facts") or {}).get("load") if named else None
    if load is None:
        raise UsageError("--baseline holds no speeds: its performance stage did not run.")
    try:
        return msgspec.convert(load, Baseline)
    except msgspec.ValidationError as error:
        raise UsageError(f"--baseline holds speeds of another form: {error}.") from error
