"""Which variants of an operator are not bound on a device, and why: what to try when it is slow."""

from __future__ import annotations

from dataclasses import dataclass

from dayzero.decl import OpUse
from dayzero.hardware import Hardware
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line, lacking


@dataclass(frozen=True, slots=True)
class Untried:
    """A variant for this kind of device that is not bound. ready: it can be bound as things are. why: it is not."""

    contract: str
    variant: str
    ready: bool
    why: str


def untried(use: OpUse, bound: str, hardware: Hardware, dtype: str, catalog: Catalog = CATALOG) -> list[Untried]:
    """Variants of the use's contract for ``hardware``'s kind of device other than ``bound`` and the reference; those
    that can be bound first, best-ranked first. dtype: of activations."""
    lines = [
        line
        for line in catalog.lookup(use.contract)
        if line.variant not in (bound, REFERENCE) and line.target in ("any", hardware.target)
    ]
    rank = next((line.rank for line in catalog.lookup(use.contract) if line.variant == bound), 0)
    made = [(line, _hindrance(line, use, hardware, dtype)) for line in lines]
    ordered = sorted(made, key=lambda one: (bool(one[1]), -one[0].rank, one[0].variant))
    return [Untried(use.contract, line.variant, not why, why or _left_out(line, rank)) for line, why in ordered]


def _hindrance(line: Line, use: OpUse, hardware: Hardware, dtype: str) -> str:
    absent = [need for need in line.needs if need not in hardware.features]
    if absent:
        return f"needs {', '.join(absent)}"
    if line.dtypes and dtype not in line.dtypes:
        return f"is for {' and '.join(line.dtypes)}, not {dtype}"
    return "; ".join(lacking(line, dict(use.traits)))


def _left_out(line: Line, rank: int) -> str:
    """rank: of the variant that is bound."""
    if line.rank > rank:
        return "fits, and a plan would take it: it was bound otherwise"
    return "fits, ranked below the one that is bound" if line.rank else "fits, but is only bound when it is asked for"
