"""Which variant each operator of a model gets on a device: the best-ranked one that fits, before anything runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from dayzero.decl import OpUse
from dayzero.hardware import Hardware
from dayzero.ops.catalog import CATALOG, Catalog, Line, lacking


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
