"""Readings that go on: every recipe comes to its end with every config; which family is nearest, and by what."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.arch.raw import Raw
from dayzero.models.nearness import match_tensors, nearness, patterns_of
from dayzero.models.reading import Reading, read_through
from dayzero.models.recipe import Recipe
from dayzero.models.registry import find, recipes
from dayzero.ops.catalog import CATALOG
from dayzero.planner.operators import from_reading
from tests.paper.inspect_checkpoints import CONFIGS, config_of, table_of

NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
RECIPES = {recipe.name: recipe for recipe in recipes()}


def own(name: str) -> Recipe:
    recipe = find(config_of(name)).recipe
    assert recipe is not None
    return recipe


def few_experts(name: str) -> dict[str, Any]:
    """The config with 32 experts, which have the same names as hundreds."""
    config = config_of(name)
    part = config.get("text_config", config)
    part.update((key, 32) for key in ("n_routed_experts", "num_experts", "num_local_experts") if key in part)
    return config


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_comes_to_its_end_with_every_config(name: str) -> None:
    for recipe in RECIPES.values():
        reading = read_through(recipe, config_of(name))
        assert reading.spec is not None and reading.stop == "" and not reading.vague, recipe.name


@pytest.mark.parametrize("name", NAMES)
def test_a_sound_reading_is_the_strict_one(name: str) -> None:
    recipe, config = own(name), config_of(name)
    reading, raw = read_through(recipe, config), Raw(config)
    assert reading.spec == recipe.make_spec(raw)
    assert reading.unread == raw.unread() == [] and reading.refusals == [] and reading.others == []
    assert reading.ledger.defaulted == raw.ledger.defaulted and reading.ledger.ignored == raw.ledger.ignored


@pytest.mark.parametrize("name", NAMES)
def test_the_nearest_family_of_each_release_is_its_own(name: str) -> None:
    """By keys alone, and by tensors alone under keys that say nothing."""
    config = config_of(name, architectures=["NovaForCausalLM"], model_type="nova")
    config.get("text_config", {}).pop("architectures", None)
    near = find(config).nearest
    assert near is not None and near.name == own(name).name and near.keys == 1.0
    patterns = patterns_of(table_of(few_experts(name)))
    shares = {n: nearness(read_through(r, config), config, patterns).tensors for n, r in RECIPES.items()}
    best = max(shares, key=lambda n: shares[n].share if shares[n] is not None else 0.0)  # type: ignore[union-attr]
    found = shares[own(name).name]
    assert found is not None and found.share == 1.0 and shares[best].share == 1.0  # type: ignore[union-attr]
    assert found.only_here == found.only_there == []


def test_families_as_near_are_named() -> None:
    config = config_of("deepseek_v32", architectures=["NovaForCausalLM"], model_type="nova")
    found = find(config)
    assert found.nearest is not None and found.nearest.as_near == ["glm5"] and "as near: glm5" in found.why


def test_without_files_only_keys_count() -> None:
    reading = read_through(RECIPES["llama"], config_of("smollm2_135m"))
    assert nearness(reading, config_of("smollm2_135m"), {}).tensors is None
    found = match_tensors(Reading(RECIPES["llama"]), {"a.#.b": "a.0.b"})
    assert found.only_here == ["a.#.b"] and found.share == 0.0


def test_experts_stored_either_way_are_known() -> None:
    """The recipe knows fused experts and single ones; a file has one of the two."""
    config = config_of("qwen3_5_35b_a3b")
    table = table_of(config)
    single = {name: entry for name, entry in table.items() if ".experts." not in name}
    for i in range(40):
        for part in ("gate", "up", "down"):
            single[f"model.language_model.layers.{i}.mlp.experts.0.{part}_proj.weight"] = ("BF16", (1, 1), None)
    for held in (table, single):
        found = match_tensors(read_through(own("qwen3_5_35b_a3b"), config), patterns_of(held))
        assert found.only_here == found.only_there == []


VALUES = st.sampled_from(
    [
        None,
        0,
        1,
        -1,
        3.5,
        "odd",
        "silu",
        True,
        False,
        [],
        {},
        [1, 2],
        ["full_attention"],
        {"rope_type": "longrope"},
        "64",
    ]
)


@given(
    name=st.sampled_from(NAMES), other=st.sampled_from(sorted(RECIPES)), data=st.data(), number=st.integers(1, 4)
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_each_key_is_accounted_for_once(name: str, other: str, data: st.DataObject, number: int) -> None:
    config: dict[str, Any] = copy.deepcopy(config_of(name))
    part = config.get("text_config", config)
    for _ in range(number):
        key = data.draw(st.sampled_from([*sorted(part), "odd_key"]))
        value = data.draw(VALUES)
        if value is None and data.draw(st.booleans()):
            part.pop(key, None)
        else:
            part[key] = copy.deepcopy(value)
    reading = read_through(RECIPES[other], config)
    kept, unread = reading.ledger, set(reading.unread)
    assert not unread & (kept.read | set(kept.ignored)) and not kept.read & set(kept.ignored)
    said = {r.key for r in reading.refusals if r.stated is not None}
    assert said <= kept.read
    build = {
        key
        for entry in from_reading(reading, config, reading.unread, CATALOG)["build"]
        for key in entry.get("keys", ())
    }
    assert all(any(key == left or key.startswith(f"{left}.") for left in unread) for key in build)
