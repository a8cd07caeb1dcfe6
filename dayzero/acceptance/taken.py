"""Which variants an alignment ran: what was asked for is checked first, what the blocks took is kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dayzero.arch.spec import ModelSpec
from dayzero.errors import UsageError
from dayzero.ops.bind import resolve
from dayzero.ops.bindings import bound_uses, chosen
from dayzero.ops.catalog import REFERENCE, Catalog


class Taken:
    """A ``Bind`` over the asked bindings that remembers which variant it gave to which site.

    bound: ``contract@site`` -> variant, for every operator of the model that the bindings move off its reference.

    Raises UsageError at once where ``bound_uses`` does, as a plan and an engine do.
    """

    def __init__(self, bindings: Mapping[str, str], catalog: Catalog, spec: ModelSpec) -> None:
        self._bindings, self._catalog = dict(bindings), catalog
        self.bound = bound_uses(self._bindings, spec.contracts(), catalog)
        self._given: dict[str, str] = {}
        self._met: set[str] = set()

    def __call__(self, contract: str, site: str) -> Callable[..., Any]:
        line = chosen(contract, site, self._bindings, self._catalog)
        key = f"{contract}@{site}"
        self._met |= {key, contract}
        if line.variant != REFERENCE:
            self._given[key] = line.variant
        return resolve(line)

    def variants(self) -> dict[str, str]:
        """``contract@site`` -> variant, as the blocks took them. UsageError for a binding that no block took."""
        left = [key for key in self._bindings if key not in self._met]
        if left:
            raise UsageError(f"--bind {left[0]}: no block took it; this form of the model does not run that operator.")
        return dict(self._given)
