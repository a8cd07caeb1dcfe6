"""Every variant for a GPU against its reference, on all cases of its contract, both on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dayzero.ops.cases import CASES
from dayzero.ops.catalog import CATALOG, Line
from dayzero.ops.contract import Case
from tests.parity import check_parity, fits

pytestmark = pytest.mark.gpu
LINES = [line for line in CATALOG.lines.values() if line.target == "cuda"]


def _pairs() -> list[Any]:
    pairs = [(line, case) for line in LINES for case in CASES[line.contract] if fits(line, case.make(0))]
    return [pytest.param(*pair, id=f"{pair[0].contract}-{pair[0].variant}-{pair[1].name}") for pair in pairs]


@pytest.mark.parametrize("line, case", _pairs())
def test_a_variant_matches_its_reference(line: Line, case: Case) -> None:
    for seed in (0, 1):
        check_parity(line, case, seed, "cuda")
    torch.cuda.synchronize()


def test_every_variant_has_a_case_that_fits() -> None:
    tried = {(p.values[0].contract, p.values[0].variant) for p in _pairs()}
    assert tried == {(line.contract, line.variant) for line in LINES}
