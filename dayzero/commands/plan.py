"""``dayzero plan``: layouts, bytes per rank, lower bounds, the exactly-once weight plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.frame import (
    BindOption,
    CacheOption,
    ExpertInputsOption,
    LinearInputsOption,
    RecipeOption,
    SourceArgument,
    exit_code,
)
from dayzero.console import Console

if TYPE_CHECKING:
    from dayzero.planner.plan_report import PlanReport


@dataclass(frozen=True, slots=True)
class PlanArguments:
    source: SourceArgument
    hardware: Annotated[
        str,
        typer.Option(
            metavar="NAME[xN]",
            help="h100, h200, b200, b300, mi355x, cpu, here (this machine), or a TOML file; xN for N of them.",
        ),
    ]
    tp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Tensor-parallel ranks.")] = None
    ep: Annotated[int | None, typer.Option(min=1, metavar="N", help="Expert-parallel ranks.")] = None
    pp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Pipeline stages.")] = None
    cp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Context-parallel ranks.")] = None
    dp: Annotated[int | None, typer.Option(min=1, metavar="N", help="Data-parallel replicas.")] = None
    context_tokens: Annotated[
        int | None,
        typer.Option(
            "--context",
            min=1,
            metavar="N",
            help="Tokens that each request must be able to hold; left out, the trained context is aimed at.",
        ),
    ] = None
    concurrency: Annotated[int, typer.Option(min=1, metavar="N", help="Requests to hold at once.")] = 1
    cache: CacheOption = "bf16"
    drafts: Annotated[
        bool, typer.Option("--drafts", help="Count draft layers (multi-token prediction) too, on the last stage.")
    ] = False
    expert_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", show_default="all", help="Of a rank for routed experts; others are swapped in."),
    ] = None
    bindings: BindOption = None
    expert_inputs: ExpertInputsOption = "bf16"
    linear_inputs: LinearInputsOption = "bf16"
    recipe: RecipeOption = None


def report_of(options: PlanArguments, console: Console) -> PlanReport:
    from dayzero.commands.engine_options import size_of
    from dayzero.hardware import load_hardware_entry_points
    from dayzero.ops.bind import load_entry_points
    from dayzero.ops.bindings import parse_bindings
    from dayzero.planner.plan_report import PlanOptions
    from dayzero.planner.planner import plan_source

    wanted = PlanOptions(
        options.hardware,
        tp=options.tp,
        ep=options.ep,
        pp=options.pp,
        cp=options.cp,
        dp=options.dp,
        context=options.context_tokens,
        concurrency=options.concurrency,
        cache=options.cache,
        drafts=options.drafts,
        recipe=None if options.recipe is None else str(options.recipe),
        expert_bytes=None if options.expert_memory is None else size_of("--expert-memory", options.expert_memory),
        expert_inputs=options.expert_inputs,
        linear_inputs=options.linear_inputs,
        bindings=parse_bindings(options.bindings or ()),
        catalog=load_entry_points()[0],
        known=load_hardware_entry_points(),
    )
    return plan_source(options.source, wanted, console.progress)


def run(options: PlanArguments, console: Console) -> int:
    """Find the layouts that fit on given hardware.

    Bytes per rank, largest context, lower bounds for speed; the sentence why for each layout that is not legal. Mesh
    axes that are left out are tried in all sizes.
    """
    from dayzero.planner.plan_show import show_plan

    report = report_of(options, console)
    show_plan(report, console)
    console.emit_json(report)
    return exit_code(report.verdict)
