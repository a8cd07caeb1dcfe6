"""Experts in blocks of 8 bits in an engine: as stored where their operator takes that, else decoded; held whole or in
part, they give the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.checkpoint.building import packed_bytes
from dayzero.decl import Fp8Blocks
from dayzero.engine import experts as kept_experts
from dayzero.engine.experts import StoredTier, stored_forms
from dayzero.errors import UsageError
from dayzero.ops.catalog import CATALOG
from tests.cpu.engine_support import Engine
from tests.cpu.test_experts_engine import FP8, answers, assert_same, engine, expert_stacks, write

REFERENCE = (("*", "reference"),)
CPU = (*REFERENCE, ("moe.experts", "torch_cpu"))


@pytest.fixture(scope="module", params=["deepseek_v32"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Blocks of 8 bits by expert."""
    return write(request.param, tmp_path_factory.mktemp(request.param))


def decoded(folder: Path, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Engine:
    with monkeypatch.context() as patch:
        patch.setattr(kept_experts, "stored_forms", lambda loader, lines: {})
        return engine(folder, **options)


@pytest.mark.parametrize("options", [{}, FP8], ids=["bf16", "fp8_128"])
def test_experts_in_8_bits_equal_decoded_ones_to_the_bit(
    twin: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In f32, to which the product of a code and its scale is rounded on both sides."""
    packed, apart = (
        engine(twin, bindings=REFERENCE, **options),
        decoded(twin, monkeypatch, bindings=REFERENCE, **options),
    )
    assert_same(answers(packed), answers(apart))
    stacks = expert_stacks(packed.runner)
    assert stacks and all(isinstance(stack, Fp8Blocks) for stack in stacks)
    assert all(isinstance(stack, Tensor) for stack in expert_stacks(apart.runner))
    held = sum(stack.nbytes for stack in stacks)
    assert held == sum(packed_bytes("fp8_block", stack.shape) for stack in stacks)
    assert packed.runner._ready.experts.held_bytes == held < apart.runner._ready.experts.held_bytes / 3
    assert "in 8 bits as stored" in dict(packed.runner.info.table)["experts"]


def test_any_expert_memory_gives_the_same(twin: Path) -> None:
    want = answers(engine(twin, bindings=REFERENCE))
    first = engine(twin, bindings=REFERENCE, expert_bytes=1 << 30)
    tiers = first.runner._ready.experts.tiers
    one = next(iter(tiers.values())).expert_bytes
    moe = next(iter(first.runner._ready.experts.sites.values()))
    shapes = (moe.inner, moe.width), (moe.inner, moe.width), (moe.width, moe.inner)
    assert one == sum(packed_bytes("fp8_block", shape) for shape in shapes)
    assert tiers[max(tiers)].fetch(1)["gate"].nbytes == packed_bytes("fp8_block", shapes[0])
    for held in (2, 5):
        served = engine(twin, bindings=REFERENCE, expert_bytes=held * one + one // 2)
        assert_same(answers(served), want)
        assert served.loop.progress().counters["expert_evictions"] > 0
        assert "in 8 bits as stored" in dict(served.runner.info.table)["experts"]


def test_what_a_variant_does_not_take_is_decoded(twin: Path) -> None:
    """Those that a plan chooses on a CPU take 4 bits alone."""
    served = engine(twin, bindings=CPU)
    assert all(isinstance(stack, Tensor) for stack in expert_stacks(served.runner))
    assert "decoded" in dict(served.runner.info.table)["experts"]
    want, one = answers(served), _one(twin)
    assert_same(answers(engine(twin, bindings=CPU, expert_bytes=3 * one)), want)
    loader = served.runner._ready.experts.loader
    name = next(iter(served.runner._ready.experts.sites)) + ".up"
    lines = {variant: CATALOG.lines["moe.experts", variant] for variant in ("reference", "torch_cpu", "triton")}
    assert {v: stored_forms(loader, {name: line}) for v, line in lines.items()} == {
        "reference": {name: "fp8_block"}, "torch_cpu": {}, "triton": {name: "fp8_block"},
    }  # fmt: skip
    with pytest.raises(UsageError, match="variant 'ring' converts experts in MXFP4, but .* is stored otherwise"):
        engine(twin, bindings=(("moe.experts_fp8_128", "ring"),), **FP8)


def _one(twin: Path) -> int:
    """Bytes of a decoded expert."""
    held = engine(twin, bindings=CPU, expert_bytes=1 << 30).runner._ready.experts
    return next(iter(held.tiers.values())).expert_bytes


def test_an_expert_is_laid_out_as_a_stack_of_one(twin: Path) -> None:
    """As for an operator on an accelerator, which knows how it wants them."""
    experts = engine(twin, bindings=REFERENCE).runner._ready.experts
    site, moe = next(iter(experts.sites.items()))
    seen: list[tuple[int, ...]] = []

    def lay_out(stack: Fp8Blocks) -> Fp8Blocks:
        seen.append(stack.shape)
        return stack

    tier = StoredTier(experts.loader, site, moe.router.experts, experts.packed, lay_out)
    one = tier.fetch(2)["down"]
    whole = experts.load(f"{site}.down")[f"{site}.down"]
    assert isinstance(one, Fp8Blocks) and isinstance(whole, Fp8Blocks)  # type: ignore[unreachable]
    assert torch.equal(one.codes[0].view(torch.uint8), whole.codes[2].view(torch.uint8))  # type: ignore[unreachable]
    assert torch.equal(one.scales[0], whole.scales[2]) and set(seen) == {
        (1, moe.inner, moe.width), (1, moe.width, moe.inner),
    }  # fmt: skip
