"""A long mixed load: does memory grow, does a token get lost or come twice, is anything held behind it?

Among the requests are long and short ones, shared prefixes, streams and whole answers, clients that leave, and bad
requests. Each answer is held against what the same prompt got alone before the load began.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero.acceptance.accept.http import NoAnswer
from dayzero.acceptance.stages import robust_memory
from dayzero.acceptance.stages.answers import Api
from dayzero.acceptance.stages.long_known import Known, limit_of
from dayzero.acceptance.stages.metrics import HELD, read_numbers
from dayzero.acceptance.stages.robust_ask import Asker, Completion, Prompt, eventually
from dayzero.acceptance.stages.robust_same import difference

NUM_PROMPTS, NUM_CLIENTS, SAMPLE_SECONDS, SETTLE_SECONDS = 12, 8, 0.2, 20.0
LONGER = 4
# Of one number drawn from 0 to 1: below the first a bad request, then a client that leaves, a stream, a whole answer.
BAD_ONES, LEAVERS, STREAMED = 0.1, 0.3, 0.65
FIRST = (0.0, BAD_ONES, LEAVERS, STREAMED)  # of each client's first request: all kinds come, however slow the server is
LEAVERS_TOKENS = 4  # times as many as an answer has that somebody waits for
SETTLE_SHARE = 1 / 6  # of the time that one answer is given
SHARED_TOKENS, OWN_TOKENS = 90, 60
USER = {"role": "user", "content": "x"}
BAD: Mapping[Api, tuple[Mapping[str, Any], ...]] = {
    "completions": (
        {"prompt": [[]], "max_tokens": 1}, {"prompt": "x", "temperature": "hot"}, {"prompt": {"a": 1}},
    ),
    "chat": (
        {"messages": []}, {"messages": [USER], "temperature": "hot"}, {"messages": {"a": 1}},
    ),
}  # fmt: skip
# What keeps a server busy for good where it is taken, so it is sent to our own alone (as ``refusals.ENDLESS``).
ENDLESS: Mapping[str, Any] = {"max_tokens": 10**9}
# And what other servers are known to take: some read a number below 0 as no limit, which is as much as ENDLESS, and one
# that serves a single model may not look at its name (as ``refusals._model``).
OURS: tuple[Mapping[str, Any], ...] = (ENDLESS, {"max_tokens": -1}, {"model": "nobody"})


def bad_requests(known: Known) -> list[Mapping[str, Any]]:
    """Fields that make a good request one that no server may take."""
    return [*BAD[known.asker.api], *(OURS if known.own else ())]


@dataclass
class Soak:
    """memory: (seconds, bytes of each process). wrong: answers that differ from the one alone, and bad requests that
    were not refused. failed: good requests without an answer. parted: answers that went another way at a tie."""

    counts: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, list[int]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    not_refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    parted: int = 0
    seconds: float = 0.0

    def series(self, process: int | None = None) -> list[tuple[float, float]]:
        """(seconds, bytes) of all processes together, or of one."""
        return [(t, float(sum(each) if process is None else each[process])) for t, each in self.memory]


@dataclass(frozen=True)
class Load:
    """What is asked. prompts and how many tokens each answer has; alone: what each got with nobody beside it. bad:
    fields of requests that are to be refused."""

    prompts: Sequence[Prompt]
    sizes: Sequence[int]
    alone: Sequence[Completion]
    bad: Sequence[Mapping[str, Any]] = BAD["completions"]


def load_of(known: Known, seed: int, told: Callable[[str], None] = lambda text: None, longer: int = 3) -> Load:
    """Prompts that share beginnings, each asked alone once. longer: tokens that each answer has more than the last."""
    deal, limit = random.Random(f"{seed} soak"), limit_of(known) or 1 << 30
    shared_tokens, own_tokens = min(SHARED_TOKENS, max(2, limit // 4)), min(OWN_TOKENS, max(2, limit // 5))
    base, prompts = known.prompt(deal, shared_tokens), list[Prompt]()
    for _ in range(NUM_PROMPTS):
        cut, own = deal.randrange(1, len(base)), known.prompt(deal, deal.randrange(1, own_tokens + 1))
        if isinstance(base, list) and isinstance(own, list):
            prompts.append([*base[:cut], *own])
        else:
            prompts.append(f"{base[:cut]} {own}")
    sizes = [min(4 + longer * i, max(1, limit // 4)) for i in range(NUM_PROMPTS)]
    alone = []
    for number, (prompt, size) in enumerate(zip(prompts, sizes, strict=True)):
        told(f"prompt {number + 1} of {NUM_PROMPTS} alone")
        alone.append(known.asker.complete(prompt, size, logprobs=2))
    return Load(prompts, sizes, alone, bad_requests(known))


def patience(load: Load, room: int) -> float:
    """Seconds in which any answer of the load has come from a sound server, however slow: as if all that it has room
    for, as long as those of clients that leave, were computed before it one after another. By the median of what
    answers take alone, twice, since the first ones may wait for kernels that are compiled."""
    alone = [one.seconds for one in load.alone if one.good]
    return 2 * LEAVERS_TOKENS * room * statistics.median(alone) if alone else 0.0


def soak(known: Known, load: Load, seconds: float, memory: Callable[[], list[int]], bound: float, seed: int) -> Soak:
    """Ask for so long, and on a busy machine up to LONGER times that, until there are samples enough for a slope.
    memory: resident bytes of the server's processes. bound: of ``robust_same.difference``."""
    out, lock, stop = Soak(), threading.Lock(), threading.Event()
    clients = [
        threading.Thread(target=_client, args=(known.asker, load, out, (lock, stop), bound, seed, i), daemon=True)
        for i in range(NUM_CLIENTS)
    ]
    began = time.monotonic()
    for client in clients:
        client.start()
    while (gone := time.monotonic() - began) < seconds or (
        len(out.memory) < robust_memory.LEAST_SAMPLES and gone < LONGER * seconds
    ):
        time.sleep(SAMPLE_SECONDS)
        out.memory.append((time.monotonic() - began, memory()))
    stop.set()
    for client in clients:
        client.join(known.asker.timeout + 10)
    out.seconds = time.monotonic() - began
    return out


