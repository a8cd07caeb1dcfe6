"""Gated layers: products, activation and the sum with another's result, in one call each where operators are bound that
do both, else in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dayzero.arch.channels import GLU
from dayzero.arch.norms import Activation
from dayzero.arch.residuals import Plain
from dayzero.blocks.glu import GLUBlock
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import MoEBlock
from dayzero.blocks.site import Params, Site, reference
from tests.cpu.random_models import DIM, NORM, attention, model, moe, random_params

GATED, ADDED = "linear.matmul_glu", "linear.matmul_add"
IN_TURN = ["linear.matmul", "linear.matmul", "activation.glu", "linear.matmul"]


def binding(called: list[str], fused: tuple[str, ...]) -> Callable[[str, str], Callable[..., Any]]:
    """References that note that they were called; of operators that are others in turn, variants where asked."""

    def bound(contract: str, site: str) -> Callable[..., Any]:
        body = reference(contract, site)

        def call(*args: Any, **options: Any) -> Any:
            called.append(contract)
            return body(*args, **options)

        return body if contract in (GATED, ADDED, "moe.matmul_route") and contract not in fused else call

    return bound


@pytest.mark.parametrize("act", [Activation(), Activation("situ", beta=4.0, linear_beta=25.0)])
def test_one_call_multiplies_and_activates(act: Activation) -> None:
    spec = GLU(DIM, 28, act)
    whole = model((attention(),), (spec,), Plain(NORM))
    x_TD, seen = torch.randn(5, DIM, generator=torch.Generator().manual_seed(0)), []
    for fused, want in (((GATED,), [GATED, "linear.matmul"]), ((), IN_TURN)):
        called: list[str] = []
        params = Params(random_params(whole), "layers.0.channel.")
        block = GLUBlock(spec, params, Site("layers.0.channel", binding(called, fused)))
        assert not params.left_over()
        seen.append(block.forward(x_TD, LocalCache(whole, torch.float32).view([1] * 5)))
        assert called == want
    assert torch.equal(*seen)


def test_a_weight_that_is_added_is_laid_out_once() -> None:
    """Whatever else its product alone is bound to."""
    whole = model((attention(),), (moe(shared=GLU(DIM, 24)),), Plain(NORM))
    packed: list[tuple[str, str]] = []

    def prepack(contract: str, site: str) -> Callable[[torch.Tensor], torch.Tensor]:
        def pack(weight_NK: torch.Tensor) -> torch.Tensor:
            packed.append((contract, site))
            return weight_NK.clone()

        return pack

    for fused in ((ADDED,), ()):
        packed.clear()
        params = Params(random_params(whole), "layers.0.channel.shared.")
        site = Site("layers.0.channel.shared", binding([], fused), prepack=prepack)
        GLUBlock(GLU(DIM, 24), params, site, adds=True)
        assert not params.left_over()
        assert [c for c, s in packed if s.endswith("down")] == [ADDED if fused else "linear.matmul"]


@pytest.mark.parametrize("gate", [False, True])
def test_a_shared_expert_is_added_in_its_last_product(gate: bool) -> None:
    """Not where a gate weighs it first."""
    spec = moe(shared=GLU(DIM, 24), shared_gate=gate)
    whole = model((attention(),), (spec,), Plain(NORM))
    assert (ADDED in {use.contract for use in spec.contracts("c")}) == (not gate)
    x_TD, seen = torch.randn(5, DIM, generator=torch.Generator().manual_seed(0)), []
    for fused in ((ADDED,), ()):
        called: list[str] = []
        params = Params(random_params(whole), "layers.0.channel.")
        block = MoEBlock(spec, params, Site("layers.0.channel", binding(called, fused)))
        seen.append(block.forward(x_TD, LocalCache(whole, torch.float32).view([1] * 5)))
        assert called.count(ADDED) == int(bool(fused) and not gate)
        assert called.count("linear.matmul") == 3 - called.count(ADDED) + int(gate)
    assert torch.equal(*seen)
