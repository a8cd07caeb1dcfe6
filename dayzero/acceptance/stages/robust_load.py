"""Loads that are no service's friend: clients that vanish, requests that are none, and more than there is room for."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero.acceptance.accept.http import Answer, NoAnswer
from dayzero.acceptance.accept.stage import RunningServer
from dayzero.acceptance.load.drive import LevelRun, run_level
from dayzero.acceptance.load.figures import Figures, figures
from dayzero.acceptance.load.workload import Lengths, Level, Workload, requests
from dayzero.acceptance.stages.answers import PATHS
from dayzero.acceptance.stages.long_known import Known, limit_of
from dayzero.acceptance.stages.metrics import read_ends
from dayzero.acceptance.stages.perf_load import Opened, prompts_for
from dayzero.acceptance.stages.robust_ask import Asker, Completion, at_once, pace
from dayzero.acceptance.stages.robust_soak import LEAVING, held, leave

LEAST_OF_A_LEVEL = 3
HOLDING, HOLD_SECONDS, BURST_TOKENS = 8, 2.0, 4  # clients of a burst whose answers take so long that the others wait
MOST_HELD = 2000
SLOWER = 4  # than one after another, is a burst allowed to be computed
STORM_WORKERS, FLOOD_WORKERS = 32, 8
PATH, CHAT = PATHS["completions"], PATHS["chat"]
DEEP = b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
# (method, path, body): nothing of it can be served. A body of None is left out; bytes go as they are.
MALFORMED: tuple[tuple[str, str, Any], ...] = (
    ("POST", PATH, b""), ("POST", PATH, b"{"), ("POST", PATH, b"[]"), ("POST", PATH, b"null"), ("POST", PATH, b"7"),
    ("POST", PATH, b"\xff\xfe{}"), ("POST", PATH, b'{"prompt": "x", "prompt'), ("POST", PATH, DEEP),
    ("POST", PATH, b'{"prompt": "x", "max_tokens": NaN}'), ("POST", PATH, {"prompt": "x", "max_tokens": "many"}),
    ("POST", PATH, {"prompt": {"a": 1}}), ("POST", PATH, {"prompt": [[]]}), ("POST", PATH, {"prompt": [-1]}),
    ("POST", PATH, {"prompt": [2**40]}), ("POST", PATH, {"prompt": ["a", 1]}), ("POST", PATH, {"prompt": "x", "n": 0}),
    ("POST", PATH, {"prompt": "x", "temperature": -1}), ("POST", PATH, {"prompt": "x", "top_p": 7}),
    ("POST", PATH, {"prompt": "x", "stop": 5}), ("POST", PATH, {"prompt": "x", "model": "nobody"}),
    ("POST", CHAT, {"messages": []}), ("POST", CHAT, {"messages": "hello"}),
    ("POST", CHAT, {"messages": [{"role": 1}]}), ("POST", CHAT, b"<xml/>"), ("GET", PATH, None),
    ("DELETE", CHAT, None), ("GET", "/v1/nothing", None),
)  # fmt: skip
# Of these, what servers are known to take, and give what they think is meant (as ``refusals.LENIENT``).
LENIENT: tuple[Any, ...] = ({"prompt": "x", "n": 0}, {"prompt": "x", "stop": 5}, {"prompt": "x", "model": "nobody"})
LEAVES_WITHIN = 0.3  # of the time that a whole answer takes: a client that leaves later has seen all of it


@dataclass(frozen=True)
class Storm:
    """clients: that vanished. before, after: the answer to one prompt. left: what is held (see ``held``). ends: how the
    answers that were begun have ended, by the server's own counters; empty where it has none. exact: see ``Known``."""

    clients: int
    before: Completion
    after: Completion
    left: dict[str, float] | None
    ends: Mapping[str, float] = field(default_factory=dict)
    exact: bool = True


