"""``dayzero twin``: a small seeded checkpoint with every trait of the real one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from dayzero.commands.frame import RecipeOption
from dayzero.console import Console


@dataclass(frozen=True, slots=True)
class TwinOptions:
    source: Annotated[str, typer.Argument(help="A checkpoint, or a config.json alone.")]
    out: Annotated[Path, typer.Argument(help="Folder to write; must not exist yet.")]
    seed: Annotated[int, typer.Option(min=0, help="Seed of the weights.")] = 0
    recipe: RecipeOption = None
    paper: Annotated[bool, typer.Option("--paper", help="Full size: headers over sparse files, no weights.")] = False
    scale: Annotated[int, typer.Option(min=1, help="Widths as a multiple of the smallest twin.")] = 1


def run(options: TwinOptions, console: Console) -> int:
    """Write a small checkpoint with the real names, formats and traits; --paper: full size, no weights."""
    from dayzero.rehearse.twin import write_twin

    summary = write_twin(
        options.source,
        str(options.out),
        seed=options.seed,
        recipe=None if options.recipe is None else str(options.recipe),
        paper=options.paper,
        scale=options.scale,
        progress=console.progress,
    )
    console.line(f"wrote {options.out}")
    console.emit_json(summary if summary is not None else {"out": str(options.out)})
    return 0
