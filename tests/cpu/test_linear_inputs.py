"""Linear layers whose inputs are rounded (`--linear-inputs fp8_128`): which do, that composed operators leave them
alone, and the numbers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero import LLM, SamplingParams
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.site import reference
from dayzero.blocks.stack import Stack
from dayzero.decl import Form
from dayzero.engine import build
from dayzero.engine.scheduler import Scheduler
from dayzero.engine.seeded import open_seeded
from dayzero.errors import UsageError
from dayzero.hardware import HARDWARE
from dayzero.models.blueprint import require_recipe
from dayzero.ops.experts_fp8 import rounded_to_fp8_128
from dayzero.ops.linear import matmul
from dayzero.planner.bindings import decide
from dayzero.planner.linear_inputs import linear_inputs_of, with_linear_inputs
from dayzero.rehearse.shrink import shrink
from tests.cpu.engine_support import Engine

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
ROUNDED, GATED = "linear.matmul_fp8_128", "linear.matmul_glu"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "pool_bytes": 16 << 20, "max_running": 2}


def source(folder: Path, name: str) -> str:
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(shrink(config, require_recipe(config).twin, keep_vocab=False, changes={}))
    )
    return f"seeded:{folder}"


def rounding(where: str) -> tuple[ModelSpec, dict[str, Form], Any]:
    model = open_seeded(where, dtype=torch.float32)
    found = {name: model.loader.packs(name) for name in model.loader.names()}
    forms = {name: form for name, form in found.items() if form is not None}
    return with_linear_inputs(model.spec, "fp8_128", forms), forms, model


def test_the_layers_that_are_stored_in_8_bits_round_and_no_operator_does_their_work_otherwise(tmp_path: Path) -> None:
    spec, forms, model = rounding(source(tmp_path, "deepseek_v32"))
    before, after = model.spec.contracts(), spec.contracts()
    sites = {use.site for use in after if use.contract == ROUNDED}
    assert sites == {use.site for use in before if use.contract == "linear.matmul" and forms.get(use.site)}
    assert {"layers.0.mixer.q_a", "layers.0.channel.down", "layers.3.channel.shared.gate"} <= sites
    assert not any("kv_b" in site or "router" in site or "experts" in site for site in sites)
    assert GATED not in {use.contract for use in after}, "all gated layers of this model are in 8 bits"
    changed = {("linear.matmul", site) for site in sites} | {("linear.matmul_add", site) for site in sites}
    unchanged = [use for use in before if (use.contract, use.site) not in changed and use.contract != GATED]
    assert unchanged == [use for use in after if use.contract != ROUNDED]
    assert with_linear_inputs(spec, "bf16", forms) == model.spec and spec.params() == model.spec.params()
    bound = decide(after, HARDWARE["h200"], "bf16", {})
    assert all(bound[f"{ROUNDED}@{site}"] == "few_rows" for site in sites)


def test_inputs_are_rounded_and_nothing_else_is_changed(tmp_path: Path) -> None:
    """By hand: the operators as they were, those of such layers given rounded rows. Blocks ask for just what the spec
    declares."""
    spec, _, model = rounding(source(tmp_path, "deepseek_v32"))
    sites = {use.site for use in spec.contracts() if use.contract == ROUNDED}
    asked: set[tuple[str, str]] = set()

    def noted(contract: str, site: str) -> Callable[..., Any]:
        asked.add((contract, site))
        return reference(contract, site)

    def by_hand(contract: str, site: str) -> Callable[..., Any]:
        if contract != "linear.matmul" or site not in sites:
            return reference(contract, site)
        return lambda x, w, bias: matmul.body(rounded_to_fp8_128(x, torch.float64), w, bias).to(x.dtype)

    def logits(of: ModelSpec, bind: Callable[[str, str], Callable[..., Any]]) -> Tensor:
        return Stack(of, model.loader.load, bind=bind).forward(LocalCache(of, torch.float32).view(TOKENS))

    got, plain = logits(spec, noted), logits(model.spec, reference)
    assert torch.equal(got, logits(model.spec, by_hand))
    error = float((got - plain).norm() / plain.norm())
    assert 0.005 < error < 0.5, "3 bits of a mantissa are lost, at each of some thirty products"
    declared = {(use.contract, use.site) for use in spec.contracts()}
    assert {pair for pair in asked if pair[0].startswith("linear.")} <= declared


def test_an_engine_rounds_them(tmp_path: Path) -> None:
    where = source(tmp_path, "deepseek_v32")
    greedy = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=1)
    said = []
    for inputs in ("bf16", "fp8_128", "fp8_128"):
        with LLM(where, **SMALL, bindings=(("*", "reference"),), linear_inputs=inputs) as llm:
            said.append(repr([choice.logprobs for choice in llm.generate([TOKENS], greedy)]))
    assert said[0] != said[1] == said[2]


def test_what_is_cached_of_other_inputs_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where, said = source(tmp_path, "deepseek_v32"), []

    def scheduler(*args: Any, fingerprint: bytes) -> Scheduler:
        said.append(fingerprint)
        return Scheduler(*args, fingerprint=fingerprint)

    monkeypatch.setattr(build, "Scheduler", scheduler)
    for inputs in ("bf16", "fp8_128", "fp8_128"):
        Engine(where, linear_inputs=inputs)
    assert said[0] != said[1] == said[2]


def test_a_model_without_such_layers_refuses(tmp_path: Path) -> None:
    where = source(tmp_path, "qwen3_8b")
    with pytest.raises(UsageError, match="no linear layer of .* is stored in blocks of FP8; leave it out"):
        rounding(where)
    with pytest.raises(UsageError, match="must be one of bf16, fp8_128"):
        linear_inputs_of("fp4")
    with pytest.raises(UsageError, match="linear_inputs is 'fp4'"), LLM(where, **SMALL, linear_inputs="fp4"):
        pass
