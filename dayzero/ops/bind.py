"""From a contract's name to the function a block calls. What is asked for is what is used, or an error.

A binding maps ``contract@site`` (one site) or ``contract`` (all its sites) to the name of a variant. What no binding
names gets the reference body.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any

from dayzero.decl import OpUse
from dayzero.errors import MachineError, UsageError
from dayzero.extensions import OPERATORS, ask_point, load_point, points_of, said_of
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


def bound_uses(bindings: Mapping[str, str], uses: Iterable[OpUse], catalog: Catalog = CATALOG) -> dict[str, str]:
    """``contract@site`` -> variant for every use that ``bindings`` moves off the reference.

    UsageError when a binding meets no use, names no variant, or names one that lacks an option its site needs.
    """
    known = list(uses)
    check_bindings(bindings, ((use.contract, use.site) for use in known), catalog)
    out = {}
    for use in known:
        line = chosen(use.contract, use.site, bindings, catalog)
        if line.variant == REFERENCE:
            continue
        missing = lacking(line, dict(use.traits))
        if missing:
            raise UsageError(f"{use.site}: variant {line.variant!r} does not fit: {'; '.join(missing)}")
        out[f"{use.contract}@{use.site}"] = line.variant
    return out


def parse_bindings(given: Iterable[str]) -> dict[str, str]:
    """``attention.causal@layers.3.mixer.attend=tiled`` -> {"attention.causal@layers.3.mixer.attend": "tiled"}.

    UsageError for what has another form, and for two bindings of the same place.
    """
    out: dict[str, str] = {}
    for text in given:
        key, equals, variant = text.partition("=")
        contract, at, site = key.partition("@")
        if not (equals and contract and variant) or (at and not site):
            raise UsageError(f"--bind {text}: give CONTRACT=VARIANT, or CONTRACT@SITE=VARIANT for one site.")
        if key in out:
            raise UsageError(f"--bind {text}: {key} is bound to {out[key]!r} already; give one of them.")
        out[key] = variant
    return out


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
