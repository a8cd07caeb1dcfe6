"""``dayzero twin``: a small seeded checkpoint with every trait of the real one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from dayzero.commands.frame import RecipeOption
from dayzero.console import Console
from dayzero.errors import UsageError
from dayzero.units import bytes_text, count_text, counted


@dataclass(frozen=True, slots=True)
class TwinArguments:
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="A checkpoint, or a config (.json) alone.")]
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist yet.")]
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Seed of the weights.")] = 0
    recipe: RecipeOption = None
    paper: Annotated[bool, typer.Option("--paper", help="Full size: headers over sparse files, no weights.")] = False
    changes: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=JSON", help="A config key of the twin; may be repeated.")
    ] = None
    num_shards: Annotated[int | None, typer.Option("--shards", min=1, metavar="N", help="Number of shard files.")] = (
        None
    )


def run(arguments: TwinArguments, console: Console) -> int:
    """Write a small seeded checkpoint with every trait of SOURCE.

    It has the real names, formats and tokenizer, so that a port is proven on a laptop. --paper: full size, no weights.
    """
    with console.progress("loading the libraries"):
        from dayzero.rehearse.twin import TwinOptions, write_twin

    options = TwinOptions(
        seed=arguments.seed,
        recipe=None if arguments.recipe is None else str(arguments.recipe),
        paper=arguments.paper,
        changes=parse_changes(arguments.changes or ()),
        num_shards=arguments.num_shards,
    )
    made = write_twin(arguments.source, str(arguments.out), options, console.progress)
    size = f"{bytes_text(made.total_bytes)}{' (sparse)' if made.paper else ''}"
    held = f"{counted(made.num_tensors, 'tensor')}, {counted(made.num_shards, 'shard')}, {size}"
    console.line(f"wrote {made.out}: {made.family}, {count_text(made.parameters)} parameters in {held}")
    console.emit_json(made)
    return 0


def parse_changes(given: Iterable[str]) -> dict[str, Any]:
    """``hidden_size=256`` -> {"hidden_size": 256}. UsageError where the value is not JSON or there is none."""
    changes: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        try:
            changes[key] = json.loads(value)
        except ValueError as error:
            raise UsageError(f"--set {text}: give KEY=JSON, e.g. --set hidden_size=256; {error}") from error
        if not (key and equals):
            raise UsageError(f"--set {text}: give KEY=JSON, e.g. --set hidden_size=256")
    return changes
