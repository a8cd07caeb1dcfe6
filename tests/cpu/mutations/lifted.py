"""Faults that other proofs plant already, put under a whole acceptance."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tests.cpu.faults.catalogue import Fault, all_faults
from tests.cpu.faults.stand import FAULTY
from tests.cpu.mutations.mutation import Patches, found

FAULT = "fault:"


@cache
def _faults() -> Mapping[str, Fault]:
    return {fault.name: fault for fault in all_faults()}


def edit_of(name: str) -> Callable[[Path], None]:
    """Of ``fault:NAME``, what it does to a folder."""
    edit = _faults()[name.removeprefix(FAULT)].edit
    assert edit is not None, name
    return edit


def plant_fault(name: str, patches: Patches) -> None:
    """A fault of the port. A faulty operator takes the place of its contract's reference at all sites."""
    plant = _faults()[name].plant
    assert plant is not None, name
    for binding, variant in plant(patches.stack).items():
        contract, _, site = binding.partition("@")
        assert not site, f"{name}: it is bound at one site"
        faulty = _variant(contract, variant)
        patches.operator(_reference(contract), lambda body, faulty=faulty: faulty)


def _variant(contract: str, name: str) -> Callable[..., Any]:
    from importlib import import_module

    places = [import_module(module).VARIANTS.get(contract, {}) for module in FAULTY]
    return found(next(of[name] for of in places if name in of))


def _reference(contract: str) -> str:
    from dayzero.ops.catalog import CATALOG, REFERENCE

    return next(line.module for line in CATALOG.lookup(contract) if line.variant == REFERENCE)
