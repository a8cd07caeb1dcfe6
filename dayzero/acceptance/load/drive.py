"""Runs a level: a closed loop keeps N requests running, an open loop lets them arrive when they arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dayzero.acceptance.load.outcome import Driver, Outcome
from dayzero.acceptance.load.workload import Level, LoadRequest


@dataclass(frozen=True, slots=True)
class LevelRun:
    """outcomes: in the order in which they ended. seconds: from the first request to the last answer. late_seconds: the
    longest that the client itself was behind an arrival. client_cpu_seconds: what the client took of this machine."""

    outcomes: list[Outcome]
    seconds: float
    late_seconds: float
    client_cpu_seconds: float


async def run_level(
    driver: Driver, level: Level, requests: Sequence[LoadRequest], on_done: Callable[[], None] = lambda: None
) -> LevelRun:
    """Ask all ``requests`` as ``level`` says. on_done: called after each."""
    outcomes: list[Outcome] = []
    late = 0.0

    async def one(request: LoadRequest, due: float | None) -> None:
        nonlocal late
        if due is not None:
            late = max(late, time.perf_counter() - due)
        outcomes.append(await driver.ask(request, due))
        on_done()

    began, cpu = time.perf_counter(), time.process_time()
    async with asyncio.TaskGroup() as group:
        if level.rate is None:
            waiting = iter(requests)

            async def worker() -> None:
                for request in waiting:
                    await one(request, None)

            for _ in range(min(level.concurrency or 1, len(requests))):
                group.create_task(worker())
        else:
            for request in requests:
                due = began + request.at
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(one(request, due))
    return LevelRun(outcomes, time.perf_counter() - began, late, time.process_time() - cpu)
