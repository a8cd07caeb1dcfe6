"""What is planted, and which command has to name it. ``ALL`` is every fault, in order.

A fault is one of the kinds A to H of public release-day reports: A tensors that are missing, renamed, dead or never
read; B a tied head; C which module has which quantisation; D scales, packing and rounding; E rope, windows, latent
attention and config fields; F small constants and activations; G the router; H tokenizer, template and stop ids.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Command = Literal["inspect", "align", "load", "plan", "twin"]
Edit = Callable[[Path], None]  # changes a twin's folder
Plant = Callable[[ExitStack], Mapping[str, str]]  # plants a fault in our own port; returns bindings for ``align``

KINDS: Mapping[str, str] = {
    "A": "tensors missing, renamed, dead, never read",
    "B": "tied and untied heads",
    "C": "which module has which quantisation",
    "D": "scales, packing, rounding",
    "E": "rope, window, latent attention, config fields",
    "F": "small constants and activations",
    "G": "router precision and expert choice",
    "H": "tokenizer, template, stop ids",
}


@dataclass(frozen=True)
class Fault:
    """report: the public report it is drawn from, empty for one of the same kind that no report tells of.

    twin: the twin it is planted in. run: the command that is given it.

    Exactly one of edit (the checkpoint's files), plant (our own port) and call (arguments of the command) is used.
    names: pattern that one failing finding, or the error, must contain. verdict: ``note`` where the product is meant to
    go on and say so. missed: why no command catches it; such faults are run too, and must stay uncaught.
    """

    name: str
    kind: str
    report: str
    twin: str
    run: Command
    names: str
    edit: Edit | None = None
    plant: Plant | None = None
    call: Mapping[str, object] | None = None
    verdict: Literal["fail", "note"] = "fail"
    missed: str = ""

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind
        assert sum(x is not None for x in (self.edit, self.plant, self.call)) == 1, self.name

    @property
    def caught_by(self) -> Command | None:
        return None if self.missed else self.run


def first(site: str) -> str:
    """The pattern of an alignment whose first diverging site is ``site``."""
    return f"^first diverging: {re.escape(site)}$"


def all_faults() -> tuple[Fault, ...]:
    """Every fault, by kind and then in the order they are written."""
    from tests.cpu.faults import depth, depth_operators, files, layers, operators, weights

    rooms = (files, weights, layers, operators, depth, depth_operators)
    found = tuple(fault for room in rooms for fault in room.FAULTS)
    assert len({f.name for f in found}) == len(found), "two faults have one name"
    return tuple(sorted(found, key=lambda f: f.kind))
