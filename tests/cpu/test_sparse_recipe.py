"""Every index generator in one small model, by a recipe that is only a path: against a plain forward, and through the
engine's equalities."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dayzero.arch.index import Index, LocalIndex, Pool
from dayzero.arch.mixers import MLA
from dayzero.arch.raw import Raw
from dayzero.arch.sound import unsound
from dayzero.engine.request import SamplingParams
from dayzero.models.registry import load_recipe
from dayzero.planner.effective import effective_values
from tests.cpu.cli_support import run_json
from tests.cpu.engine_support import REFERENCE, Engine, ask, prompt_ids
from tests.cpu.path_recipe import make_twin, plain_forward

HERE = Path(__file__).resolve().parents[1] / "data" / "pooled"
RECIPE, ORACLE, CONFIG = HERE / "pond.py", HERE / "oracle.py", HERE / "config.json"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
# One list for each generator's contract, attention in each of its ways.
VARIANTS = {f"sparse_index.{name}": "tiled" for name in ("tokens", "pool")}
BINDINGS = {
    "references": REFERENCE,
    **{way: tuple({**VARIANTS, "attention.sparse": way}.items()) for way in ("gather", "masked", "by_length")},
}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(CONFIG, RECIPE, tmp_path_factory.mktemp("pond") / "twin")


@pytest.fixture(scope="module")
def oracle(twin: Path) -> Callable[[list[int]], Tensor]:
    return plain_forward(ORACLE, twin)


@pytest.fixture(scope="module")
def wanted(oracle: Callable[[list[int]], Tensor]) -> Callable[[list[int]], tuple[list[int], Tensor]]:
    """prompt -> (greedy answer, logits [V] behind the prompt), each computed once."""
    known: dict[tuple[int, ...], tuple[list[int], Tensor]] = {}

    def answer(prompt: list[int]) -> tuple[list[int], Tensor]:
        key = tuple(prompt)
        if key not in known:
            tokens, first = list(prompt), oracle(prompt)[-1]
            for _ in range(GREEDY.max_tokens or 0):
                tokens.append(int(oracle(tokens)[-1].argmax()))
            known[key] = tokens[len(prompt) :], first
        return known[key]

    return answer


def test_the_port_agrees_with_a_plain_forward(twin: Path) -> None:
    code, said = run_json("align", str(twin), "--recipe", str(RECIPE), "--oracle", str(ORACLE), "--tokens", "64")
    assert (code, said["verdict"]) == (0, "pass"), said


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 7}, {"max_step_tokens": 40, "max_running": 4}], ids=str)
@pytest.mark.parametrize("bindings", BINDINGS)
def test_tokens_equal_the_plain_forward(
    twin: Path, wanted: Callable[[list[int]], tuple[list[int], Tensor]], bindings: str, options: dict[str, Any]
) -> None:
    """Shorter and longer than any list; together, in chunks, and again from the prefix cache. References differ from
    the oracle by float32 roundings; the variants also sum in float32, over six layers."""
    made = Engine(
        twin,
        recipe=str(RECIPE),
        page_tokens=16,
        pool_bytes=4 << 20,
        record=True,
        bindings=BINDINGS[bindings],
        **options,
    )
    trunk = prompt_ids(48, 1)
    prompts = {"short": prompt_ids(3, 2), "trunk": trunk, "branch": trunk[:37] + prompt_ids(20, 3)}
    for number in range(2):
        answers = made.run([ask(name, prompt, GREEDY) for name, prompt in prompts.items()])
        for name, answer in answers.items():
            tokens, logits_V = wanted(prompts[name])
            assert answer.tokens == tokens, (number, name)
            spread = float(logits_V.max() - logits_V.min())
            assert float((answer.logits[0] - logits_V).abs().max()) <= 1e-5 * spread, (number, name)
    assert answers["trunk"].cached == 32 and answers["branch"].cached == 48


def test_a_plan_adds_no_generator_and_no_forced_rows() -> None:
    spec = load_recipe(str(RECIPE)).make_spec(Raw(json.loads(CONFIG.read_text())))
    uses = {u.site: (u.contract, dict(u.traits)) for u in spec.contracts() if u.site.endswith("index.select")}
    assert uses == {
        "layers.0.mixer.index.select": ("sparse_index.pool", {"how": "max", "local": True, "tail": "scored"}),
        "layers.1.mixer.index.select": ("sparse_index.pool", {"how": "gated", "local": False, "tail": "always"}),
        "layers.3.mixer.index.select": ("sparse_index.window", {"sinks": False}),
        "layers.4.mixer.index.select": ("sparse_index.window", {"sinks": True}),
        "layers.5.mixer.index.select": ("sparse_index.tokens", {"sinks": True, "window": True}),
    }
    shown = effective_values(spec, {})["index"]
    assert [one.get("pool", {}).get("how") for one in shown] == ["max", "gated", "gated", None, None, None]


@pytest.mark.parametrize(
    ("index", "said"),
    [
        ({"pool": Pool(5, "max")}, "no whole pools of 5"),
        ({"pool": Pool(4, "gated", tail="scored")}, "has no gated key"),
        ({"pool": Pool(4, "max", local=4, tail="scored")}, "4 pools are forced into the 3"),
        ({"pool": Pool(4, "max"), "sinks": 1}, "forces whole pools"),
        ({"window": 9, "sinks": 4}, "13 rows are forced into the 12"),
        (LocalIndex(0), "the window of the sparse index is 0"),
    ],
    ids=str,
)
def test_an_index_that_cannot_be_is_refused(index: Any, said: str) -> None:
    spec = load_recipe(str(RECIPE)).make_spec(Raw(json.loads(CONFIG.read_text())))
    layers, mixer = list(spec.layers), spec.layers[5].mixer
    assert isinstance(mixer, MLA) and isinstance(mixer.index, Index)
    changed = index if isinstance(index, LocalIndex) else replace(mixer.index, **{"sinks": 0, "window": 0, **index})
    layers[5] = replace(layers[5], mixer=replace(mixer, index=changed))
    assert any(said in fault for fault in unsound(replace(spec, layers=tuple(layers))))
