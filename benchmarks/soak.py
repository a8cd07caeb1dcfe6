"""A long mixed load on a real server: does memory grow, does a token get lost or come twice?

    python benchmarks/soak.py FOLDER --seconds 1800
    python benchmarks/soak.py seeded:CONFIG --seconds 480 --clients 256 --loose -- --device cuda --dtype bfloat16

The server runs reference operators, so that an answer does not depend on its company: every answer is compared with
what the same request got alone at the beginning. Among the requests are aborted ones, bad ones, long and short ones,
shared prefixes, streams and whole answers. With --loose the server runs as the options behind ``--`` say; of an answer
its tokens are counted, not compared, and memory of the device is watched too.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dayzero.acceptance.server_process import ServerProcess
from dayzero.acceptance.stages import robust_memory
from dayzero.acceptance.stages.robust_soak import BAD

NUM_PROMPTS, NUM_CLIENTS, SAMPLE_SECONDS = 12, 8, 0.5
DEVICE_BYTES = 64 << 20  # that a device's use may move by: modules and workspaces of libraries come late
START_SECONDS = 600.0
# Small enough to be in use as a whole before the warm-up ends: memory of the pool becomes resident when a block is used
# for the first time, which is no growth of the server.
POOL_BYTES = "1MiB"


@dataclass(frozen=True)
class Load:
    """How a server is loaded. loose: answers are as long as the ones alone, and need not be the same. device: gives the
    bytes in use of the device that the server has for itself."""

    clients: int = NUM_CLIENTS
    loose: bool = False
    device: Callable[[], int] | None = None
    seed: int = 0


@dataclass
class Soak:
    """What was seen. rss: (seconds, bytes of each process). device: (seconds, bytes in use of the whole device). wrong:
    answers that differ from the one alone, or, loose, in their length."""

    counts: Counter[str] = field(default_factory=Counter)
    rss: list[tuple[float, list[int]]] = field(default_factory=list)
    device: list[tuple[float, int]] = field(default_factory=list)
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
        if self.device and self.device[-1][1] - self.device[0][1] > DEVICE_BYTES:
            found.append(f"memory of the device grew by {(self.device[-1][1] - self.device[0][1]) / 2**20:.0f} MiB")
        if self.usage_at_end != 0.0:
            found.append(f"{self.usage_at_end:.2%} of the pool is still held when nothing runs")
        if not self.counts["aborted"] or not self.counts["bad"] or not self.counts["answers"]:
            found.append(f"the load was not mixed: {dict(self.counts)}")
        return found


async def soak(
    address: str, rss: Callable[[], list[int]], seconds: float, vocab: int, warm_seconds: float = 0.0,
    load: Load = Load(),
) -> Soak:  # fmt: skip
    """Load a server for so long, behind as much of the same load as is to warm it up. rss: gives the resident bytes of
    its processes. Prompts are ids in [3, vocab)."""
    out, deal = Soak(), random.Random(load.seed)
    base = [deal.randrange(3, vocab) for _ in range(90)]
    prompts = [
        base[: deal.randrange(1, 90)] + [deal.randrange(3, vocab) for _ in range(deal.randrange(1, 60))]
        for _ in range(NUM_PROMPTS)
    ]
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=load.clients)
    async with httpx.AsyncClient(base_url=address, timeout=120, limits=limits) as http:
        alone = [await _answer(http, prompt, 4 + 3 * i) for i, prompt in enumerate(prompts)]
        began, stop = time.monotonic(), asyncio.Event()
        one = _Client(http, prompts, alone, out, load.loose, stop)
        tasks = [asyncio.create_task(one.run(i)) for i in range(load.clients)]
        await asyncio.sleep(warm_seconds)
        while time.monotonic() - began < warm_seconds + seconds:
            await asyncio.sleep(SAMPLE_SECONDS)
            out.rss.append((time.monotonic() - began, rss()))
            if load.device is not None:
                out.device.append((time.monotonic() - began, load.device()))
        stop.set()
        await asyncio.gather(*tasks)
        for _ in range(100):
            seen = (await http.get("/progress")).json()["progress"]
            out.usage_at_end, out.steps = seen["usage"], seen["step"]
            if not seen["running"] and not seen["waiting"] and seen["usage"] == 0.0:
                break
            await asyncio.sleep(0.1)
    return out


@dataclass
class _Client:
    """What each of the clients does. alone: the answers of the prompts when nobody else asked."""

    http: httpx.AsyncClient
    prompts: list[list[int]]
    alone: list[list[int]]
    out: Soak
    loose: bool
    stop: asyncio.Event

    async def run(self, number: int) -> None:
        deal, out = random.Random(1000 + number), self.out
        while not self.stop.is_set():
            which, kind = deal.randrange(len(self.prompts)), deal.random()
            if kind < 0.1:
                answer = await self.http.post(
                    "/v1/completions", json={"model": "soak", **deal.choice(BAD["completions"])}
                )
                out.counts["bad"] += 1
                if not 400 <= answer.status_code < 500:
                    out.wrong.append(f"a bad request got {answer.status_code}: {answer.text[:200]}")
            elif kind < 0.3:
                await _abort(self.http, self.prompts[which], deal.random() * 0.2)
                out.counts["aborted"] += 1
            else:
                got = await _answer(self.http, self.prompts[which], 4 + 3 * which, stream=kind < 0.65)
                out.counts["answers"] += 1
                out.counts["tokens"] += len(got)
                want = self.alone[which]
                if (len(got) != len(want)) if self.loose else (got != want):
                    out.wrong.append(f"request {which} gave {got}, alone {want}")


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


REFERENCE = ("--dtype", "float32", "--bind", "*=reference", "--pool-bytes", POOL_BYTES)


@contextlib.contextmanager
def serving(model: str, folder: Path, options: Sequence[str] = REFERENCE) -> Iterator[ServerProcess]:
    """A server of these options over ``model``, ready; on reference operators unless they say otherwise. folder: gets
    its log."""
    server = ServerProcess([model, "--served-model-name", "soak", *options], folder / "server.log")
    try:
        if server.address(START_SECONDS) is None:
            raise TimeoutError(f"the server is not ready after {START_SECONDS:.0f} s: {server.last_words()}")
        yield server
    finally:
        server.end()


def device_use() -> Callable[[], int] | None:
    """What gives the bytes in use of the first accelerator, by whatever process; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None

    def used() -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    return used


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--seconds", type=float, default=1800)
    parser.add_argument("--warm-seconds", type=float, default=0, help="load before the first sample")
    parser.add_argument("--vocab", type=int, default=500)
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS)
    parser.add_argument("--loose", action="store_true", help="count tokens of answers, watch the device")
    words = sys.argv[1:]
    end = words.index("--") if "--" in words else len(words)
    options = words[end + 1 :]  # of the server
    given = parser.parse_args(words[:end])
    load = Load(given.clients, given.loose, device_use() if given.loose else None)
    with (
        tempfile.TemporaryDirectory(prefix="soak-") as folder,
        serving(given.folder, Path(folder), options or REFERENCE) as server,
    ):
        work = soak(server.told["address"], server.rss, given.seconds, given.vocab, given.warm_seconds, load)
        seen = asyncio.run(work)
        code = server.stop()
    slope, t = seen.slope()
    print(f"{dict(seen.counts)} in {seen.steps} steps; pool held at the end {seen.usage_at_end:.1%}; exit {code}")
    print(f"memory {sum(seen.rss[-1][1]) / 2**20:.0f} MiB, slope {slope / 2**20:+.2f} MiB/h (t {t:+.2f})")
    if seen.device:
        uses = [seen.device[i][1] / 2**20 for i in (0, len(seen.device) // 2, -1)]
        print("device, MiB in use at first, in the middle, at last:", ", ".join(f"{use:,.0f}" for use in uses))
    for i, last in enumerate(seen.rss[-1][1]):
        slope, t = seen.slope(i)
        print(f"  process {i}: {last / 2**20:.1f} MiB, slope {slope / 2**20:+.3f} MiB/h (t {t:+.2f})")
    for fault in seen.faults():
        print("FAULT:", fault)
    return 1 if seen.faults() or code else 0


if __name__ == "__main__":
    sys.exit(main())
