"""Packages outside the tree that add families, operators and accelerators: finding them, loading them, and what to say
when one cannot be loaded. Each room that accepts extensions asks here for its group.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any, TypeVar

from dayzero.errors import UsageError

MODELS, OPERATORS, HARDWARE = "dayzero.models", "dayzero.operators", "dayzero.hardware"

# What somebody else's module can come to while it is imported or asked.
IMPORT_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, NameError, OSError, RuntimeError,
    SyntaxError, TypeError, ValueError,
)  # fmt: skip

Answer = TypeVar("Answer")


def points_of(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of ``group`` in all installed packages, by name; nothing is imported."""
    return tuple(sorted(entry_points(group=group), key=lambda point: (point.name, point.value)))


def said_of(point: EntryPoint) -> str:
    """``package 'acme': entry point fast = acme.ops of dayzero.operators``, as an error names it."""
    package = point.dist.name if point.dist is not None else "unknown"
    return f"package {package!r}: entry point {point.name} = {point.value} of {point.group}"


def load_point(point: EntryPoint) -> Any:
    """The object an entry point names: a module, or something in it.

    UsageError, in one sentence, when it does not import.
    """
    return _asked(point, point.load, "does not import")


def ask_point(point: EntryPoint, ask: Callable[[], Answer]) -> Answer:
    """``ask()``, which calls code of the point's package. UsageError, in one sentence, when that code stops.

    A UsageError that the call itself raises keeps its words.
    """
    return _asked(point, ask, "stops when it is called")


def _asked(point: EntryPoint, ask: Callable[[], Answer], what: str) -> Answer:
    try:
        return ask()
    except UsageError as error:
        raise UsageError(f"{said_of(point)}: {error}") from error
    except IMPORT_ERRORS as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".: ")
        raise UsageError(f"{said_of(point)} {what} ({reason}); repair or uninstall the package.") from error


def named_object(where: str) -> Any:
    """The object that ``package.module:name`` names. ImportError or AttributeError when there is none."""
    module_name, _, attribute = where.partition(":")
    module: ModuleType = importlib.import_module(module_name)
    return getattr(module, attribute)


def refuse_twice(points: Iterable[EntryPoint], names: Iterable[str], taken: Iterable[str], what: str) -> None:
    """UsageError when two points, or a point and the tree itself, give the same name."""
    seen = dict.fromkeys(taken, "dayzero itself")
    for point, name in zip(points, names, strict=True):
        if name in seen:
            raise UsageError(f"{said_of(point)}: {what} {name!r} is given by {seen[name]} too; rename one of them.")
        seen[name] = said_of(point)
