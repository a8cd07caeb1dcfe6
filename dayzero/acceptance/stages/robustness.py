"""Stage 7: what a service meets in a bad week. Long mixed load, storms of clients that vanish, floods of malformed
requests, more than there is room for; the engine frozen and killed, the server drained and started again."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dayzero.acceptance.accept.stage import Context, Figure, Profile, RunningServer, Stage, StageResult
from dayzero.acceptance.stages import robust_findings as judge
from dayzero.acceptance.stages import robust_load, robust_memory, robust_process, robust_soak
from dayzero.acceptance.stages.long_known import Known, chunk_of, limit_of, look, paper_of
from dayzero.acceptance.stages.robust_same import difference
from dayzero.acceptance.stages.robust_soak import Load, Soak
from dayzero.acceptance.stages.ties import bound_of
from dayzero.arch.cost import cache_cost
from dayzero.errors import UserError
from dayzero.finding import Finding

RUNNING, WAITING, STALL_SECONDS, DRAIN_SECONDS = 4, 16, 1.0, 60.0
STEP_TOKENS = 32  # short steps: few sizes to warm up, and what counts as frozen is five times the slowest of them
WARM_ROUNDS, WARM_SECONDS = 2, 10.0  # a further round is asked where the first was quick
MORE_ROUNDS = 2  # of levels, where the first one falls off a cliff
LEAST_POOL = 2 << 20
READY_SECONDS, READY_STARTS = 120.0, 3


@dataclass(frozen=True, slots=True)
class Size:
    """soak: seconds. pool_tokens: of the cache, small enough to be in use as a whole before the warm-up ends: memory of
    the pool becomes resident when a block is used for the first time, which is no growth of the server."""

    soak: float
    storm: int
    flood: int
    burst: int
    levels: tuple[int, ...]
    pool_tokens: int
    timeout: float
    longer: int = 3


SIZES: dict[Profile, Size] = {
    "quick": Size(24.0, 60, 120, 48, (1, 4, 12), 512, 60.0, 1),
    "release-day": Size(600.0, 400, 1000, 128, (1, 4, 16, 64), 8192, 120.0),
    "long": Size(3600.0, 2000, 10_000, 256, (1, 4, 16, 64), 16_384, 120.0),
}


def run(context: Context) -> StageResult:
    """Errors: those of starting a server."""
    size = SIZES[context.profile]
    with context.progress("robustness") as bar:
        if not context.services.own:
            server = context.services.shared()
            known, load = _known(context, server, bar.note)
            soak, found, facts = _loaded(context, server, known, load, bar.note)
            found += judge.not_ours()
        else:
            bar.note("starting a server of its own")
            with contextlib.ExitStack() as stack:
                began = time.monotonic()
                server, small = _started(context, size, stack)
                started = time.monotonic() - began
                known, load = _known(context, server, bar.note)
                soak, found, facts = _loaded(context, server, known, load, bar.note, small)
                found += _hurt(server, known, load, started, bar.note)
            bar.note("starting it again")
            found.append(_again(context, size, load))
    return StageResult(tuple(found), tuple(figures(soak)), facts, samples(soak))


def _known(context: Context, server: RunningServer, told: Callable[[str], None]) -> tuple[Known, Load]:
    """The server, asked with the patience that what it needs for single answers calls for; and the load."""
    size = SIZES[context.profile]
    known = look(context, server, size.timeout)
    load = robust_soak.load_of(known, context.seed, told, size.longer)
    return replace(known, asker=known.asker.patient(robust_soak.patience(load, RUNNING + WAITING))), load


def _started(context: Context, size: Size, stack: contextlib.ExitStack) -> tuple[RunningServer, bool]:
    """A server with little room, and whether its pool is as small as it should be."""
    options = [
        "--max-running", str(RUNNING), "--max-waiting", str(WAITING), "--max-step-tokens", str(STEP_TOKENS),
        "--stall-seconds", str(STALL_SECONDS), "--drain-seconds", str(DRAIN_SECONDS),
    ]  # fmt: skip
    pool = _pool_bytes(context, size)
    if pool is not None:
        try:
            return stack.enter_context(context.services.private(*options, "--pool-bytes", str(pool))), True
        except UserError:
            pass  # the smallest sequence of this model needs more: as large as it likes, then
    return stack.enter_context(context.services.private(*options)), False


def _pool_bytes(context: Context, size: Size) -> int | None:
    """For ``pool_tokens`` tokens in float32, or None where the model's caches are not known."""
    paper, _ = paper_of(context.subject.source, context.subject.recipe)
    if paper is None:
        return None
    cost = cache_cost(paper.paper.spec, "bf16")
    tokens = min(size.pool_tokens, paper.paper.spec.max_positions)
    sequences = 4 * RUNNING  # with snapshots beside the working state
    return max(LEAST_POOL, 2 * (tokens * cost.per_token + sequences * (cost.window + cost.per_sequence)))


