"""A vision tower on paper: its parameters against the published bytes, what an image costs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dayzero.arch.raw import Raw
from dayzero.arch.sound import unsound
from dayzero.arch.spec import ModelSpec
from dayzero.arch.vision import SCORE_TILE_BYTES, PatchTower
from dayzero.models.recipe import read_spec
from dayzero.models.registry import find
from tests.paper.model_configs import config_of


def spec_of(name: str) -> ModelSpec:
    config = config_of(name)
    recipe = find(config).recipe
    assert recipe is not None
    return read_spec(recipe, Raw(config))


def tower_of(name: str) -> PatchTower:
    tower = spec_of(name).vision
    assert tower is not None
    return tower


def test_parameters_are_the_published_bytes() -> None:
    tower = tower_of("kimi_k3")
    sizes = {part: sum(d.numel for d in tower.params() if d.name.startswith(part)) for part in ("vision", "projector")}
    assert 2 * sum(sizes.values()) == 894_717_952 and len(tower.params()) == 168
    assert round(sizes["vision"] / 1e6, 1) == 401.2 and round(sizes["projector"] / 1e6, 1) == 46.1


def test_the_two_towers_differ_where_they_should() -> None:
    one, two = tower_of("kimi_k3"), tower_of("qwen3_5_35b_a3b")
    assert (one.head_dim, two.head_dim) == (128, 72)
    assert (one.style, one.first, one.place) == ("interleaved", "column", "line")
    assert (two.style, two.first, two.place) == ("half", "row", "grid")
    assert (one.norm.eps, one.norm.kind, two.norm.eps, two.norm.kind) == (2**-23, "rms", 1e-6, "layer")
    assert len(one.inv_freq()) == 32 and one.inv_freq()[1] == pytest.approx(10000 ** (-4 / 128))


def test_the_workspace_of_the_largest_image_by_hand() -> None:
    """Patches: 65,536 and what padding to whole tokens can add, 2 * (512 + 128 + 2); 8,192 values wide in the MLP."""
    patches = 65_536 + 1_284
    rows = patches // 4 * (2 * 4_096 + 7_168)
    assert tower_of("kimi_k3").workspace_bytes() == 2 * (patches * (2_048 + 8_192) + rows) + SCORE_TILE_BYTES


def test_flops_count_matrices_projector_and_attention_among_all_patches() -> None:
    tower = tower_of("kimi_k3")
    block = 1_024 * (3 * 1_536 + 1_536 + 2 * 4_096)
    matrices = 27 * block + 1_024 * 3 * 14 * 14
    projector = 4_096 * (4_096 + 7_168)
    want = 2 * 1_024 * (matrices + 27 * 2 * 1_024 * 1_536) + 2 * 256 * projector
    assert tower.flops(1_024) == pytest.approx(want, rel=1e-12)


def test_impossible_towers_are_named() -> None:
    spec = spec_of("kimi_k3")
    assert spec.vision is not None and not unsound(spec)
    for change, said in (
        ({"heads": 11}, "does not divide"),
        ({"qkv_dim": 12 * 6}, "multiple of 4"),
        ({"pad_id": spec.vocab}, "placeholder of images"),
    ):
        (fault,) = unsound(replace(spec, vision=replace(spec.vision, **change)))
        assert said in fault
