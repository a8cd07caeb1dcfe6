"""Which weights of linear layers may stay as they are stored: those that nothing else takes than operators that have
that form. Paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dayzero.decl import OpUse
from dayzero.ops.bindings import chosen
from dayzero.ops.catalog import REFERENCE, Catalog, Line

# Whose site is the name of the weight they take.
_PRODUCTS = ("linear.matmul", "linear.matmul_f32", "linear.matmul_fp8_128")


def linear_lines(uses: Iterable[OpUse], bindings: Mapping[str, str], catalog: Catalog) -> dict[str, Line]:
    """By name of a weight, the variant that takes it, with the forms that all have which take it: its product's, and
    that of a composed operator which does the product too, where one is bound."""
    found: dict[str, Line] = {}
    for use in uses:
        line = chosen(use.contract, use.site, bindings, catalog)
        if use.parts and line.variant == REFERENCE:
            continue  # its parts do the work
        for contract, _, site in (place.partition("@") for place in use.parts or (use.place,)):
            if contract in _PRODUCTS:
                before = found.get(site, line).packed
                found[site] = replace(line, packed=tuple(form for form in line.packed if form in before))
    return found