def _loaded(
    context: Context, server: RunningServer, known: Known, load: Load, told: Callable[[str], None], small: bool = False
) -> tuple[Soak, list[Finding], dict[str, Any]]:
    """Everything that load alone can do to a server."""
    size, seed, bound = SIZES[context.profile], context.seed, 0.0 if known.reference else bound_of(known.dtype)
    longest = _longest(known, seed) if small else None
    told(f"{size.storm} clients that vanish")
    found = judge.storm(_storm(known, size.storm, seed, told), bound)
    told(f"{size.flood} malformed requests")
    found += judge.flood(robust_load.flood(known.asker, size.flood, seed, known.own))
    told("more and more at once")
    room = RUNNING + WAITING if context.services.own else None
    levels = _levels(size.levels, room)
    rounds = robust_load.scale(server, known, levels, known.asker.timeout, seed)
    if known.exact and judge.falls(levels, rounds):  # one look at a busy machine is no cliff
        told("more and more at once, again")
        rounds += robust_load.scale(server, known, levels, known.asker.timeout, seed + 1, MORE_ROUNDS)
    found += judge.scale(levels, rounds, known.exact)
    told(f"{size.burst} requests in one burst")
    found += judge.burst(_burst(known, size.burst, seed, room), room)
    if small:
        told("a step of every size")
        found.append(_warm(context, server, known))
    # last of the loads: what they have allocated for the first time is there
    told(f"mixed load for {size.soak:.0f} seconds")
    soak = robust_soak.soak(known, load, size.soak, robust_soak.memory_of(server.process_ids), bound, seed)
    left = robust_soak.held(known.asker)
    found += [*judge.soak(soak, load, known, bound), judge.memory(soak, small), judge.held("soak", left)]
    found.append(judge.fragmentation(longest, _longest(known, seed + 1) if small else None, limit_of(known)))
    facts = {
        "soak_seconds": round(soak.seconds, 1), "requests": dict(soak.counts), "reference_operators": known.reference,
        "bound": bound, "pool_tokens": known.pool_tokens,
    }  # fmt: skip
    return soak, found, facts


def _storm(known: Known, clients: int, seed: int, told: Callable[[str], None]) -> robust_load.Storm:
    """Once more where it seems that the server works on: clients of a busy machine may have left too late."""
    seen = robust_load.storm(known, clients, seed)
    for again in range(1, MORE_ROUNDS + 1):
        if not judge.works_on(seen):
            break
        told(f"{clients} clients that vanish, again")
        seen = robust_load.storm(known, clients, seed + again)
    return seen


def _burst(known: Known, clients: int, seed: int, room: int | None) -> robust_load.Burst:
    """Once more, with long answers alone, where nobody was refused: a client that is slower than its server does not
    have so many under way at once."""
    seen = robust_load.burst(known, clients, seed)
    return robust_load.burst(known, clients, seed + 1, clients) if judge.is_open(seen, room) else seen


def _levels(levels: tuple[int, ...], room: int | None) -> tuple[int, ...]:
    """As far as the queue holds them: what is beyond it is refused, which ``burst`` looks at."""
    return levels if room is None else tuple(dict.fromkeys(min(number, room) for number in levels))


