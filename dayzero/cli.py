"""The command line. Importing this file imports neither torch nor any command's work (a test counts the seconds)."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from dayzero import __version__
from dayzero.commands import align, demo, inspect, plan, twin
from dayzero.commands.frame import EXIT_INTERRUPTED, register
from dayzero.console import Console
from dayzero.errors import UsageError

# typer brings a click of its own; its usage errors are reached through the one name that typer publishes.
_CALL_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if issubclass(kind, Exception) and hasattr(kind, "format_message")
)


def build_app() -> typer.Typer:
    """The typer application with every command registered."""
    app = typer.Typer(
        name="dayzero",
        help="From a freshly published checkpoint to a proven port: inspect, plan, twin, align.",
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
    register(app, "demo", demo.DemoOptions, demo.run)
    register(app, "inspect", inspect.InspectOptions, inspect.run)
    register(app, "plan", plan.PlanOptions, plan.run)
    register(app, "twin", twin.TwinOptions, twin.run)
    register(app, "align", align.AlignArguments, align.run)
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (see commands/frame). ``arguments`` default to the process's own."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = build_app()(given, prog_name="dayzero", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except _CALL_ERRORS as error:
        message = error.format_message() if hasattr(error, "format_message") else str(error)
        path = getattr(getattr(error, "ctx", None), "command_path", "dayzero")
        Console(json_mode="--json" in given).error(UsageError(f"{message} (see {path} --help)"))
        return UsageError.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader has gone. Point stdout elsewhere, or the interpreter complains again when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UsageError.exit_code


if __name__ == "__main__":
    sys.exit(main())
