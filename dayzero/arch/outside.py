"""What a spec from another package answers, so that plan, twin, align and the stack run it like one of our own.

Two things are asked of it beyond what our specs answer, because nothing here can know them: its words in a layer map,
and how long its sums are, from which the bound of an alignment follows. ``block`` names its code as a catalog line
names an operator's, so that the spec itself stays free of tensors.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from dayzero.decl import CacheNeed, OpUse, ParamDecl


@runtime_checkable
class OutsideMixer(Protocol):
    """A token mixer. kind: one word. block: ``package.module:Class``, called with (spec, params, site)."""

    kind: str
    block: str

    def params(self, p: str) -> list[ParamDecl]: ...

    def cache(self, p: str) -> list[CacheNeed]: ...

    def contracts(self, p: str) -> list[OpUse]: ...

    def flops(self, context: float) -> float: ...

    def word(self) -> str:
        """The spec in a layer map, e.g. ``mean window 8``."""

    def sums(self, num_tokens: int) -> tuple[int, int, str]:
        """(terms of the longest sum, sums one after another, what they are), the input norm included."""


@runtime_checkable
class OutsideChannel(Protocol):
    """A channel mixer. kind, block, word, sums: as for a mixer. active_params: weights one token meets."""

    kind: str
    block: str

    def params(self, p: str) -> list[ParamDecl]: ...

    def contracts(self, p: str) -> list[OpUse]: ...

    def active_params(self) -> int: ...

    def word(self) -> str: ...

    def sums(self) -> tuple[int, int, str]: ...
