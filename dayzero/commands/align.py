"""``dayzero align``: our forward against an independent oracle, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.frame import CacheOption, RecipeOption, SourceArgument, exit_code
from dayzero.console import Console

if TYPE_CHECKING:
    from dayzero.acceptance.align import AlignReport


@dataclass(frozen=True, slots=True)
class AlignArguments:
    source: SourceArgument
    oracle: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE.py", show_default="the recipe's", help="The independent forward."),
    ] = None
    trace: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Compare to a trace recorded on another machine.")
    ] = None
    record: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the oracle's side as a trace.")] = None
    allow_remote_code: Annotated[
        bool, typer.Option("--allow-remote-code", help="Run the Python code that the checkpoint ships.")
    ] = False
    recipe: RecipeOption = None
    tokens: Annotated[int | None, typer.Option(min=2, metavar="N", help="How many tokens both sides read.")] = None
    token_ids: Annotated[
        Path | None, typer.Option("--token-ids", metavar="FILE", help="Read the ids of this file, a JSON list.")
    ] = None
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Read this text.")] = None
    threads: Annotated[int | None, typer.Option(min=1, max=1024, metavar="N", help="CPU threads of each process.")] = (
        None
    )
    expert_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", show_default="a quarter of what is free", help="For experts kept between runs of a layer."
        ),
    ] = None
    cache: CacheOption = "bf16"
    bindings: Annotated[
        list[str] | None,
        typer.Option("--bind", metavar="CONTRACT[@SITE]=VARIANT", help="Run this variant; may be repeated."),
    ] = None


def report_of(arguments: AlignArguments, console: Console) -> AlignReport:
    from dayzero.commands.engine_options import size_of
    from dayzero.ops.bind import load_entry_points
    from dayzero.ops.bindings import parse_bindings
    from dayzero.planner.memory import return_large_blocks

    return_large_blocks()
    bindings, catalog = parse_bindings(arguments.bindings or ()), load_entry_points()[0]
    expert_bytes = None if arguments.expert_memory is None else size_of("--expert-memory", arguments.expert_memory)
    with console.progress("loading the libraries"):
        from dayzero.acceptance.align import AlignOptions, align_source

    options = AlignOptions(
        oracle=arguments.oracle,
        trace=None if arguments.trace is None else str(arguments.trace),
        record=None if arguments.record is None else str(arguments.record),
        allow_remote_code=arguments.allow_remote_code,
        recipe=None if arguments.recipe is None else str(arguments.recipe),
        num_tokens=arguments.tokens,
        tokens=None if arguments.token_ids is None else str(arguments.token_ids),
        prompt=arguments.prompt,
        threads=arguments.threads,
        expert_bytes=expert_bytes,
        cache=arguments.cache,
        bindings=bindings,
        catalog=catalog,
    )
    return align_source(arguments.source, options, progress=console.progress)


def run(arguments: AlignArguments, console: Console) -> int:
    """Compare our forward with an independent one.

    Both sides read the same tokens, layer by layer; the first module that diverges is named.
    """
    from dayzero.acceptance.align import show_align

    report = report_of(arguments, console)
    show_align(report, console)
    console.emit_json(report)
    return exit_code(report.verdict)
