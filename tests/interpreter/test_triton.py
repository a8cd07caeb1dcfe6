"""Variants in Triton against their references on a CPU, as far as Triton's interpreter goes: smallest odd sizes.

`.ci/run` runs this with TRITON_INTERPRET=1 in an environment of its own: beside triton, other libraries take a machine
for one with a GPU. The interpreter multiplies no bf16 tiles and has no instructions of a chip; what it cannot run is
listed here by name, with the reason, and the list is held to be true. On a GPU tests/gpu/test_parity.py runs all.
"""

from __future__ import annotations

from typing import Any

import pytest

from dayzero.ops.cases import CASES
from dayzero.ops.catalog import CATALOG, Line
from dayzero.ops.contract import Case
from tests.parity import check_parity, element_of, fits

triton = pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)

# contract/variant -> why the interpreter cannot run it. Stands in: tests/gpu/test_parity.py, which runs every line.
NOT_HERE: dict[str, str] = {}
LINES = [
    line for line in CATALOG.lines.values() if line.target == "cuda" and line.module.startswith("dayzero.ops.triton")
]


def _runs(line: Line, case: Case) -> bool:
    inputs = case.make(0)
    return fits(line, inputs) and (not line.dtypes or element_of(inputs) != "bf16" or "f32" not in line.dtypes)


def _pairs() -> list[Any]:
    here = [line for line in LINES if f"{line.contract}/{line.variant}" not in NOT_HERE]
    pairs = [(line, case) for line in here for case in CASES[line.contract] if _runs(line, case)]
    return [pytest.param(*pair, id=f"{pair[0].contract}-{pair[0].variant}-{pair[1].name}") for pair in pairs]


@pytest.mark.parametrize("line, case", _pairs())
def test_a_variant_matches_its_reference(line: Line, case: Case) -> None:
    check_parity(line, case, 0)


def test_what_is_not_run_here_exists_and_what_is_run_has_a_case() -> None:
    known = {f"{line.contract}/{line.variant}" for line in LINES}
    assert set(NOT_HERE) <= known, "a name in NOT_HERE is no variant any more"
    tried = {f"{p.values[0].contract}/{p.values[0].variant}" for p in _pairs()}
    assert tried == known - set(NOT_HERE)


@pytest.mark.parametrize("shape", [(3, 0, 64), (3, 5, 0), (0, 5, 64), (2, 5, 64)])
def test_a_stack_in_tiles_has_a_factor_for_each_matrix(shape: tuple[int, int, int]) -> None:
    """Also for one without rows or columns, where nothing is laid out."""
    import torch

    from dayzero.decl import Mxfp4
    from dayzero.ops.triton.mxfp4 import pack

    experts, rows, columns = shape
    codes = torch.full((experts, rows, columns // 2), 0x22, dtype=torch.uint8)
    tiles = pack(Mxfp4(codes, torch.full((experts, rows, columns // 32), 127, dtype=torch.uint8)))
    assert tiles.shape == shape and tiles.shifts.tolist() == [1.0] * experts


@pytest.mark.parametrize("name", ["7 tokens torch.bfloat16 biases True", "wide"])
def test_experts_whose_inputs_are_rounded_take_plain_stacks_too(name: str) -> None:
    """The contract's cases are all in 4 bits, since not every variant of it takes others."""
    line = next(line for line in LINES if (line.contract, line.variant) == ("moe.experts_fp8_128", "triton"))
    check_parity(line, next(case for case in CASES["moe.experts"] if case.name == name), 0)
