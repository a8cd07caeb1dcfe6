"""``dayzero plan``: layouts, bytes per rank, lower bounds, the exactly-once weight plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.frame import RecipeOption, SourceArgument, exit_code
from dayzero.console import Console

if TYPE_CHECKING:
    from dayzero.planner.planner import PlanReport

RanksOption = Annotated[
    int | None, typer.Option(min=1, metavar="N", help="Ranks of this mesh axis; chosen when left out.")
]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    source: SourceArgument
    hardware: Annotated[
        str,
        typer.Option(metavar="NAME[xN]", help="h100, h200, b200, b300, mi355x, cpu, or a TOML file; xN for N of them."),
    ]
    tp: RanksOption = None
    ep: RanksOption = None
    pp: RanksOption = None
    cp: RanksOption = None
    dp: RanksOption = None
    context_tokens: Annotated[
        int | None, typer.Option("--context", min=1, metavar="N", help="Tokens a request must be able to hold.")
    ] = None
    concurrency: Annotated[int | None, typer.Option(min=1, metavar="N", help="Requests that must fit at once.")] = None
    recipe: RecipeOption = None


def report_of(options: PlanOptions, console: Console) -> PlanReport:
    from dayzero.planner.planner import plan_source

    return plan_source(
        options.source,
        options.hardware,
        tp=options.tp,
        ep=options.ep,
        pp=options.pp,
        cp=options.cp,
        dp=options.dp,
        context_tokens=options.context_tokens,
        concurrency=options.concurrency,
        recipe=None if options.recipe is None else str(options.recipe),
        progress=console.progress,
    )


def run(options: PlanOptions, console: Console) -> int:
    """Find a legal layout on the given hardware: bytes per rank, largest context, lower bounds for speed."""
    from dayzero.planner.show import show_plan

    report = report_of(options, console)
    show_plan(report, console)
    console.emit_json(report)
    return exit_code(report.verdict)
