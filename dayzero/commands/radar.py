"""``dayzero radar``: known families and the operator traits they carry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.frame import RecipeOption
from dayzero.console import Console
from dayzero.errors import UsageError

if TYPE_CHECKING:
    from dayzero.planner.radar import RadarReport


@dataclass(frozen=True, slots=True)
class RadarArguments:
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="A checkpoint or config to place among them.")
    ] = None
    hardware: Annotated[
        str, typer.Option(metavar="NAME", help="Which device's variants count: h200, cpu, here, or a TOML file.")
    ] = "h200"
    picture: Annotated[Path | None, typer.Option(metavar="FILE.svg", help="Draw families by traits.")] = None
    recipe: RecipeOption = None


def report_of(arguments: RadarArguments, console: Console) -> RadarReport:
    from dayzero.hardware import load_hardware_entry_points, parse_hardware
    from dayzero.ops.bind import load_entry_points
    from dayzero.planner.detect import HERE, detect
    from dayzero.planner.inspect import inspect_source
    from dayzero.planner.radar import read_radar, report_on

    if arguments.picture is not None and arguments.picture.suffix.lower() != ".svg":
        raise UsageError(f"--picture {arguments.picture}: give a file name that ends in .svg.")
    here = arguments.hardware == HERE
    hardware, _ = detect() if here else parse_hardware(arguments.hardware, load_hardware_entry_points())
    catalog, seen = load_entry_points()[0], None
    if arguments.source is not None:
        recipe = None if arguments.recipe is None else str(arguments.recipe)
        seen = inspect_source(arguments.source, recipe=recipe, progress=console.progress, catalog=catalog)
    return report_on(read_radar(), hardware, catalog, seen)


def run(arguments: RadarArguments, console: Console) -> int:
    """Show known families by the operator traits they carry.

    How often each trait recurs, which have a reference here and which a fast variant, and what a given config needs.
    """
    from dayzero.planner.radar_show import radar_svg, show_radar

    report = report_of(arguments, console)
    if arguments.picture is not None:
        arguments.picture.write_text(radar_svg(report), encoding="utf-8")
    show_radar(report, console)
    console.emit_json(report)
    return 0
