"""A long mixed load on a real server: does memory grow, does a token get lost or come twice?

    python benchmarks/soak.py FOLDER --seconds 1800

The server runs reference operators, so that an answer does not depend on its company: every answer is compared with
what the same request got alone at the beginning. Among the requests are aborted ones, bad ones, long and short ones,
shared prefixes, streams and whole answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dayzero.acceptance.server_process import ServerProcess
from dayzero.acceptance.stages import robust_memory
from dayzero.acceptance.stages.robust_soak import BAD

NUM_PROMPTS, NUM_CLIENTS, SAMPLE_SECONDS = 12, 8, 0.5
START_SECONDS = 600.0
# Small enough to be in use as a whole before the warm-up ends: memory of the pool becomes resident when a block is used
# for the first time, which is no growth of the server.
POOL_BYTES = "1MiB"


@dataclass
class Soak:
    """What was seen. rss: (seconds, bytes of each process). wrong: answers that differ from the one alone."""

    counts: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[float, list[int]]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    usage_at_end: float = -1.0
    steps: int = 0

    def slope(self, process: int | None = None) -> tuple[float, float]:
        """(bytes an hour, t) of the memory behind the warm-up, of all processes or of one."""
        return robust_memory.slope(
            [(t, float(sum(each) if process is None else each[process])) for t, each in self.rss]
        )

    def faults(self) -> list[str]:
        """Why the run failed; empty when it passed."""
        found = list(self.wrong[:5])
        rate, t = self.slope()
        grown = rate / 3600 * (self.rss[-1][0] - self.rss[0][0])
        # Growth that shows against the spread of the blocks, and is more than what an allocator's arenas move by.
        if t > robust_memory.T_995_8 and grown > robust_memory.ARENA_SHARE * sum(self.rss[-1][1]):
            found.append(f"memory grows by {rate / 2**20:.1f} MiB an hour (t {t:.1f})")
        if self.usage_at_end != 0.0:
            found.append(f"{self.usage_at_end:.2%} of the pool is still held when nothing runs")
        if not self.counts["aborted"] or not self.counts["bad"] or not self.counts["answers"]:
            found.append(f"the load was not mixed: {dict(self.counts)}")
        return found


async def soak(
    address: str, rss: Callable[[], list[int]], seconds: float, vocab: int, warm_seconds: float = 0.0, seed: int = 0
) -> Soak:
    """Load a server for so long, behind as much of the same load as is to warm it up. rss: gives the resident bytes of
    its processes. Prompts are ids in [3, vocab)."""
    out, deal = Soak(), random.Random(seed)
    base = [deal.randrange(3, vocab) for _ in range(90)]
    prompts = [
        base[: deal.randrange(1, 90)] + [deal.randrange(3, vocab) for _ in range(deal.randrange(1, 60))]
        for _ in range(NUM_PROMPTS)
    ]
    async with httpx.AsyncClient(base_url=address, timeout=120) as http:
        alone = [await _answer(http, prompt, 4 + 3 * i) for i, prompt in enumerate(prompts)]
        began, stop = time.monotonic(), asyncio.Event()
        tasks = [asyncio.create_task(_client(http, i, prompts, alone, out, stop)) for i in range(NUM_CLIENTS)]
        await asyncio.sleep(warm_seconds)
        while time.monotonic() - began < warm_seconds + seconds:
            await asyncio.sleep(SAMPLE_SECONDS)
            out.rss.append((time.monotonic() - began, rss()))
        stop.set()
        await asyncio.gather(*tasks)
        for _ in range(100):
            seen = (await http.get("/progress")).json()["progress"]
            out.usage_at_end, out.steps = seen["usage"], seen["step"]
            if not seen["running"] and not seen["waiting"] and seen["usage"] == 0.0:
                break
            await asyncio.sleep(0.1)
    return out


async def _client(
    http: httpx.AsyncClient,
    number: int,
    prompts: list[list[int]],
    alone: list[list[int]],
    out: Soak,
    stop: asyncio.Event,
) -> None:
    deal = random.Random(1000 + number)
    while not stop.is_set():
        which, kind = deal.randrange(len(prompts)), deal.random()
        if kind < 0.1:
            answer = await http.post("/v1/completions", json={"model": "soak", **deal.choice(BAD)})
            out.counts["bad"] += 1
            if not 400 <= answer.status_code < 500:
                out.wrong.append(f"a bad request got {answer.status_code}: {answer.text[:200]}")
        elif kind < 0.3:
            await _abort(http, prompts[which], deal.random() * 0.2)
            out.counts["aborted"] += 1
        else:
            got = await _answer(http, prompts[which], 4 + 3 * which, stream=kind < 0.65)
            out.counts["answers"] += 1
            if got != alone[which]:
                out.wrong.append(f"request {which} gave {got}, alone {alone[which]}")


def _body(prompt: list[int], max_tokens: int, stream: bool) -> dict[str, Any]:
    return {
        "model": "soak", "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "stream": stream, "return_token_ids": True,
    }  # fmt: skip


async def _answer(http: httpx.AsyncClient, prompt: list[int], max_tokens: int, *, stream: bool = False) -> list[int]:
    body = _body(prompt, max_tokens, stream)
    if not stream:
        answer = await http.post("/v1/completions", json=body)
        answer.raise_for_status()
        return list(answer.json()["choices"][0]["token_ids"])
    tokens: list[int] = []
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    tokens += choice.get("token_ids") or []
    return tokens


async def _abort(http: httpx.AsyncClient, prompt: list[int], seconds: float) -> None:
    """A client that goes away, before or in the middle of its answer."""
    try:
        await asyncio.wait_for(_answer(http, prompt, 200, stream=True), seconds)
    except TimeoutError:
        pass


@contextlib.contextmanager
def serving(model: str, folder: Path) -> Iterator[ServerProcess]:
    """A server on reference operators over ``model``, ready. folder: gets its log."""
    options = ["--served-model-name", "soak", "--dtype", "float32", "--bind", "*=reference", "--pool-bytes", POOL_BYTES]
    server = ServerProcess([model, *options], folder / "server.log")
    try:
        if server.address(START_SECONDS) is None:
            raise TimeoutError(f"the server is not ready after {START_SECONDS:.0f} s: {server.last_words()}")
        yield server
    finally:
        server.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--warm-seconds", type=float, default=0, help="load before the first sample")
    parser.add_argument("--vocab", type=int, default=500)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="soak-") as folder, serving(given.folder, Path(folder)) as server:
        seen = asyncio.run(soak(server.told["address"], server.rss, given.seconds, given.vocab, given.warm_seconds))
        code = server.stop()
    slope, t = seen.slope()
    print(f"{dict(seen.counts)} in {seen.steps} steps; pool held at the end {seen.usage_at_end:.1%}; exit {code}")
    print(f"memory {sum(seen.rss[-1][1]) / 2**20:.0f} MiB, slope {slope / 2**20:+.2f} MiB/h (t {t:+.2f})")
    for i, last in enumerate(seen.rss[-1][1]):
        slope, t = seen.slope(i)
        print(f"  process {i}: {last / 2**20:.1f} MiB, slope {slope / 2**20:+.3f} MiB/h (t {t:+.2f})")
    for fault in seen.faults():
        print("FAULT:", fault)
    return 1 if seen.faults() or code else 0


if __name__ == "__main__":
    sys.exit(main())
