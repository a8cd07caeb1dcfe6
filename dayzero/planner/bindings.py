"""Which variant each operator of a model gets on a device: the best-ranked one that fits, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dayzero.decl import OpUse
from dayzero.errors import UsageError
from dayzero.hardware import Hardware
from dayzero.ops.bindings import asked_by, bound_uses
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line, lacking

EVERYWHERE = "*"


def decide(
    uses: Iterable[OpUse], hardware: Hardware, dtype: str, asked: Mapping[str, str], catalog: Catalog = CATALOG
) -> dict[str, str]:
    """``contract@site`` -> variant for every use that does not run its reference: what is asked for, else the choice.

    asked: bindings, in which ``*=reference`` means that nothing is chosen. A composed operator that was not asked for
    gives way to its parts where one of them was. Errors: those of ``bound_uses``; UsageError for ``*`` with a variant.
    """
    uses, named = tuple(uses), {place: variant for place, variant in asked.items() if place != EVERYWHERE}
    everywhere = asked.get(EVERYWHERE)
    if everywhere not in (None, REFERENCE):
        raise UsageError(
            f"binding *={everywhere}: * goes with {REFERENCE} alone; name the contracts to bind {everywhere}."
        )
    moved = bound_uses(named, uses, catalog)
    made = {} if everywhere == REFERENCE else choose(uses, hardware, dtype, catalog)
    # What is asked for holds against what would be chosen, a reference too: ``moved`` names only other variants.
    left = {place: variant for place, variant in made.items() if not asked_by(place, named)}
    for use in uses:
        if any(asked_by(part, named) for part in use.parts):
            left.pop(use.place, None)
    return left | moved


def choose(uses: Iterable[OpUse], hardware: Hardware, dtype: str, catalog: Catalog = CATALOG) -> dict[str, str]:
    """``contract@site`` -> variant, for every use that some ranked variant fits; all others get the reference.

    dtype: of activations and plain weights, ``bf16``, ``f32`` or ``f16``. A variant fits when its target is ``any`` or
    the device's, its needs are all features of the device, it has the dtype, and it has the options of the site.
    """
    out = {}
    for use in uses:
        fitting = [line for line in catalog.lookup(use.contract) if fits(line, hardware, dtype, dict(use.traits))]
        if fitting:
            best = max(fitting, key=lambda line: (line.rank, line.variant))
            out[f"{use.contract}@{use.site}"] = best.variant
    return out


def fits(line: Line, hardware: Hardware, dtype: str, traits: Mapping[str, object]) -> bool:
    """Whether a plan may choose this line of its own accord."""
    return (
        line.rank > 0
        and line.target in ("any", hardware.target)
        and hardware.features.issuperset(line.needs)
        and (not line.dtypes or dtype in line.dtypes)
        and not lacking(line, traits)
    )
