"""The engine frozen and killed, the server asked to end, and started again. Only for a server that is ours to hurt."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from dayzero.acceptance.accept.stage import RunningServer
from dayzero.acceptance.stages.long_known import Known, limit_of
from dayzero.acceptance.stages.metrics import RUNNING, read_numbers
from dayzero.acceptance.stages.robust_ask import Completion, Prompt, eventually, pace
from dayzero.acceptance.stages.robust_same import Difference, difference

STEPS_OF_SLACK = 5  # docs/operations.md, Probes: frozen is five times the slowest of 100 steps, where that is longer
DEATH_SECONDS = 2.0  # docs/operations.md, Processes: /health turns 503 within two seconds
POLL_SLACK = 1.0  # of this client, on a machine that is busy with the server
PROBES = 10  # further ones, as long as one takes now: a slow machine looks less often
STREAMS = 3
PROBE_TOKENS, ANSWER_SECONDS = 8, 5.0
BEGIN_SECONDS = 30.0  # for an answer to begin
BEGINNINGS = 4  # of answers that are over before anything can happen to them


@dataclass(frozen=True)
class Frozen:
    """bound: seconds in which /health has to say so; seen: in which it did, None: not at all. back: until it was well
    again. answer: to the request that waited. well: /health was 200 before."""

    bound: float
    seen: float | None
    back: float | None
    answer: Difference
    well: bool = True


@dataclass(frozen=True)
class Killed:
    """ends: how each stream ended. sick: seconds until /health said so. ready: until requests were taken again. answer:
    of one behind it. asked: tokens that each stream was to have."""

    ends: list[Completion]
    sick: float | None
    ready: float | None
    answer: Difference
    asked: int = 0


@dataclass(frozen=True)
class Drained:
    """running: the answer that had begun. asked: tokens it was to have. late: statuses of requests that came behind the
    signal, in order. code: exit code. seconds: from the signal to the end. ran: the answer still ran at the signal."""

    running: Completion
    asked: int
    late: list[int]
    code: int
    seconds: float
    ran: bool = True


def engine_of(server: RunningServer) -> int:
    return server.process_ids[1]


def freeze(server: RunningServer, known: Known, case: tuple[Prompt, Completion], stall: float, bound: float) -> Frozen:
    """Stop the engine process with work queued; let it go on. case: a prompt and what it got alone."""
    pid, (prompt, alone) = engine_of(server), case
    slowest = read_numbers(known.asker.client).get("engine_slowest_step_seconds", 0.0)
    # the request has to get there first, which takes no longer than its whole answer did
    limit = max(stall, STEPS_OF_SLACK * slowest) + alone.seconds + _slack(known)
    well = eventually(lambda: known.asker.status("/health") == 200, limit) is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(known.asker.complete, prompt, len(alone.tokens) or 8)
            try:
                seen = eventually(lambda: known.asker.status("/health") == 503, limit)
            finally:
                os.kill(pid, signal.SIGCONT)
            answer = waiting.result()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
    back = eventually(lambda: known.asker.status("/health") == 200, limit)
    return Frozen(limit, seen, back, difference(alone, answer, bound), well)


def kill(
    server: RunningServer, known: Known, case: tuple[Prompt, Completion], bound: float, ready_seconds: float
) -> Killed:
    """Kill the engine process under streams that run."""
    (prompt, alone), asked, slack = case, long_answer(known), _slack(known)
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = _begin(pool, known, prompt, STREAMS, asked)
        os.kill(engine_of(server), signal.SIGKILL)
        sick = eventually(lambda: known.asker.status("/health") == 503, DEATH_SECONDS + slack, every=0.02)
        ends = [stream.result() for stream in streams]
    ready = eventually(lambda: known.asker.status("/ready") == 200, ready_seconds, every=0.2)
    answer = known.asker.complete(prompt, len(alone.tokens) or 8)
    return Killed(ends, sick, ready, difference(alone, answer, bound), asked)


def drain(server: RunningServer, known: Known, prompt: Prompt, seconds: float) -> Drained:
    """Ask the server to end while an answer runs, one that takes a few seconds and not the whole drain."""
    each = pace(known.asker, prompt, 1, min(PROBE_TOKENS, long_answer(known)))
    asked = max(2, min(long_answer(known), round(ANSWER_SECONDS / each)))
    late, done = list[int](), threading.Event()
    with ThreadPoolExecutor(2) as pool:
        (running,) = _begin(pool, known, prompt, 1, asked)
        began, ran = time.monotonic(), not running.done()
        ending = pool.submit(server.stop, seconds)
        ending.add_done_callback(lambda _: done.set())
        while not done.is_set() and len(late) < 200:
            late.append(known.asker.complete(prompt, 1).status)
            done.wait(0.05)
        return Drained(running.result(), asked, late, ending.result(), time.monotonic() - began, ran)


def long_answer(known: Known) -> int:
    """Tokens of an answer that still runs when something happens to it."""
    return max(2, min(300, (limit_of(known) or 1 << 30) // 2))


def _begin(
    pool: ThreadPoolExecutor, known: Known, prompt: Prompt, count: int, tokens: int
) -> Sequence[Future[Completion]]:
    """So many streams, running. A client that is slower than its server may find them over: they are begun anew then,
    BEGINNINGS times in all."""
    usage = {"include_usage": True}
    ask: Callable[[], Completion] = lambda: known.asker.complete(  # noqa: E731
        prompt, tokens, stream=True, stream_options=usage
    )
    for left in reversed(range(BEGINNINGS)):
        streams = [pool.submit(ask) for _ in range(count)]
        over = lambda: any(stream.done() for stream in streams)  # noqa: E731, B023
        runs = lambda: read_numbers(known.asker.client).get(RUNNING, 0) >= count  # noqa: E731
        eventually(lambda: over() or runs(), BEGIN_SECONDS, every=0.01)  # noqa: B023
        if not over() or not left:
            break
        wait(streams)
    return streams


def _slack(known: Known) -> float:
    began = time.monotonic()
    known.asker.status("/health")
    return POLL_SLACK + PROBES * (time.monotonic() - began)