def storm(known: Known, clients: int, seed: int) -> Storm:
    """Many clients ask for long answers and go away, before them and within them."""
    rng, limit = random.Random(f"{seed} storm"), limit_of(known) or 1 << 30
    prompt = known.prompt(rng, min(24, limit // 4))
    longest = min(400, limit // 2)
    before = known.asker.complete(prompt, 8, logprobs=2)
    whole = longest * pace(known.asker, prompt, 1, min(24, longest))
    within = (min(LEAVING[0], LEAVES_WITHIN * whole / 4), min(LEAVING[1], LEAVES_WITHIN * whole))
    deals = [random.Random(f"{seed} storm {i}") for i in range(clients)]
    begun = read_ends(known.asker.client)

    def client(deal: random.Random) -> None:
        leave(known.asker, known.prompt(deal, deal.randrange(1, min(32, limit // 3))), longest, deal, within)

    at_once(client, deals, STORM_WORKERS)
    left = held(known.asker)
    ended = {name: count - begun.get(name, 0.0) for name, count in read_ends(known.asker.client).items()}
    return Storm(clients, before, known.asker.complete(prompt, 8, logprobs=2), left, ended, known.exact)


@dataclass(frozen=True)
class Flood:
    """served: malformed requests that did not get a 4xx. lenient: those that servers of other makes are known to take.
    sick: what a probe said meanwhile, where it was not 200.
    silent: refusals without a sentence."""

    requests: int
    served: list[str]
    lenient: list[str]
    silent: list[str]
    sick: list[str]
    probe: str


def flood(asker: Asker, count: int, seed: int, own: bool = True) -> Flood:
    """Malformed requests at once, while a probe is asked again and again. own: the server is of this package, so that
    it has /health."""
    probe = "/health" if own or asker.status("/health") == 200 else "/v1/models"
    sick, stop = list[str](), threading.Event()

    def watch() -> None:
        while True:  # once more behind the last request
            over, status = stop.is_set(), asker.status(probe, timeout=20.0)
            if status != 200:
                sick.append(f"{probe} {status or 'did not answer'}")
            if over:
                return
            stop.wait(0.1)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    deal = random.Random(f"{seed} flood")
    asked = [*MALFORMED, *(deal.choice(MALFORMED) for _ in range(count - len(MALFORMED)))]
    seen = at_once(lambda one: _malformed(asker, *one), asked, FLOOD_WORKERS)
    stop.set()
    watcher.join(30.0)
    served: dict[bool, dict[str, None]] = {False: {}, True: {}}
    for one, (good, answer, _) in zip(asked, seen, strict=True):
        if not good:
            meant_well = not own and answer.startswith("200") and one[2] in LENIENT
            served[meant_well][f"{_said(one)}: {answer}"] = None
    silent = [
        f"{_said(one)}: {answer}" for one, (good, answer, told) in zip(asked, seen, strict=True) if good and not told
    ]
    return Flood(len(asked), list(served[False]), list(served[True]), list(dict.fromkeys(silent)), sick, probe)


def _malformed(asker: Asker, method: str, path: str, body: Any) -> tuple[bool, str, bool]:
    """(refused as it should be, what came, with a sentence)."""
    try:
        answer: Answer = asker.client.request(method, path, body)
    except NoAnswer as error:
        return False, str(error), False
    told = isinstance(answer.json, dict) and bool(answer.json.get("error") or answer.json.get("detail"))
    return 400 <= answer.status < 500, answer.said[:120], told


def _said(one: tuple[str, str, Any]) -> str:
    return f"{one[0]} {one[1]} {str(one[2])[:60]}"


# --- more than there is room for -------------------------------------------------------------------------------------


def scale(
    server: RunningServer, known: Known, levels: Sequence[int], timeout: float, seed: int, rounds: int = 1
) -> list[list[Figures]]:
    """Short requests at each concurrency, as many each as run at once; all levels, ``rounds`` times."""
    limit = limit_of(known) or 1 << 30
    prompt, output = min(16, limit // 4), min(8, limit // 4)
    prompts = prompts_for(known, seed)

    async def level(opened: Opened, number: int, name: str) -> LevelRun:
        one = Level(concurrency=number)
        lengths = Lengths(prompt, prompt), Lengths(output, output)
        workload = Workload(*lengths, num_requests=max(LEAST_OF_A_LEVEL, number), seed=seed)
        return await run_level(opened.driver, one, requests(workload, one, name, prompts))

    async def work() -> list[list[LevelRun]]:
        with Opened(server, known, timeout) as opened:
            names = ["robustness", *(f"robustness {n}" for n in range(1, rounds))]
            return [[await level(opened, number, name) for number in levels] for name in names]

    return [[figures(run) for run in runs] for runs in asyncio.run(work())]


@dataclass(frozen=True)
class Burst:
    """statuses: how many answers had which (0: none). bare: refusals of 429 or 503 without Retry-After."""

    clients: int
    statuses: Counter[int]
    bare: int
    wrong: list[str]
    seconds: float


def burst(known: Known, clients: int, seed: int, holding: int = HOLDING) -> Burst:
    """All at once, each once; ``holding`` of them keep the others waiting."""
    rng, limit = random.Random(f"{seed} burst"), limit_of(known) or 1 << 30
    prompts = [known.prompt(rng, min(12, limit // 4)) for _ in range(clients)]
    each = pace(known.asker, prompts[0], 1, min(2 * BURST_TOKENS, limit // 2))
    long = max(BURST_TOKENS, min(round(HOLD_SECONDS / each), limit // 2, MOST_HELD))
    asked = [(prompt, long if i < holding else min(BURST_TOKENS, limit // 2)) for i, prompt in enumerate(prompts)]
    asker = known.asker.patient(SLOWER * each * sum(tokens for _, tokens in asked))
    began = time.monotonic()
    seen = at_once(lambda one: asker.complete(*one), asked, clients)
    refused = [one for one in seen if one.status in (429, 503)]
    bare = sum("retry-after" not in (one.headers or {}) for one in refused)
    wrong = [one.error for one in seen if not one.good and one.status != 429]
    return Burst(clients, Counter(one.status for one in seen), bare, wrong, time.monotonic() - began)
