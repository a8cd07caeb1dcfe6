"""Variants in Triton that the catalog calls fit for a recorded step, without being told where rows stand: spans name
the place in the step alone, and tables are wider than any row, with numbers behind its pages that must not be read."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from dayzero.engine.fixed import HiddenSpan
from dayzero.ops.bind import resolve
from dayzero.ops.cases import CASES
from dayzero.ops.catalog import CATALOG, Line
from dayzero.ops.contract import CONTRACTS, Case
from dayzero.view import Paged
from tests.parity import close, element_of, fits, tensors

triton = pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)

MORE_PAGES = 3
UNREAD = 1 << 20
LINES = [
    line
    for line in CATALOG.lines.values()
    if line.target == "cuda" and line.module.startswith("dayzero.ops.triton") and line.graph
]


def _spans(value: Any) -> list[Any]:
    """Every object with spans among inputs."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = [value] if hasattr(value, "spans") else []
        return own + [one for f in dataclasses.fields(value) for one in _spans(getattr(value, f.name))]
    return []


def _single(case: Case) -> bool:
    """Whether rows are told apart, and all have one token."""
    found = [one for value in case.make(0).values() for one in _spans(value)]
    return bool(found) and all(span.count == 1 for one in found for span in one.spans)


def as_recorded(value: Any) -> Any:
    """The same input as a recorded step has it."""
    if not (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        return value
    changed = {f.name: as_recorded(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if hasattr(value, "spans"):
        changed["spans"] = tuple(HiddenSpan(span.row) for span in value.spans)
    if isinstance(value, Paged):
        wide = torch.full((value.table.shape[0], MORE_PAGES), UNREAD, dtype=torch.int32)
        lengths = torch.tensor([s.start + 1 for s in value.spans]) - value.first
        pages = -(-lengths // value.page)
        own = torch.where(torch.arange(value.table.shape[1]) < pages[:, None], value.table, UNREAD)
        changed["table"] = torch.cat((own.to(torch.int32), wide), dim=1)
    return dataclasses.replace(value, **changed)


def _pairs() -> list[Any]:
    pairs = [
        (line, case)
        for line in LINES
        for case in CASES[line.contract]
        if fits(line, case.make(0)) and _single(case)
        and (not line.dtypes or element_of(case.make(0)) != "bf16" or "f32" not in line.dtypes)
    ]  # fmt: skip
    return [pytest.param(*pair, id=f"{pair[0].contract}-{pair[0].variant}-{pair[1].name}") for pair in pairs]


@pytest.mark.parametrize("line, case", _pairs())
def test_a_row_is_found_by_the_device(line: Line, case: Case) -> None:
    inputs, given = case.make(0), case.make(0)
    contract = CONTRACTS[line.contract]
    wants = tensors(contract.body(**inputs))
    gots = tensors(resolve(line)(**{name: as_recorded(value) for name, value in given.items()}))
    bound = contract.bound[element_of(inputs)].value
    if contract.compare is not None:
        assert not contract.compare(inputs, gots, wants)
        return
    for got, want in zip(gots, wants, strict=True):
        close(got, want, bound)
    if "kept" in contract.mutates:
        for got, want in zip(tensors(given["kept"]), tensors(inputs["kept"]), strict=True):
            close(got.nan_to_num(), want.nan_to_num(), bound)


def test_every_operator_over_pages_and_states_is_tried() -> None:
    tried = {p.values[0].contract for p in _pairs()}
    assert tried >= {"attention.paged", "attention.sparse", "recurrence.paged", "sparse_index.tokens"}
