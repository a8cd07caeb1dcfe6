"""Side by side with other servers: `python benchmarks/serving.py SOURCE --server NAME=COMMAND|URL …`.

All servers get the same load through the client of `dayzero bench`: distinct prompts of an exact length as text,
greedy, end-of-text ignored, every count checked. Levels are interleaved (repeat by repeat, level by level, one server
after the other), and what is not being measured is stopped (SIGSTOP), so that an idle server that spins costs the
others nothing. Shown are medians over the repeats and ratios to ours: a section for docs/log.md, on stdout.

COMMAND is started in a session of its own; ``{port}`` in it becomes a free port. Ours is added by itself.

    python benchmarks/serving.py MODEL --server 'llama=llama-server -m MODEL.gguf --port {port} -np 16'
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import load_text
from dayzero import __version__
from dayzero.acceptance.load.drive import run_level
from dayzero.acceptance.load.figures import Figures, figures, medians, spreads
from dayzero.acceptance.load.outcome import Outcome
from dayzero.acceptance.load.report import machine
from dayzero.acceptance.load.streamed import Body, HttpDriver
from dayzero.acceptance.load.target import check_loopback, is_url, look
from dayzero.acceptance.load.wire import Address, Pool
from dayzero.acceptance.load.workload import Lengths, Level, LoadRequest, TextPrompts, Workload, requests
from dayzero.chat.tokenizer import open_tokenizer
from dayzero.checkpoint.source import open_source
from dayzero.errors import UserError

OURS = "dayzero"
START_SECONDS = 600.0
STOP_SECONDS = 15.0
REQUEST_SECONDS = 600.0


@dataclass
class Server:
    """One server. command: None for one that runs already at ``address``."""

    name: str
    command: list[str] | None
    address: Address
    extra: dict[str, Any]
    process: subprocess.Popen[bytes] | None = None
    first_token_seconds: float | None = None
    prefix_ms: list[float] = field(default_factory=list)
    runs: dict[str, list[Figures]] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)

    def signal(self, number: int) -> None:
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    @contextlib.asynccontextmanager
    async def driver(self) -> Any:
        """A driver for it, over new connections; the server runs while the context lasts."""
        self.signal(signal.SIGCONT)
        pool = Pool(self.address)
        try:
            served = await look(pool)
            yield HttpDriver(pool, Body("completions", served.model, served.own, self.extra), REQUEST_SECONDS)
        finally:
            pool.close()
            self.signal(signal.SIGSTOP)

    def take(self, outcomes: Sequence[Outcome], where: str) -> bool:
        """Whether all went well; what did not is kept."""
        bad = [out.error[1] for out in outcomes if out.error is not None]
        if bad:
            self.errors.append(f"{where}: {len(bad)} of {len(outcomes)} requests failed, first: {bad[0]}")
        return not bad


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def read_server(text: str, extras: dict[str, dict[str, Any]]) -> Server:
    name, equals, target = text.partition("=")
    if not equals or not name or not target:
        sys.exit(f"--server {text}: give NAME=COMMAND or NAME=URL")
    if is_url(target):
        address = Address.parse(target)
        check_loopback(address)
        return Server(name, None, address, extras.get(name, {}))
    port = free_port()
    if "{port}" not in target:
        sys.exit(f"--server {text}: the command must hold {{port}}")
    command = shlex.split(target.replace("{port}", str(port)))
    return Server(name, command, Address("127.0.0.1", port, False, ""), extras.get(name, {}))


async def start(server: Server, first: LoadRequest, log: Any) -> None:
    """Start it and ask it once: cold start to first token, the polling of 20 ms included."""
    began = time.perf_counter()
    if server.command is not None:
        server.process = subprocess.Popen(
            server.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    while True:
        try:
            async with server.driver() as driver:
                out = await driver.ask(first)
            if out.error is None:
                break
            why = out.error[1]
        except UserError as error:  # not there yet, or loading
            why = str(error)
        server.signal(signal.SIGCONT)
        if server.process is not None and server.process.poll() is not None:
            sys.exit(f"{server.name} ended with {server.process.returncode} before it answered: {why}")
        if time.perf_counter() - began > START_SECONDS or server.process is None:
            sys.exit(f"{server.name} does not answer: {why}")
        await asyncio.sleep(0.02)
    if server.process is not None:
        server.first_token_seconds = out.times[0] - began


async def measure_prefix(server: Server, prompt: LoadRequest, count: int) -> None:
    """TTFT of a prompt that the server has just seen."""
    async with server.driver() as driver:
        outcomes = [await driver.ask(prompt) for _ in range(1 + count)]
    if server.take(outcomes, "prefix hit"):
        server.prefix_ms += [1e3 * out.ttft for out in outcomes[1:]]


async def measure(servers: Sequence[Server], options: argparse.Namespace, prompts: TextPrompts) -> None:
    work = Workload(Lengths.parse("--prompt-tokens", options.prompt_tokens),
                    Lengths.parse("--output-tokens", options.output_tokens), seed=options.seed)  # fmt: skip
    levels = [Level(concurrency=int(part)) for part in options.concurrency.split(",")]
    warm = requests(work, Level(concurrency=1), "warm-up", prompts)
    with tempfile.TemporaryFile() as log:
        for number, server in enumerate(servers):
            say(f"starting {server.name}")
            await start(server, warm[number % len(warm)], log)
        for repeat in range(options.repeats):
            seen = requests(work, Level(concurrency=1), f"prefix {repeat}", prompts)[0]
            for server in servers:
                say(f"repeat {repeat + 1}: {server.name}, prefix hit")
                await measure_prefix(server, seen, options.prefix_requests)
            for level in levels:
                asked = requests(work, level, repeat, prompts)
                # The order turns, so that no server always runs behind the same one.
                for server in [*servers[repeat % len(servers) :], *servers[: repeat % len(servers)]]:
                    say(f"repeat {repeat + 1}: {server.name}, {level.name}")
                    async with server.driver() as driver:
                        done = await run_level(driver, level, asked)
                    if server.take(done.outcomes, level.name):
                        server.runs.setdefault(level.name, []).append(figures(done))


def say(text: str) -> None:
    sys.stderr.write(f"{time.strftime('%H:%M:%S')} {text}\n")


def stop(servers: Sequence[Server]) -> None:
    for server in servers:
        server.signal(signal.SIGCONT)
        if server.process is not None:
            server.process.terminate()
            try:
                server.process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                pass
            server.signal(signal.SIGKILL)


def number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table(servers: Sequence[Server], options: argparse.Namespace) -> str:
    """The section for docs/log.md."""
    levels = [f"c={part}" for part in options.concurrency.split(",")]
    ours = {name: medians(runs) for name, runs in servers[0].runs.items()}
    here = machine()
    lines = [
        f"## {time.strftime('%Y-%m-%d')} · serving, side by side",
        "",
        f"`python benchmarks/serving.py {Path(options.source).name} …`: {options.prompt_tokens} in, "
        f"{options.output_tokens} out, {options.repeats} interleaved repeats, medians; others stopped meanwhile. "
        f"dayzero {__version__}, {here['cpus']} x {here['cpu']}, Python {platform.python_version()}; "
        f"{load_text()} at the end.",
        "",
        "Each cell: TTFT p50 ms / mean TPOT ms / output tok/s (their ratio to dayzero's; the repeats' spread).",
        "",
        "| server | start to first token s | prefix hit TTFT ms | " + " | ".join(levels) + " |",
        "| --- |" + " --- |" * (2 + len(levels)),
    ]
    for server in servers:
        hit = statistics.median(server.prefix_ms) if server.prefix_ms else None
        cells = [_cell(server.runs.get(name, []), ours.get(name)) for name in levels]
        lines.append(
            f"| {server.name} | {number(server.first_token_seconds, 1)} | {number(hit)} | {' | '.join(cells)} |"
        )
    problems = [f"- {server.name}: {text}" for server in servers for text in server.errors]
    return "\n".join([*lines, *(["", "What failed (its figures are left out):", *problems] if problems else []), ""])


def _cell(runs: Sequence[Figures], ours: dict[str, Any] | None) -> str:
    if not runs:
        return "failed"
    middle, spread = medians(runs), spreads(runs).get("output_tok_s")
    ratio = middle["output_tok_s"] / ours["output_tok_s"] if ours else None
    said = (
        f"{number(middle['ttft_p50_ms'])} / {number(middle['tpot_mean_ms'], 1)} / **{number(middle['output_tok_s'])}**"
    )
    return f"{said} ({number(ratio, 2)}x; {'-' if spread is None else f'{spread:.0%}'})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="checkpoint that we serve; its tokenizer makes the prompts")
    parser.add_argument("--server", action="append", default=[], metavar="NAME=COMMAND|URL")
    parser.add_argument("--extra-body", action="append", default=[], metavar="NAME=JSON", help="fields for one server")
    parser.add_argument("--ours", default="", metavar="OPTIONS", help="options of `dayzero serve`")
    parser.add_argument("--concurrency", default="1,4,16")
    parser.add_argument("--prompt-tokens", default="512")
    parser.add_argument("--output-tokens", default="64")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prefix-requests", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    extras = {name: json.loads(text) for name, _, text in (one.partition("=") for one in options.extra_body)}
    ours = (
        f"{shlex.quote(sys.executable)} -m dayzero serve {shlex.quote(options.source)} --port {{port}} {options.ours}"
    )
    servers = [read_server(text, extras) for text in [f"{OURS}={ours}", *options.server]]
    unknown = extras.keys() - {server.name for server in servers}
    if unknown or len({server.name for server in servers}) < len(servers):
        sys.exit(f"--extra-body for no server: {', '.join(sorted(unknown))}" if unknown else "two servers of one name")
    tokenizer, why = open_tokenizer(open_source(options.source))
    if tokenizer is None:
        sys.exit(why)
    try:
        asyncio.run(measure(servers, options, TextPrompts(tokenizer, 0, options.seed)))
    finally:
        stop(servers)
    print(table(servers, options))
    return 1 if any(server.errors for server in servers) else 0


if __name__ == "__main__":
    sys.exit(main())
