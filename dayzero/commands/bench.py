"""``dayzero bench``: how fast a server answers, against how much it is asked at once."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import MISSING, dataclass, fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from dayzero.commands.engine_options import EngineArguments, chat_of, launch_of
from dayzero.commands.frame import exit_code, register
from dayzero.commands.serve import API_KEY
from dayzero.console import Console
from dayzero.errors import UsageError

if TYPE_CHECKING:
    from dayzero.acceptance.load.outcome import Driver
    from dayzero.acceptance.load.report import Baseline, LoadReport
    from dayzero.acceptance.load.streamed import Served
    from dayzero.acceptance.load.workload import Level, Prompts, Workload
    from dayzero.chat.tokenizer import Tokenizer

Result = TypeVar("Result")
SAFE_VOCAB = 256  # ids that every vocabulary has
BASELINE_REPEATS = 3


@dataclass(frozen=True, slots=True)
class BenchArguments(EngineArguments):
    source: Annotated[
        str,
        typer.Argument(metavar="TARGET", help="URL of a running server, or a SOURCE that is served for the run."),
    ]
    concurrency: Annotated[str, typer.Option(metavar="N,N…", help="Closed loop: requests kept running.")] = "1,4,16"
    rate: Annotated[
        str | None, typer.Option(metavar="R,R…", help="Open loop instead: requests a second that arrive (Poisson).")
    ] = None
    requests: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="twice the concurrency, at least 8", help="Of each level."),
    ] = None
    prompt_tokens: Annotated[str, typer.Option(metavar="N|A:B", help="Tokens of a prompt.")] = "512"
    output_tokens: Annotated[str, typer.Option(metavar="N|A:B", help="Tokens of an answer.")] = "64"
    shared_prefix: Annotated[int, typer.Option(min=0, metavar="N", help="First tokens that all prompts share.")] = 0
    repeats: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", show_default="1; 3 with --out or --baseline", help="Of all levels, in turn."),
    ] = None
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of lengths, arrivals and prompts.")] = 0
    api: Annotated[str, typer.Option(metavar="completions|chat", help="Endpoint.")] = "completions"
    prompts: Annotated[
        str, typer.Option(metavar="auto|ids|text", help="How prompts are sent; auto: ids to a dayzero server.")
    ] = "auto"
    tokenizer: Annotated[str | None, typer.Option(metavar="FOLDER", help="Whose tokenizer makes prompts of text.")] = (
        None
    )
    vocab: Annotated[int | None, typer.Option(min=2, metavar="N", help="Prompts of ids stay below this one.")] = None
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Else the first that the server lists.")] = None
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help=f"Sent to the server; else ${API_KEY}.")] = None
    extra_body: Annotated[str | None, typer.Option(metavar="JSON", help="Fields added to each request.")] = None
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Requests before anything is measured.")] = 2
    timeout: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds for one request.")] = 600.0
    in_process: Annotated[bool, typer.Option("--in-process", help="Drive the engine of SOURCE without HTTP.")] = False
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Load a server that is not on this machine. Ask its owner.")
    ] = False
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the figures.")] = None
    out: Annotated[Path | None, typer.Option(metavar="FILE.json", help="Write the report; a later --baseline.")] = None
    baseline: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Fail when slower than this report beyond the noise.")
    ] = None
    min_change: Annotated[
        float, typer.Option(min=0, metavar="SHARE", help="With --baseline: slower by less than this is no regression.")
    ] = 0.03


@dataclass(frozen=True)
class _Bench:
    """What the options come to."""

    options: BenchArguments
    workload: Workload
    levels: list[Level]
    repeats: int
    baseline: Baseline | None
    extra: dict[str, Any]


def run(options: BenchArguments, console: Console) -> int:
    """Measure time to first token, time of a token, inter-token latency and throughput under a seeded load.

    TARGET is a running OpenAI-compatible server, or a checkpoint that is served for the run. Every answer's token
    counts are checked. With --baseline, exit 1 when a figure is worse beyond the noise of the repeats.
    """
    from dayzero.acceptance.files import write_json
    from dayzero.acceptance.load import judge, plot
    from dayzero.acceptance.load import report as reports

    bench = _read(options)
    report = _run(_measure(bench, console))
    report.findings += judge.check_run(report)
    if bench.baseline is not None:
        report.findings += judge.check_baseline(report, bench.baseline, options.min_change)
    if options.out is not None:
        write_json(options.out, report)
    if options.plot is not None:
        plot.draw(report, options.plot)
    reports.show(report, console)
    console.emit_json(report)
    return exit_code(report.verdict)


# --- options ---------------------------------------------------------------------------------------------------------


def _read(options: BenchArguments) -> _Bench:
    """Everything that can be wrong with the call, before anything is started. UsageError, MachineError."""
    from dayzero.acceptance.load.plot import check_plot
    from dayzero.acceptance.load.report import read_baseline
    from dayzero.acceptance.load.target import is_url
    from dayzero.acceptance.load.workload import Lengths, Workload

    if options.api not in ("completions", "chat"):
        raise UsageError(f"--api {options.api}: give completions or chat.")
    if options.prompts not in ("auto", "ids", "text"):
        raise UsageError(f"--prompts {options.prompts}: give auto, ids or text.")
    if options.api == "chat" and options.prompts == "ids":
        raise UsageError("--prompts ids: a chat message is text; leave --prompts out or take --api completions.")
    if options.in_process and (options.api == "chat" or options.prompts == "text" or is_url(options.source)):
        raise UsageError("--in-process drives the engine of a SOURCE with token ids: no URL, no chat, no text.")
    if is_url(options.source):
        given = [option for option, _ in _engine_options(options)]
        if given:
            raise UsageError(f"{given[0]}: an option of an engine; {options.source} runs with its own already.")
    elif options.allow_remote:
        raise UsageError("--allow-remote: a SOURCE is always served on this machine; leave it out.")
    for path in (options.plot, options.out):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"{path}: its folder does not exist; make it first.")
    if options.plot is not None:
        check_plot(options.plot)
    baseline = None if options.baseline is None else read_baseline(options.baseline)
    repeats = options.repeats or (BASELINE_REPEATS if options.out or baseline else 1)
    if baseline is not None and repeats < BASELINE_REPEATS:
        raise UsageError(f"--baseline needs this run's noise too: --repeats {BASELINE_REPEATS} or more.")
    workload = Workload(
        Lengths.parse("--prompt-tokens", options.prompt_tokens),
        Lengths.parse("--output-tokens", options.output_tokens),
        shared_prefix=options.shared_prefix,
        num_requests=options.requests,
        seed=options.seed,
        api=options.api,  # type: ignore[arg-type]
    )
    return _Bench(options, workload, _levels(options), repeats, baseline, _extra(options.extra_body))


def _levels(options: BenchArguments) -> list[Level]:
    from dayzero.acceptance.load.workload import Level

    option, text = ("--rate", options.rate) if options.rate is not None else ("--concurrency", options.concurrency)
    found = []
    for part in text.split(","):
        try:
            level = Level(rate=float(part)) if options.rate is not None else Level(concurrency=int(part))
        except ValueError:
            level = Level()
        if not 0 < level.value < 1e6:
            raise UsageError(f"{option} {text}: give numbers above zero with commas between, such as 1,4,16.")
        found.append(level)
    if len(set(found)) < len(found):
        raise UsageError(f"{option} {text}: names a level twice.")
    return found


def _extra(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(f"--extra-body {text}: no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise UsageError(f"--extra-body {text}: give a JSON object.")
    return found


def _engine_options(options: BenchArguments) -> list[tuple[str, str | None]]:
    """The options of an engine that were given, as (option, value) pairs; value None of a flag. ``--seed`` is the
    load's here, and the engine keeps its own."""
    app = typer.Typer(add_completion=False)
    register(app, "engine", EngineArguments, lambda arguments, console: 0)
    spelled = {parameter.name: parameter.opts[0] for parameter in typer.main.get_command(app).params}
    out: list[tuple[str, str | None]] = []
    for field in fields(EngineArguments):
        name, value = spelled[field.name], getattr(options, field.name)
        if field.default is MISSING or value == field.default or field.name == "seed":
            continue
        if value is True:
            out.append((name, None))
        else:
            out += [(name, str(one)) for one in (value if isinstance(value, list) else [value])]
    return out


