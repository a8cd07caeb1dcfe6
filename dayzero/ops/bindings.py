"""Bindings: which variant each site is to run, as asked for. No torch: a plan reads them too.

A binding maps ``contract@site`` (one site) or ``contract`` (all its sites) to the name of a variant. What no binding
names gets the reference body.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dayzero.decl import OpUse
from dayzero.errors import UsageError
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line, lacking


def variant_at(contract: str, site: str, bindings: Mapping[str, str]) -> str:
    """The name of the variant that a site gets: by its own binding, its contract's, or the reference."""
    return bindings.get(f"{contract}@{site}", bindings.get(contract, REFERENCE))


def chosen(contract: str, site: str, bindings: Mapping[str, str], catalog: Catalog) -> Line:
    """The catalog line a site gets; UsageError when there is none."""
    lines = {line.variant: line for line in catalog.lookup(contract)}
    if not lines:
        near = ", ".join(catalog.nearest(contract)) or "none"
        raise UsageError(f"{site}: there is no operator contract {contract!r}; nearest: {near}")
    variant = variant_at(contract, site, bindings)
    if variant not in lines:
        raise UsageError(f"{site}: {contract} has no variant {variant!r}; it has {', '.join(lines)}")
    return lines[variant]


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


def asked_by(place: str, bindings: Mapping[str, str]) -> str:
    """The binding that names ``contract@site``, by itself or with its contract; empty when none does."""
    return next((key for key in (place, place.partition("@")[0]) if key in bindings), "")


def bound_uses(bindings: Mapping[str, str], uses: Iterable[OpUse], catalog: Catalog = CATALOG) -> dict[str, str]:
    """``contract@site`` -> variant for every use that ``bindings`` moves off the reference.

    UsageError when a binding meets no use, names no variant, or names one that lacks an option its site needs, and for
    one of a composed operator beside one of its parts.
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
        out[use.place] = line.variant
        part = next(filter(None, (asked_by(part, bindings) for part in use.parts)), "")
        if part:
            raise UsageError(
                f"bindings {asked_by(use.place, bindings)!r} and {part!r} are of the same work: at {use.site} "
                f"{use.contract} does what {part.partition('@')[0]} would; leave one of them out."
            )
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
