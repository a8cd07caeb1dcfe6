"""``dayzero accept``: everything that is checked on release day, in one run and one record."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from dayzero.commands.frame import (
    CALL_ERRORS,
    EXIT_INTERRUPTED,
    RecipeOption,
    call_error_text,
    exit_code,
    register,
)
from dayzero.commands.serve import API_KEY, ServeArguments
from dayzero.console import Console
from dayzero.errors import UsageError
from dayzero.finding import Verdict

if TYPE_CHECKING:
    from dayzero.acceptance.accept.run import Asked
    from dayzero.acceptance.accept.stage import Subject

# Options of servers that an acceptance decides itself: they listen on a free loopback port, with a key of the run's.
DECIDED = ("--host", "--port", "--api-key", "--api-key-fd", "--json", "--recipe", "--served-model-name")


@dataclass(frozen=True, slots=True)
class AcceptArguments:
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="A folder, s3://bucket/prefix, or a hub id; may be left out with --url."),
    ] = None
    serve: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- OPTIONS", help="Behind --: of `dayzero serve`, for servers that are started."),
    ] = None
    url: Annotated[
        str | None, typer.Option(metavar="URL", help="A running OpenAI-compatible server, in place of one of our own.")
    ] = None
    model: Annotated[str | None, typer.Option(metavar="NAME", help="At --url; else the first that it lists.")] = None
    api_key: Annotated[str | None, typer.Option(metavar="KEY", help=f"Sent to the server; else ${API_KEY}.")] = None
    profile: Annotated[str, typer.Option(metavar="quick|release-day|long", help="How much is tried.")] = "quick"
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", show_default="accept-NAME-PROFILE", help="Where the record goes; resumed if there."
        ),
    ] = None
    stages: Annotated[str | None, typer.Option(metavar="A,B…", show_default="all eight", help="Only these stages.")] = (
        None
    )
    seed: Annotated[int, typer.Option(min=0, metavar="N", help="Of everything that is drawn.")] = 0
    recipe: RecipeOption = None
    baseline: Annotated[
        Path | None, typer.Option(metavar="DIR", help="An earlier record: fail where speed is worse beyond the noise.")
    ] = None
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Judge a server that is not on this machine. Ask its owner.")
    ] = False
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(metavar="A B", help="Two records side by side; nothing is run.")
    ] = None


def run(arguments: AcceptArguments, console: Console) -> int:
    """Judge a checkpoint and the service over it: eight stages of checks, one record.

    Weights, numerics, equalities, function, long context, performance, robustness, API contract. DIR gets record.json,
    junit.xml and index.html; a run that is started again does what is left. With --url alone: the black-box half, of
    any OpenAI-compatible server.
    """
    if arguments.compare is not None:
        return _compare(arguments, arguments.compare, console)
    from dayzero.acceptance.accept.run import Shown, accept
    from dayzero.acceptance.accept.service import Servers
    from dayzero.acceptance.accept.show import show_record
    from dayzero.acceptance.page import write_page

    asked = _asked(arguments, console)
    shown = Shown(console.progress, console.news)
    try:
        record = accept(asked, lambda folder: Servers(asked.subject, folder, console.progress), write_page, shown)
    except KeyboardInterrupt:
        said = f"interrupted; stages that are done are kept in {asked.out}: the same command does the rest"
        console.problem("Interrupted", said, EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    show_record(record, asked.out, console)
    console.emit_json(record)
    return exit_code(record["verdict"])


def _compare(arguments: AcceptArguments, records: tuple[Path, Path], console: Console) -> int:
    from dayzero.acceptance.accept.compare import compare
    from dayzero.acceptance.accept.show import show_comparison

    if arguments.source is not None or arguments.url is not None:
        raise UsageError("--compare A B reads two records and runs nothing: leave SOURCE and --url out.")
    comparison = compare(*records)
    if arguments.out is not None:
        from dayzero.acceptance.files import write_json
        from dayzero.acceptance.page import write_comparison_page

        arguments.out.mkdir(exist_ok=True)
        write_comparison_page(comparison, arguments.out)
        write_json(arguments.out / "comparison.json", comparison)
    show_comparison(comparison, console)
    console.emit_json(comparison)
    return exit_code(cast(Verdict, comparison["verdict"]))


# --- options ---------------------------------------------------------------------------------------------------------


def _asked(arguments: AcceptArguments, console: Console) -> Asked:
    """Everything that can be wrong with the call, before anything is started. UsageError, MachineError, and the errors
    of opening the source."""
    from dayzero.acceptance.accept.digest import verify_digest
    from dayzero.acceptance.accept.protocol import protocol_of, stamps_of
    from dayzero.acceptance.accept.record import read_record
    from dayzero.acceptance.accept.registry import parse_stages, stage_named
    from dayzero.acceptance.accept.run import Asked
    from dayzero.acceptance.accept.stage import PROFILES, Profile
    from dayzero.checkpoint.source import open_source

    if arguments.profile not in PROFILES:
        raise UsageError(f"--profile {arguments.profile}: give {', '.join(PROFILES[:-1])} or {PROFILES[-1]}.")
    names = parse_stages(arguments.stages)
    subject = _subject(arguments)
    out = arguments.out or Path(_folder_name(subject, arguments.profile))
    _check_out(out, subject)
    baseline = None if arguments.baseline is None else read_record(arguments.baseline)
    if baseline is not None and not verify_digest(baseline):
        raise UsageError(f"--baseline {arguments.baseline} was changed after it was written: its digest does not fit.")
    with console.progress("reading headers and versions"):
        protocol = protocol_of(subject, names, arguments.profile, arguments.seed, baseline)
        stamps = "" if subject.source is None else stamps_of(open_source(subject.source))
    return Asked(
        subject, [stage_named(name) for name in names], out, protocol, stamps, cast(Profile, arguments.profile),
        arguments.seed, baseline,
    )  # fmt: skip


def _subject(arguments: AcceptArguments) -> Subject:
    from dayzero.acceptance.accept.stage import Subject
    from dayzero.acceptance.load.target import check_loopback, is_url
    from dayzero.acceptance.load.wire import Address

    source, url, options = arguments.source, arguments.url, tuple(arguments.serve or ())
    if source is None and url is None:
        raise UsageError("give a SOURCE to judge, the address of a server with --url, or both.")
    if source is not None and is_url(source):
        raise UsageError(f"{source} is the address of a server: give it with --url.")
    if url is not None:
        if not is_url(url):
            raise UsageError(f"--url {url}: give an address such as http://127.0.0.1:8000.")
        if options:
            raise UsageError(f"{options[0]}: an option for servers that are started; {url} runs with its own already.")
        if not arguments.allow_remote:
            check_loopback(Address.parse(url))
    else:
        if arguments.model is not None or arguments.allow_remote:
            raise UsageError("--model and --allow-remote are about a server that runs already: give its --url.")
        check_serve_options(options)
    key = (arguments.api_key or os.environ.get(API_KEY)) if url is not None else None
    recipe = None if arguments.recipe is None else str(arguments.recipe)
    return Subject(source, url.rstrip("/") if url else None, arguments.model, key, recipe, options)


def check_serve_options(options: Sequence[str]) -> None:
    """UsageError for options that ``dayzero serve`` does not have, and for those that an acceptance decides itself."""
    for option in options:
        if option.partition("=")[0] in DECIDED:
            raise UsageError(f"{option}: an acceptance decides this itself; leave it out behind --.")
    if options and not options[0].startswith("-"):
        raise UsageError(f"{options[0]}: options for servers come behind --, such as -- --threads 4.")
    app = typer.Typer(add_completion=False)
    register(app, "serve", ServeArguments, lambda arguments, console: 0)
    command = typer.main.get_command(app)
    try:
        command.make_context("dayzero serve", ["SOURCE", *options])
    except typer.Exit as error:  # --help
        raise UsageError("--help: see dayzero serve --help.") from error
    except CALL_ERRORS as error:
        raise UsageError(f"behind --: {call_error_text(error)} (see dayzero serve --help)") from error


def _folder_name(subject: Subject, profile: str) -> str:
    """``accept-nova-quick``, below the current folder."""
    from dayzero.checkpoint.seeded_source import SEEDED, served_name

    name = subject.source or (subject.url or "").partition("://")[2]
    if subject.source is not None and subject.source.startswith(SEEDED):
        name = f"seeded-{served_name(subject.source)}"
    if subject.source is not None and Path(subject.source).exists():
        name = Path(subject.source).resolve().name
    return f"accept-{re.sub(r'[^A-Za-z0-9_.-]+', '-', name).strip('-.') or 'model'}-{profile}"


def _check_out(out: Path, subject: Subject) -> None:
    """UsageError when the record would lie inside what it is about: each run would change the checkpoint."""
    if subject.source is not None and Path(subject.source).is_dir():
        source = Path(subject.source).resolve()
        if source in (out.resolve(), *out.resolve().parents):
            raise UsageError(f"{out} lies in the checkpoint's own folder; give another place with --out.")
