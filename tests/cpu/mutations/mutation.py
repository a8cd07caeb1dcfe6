"""A mutation: one thing that is wrong in a checkpoint or in the product, and what an acceptance must say of it.

No torch here.
Kinds are the letters of public release-day reports. ``tests/cpu/faults`` holds those of the alignment's own proof, some
of which are planted here again, as a whole acceptance sees them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cpu.faults.catalogue import KINDS as OF_PORTS

KINDS = {
    **OF_PORTS,
    "H": OF_PORTS["H"] + ", sampling defaults",
    "I": "parsers of reasoning and tools",
    "J": "the contract of the API",
    "K": "recurrent state, prefix cache, chunks",
    "M": "sizes of rows and pool",
    "N": "recorded steps: what they go on reading, padding",
    "Q": "structured output",
    "R": "images and their placeholders",
    "S": "cancelling, leaks, health, probes",
    "T": "answers that depend on their company",
    "U": "families that nobody knows",
}
# Kinds of the list that nothing of an acceptance on a CPU computes: no draft runs, there is one rank, and no load takes
# long enough to be judged.
NOT_HERE = {"L": "drafts", "O": "ranks", "P": "time and memory of loading"}


class Patches:
    """Replaces attributes, as ``pytest.MonkeyPatch`` does, until it is closed; a process that ends soon never is."""

    def __init__(self) -> None:
        self.stack = ExitStack()

    def setattr(self, owner: Any, name: str, value: Any) -> None:
        before = vars(owner).get(name, _NONE)
        self.stack.callback(_put_back, owner, name, before)
        setattr(owner, name, value)

    def wrap(self, place: str, make: Callable[[Any], Any]) -> None:
        """Replace what ``module:Class.name`` names by ``make(what it is)``."""
        module, _, path = place.partition(":")
        *inside, name = path.split(".")
        owner = functools.reduce(getattr, inside, importlib.import_module(module))
        self.setattr(owner, name, make(getattr(owner, name)))

    def operator(self, place: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Give the reference of a contract, ``module:name``, another body; the contract itself stays for whoever has
        imported it."""
        from dataclasses import replace

        self.wrap(place, lambda contract: replace(contract, body=make(contract.body)))


_NONE = object()


def _put_back(owner: Any, name: str, value: Any) -> None:
    if value is _NONE:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


@dataclass(frozen=True)
class Part:
    """A stage, or of a long one what a mutation can touch. chosen: of functional and contract the checks, of
    equalities the features, of robustness and long_context their parts; empty: all."""

    stage: str
    chosen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mutation:
    """layer: at fault. base: the source it is made in, see ``bases``. report: that it is drawn from, if it is one.

    One of edit, which changes a copy of the source's folder, and plant, which changes the product in every process of
    the run; either may be ``module:name``, looked up when it is needed, or the name of one of ``tests/cpu/faults``.
    process: where plant is needed: ``engine``, ``http``, or both; the acceptance's own process always has it.
    """

    name: str
    kind: str
    layer: str
    base: str
    parts: tuple[Part, ...]
    report: str = ""
    edit: Callable[[Path], None] | str = ""
    plant: Callable[[Patches], None] | str = ""
    process: str = "both"

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert bool(self.edit) != bool(self.plant), self.name
        assert self.process in ("both", "engine", "http"), self.process

    @property
    def stages(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.stage for part in self.parts))


def found(place: str) -> Any:
    """What ``module:name`` names."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