# --- the run ---------------------------------------------------------------------------------------------------------


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    """With the loop that takes least from what is measured."""
    factory = None
    if find_spec("uvloop") is not None and sys.platform != "win32":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def _measure(bench: _Bench, console: Console) -> LoadReport:
    from dayzero.acceptance.load.drive import run_level
    from dayzero.acceptance.load.figures import figures
    from dayzero.acceptance.load.judge import comparable
    from dayzero.acceptance.load.report import LevelReport, LoadReport
    from dayzero.acceptance.load.workload import Level, requests

    options, workload = bench.options, bench.workload
    async with _target(bench, console) as under:
        levels = [LevelReport(level) for level in bench.levels]
        how = "in-process" if options.in_process else "http"
        report = LoadReport(
            options.source, under.model, how, under.prompts.kind, workload, levels, start_seconds=under.start_seconds,
            expert_choice=(under.facts or {}).get("expert_choice"),
        )  # fmt: skip
        if bench.baseline is not None:
            comparable(report, bench.baseline)
        first = requests(workload, Level(concurrency=1), "warm-up", under.prompts)
        for number in range(options.warmup):
            out = await under.driver.ask(first[number % len(first)])
            if out.error is not None and out.error[0] in ("refused", "connection"):  # all others would fail alike
                raise UsageError(f"{options.source}: the first request failed: {out.error[1]}")
            if number == 0 and under.began is not None and out.times:
                report.first_token_seconds = out.times[0] - under.began
        total = bench.repeats * sum(workload.count(level) for level in bench.levels)
        with console.progress("asking", total, "requests") as bar:
            for repeat in range(bench.repeats):
                for one in levels:
                    bar.note(f"{one.level.name}, repeat {repeat + 1} of {bench.repeats}")
                    asked = requests(workload, one.level, repeat, under.prompts)
                    done = await run_level(under.driver, one.level, asked, bar.advance)
                    one.add(figures(done), done.outcomes)
    return report


