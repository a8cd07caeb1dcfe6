"""``dayzero doctor``: which layer is at fault when a model will not run."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.frame import RecipeOption, exit_code
from dayzero.commands.serve import API_KEY
from dayzero.console import Console
from dayzero.errors import UsageError

if TYPE_CHECKING:
    from dayzero.acceptance.doctor.diagnosis import Diagnosis
    from dayzero.acceptance.doctor.machine import Look


@dataclass(frozen=True, slots=True)
class DoctorArguments:
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="RECORD|SOURCE|URL",
            help="A folder of dayzero accept, a checkpoint, or a running server; left out: this machine.",
        ),
    ] = None
    recipe: RecipeOption = None
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help=f"Sent to a URL; else ${API_KEY}.")] = None
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Ask a server that is not on this machine.")] = (
        False
    )
    port: Annotated[int, typer.Option(min=1, max=65535, help="Of a server that is to be started here.")] = 8000


def run(arguments: DoctorArguments, console: Console) -> int:
    """Say which layer is at fault when a model will not run.

    Of a record: the first gate that fails, what it explains of the others, the next command. Of a checkpoint: what
    paper and this machine say, without reading weights. Of a server: where its answers stop. Alone: what this machine
    lacks.
    """
    from dayzero.acceptance.doctor.show import show

    found = diagnosis_of(arguments, console)
    show(found, console)
    console.emit_json(found)
    return exit_code(found.verdict)


def diagnosis_of(arguments: DoctorArguments, console: Console) -> Diagnosis:
    from dayzero.acceptance.doctor.record import diagnose_record, is_record
    from dayzero.acceptance.load.target import check_loopback, is_url

    target = arguments.target
    if target is not None and is_url(target):
        from dayzero.acceptance.doctor.service import diagnose_url
        from dayzero.acceptance.load.wire import Address

        if arguments.recipe is not None:
            raise UsageError("--recipe: it is of a checkpoint; leave it out with a URL.")
        if not arguments.allow_remote:
            check_loopback(Address.parse(target))
        key = arguments.api_key or os.environ.get(API_KEY)
        with console.progress(f"asking {target}"):
            return diagnose_url(target, {"Authorization": f"Bearer {key}"} if key else None)
    if target is not None and is_record(Path(target)):
        return diagnose_record(Path(target))
    from dayzero.acceptance.doctor.source import diagnose_machine, diagnose_source

    look = _look(arguments, console)
    if target is None:
        return diagnose_machine(look)
    recipe = None if arguments.recipe is None else str(arguments.recipe)
    return diagnose_source(target, look, recipe=recipe, progress=console.progress)


def _look(arguments: DoctorArguments, console: Console) -> Look:
    from dayzero.acceptance.doctor.machine import look_here
    from dayzero.demo import cache_root

    folders = [("what is kept between runs", cache_root()), ("temporary files", Path(tempfile.gettempdir()))]
    folders.append(("records and logs", Path.cwd()))
    with console.progress("looking at this machine"):
        return look_here(folders, arguments.port)
