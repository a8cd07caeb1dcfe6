"""Catalog, contracts and cases name the same things; variants match their reference; bindings do as told or raise."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Any

import pytest
import torch
from ops_support import poisoned_memory, tensors  # noqa: F401

from dayzero.errors import MachineError, UsageError
from dayzero.ops.bind import bind, load_entry_points, resolve
from dayzero.ops.bindings import check_bindings
from dayzero.ops.cases import CASES
from dayzero.ops.catalog import CATALOG, REFERENCE, Catalog, Line, builtin
from dayzero.ops.contract import CONTRACTS
from dayzero.planner.detect import detect
from tests.parity import ELEMENT, bitwise_equal, check_parity, fits


def _all_cases() -> list[Any]:
    return [pytest.param(n, case, id=f"{n}-{case.name}") for n, cases in CASES.items() for case in cases]


def _parity() -> list[Any]:
    features = detect()[0].features
    # What needs a GPU is compared in tests/gpu, and as far as its interpreter goes in tests/interpreter.
    lines = [line for line in CATALOG.lines.values() if line.target != "cuda"]
    pairs = [(line, case) for line in lines for case in CASES[line.contract]]
    return [
        pytest.param(
            line, case, id=f"{line.contract}-{line.variant}-{case.name}",
            marks=[pytest.mark.skip(reason=f"this machine lacks {', '.join(sorted(set(line.needs) - features))}")]
            if not features.issuperset(line.needs) else [],
        )
        for line, case in pairs
        if line.variant != REFERENCE and fits(line, case.make(0))
    ]  # fmt: skip


def test_catalog_and_contracts_agree_both_ways() -> None:
    for line in CATALOG.lines.values():
        assert line.target == "cuda" or callable(resolve(line))
    references = {line.contract: line for line in CATALOG.lines.values() if line.variant == REFERENCE}
    assert set(references) == set(CONTRACTS)
    for name, declared in CONTRACTS.items():
        assert dict(references[name].traits) == dict(declared.traits), name
        assert resolve(references[name]) is declared.body
        assert set(declared.bound) == set(ELEMENT.values())


def test_every_contract_has_cases_and_no_case_is_without_a_contract() -> None:
    assert set(CASES) == set(CONTRACTS)
    for name, cases in CASES.items():
        assert cases, name
        assert len({case.name for case in cases}) == len(cases)


@pytest.mark.parametrize("name, case", _all_cases())
def test_a_reference_is_finite_repeatable_and_leaves_its_inputs_alone(name: str, case: Any) -> None:
    inputs, again = case.make(1), case.make(1)
    first = tensors(CONTRACTS[name].body(**inputs))
    second = tensors(CONTRACTS[name].body(**again))
    fresh = case.make(1)
    for key, value in inputs.items():
        same = [bitwise_equal(*pair) for pair in zip(tensors(value), tensors(fresh[key]), strict=True)]
        assert all(same) or key in CONTRACTS[name].mutates, f"{name} wrote to {key}"
    for one, two in zip(first, second):
        assert not one.isnan().any()
        assert not (one == torch.inf).any()
        assert torch.equal(one, two)


@pytest.mark.parametrize("line, case", _parity())
def test_a_variant_matches_its_reference(line: Line, case: Any) -> None:
    for seed in (0, 1):
        check_parity(line, case, seed)


def test_some_case_reaches_every_option_of_a_variant() -> None:
    tried = {(p.values[0].contract, p.values[0].variant) for p in _parity()}
    assert tried == {key for key, line in CATALOG.lines.items() if key[1] != REFERENCE and line.target != "cuda"}


def test_bind_gives_the_reference_unless_told_otherwise() -> None:
    body = CONTRACTS["linear.matmul"].body
    assert bind("linear.matmul", "head") is body
    fast = bind("linear.matmul", "head", {"linear.matmul": "torch_cpu"})
    assert fast is not body
    at_one_site = {"linear.matmul": "torch_cpu", "linear.matmul@head": REFERENCE}
    assert bind("linear.matmul", "head", at_one_site) is body
    assert bind("linear.matmul", "layers.0.mixer", at_one_site) is fast


def test_bind_never_falls_back() -> None:
    with pytest.raises(UsageError, match=r"no variant 'cutlass'.*torch_cpu"):
        bind("linear.matmul", "head", {"linear.matmul": "cutlass"})
    with pytest.raises(UsageError, match=r"no operator contract 'linear\.matmull'.*linear\.matmul"):
        bind("linear.matmull", "head")
    with pytest.raises(UsageError, match="layers.0: variant 'torch_cpu' does not fit.*sinks"):
        bind("attention.causal", "layers.0", {"attention.causal": "torch_cpu"}, traits={"sinks": True})
    with pytest.raises(UsageError, match="rope.apply"):
        bind("rope.apply", "layers.0", traits={"style": "spiral"})
    catalog = builtin()
    catalog.add(Line("norm.l2", "away", "cuda", ("nowhere>=1",), "no_such_package_here.ops:l2"))
    with pytest.raises(MachineError, match="nowhere>=1"):
        bind("norm.l2", "x", {"norm.l2": "away"}, catalog=catalog)
    catalog.add(Line("norm.l2", "nameless", "cpu", (), "dayzero.ops.norm:l3"))
    with pytest.raises(UsageError, match="names no function"):
        bind("norm.l2", "x", {"norm.l2": "nameless"}, catalog=catalog)


def test_a_binding_that_meets_nothing_is_an_error() -> None:
    uses = [("linear.matmul", "head"), ("norm.rms", "layers.0")]
    check_bindings({"linear.matmul@head": "torch_cpu"}, uses)
    with pytest.raises(UsageError, match="meets no operator"):
        check_bindings({"linear.matmul@layers.0": "torch_cpu"}, uses)
    with pytest.raises(UsageError, match="no variant"):
        check_bindings({"norm.rms": "torch_cpu"}, uses)


def test_entry_points_extend_a_copy_of_the_catalog(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("acme_ops")

    def register(catalog: Catalog) -> None:
        catalog.add(Line("norm.l2", "acme", "cpu", (), "acme_ops:l2"))

    module.register, module.l2 = register, lambda x, *, eps=1e-6: x  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "acme_ops", module)
    for value in ("acme_ops", "acme_ops:register"):
        grown, loaded = load_entry_points(found=[EntryPoint("acme", value, "dayzero.operators")])
        assert loaded == (f"acme = {value}",)
        assert bind("norm.l2", "x", {"norm.l2": "acme"}, catalog=grown) is module.l2
    assert "acme" not in [line.variant for line in CATALOG.lookup("norm.l2")]
    for value, words in (("acme_gone", "does not import"), ("sys", "no register")):
        with pytest.raises(UsageError, match=words):
            load_entry_points(found=[EntryPoint("acme", value, "dayzero.operators")])
    assert load_entry_points()[0].contracts() == CATALOG.contracts()