def _client(
    asker: Asker,
    load: Load,
    out: Soak,
    sync: tuple[threading.Lock, threading.Event],
    bound: float,
    seed: int,
    number: int,
) -> None:
    deal, (lock, stop) = random.Random(f"{seed} {number}"), sync
    kind = FIRST[number % len(FIRST)]
    while True:
        which = deal.randrange(len(load.prompts))
        prompt, size = load.prompts[which], load.sizes[which]
        if kind < BAD_ONES:
            bad = asker.send({**asker.body("x", 1), **deal.choice(load.bad)})
            with lock:
                out.counts["bad"] += 1
                if not 400 <= bad.status < 500:
                    out.not_refused.append(f"a bad request got {bad.status}: {bad.error or bad.text}"[:300])
        elif kind < LEAVERS:
            leave(asker, prompt, LEAVERS_TOKENS * size, deal)
            with lock:
                out.counts["left"] += 1
        else:
            _ask(asker, load, which, kind < STREAMED, (out, lock, bound))
        if stop.is_set():
            return
        kind = deal.random()


def _ask(asker: Asker, load: Load, which: int, stream: bool, into: tuple[Soak, threading.Lock, float]) -> None:
    out, lock, bound = into
    usage = {"include_usage": True} if stream else None
    got = asker.complete(load.prompts[which], load.sizes[which], stream=stream or None, stream_options=usage)
    found = difference(load.alone[which], got, bound)
    with lock:
        if got.status == 429:
            out.counts["refused"] += 1
            return
        out.counts["answers"] += 1
        out.parted += found.tie
        if not got.good:
            out.failed.append(f"prompt {which}: {got.error}"[:300])
        elif not found.same:
            out.wrong.append(f"prompt {which}: {found.why}")


LEAVING = (0.02, 0.22)  # seconds in which a client goes away before its answer has begun to come


def leave(
    asker: Asker, prompt: Prompt, max_tokens: int, deal: random.Random, within: tuple[float, float] = LEAVING
) -> None:
    """A client that goes away, before its answer has begun or in the middle of it."""
    body = asker.body(prompt, max_tokens, stream=True)
    early = deal.random() < 0.5
    try:
        asker.client.leave(asker.path, body, deal.randrange(1, 2000), timeout=deal.uniform(*within) if early else None)
    except NoAnswer:
        pass  # it left before there was one


# --- what is held ----------------------------------------------------------------------------------------------------


def held(asker: Asker, seconds: float | None = None) -> dict[str, float] | None:
    """What is still held once the load has ended and ``seconds`` were given (None: SETTLE_SECONDS, more where answers
    are waited for longer): all zero when it is as it should be. None where the server does not say, which is known at
    once."""
    given = max(SETTLE_SECONDS, SETTLE_SHARE * asker.timeout) if seconds is None else seconds
    last: dict[str, float] = {}

    def nothing() -> bool:
        nonlocal last
        seen = read_numbers(asker.client)
        last = {name: seen[name] for name in HELD if name in seen}
        return bool(last) and not any(last.values())

    if nothing() or not last:
        return last or None
    eventually(nothing, given, every=0.2)
    return last or None


def memory_of(process_ids: tuple[int, ...]) -> Callable[[], list[int]]:
    return lambda: robust_memory.resident(process_ids)