def _warm(context: Context, server: RunningServer, known: Known) -> Finding:
    """A step of every size, so that what libraries keep for each size of a product is kept before memory is watched:
    for a small model this is more than the model, and looks like a leak for as long as new sizes come."""
    rng, sizes = random.Random(f"{context.seed} warm-up"), min(STEP_TOKENS, (limit_of(known) or 1 << 30) - 1)
    before = sum(robust_memory.resident(server.process_ids))
    began = time.monotonic()
    for number in range(WARM_ROUNDS):
        if number and time.monotonic() - began > WARM_SECONDS:
            break
        for tokens in range(1, sizes + 1):
            known.asker.complete(known.prompt(rng, tokens), 1)
    grown = sum(robust_memory.resident(server.process_ids)) - before
    return judge.sizes(grown, sizes, chunk_of(context.subject.serve, None))


def _longest(known: Known, seed: int) -> str:
    """Why the longest sequence was not answered; empty when it was."""
    limit = limit_of(known)
    if limit is None:
        return "the server does not say how long a prompt may be"
    answer = known.asker.complete(known.prompt(random.Random(f"{seed} longest"), limit - 1), 1)
    return answer.error


def _hurt(
    server: RunningServer, known: Known, load: Load, started: float, told: Callable[[str], None]
) -> list[Finding]:
    """Freeze, kill and drain, in this order: nothing lives behind the last. started: seconds that its start took."""
    bound = 0.0 if known.reference else bound_of(known.dtype)
    case = (load.prompts[2], load.alone[2])
    if not case[1].good or len(server.process_ids) < 2:
        return judge.not_ours(f"there is no engine process to hurt, or no answer to hold it to: {case[1].error}")
    told("the engine frozen")
    found = judge.frozen(robust_process.freeze(server, known, case, STALL_SECONDS, bound))
    told("the engine killed")
    began = time.monotonic()
    ready = _ready_seconds(started)
    found += judge.killed(robust_process.kill(server, known, case, bound, ready), ready)
    told(f"back after {time.monotonic() - began:.0f} seconds; draining")
    return found + judge.drained(
        robust_process.drain(server, known, load.prompts[0], DRAIN_SECONDS + 15), DRAIN_SECONDS
    )


def _ready_seconds(started: float) -> float:
    """Time for the engine to be started again: reading weights takes as long as it did, or a few times that."""
    return max(READY_SECONDS, READY_STARTS * started)


def _again(context: Context, size: Size, load: Load) -> Finding:
    """A second start: the same answers from other processes."""
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        try:
            server, _ = _started(context, size, stack)
        except UserError as error:
            return judge.restarted([], str(error), time.monotonic() - began)
        seconds = time.monotonic() - began
        known = look(context, server, size.timeout)
        bound = 0.0 if known.reference else bound_of(known.dtype)
        seen = [
            difference(alone, known.asker.complete(prompt, count, logprobs=2), bound)
            for prompt, count, alone in zip(load.prompts[:4], load.sizes[:4], load.alone[:4], strict=True)
        ]
    return judge.restarted(seen, "", seconds)


def figures(soak: Soak) -> list[Figure]:
    """Memory over time, by process."""
    if not soak.memory or not soak.memory[0][1]:
        return []
    count = min(len(each) for _, each in soak.memory)
    names = ["HTTP process", "engine process", *(f"process {i}" for i in range(2, count))]
    x = [round(t, 2) for t, _ in soak.memory]
    series = {name: [each[i] / 2**20 for _, each in soak.memory] for i, name in enumerate(names[:count])}
    return [
        Figure("curves", "Memory under mixed load", {"x": x, "series": series, "bounds": {}}, "seconds", "MiB resident")
    ]


def samples(soak: Soak) -> dict[str, dict[str, float]]:
    """Counts of the mixed load, a second: how much went through it."""
    return {"soak, a second": {kind: number / soak.seconds for kind, number in soak.counts.items()}}


STAGE = Stage("robustness", "Robustness", frozenset({"service"}), run, ends_shared=True)