@dataclass(frozen=True)
class _Under:
    """What is under load. began: when its process was started, by time.perf_counter; None: it ran already."""

    driver: Driver
    prompts: Prompts
    model: str
    began: float | None = None
    start_seconds: float | None = None
    facts: Mapping[str, Any] | None = None  # of an engine that was started for this


@asynccontextmanager
async def _target(bench: _Bench, console: Console) -> AsyncIterator[_Under]:
    from dayzero.acceptance.load import target
    from dayzero.acceptance.load.streamed import Body, HttpDriver
    from dayzero.acceptance.load.wire import Address, Pool

    options = bench.options
    if options.in_process:
        async with _engine(bench) as under:
            yield under
        return
    key = options.api_key or os.environ.get(API_KEY)
    async with AsyncExitStack() as stack:
        started = None
        if target.is_url(options.source):
            address = Address.parse(options.source)
            if not options.allow_remote:
                target.check_loopback(address)
        else:
            arguments = [part for pair in _engine_options(options) for part in pair if part is not None]
            environment = os.environ | ({API_KEY: key} if key else {})
            with console.progress(f"starting a server for {options.source}"):
                started = await stack.enter_async_context(target.served([options.source, *arguments], environment))
            address = started.address
        pool = Pool(address, {"Authorization": f"Bearer {key}"} if key else None)
        stack.callback(pool.close)
        found = await target.look(pool)
        body = Body(bench.workload.api, options.model or found.model, found.own, bench.extra)
        driver = HttpDriver(pool, body, options.timeout)
        prompts = _prompts(bench, found)
        if started is None:
            yield _Under(driver, prompts, body.model)
        else:
            yield _Under(driver, prompts, body.model, started.began, started.start_seconds, started.facts)


@asynccontextmanager
async def _engine(bench: _Bench) -> AsyncIterator[_Under]:
    """The engine of SOURCE, as the server would run it."""
    from dayzero.acceptance.load.engine import EngineDriver
    from dayzero.acceptance.load.streamed import Served
    from dayzero.engine.client import AsyncEngine

    options = bench.options
    chat = chat_of(options)
    engine = AsyncEngine(launch_of(options, chat.stop_ids))
    began = time.perf_counter()
    await engine.start()
    try:
        info = await engine.wait_ready()
        special = chat.tokenizer.special_ids if chat.tokenizer is not None else frozenset[int]()
        prompts = _prompts(bench, Served(info.family, own=True, vocab=info.vocab, special=special))
        seconds = time.perf_counter() - began
        yield _Under(EngineDriver(engine, options.timeout), prompts, info.family, began, seconds, info.facts)
    finally:
        await engine.close()


def _prompts(bench: _Bench, served: Served) -> Prompts:
    """Token ids where they can be, else text of an exact number of tokens. UsageError without a tokenizer for it."""
    from dayzero.acceptance.load.workload import IdPrompts, TextPrompts

    options, work = bench.options, bench.workload
    if options.prompts == "ids" or (options.prompts == "auto" and served.own and work.api == "completions"):
        top = options.vocab or served.vocab or SAFE_VOCAB
        ids = [token for token in range(top) if token not in served.special]
        if len(ids) < 2:
            raise UsageError(f"--vocab {top}: prompts need two ids or more that are not special.")
        return IdPrompts(ids, work.shared_prefix, work.seed)
    return TextPrompts(_tokenizer(options), work.shared_prefix, work.seed, bare=work.api == "chat")


def _tokenizer(options: BenchArguments) -> Tokenizer:
    from dayzero.acceptance.load.target import is_url
    from dayzero.chat.tokenizer import open_tokenizer
    from dayzero.checkpoint.source import open_source

    folder = options.tokenizer or (None if is_url(options.source) else options.source)
    if folder is None:
        raise UsageError(
            "prompts must be text for this server: give --tokenizer FOLDER, or --prompts ids if it takes ids."
        )
    found, why = open_tokenizer(open_source(folder))
    if found is None:
        raise UsageError(f"--tokenizer: {why}")
    return found
