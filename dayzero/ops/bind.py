"""From a contract's name to the function a block calls. What is asked for is what is used, or an error.

A binding maps ``contract@site`` (one site) or ``contract`` (all its sites) to the name of a variant. What no binding
names gets the reference body.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dayzero.errors import MachineError, UsageError
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line, lacking
from dayzero.ops.contract import Contract

ENTRY_POINT_GROUP = "dayzero.operators"


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
    lacks a trait, MachineError when its module cannot be imported here. There is no fallback to another variant.
    """
    line = chosen(contract, site, bindings or {}, catalog)
    missing = lacking(line, traits or {})
    if missing:
        raise UsageError(f"{site}: variant {line.variant!r} does not fit: {'; '.join(missing)}")
    return resolve(line)


def chosen(contract: str, site: str, bindings: Mapping[str, str], catalog: Catalog) -> Line:
    """The catalog line a site gets; UsageError when there is none."""
    lines = {line.variant: line for line in catalog.lookup(contract)}
    if not lines:
        near = ", ".join(catalog.nearest(contract)) or "none"
        raise UsageError(f"{site}: there is no operator contract {contract!r}; nearest: {near}")
    variant = bindings.get(f"{contract}@{site}", bindings.get(contract, REFERENCE))
    if variant not in lines:
        raise UsageError(f"{site}: {contract} has no variant {variant!r}; it has {', '.join(lines)}")
    return lines[variant]


def resolve(line: Line) -> Callable[..., Any]:
    """Import a line's function; for a reference, the body of its contract."""
    module_name, _, attribute = line.module.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        needs = ", ".join(line.needs) or "nothing further"
        raise MachineError(
            f"variant {line.variant!r} of {line.contract} cannot be imported here ({error}); it needs {needs}"
        ) from error
    found = getattr(module, attribute, None)
    if isinstance(found, Contract):
        if found.name != line.contract:
            raise UsageError(
                f"{line.module} is the contract {found.name}, but the catalog lists it for {line.contract}"
            )
        return found.body
    if not callable(found):
        raise UsageError(f"{line.contract}, variant {line.variant!r}: {line.module} names no function")
    return found


def check_bindings(bindings: Mapping[str, str], uses: Iterable[tuple[str, str]], catalog: Catalog = CATALOG) -> None:
    """Raise UsageError unless every binding is met by a use (contract, site) and names an existing variant."""
    keys: dict[str, tuple[str, str]] = {}
    for contract, site in uses:
        keys.setdefault(contract, (contract, site))
        keys[f"{contract}@{site}"] = (contract, site)
    for key in bindings:
        if key not in keys:
            raise UsageError(f"binding {key!r} meets no operator of this model; remove it, or correct contract or site")
        chosen(*keys[key], bindings, catalog)


def load_entry_points(
    catalog: Catalog = CATALOG, found: Iterable[EntryPoint] | None = None
) -> tuple[Catalog, tuple[str, ...]]:
    """(a copy of ``catalog`` with the operators of installed packages, what was loaded as ``name = module``).

    An entry point of group ``dayzero.operators`` is a callable ``register(catalog)``, or a module with such a
    function; it calls ``catalog.add(Line(...))``. Contracts of its own register themselves when it is imported. Pass
    the result on to ``bind``; nothing global changes. Raises UsageError, naming the package, if one cannot be loaded.
    """
    grown, loaded = catalog.copy(), []
    for point in found if found is not None else entry_points(group=ENTRY_POINT_GROUP):
        try:
            target = point.load()
        except (ImportError, AttributeError) as error:
            raise UsageError(f"operator package {point.name!r} ({point.value}) cannot be loaded: {error}") from error
        register = target if callable(target) else getattr(target, "register", None)
        if not callable(register):
            raise UsageError(f"operator package {point.name!r} ({point.value}) has no register(catalog)")
        register(grown)
        loaded.append(f"{point.name} = {point.value}")
    return grown, tuple(loaded)
