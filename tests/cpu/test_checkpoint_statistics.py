"""What the values of a parameter give away."""

from __future__ import annotations

import pytest
import torch

from dayzero.checkpoint.statistics import judge_norms, statistics
from dayzero.decl import ParamDecl


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


PLAIN = ParamDecl("n", (64,), "norm", center=1.0)
OFFSET = ParamDecl("n", (64,), "norm", center=0.0)


def kind(decl: ParamDecl, tensor: torch.Tensor) -> str | None:
    found = statistics(decl, tensor)
    assert found is None or found.evidence == (decl.name,)
    assert found is None or found.verdict == ("note" if found.kind == "weights.norm_mean" else "fail")
    return None if found is None else found.kind


def test_sound_values_give_no_finding() -> None:
    assert kind(ParamDecl("a", (5, 6)), seeded(5, 6)) is None
    assert kind(ParamDecl("b", (5,), "bias"), torch.zeros(5)) is None
    assert kind(PLAIN, 1 + 0.3 * seeded(64)) is None
    assert kind(OFFSET, 0.3 * seeded(64)) is None
    assert kind(ParamDecl("n_bias", (64,), "bias"), torch.zeros(64)) is None
    assert kind(ParamDecl("empty", (0, 3)), torch.zeros(0, 3)) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_fails(bad: float, dtype: torch.dtype) -> None:
    tensor = seeded(7, 9).to(dtype)
    tensor[3, 8] = bad
    assert kind(ParamDecl("a", (7, 9)), tensor) == "weights.not_finite"


@pytest.mark.parametrize("role", ["linear", "embed", "router", "conv"])
def test_matrices_that_were_never_loaded_fail(role: str) -> None:
    assert kind(ParamDecl("a", (4, 5), role), torch.zeros(4, 5)) == "weights.constant"  # type: ignore[arg-type]
    assert kind(ParamDecl("a", (4, 5), role), torch.full((4, 5), 0.5)) == "weights.constant"  # type: ignore[arg-type]


def test_one_dead_expert_is_named() -> None:
    stack = seeded(4, 3, 5)
    stack[2] = 0
    found = statistics(ParamDecl("up", (4, 3, 5)), stack)
    assert found is not None and found.claim == "expert 2 of up is all zero"


def test_norm_weights_in_the_other_convention_are_seen() -> None:
    assert kind(OFFSET, 1 + 0.1 * seeded(64)) == "weights.norm_mean"
    assert kind(PLAIN, 0.1 * seeded(64)) == "weights.norm_mean"
    assert kind(PLAIN, torch.zeros(64)) == "weights.constant"


def test_what_training_does_to_a_norm_is_not_mistaken_for_the_other_convention() -> None:
    """A first layer's plain norm may shrink to small positive weights; a (1 + w) norm may not have moved at all."""
    assert kind(PLAIN, 0.02 + 0.01 * seeded(64).abs()) is None
    assert kind(OFFSET, torch.zeros(64)) is None


def test_one_odd_norm_is_a_note_and_most_of_them_are_a_fault() -> None:
    odd = [statistics(ParamDecl(f"n{i}", (64,), "norm", center=1.0), 0.1 * seeded(64)) for i in range(3)]
    notes = [f for f in odd if f is not None]
    few, most = judge_norms(notes, 40), judge_norms(notes, 5)
    assert [f.verdict for f in few] == ["note"] and [f.verdict for f in most] == ["fail"]
    assert most[0].evidence == ("n0", "n1", "n2") and "3 of 5 norms" in most[0].claim and most[0].remedy
    assert judge_norms([], 5) == []
