"""``dayzero release``: the whole of release day, resumable."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.frame import RecipeOption, exit_code
from dayzero.console import Console, duration_text

if TYPE_CHECKING:
    from dayzero.acceptance.release.run import ReleaseReport


@dataclass(frozen=True, slots=True)
class ReleaseArguments:
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A folder, s3://bucket/prefix, or a hub id.")]
    serve: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Behind --: of `dayzero serve`, for servers that are started."),
    ] = None
    out: Annotated[Path, typer.Option(metavar="DIR", help="Mirror, twin, reports; run again to go on.")] = Path(
        "release"
    )
    wait: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="For the publication.")] = 0.0
    hardware: Annotated[str, typer.Option(metavar="NAME[xN]", help="To plan for.")] = "here"
    profile: Annotated[str, typer.Option(metavar="quick|release-day|long", help="Of the acceptance.")] = "release-day"
    twin_only: Annotated[bool, typer.Option("--twin-only", help="Do not align the real weights.")] = False
    recipe: RecipeOption = None


def report_of(arguments: ReleaseArguments, console: Console) -> ReleaseReport:
    from dayzero.acceptance.release.run import release
    from dayzero.acceptance.release.steps import Setting

    setting = Setting(
        arguments.source,
        arguments.source,
        arguments.out,
        hardware=arguments.hardware,
        profile=arguments.profile,
        recipe=None if arguments.recipe is None else str(arguments.recipe),
        real_align=not arguments.twin_only,
        serve=tuple(arguments.serve or ()),
    )
    return release(setting, arguments.wait, console.progress)


def run(arguments: ReleaseArguments, console: Console) -> int:
    """Take a checkpoint from its publication to its acceptance record.

    Waits for it, mirrors and verifies it, then inspect, plan, twin, align, serve, bench, accept. Stops with the reason
    at the first gate that does not hold; run again, it goes on from there.
    """
    report = report_of(arguments, console)
    rows = [
        (step.name, step.status, duration_text(step.seconds) if step.seconds else "", step.title)
        for step in report.steps
    ]
    console.line(f"{report.verdict}: {report.source}, in {report.out}")
    if report.mirrored is not None:
        held = report.mirrored
        console.line(
            f"mirrored {len(held['files'])} files to {held['folder']}, {len(held['verified'])} of them verified by the "
            f"publisher's hashes; left out: {', '.join(held['left_out']) or 'nothing'}"
        )
    console.table("steps", ("step", "gate", "time", "what it shows"), rows)
    for step in report.steps:
        if step.status == "failed":
            console.result(f"{step.name} does not hold:")
            for text in step.said:
                console.result(f"  {text}")
            console.result(f"  its whole report: {step.report}")
    console.emit_json(report)
    return exit_code(report.verdict)
