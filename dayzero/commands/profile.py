"""``dayzero profile``: where the time of a step goes, against what each operator could do at best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.engine_options import EngineArguments, launch_of
from dayzero.commands.frame import exit_code
from dayzero.console import Console
from dayzero.errors import UsageError

if TYPE_CHECKING:
    from dayzero.acceptance.profile.report import ProfileReport, Reporter
    from dayzero.engine.launch import LaunchSpec
    from dayzero.engine.profiling.measure import Bench, Phase

MOST = 1 << 20  # requests or tokens


@dataclass(frozen=True, slots=True)
class ProfileArguments(EngineArguments):
    batch: Annotated[
        str, typer.Option(metavar="N,N…", help="Requests of a decode step, each by one token; 0: no decode.")
    ] = "1,16"
    context: Annotated[
        int, typer.Option(min=1, metavar="N", help="Tokens that each request of a decode step has behind it.")
    ] = 1024
    prefill: Annotated[
        str, typer.Option(metavar="N,N…", help="Tokens of a prompt that is computed in one step; 0: no prefill.")
    ] = "2048"
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="Draw the hotspots.")] = None


def run(arguments: ProfileArguments, console: Console) -> int:
    """Time the steps of a model by operator and site, each against its floor.

    Hotspots come first: what takes the most time above its floor, and which variants could be bound in its place.
    Floors are by ceilings measured in the same run. SOURCE may be seeded:CONFIG, so that no weights are needed.
    """
    from dayzero.acceptance.profile.plot import draw
    from dayzero.acceptance.profile.show import show

    phases = phases_of(arguments)
    launch = _launch(arguments, phases)
    _check_plot(arguments.plot)
    report = report_of(launch, phases, console)
    if arguments.plot is not None:
        draw(report, arguments.plot)
    show(report, console)
    console.emit_json(report)
    return exit_code(report.verdict)


def phases_of(arguments: ProfileArguments) -> list[Phase]:
    """What is to be measured. UsageError for numbers that are none, and where nothing is left."""
    from dayzero.engine.profiling.measure import Phase

    batches, prompts = _numbers("--batch", arguments.batch), _numbers("--prefill", arguments.prefill)
    found = [Phase(True, rows, arguments.context) for rows in batches]
    found += [Phase(False, 1, tokens) for tokens in prompts]
    if not found:
        raise UsageError("--batch 0 and --prefill 0 leave nothing to measure; give one of them.")
    return found


def _numbers(option: str, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 8 and int(part) <= MOST for part in parts):
        raise UsageError(f"{option} {text}: give whole numbers with commas between, such as 1,16, or 0 for none.")
    numbers = [int(part) for part in parts]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"{option} {text}: names a number twice.")
    return [number for number in numbers if number]


def _launch(arguments: ProfileArguments, phases: list[Phase]) -> LaunchSpec:
    """The engine's options with room for what is measured; prompts are all different, so nothing is reused."""
    rows = max((phase.rows for phase in phases if phase.decode), default=1)
    tokens = max((phase.tokens for phase in phases if not phase.decode), default=0)
    if arguments.upstream:
        raise UsageError("--upstream: a profile looks at operators, which need a recipe; leave it out.")
    if arguments.chunk_tokens is not None:
        raise UsageError("--chunk-tokens: a prompt of --prefill is computed in one step; leave it out.")
    return launch_of(
        replace(
            arguments,
            max_running=rows,
            max_step_tokens=max(arguments.max_step_tokens, rows, tokens),
            no_prefix_cache=True,
        )
    )


def _check_plot(path: Path | None) -> None:
    """Before anything is measured."""
    if path is None:
        return
    from dayzero.acceptance.load.plot import check_plot

    if not path.absolute().parent.is_dir():
        raise UsageError(f"{path}: its folder does not exist; make it first.")
    check_plot(path)


def report_of(launch: LaunchSpec, phases: list[Phase], console: Console) -> ProfileReport:
    """Measure the ceilings of this machine, load the model, measure every phase."""
    from dayzero.acceptance.profile.report import findings_of
    from dayzero.checkpoint.seeded_source import SEEDED

    bench, reporter, report = opened(launch, console)
    with console.progress("measuring", len(phases), "phases") as bar:
        for phase in phases:
            measured = bench.measure(phase, lambda what, name=phase.name: bar.note(f"{name}: {what}"))  # type: ignore[misc]
            report.phases.append(reporter.phase(measured))
            bar.advance()
    report.findings = findings_of(report, made=launch.source.startswith(SEEDED))
    return report


def opened(launch: LaunchSpec, console: Console) -> tuple[Bench, Reporter, ProfileReport]:
    """Ceilings of this machine and the loaded model: what measures its phases, what reports them, a report without any
    yet."""
    from dayzero.acceptance.profile.report import ProfileReport, Reporter
    from dayzero.engine.profiling import ceilings
    from dayzero.engine.profiling.measure import Bench
    from dayzero.ops.bind import load_entry_points

    with console.progress("measuring ceilings"):
        found = ceilings.measure(launch.device, launch.threads)
    with console.progress("reading weights", None, "B") as bar:
        bench = Bench(launch, lambda done, total: bar.reach(done, total))
    info = bench.runner.info
    reporter = Reporter(
        bench.runner.stack.spec, bench.hardware, info.dtype, info.facts["bindings"], found, load_entry_points()[0]
    )
    return bench, reporter, ProfileReport(launch.source, info.family, bench.hardware, info.dtype, found, info.table, [])
