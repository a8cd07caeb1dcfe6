"""The command line. Importing this file imports neither torch nor any command's work (a test counts the seconds)."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Annotated, NoReturn

import typer

from dayzero import __version__
from dayzero.commands.frame import (
    CALL_ERRORS,
    EXIT_BROKEN_PIPE,
    EXIT_INTERRUPTED,
    call_error_text,
    leave_stdout,
    register,
)
from dayzero.console import Console
from dayzero.errors import MachineError, UsageError

# Name of a command, and of its file, -> its options. A file is imported when its command is asked for.
COMMANDS = {
    "demo": "DemoOptions",
    "inspect": "InspectOptions",
    "plan": "PlanArguments",
    "twin": "TwinArguments",
    "align": "AlignArguments",
    "chat": "ChatArguments",
    "serve": "ServeArguments",
    "bench": "BenchArguments",
    "profile": "ProfileArguments",
    "accept": "AcceptArguments",
    "doctor": "DoctorArguments",
    "radar": "RadarArguments",
    "release": "ReleaseArguments",
}


def build_app(only: str | None = None) -> typer.Typer:
    """The typer application with every command registered, or with one of them."""
    app = typer.Typer(
        name="dayzero",
        help="From a freshly published checkpoint to an accepted service: inspect, plan, twin, align, serve.",
        epilog="Exit codes: 0 passed, 1 a check failed, 2 wrong call, 3 this machine lacks something, 70 a bug.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    ) -> None:
        if version:
            typer.echo(__version__)
            raise typer.Exit
        if context.invoked_subcommand is None:
            typer.echo(context.get_help(), err=True)
            raise typer.Exit(UsageError.exit_code)

    app.callback(invoke_without_command=True)(root)
    for name, options in COMMANDS.items():
        if only in (None, name):
            module = import_module(f"dayzero.commands.{name}")
            register(app, name, getattr(module, options), module.run)
    return app


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the command as an exception does: its temporary files and its children go with it."""

    def end(number: int, frame: object) -> NoReturn:
        for one in before:
            signal.signal(one, signal.SIG_IGN)  # a second one must not cut the cleaning up short
        raise SystemExit(128 + number)

    here = threading.current_thread() is threading.main_thread()  # only there handlers can be set
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if here and hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    # A parent that ignores a signal (nohup) wants it ignored here too.
    before = {number: handler for number, handler in before.items() if handler is signal.SIG_DFL}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _open_streams() -> None:
    """Give a closed stdout or stderr a place to write to, and let no character that the terminal lacks stop a run.

    Names come from downloads and from file systems: any of them may hold what a C locale, or UTF-8, cannot spell.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the process
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see commands/frame). ``arguments`` default to the process's own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _open_streams()
    try:
        with _ended_by_signals():
            only = given[0] if given and given[0] in COMMANDS else None
            code = build_app(only)(given, prog_name="dayzero", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except CALL_ERRORS as error:
        message = call_error_text(error)
        path = getattr(getattr(error, "ctx", None), "command_path", "dayzero")
        Console(json_mode="--json" in given).error(UsageError(f"{message} (see {path} --help)"))
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader has gone
        leave_stdout()
        return EXIT_BROKEN_PIPE
    except OSError as error:  # the output could not be written, and so neither what guarded() had to say about it
        leave_stdout()
        sys.stderr.write(f"error: the output cannot be written: {error.strerror or error}\n")
        return MachineError.exit_code


if __name__ == "__main__":
    sys.exit(main())
