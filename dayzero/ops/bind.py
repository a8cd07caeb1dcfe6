"""From a contract's name to the function a block calls. What is asked for (``ops.bindings``) is what is used, or an
error."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

from dayzero.errors import MachineError, UsageError
from dayzero.extensions import OPERATORS, ask_point, load_point, points_of, said_of
from dayzero.ops.bindings import chosen
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line, lacking
from dayzero.ops.contract import Contract


def bind(
    contract: str,
    site: str,
    bindings: Mapping[str, str] | None = None,
    *,
    traits: Mapping[str, object] | None = None,
    catalog: Catalog = CATALOG,
) -> Callable[..., Any]:
    """The function for ``contract`` at ``site`` (e.g. ``layers.3.mixer``).

    traits: the options the site needs. Raises UsageError when the contract or the requested variant does not exist or
    lacks a trait, MachineError when its module cannot be imported here, or says by ``check_machine`` that this machine
    lacks something. There is no fallback to another variant.
    """
    line = chosen(contract, site, bindings or {}, catalog)
    missing = lacking(line, traits or {})
    if missing:
        raise UsageError(f"{site}: variant {line.variant!r} does not fit: {'; '.join(missing)}")
    function = resolve(line)
    ready = getattr(importlib.import_module(line.module.partition(":")[0]), "check_machine", None)
    if ready is not None and line.variant != REFERENCE:
        ready()
    return function


def resolve(line: Line) -> Callable[..., Any]:
    """Import a line's function; for a reference, the body of its contract."""
    found = _imported(line, line.module)
    if isinstance(found, Contract):
        if found.name != line.contract:
            raise UsageError(
                f"{line.module} is the contract {found.name}, but the catalog lists it for {line.contract}"
            )
        return found.body
    return _function(line, line.module, found)


def prepack_of(line: Line) -> Callable[[Any], Any] | None:
    """What lays a weight [N, K] out for the line's function; None when that takes the weight as it is.

    The result has ``nbytes``; the weight is not needed any more. The returned function raises MachineError when this
    machine cannot lay it out, ValueError for a dtype the variant does not have.
    """
    return _function(line, line.prepack, _imported(line, line.prepack)) if line.prepack else None


def _imported(line: Line, place: str) -> Any:
    """The object that ``package.module:name`` names; None when the module has none of that name."""
    module_name, _, attribute = place.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        needs = ", ".join(line.needs) or "nothing further"
        raise MachineError(
            f"variant {line.variant!r} of {line.contract} cannot be imported here ({error}); it needs {needs}"
        ) from error
    return getattr(module, attribute, None)


def _function(line: Line, place: str, found: Any) -> Callable[..., Any]:
    if not callable(found):
        raise UsageError(f"{line.contract}, variant {line.variant!r}: {place} names no function")
    return found


def load_entry_points(
    catalog: Catalog = CATALOG, found: Iterable[EntryPoint] | None = None
) -> tuple[Catalog, tuple[str, ...]]:
    """(a copy of ``catalog`` with the operators of installed packages, what was loaded as ``name = module``).

    An entry point of group ``dayzero.operators`` is a callable ``register(catalog)``, or a module with such a
    function; it calls ``catalog.add(Line(...))``. Contracts of its own register themselves when it is imported. Pass
    the result on to ``bind``; nothing global changes. Raises UsageError, naming the package, if one cannot be loaded.
    """
    grown, loaded = catalog.copy(), []
    for point in points_of(OPERATORS) if found is None else found:
        target = load_point(point)
        register = target if callable(target) else getattr(target, "register", None)
        if not callable(register):
            raise UsageError(f"{said_of(point)} has no register(catalog).")
        ask_point(point, partial(register, grown))
        loaded.append(f"{point.name} = {point.value}")
    return grown, tuple(loaded)
