"""``dayzero inspect``: the verdict on paper."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.frame import RecipeOption, SourceArgument, exit_code
from dayzero.console import Console

if TYPE_CHECKING:
    from dayzero.planner.inspect import InspectReport


@dataclass(frozen=True, slots=True)
class InspectOptions:
    source: SourceArgument
    recipe: RecipeOption = None
    verify_hash: Annotated[bool, typer.Option("--hash", help="Verify SHA-256 of every file (reads all bytes).")] = False
    hash_manifest: Annotated[
        Path | None, typer.Option("--hash-manifest", metavar="FILE", help="Lines of 'SHA256  NAME' to verify against.")
    ] = None


def report_of(options: InspectOptions, console: Console) -> InspectReport:
    from dayzero.ops.bind import load_entry_points
    from dayzero.planner.inspect import inspect_source

    return inspect_source(
        options.source,
        recipe=None if options.recipe is None else str(options.recipe),
        hash_manifest=None if options.hash_manifest is None else str(options.hash_manifest),
        verify_hash=options.verify_hash or options.hash_manifest is not None,
        progress=console.progress,
        catalog=load_entry_points()[0],
    )


def run(options: InspectOptions, console: Console) -> int:
    """Give the verdict from config, headers and tokenizer.

    Says what the model is, and what is missing, unread or contradicting. No weights are read, torch is not imported.
    """
    from dayzero.planner.show import show_report

    report = report_of(options, console)
    show_report(report, console)
    console.emit_json(report)
    return exit_code(report.verdict)
