"""How a command is put together: options from a dataclass, the shared flags, errors turned into exit codes.

Exit codes: 0 passed, 1 the model or checkpoint failed a check, 2 the call was wrong, 3 this machine lacks something,
70 a bug in dayzero itself (so that it is never taken for a verdict on a checkpoint), 130 interrupted,
141 the reader of the output went away before its end (``| head``).
"""

from __future__ import annotations

import errno
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from dayzero.console import Console
from dayzero.errors import MachineError, UsageError, UserError
from dayzero.finding import Verdict

Options = TypeVar("Options")

EXIT_FAILED_CHECK = 1
EXIT_BUG = 70
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
NO_MEMORY = "can't allocate memory"  # how the tensor library's allocator says it, in a RuntimeError
LACKS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE)
EXTRA_OF_PACKAGE = {"transformers": "oracle", "huggingface_hub": "hub", "gguf": "demo"}

# typer brings a click of its own; its usage errors are reached through the one name that typer publishes.
CALL_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if issubclass(kind, Exception) and hasattr(kind, "format_message")
)

SHARED_FLAGS: dict[str, tuple[Any, Any]] = {
    "json_mode": (Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")], False),
    "quiet": (Annotated[bool, typer.Option("--quiet", "-q", help="Only the verdict and what failed.")], False),
    "show_all": (Annotated[bool, typer.Option("--all", help="Cut nothing: every row, every name.")], False),
    "debug": (Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")], False),
}

RecipeOption = Annotated[
    Path | None, typer.Option("--recipe", metavar="FILE.py", help="Recipe of the family, given by path.")
]
CacheOption = Annotated[
    str,
    typer.Option(
        "--cache",
        metavar="bf16|fp8|KIND=RECORD,…",
        help="What tokens' rows are kept in; by kind: latent=mla_fp8_656|mla_fp8_tiled, "
        "index=idx_fp8_128|idx_mxfp8_32, kv=kv_fp8.",
    ),
]
BindOption = Annotated[
    list[str] | None,
    typer.Option(
        "--bind", metavar="CONTRACT[@SITE]=VARIANT", help="Run this variant; may be repeated. *=reference: none."
    ),
]
ExpertInputsOption = Annotated[
    str, typer.Option(metavar="bf16|fp8_128", help="What inputs of routed experts are rounded to.")
]
LinearInputsOption = Annotated[
    str, typer.Option(metavar="bf16|fp8_128", help="What inputs of linear layers stored in FP8 blocks are rounded to.")
]
SourceArgument = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A folder, a config (.json), s3://bucket/prefix, a hub id if online, or seeded:CONFIG (weights are made).",
    ),
]


def register(app: typer.Typer, name: str, options_type: type[Options], run: Callable[[Options, Console], int]) -> None:
    """Add command ``name``; its parameters are the fields of ``options_type``, a dataclass with typer's annotations.

    The help text is the docstring of ``run``, which returns the exit code.
    """
    parameters = _parameters(options_type)

    def body(**values: Any) -> int:
        flags = {flag: values.pop(flag) for flag in SHARED_FLAGS}
        debug = flags.pop("debug")
        return guarded(lambda console: run(options_type(**values), console), Console(**flags), debug)

    vars(body)["__signature__"] = inspect.Signature(parameters)
    body.__annotations__ = {p.name: p.annotation for p in parameters}
    body.__doc__ = run.__doc__
    app.command(name)(body)


def call_error_text(error: Exception) -> str:
    """What one of CALL_ERRORS has to say, in a sentence without its prefix."""
    return str(error.format_message()) if hasattr(error, "format_message") else str(error)


def _parameters(options_type: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(options_type, include_extras=True)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own = [
        inspect.Parameter(
            field.name,
            kind,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(options_type)
    ]
    shared = [
        inspect.Parameter(flag, kind, default=default, annotation=annotation)
        for flag, (annotation, default) in SHARED_FLAGS.items()
    ]
    return [*own, *shared]


def guarded(work: Callable[[Console], int], console: Console, debug: bool = False) -> int:
    """Run ``work`` at the process edge: every exception becomes one sentence and an exit code."""
    try:
        return work(console)
    except KeyboardInterrupt:
        console.problem("Interrupted", "interrupted", EXIT_INTERRUPTED)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # caught here, as typer would exit with 1, which is a verdict
        leave_stdout()
        return EXIT_BROKEN_PIPE
    except Exception as error:  # noqa: BLE001 - the edge of the process: nothing above could tell a user more
        if debug:
            traceback.print_exc(file=sys.stderr)
        known = as_user_error(error)
        if known is not None:
            console.error(known)
            return known.exit_code
        message = f"internal error: {type(error).__name__}: {error} (run with --debug for the traceback)"
        console.problem("InternalError", message, EXIT_BUG)
        return EXIT_BUG


def leave_stdout() -> None:
    """Point stdout elsewhere, or the interpreter complains again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def as_user_error(error: Exception) -> UserError | None:
    """``error`` as something a user can mend, or None when it is a bug."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        extra = EXTRA_OF_PACKAGE.get(package)
        return MachineError(f"this command needs {package}: pip install 'dayzero[{extra}]'") if extra else None
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY in str(error)):
        return MachineError("this machine ran out of memory; close other programs or use a larger machine")
    if isinstance(error, OSError) and (error.filename is not None or error.errno in LACKS):
        message = f"{'an output' if error.filename is None else error.filename}: {error.strerror}"
        if error.errno in LACKS:
            return MachineError(f"{message}; free the resource and try again")
        return UsageError(f"{message}; check the path and its permissions")
    return None


def exit_code(verdict: Verdict) -> int:
    """Only a fail fails the command; notes are for reading."""
    return EXIT_FAILED_CHECK if verdict == "fail" else 0
