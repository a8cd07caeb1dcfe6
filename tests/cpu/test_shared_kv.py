"""Layers that read an earlier layer's keys and values: against a plain forward, and in the cache layout."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dayzero.arch.cost import cache_cost
from dayzero.arch.raw import Raw
from dayzero.arch.sound import unsound
from dayzero.cache.layout import lay_out
from dayzero.models.registry import load_recipe
from tests.cpu.cli_support import run_json

HERE = Path(__file__).resolve().parents[1] / "data" / "shared_kv"
RECIPE, ORACLE, CONFIG = HERE / "lean.py", HERE / "oracle.py", HERE / "config.json"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lean") / "twin"
    code, _ = run_json("twin", str(CONFIG), str(out), "--recipe", str(RECIPE))
    assert code == 0
    return out


def test_the_port_agrees_with_a_plain_forward(twin: Path) -> None:
    code, said = run_json("align", str(twin), "--recipe", str(RECIPE), "--oracle", str(ORACLE))
    assert (code, said["verdict"]) == (0, "pass")


def test_shared_keys_and_values_are_one_allocation() -> None:
    config = json.loads(CONFIG.read_text())
    spec = load_recipe(str(RECIPE)).make_spec(Raw(config))
    layout = lay_out(spec.cache(), dtype="f32", page_tokens=16)
    assert layout.aliases == {
        f"layers.{reader}.mixer.{part}": f"layers.{owner}.mixer.{part}"
        for reader, owner in ((3, 1), (4, 2), (5, 1))
        for part in ("k", "v")
    }
    full, window = layout.token_groups
    assert [p.need for p in full.places] == ["layers.1.mixer.k", "layers.1.mixer.v"]
    assert [p.need for p in window.places] == [f"layers.{i}.mixer.{part}" for i in (0, 2) for part in ("k", "v")]
    assert layout.token_bytes == 2 * 2 * 16 * 4  # one full layer of six holds K and V of 2 heads of 16, float32
    assert layout.token_bytes == 2 * cache_cost(spec, "bf16").per_token


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_kv_shared_layers": 3, "kv_layer": 5}, "layer 3 reads keys and values of layer 5"),
        ({"num_kv_shared_layers": 3, "kv_layer": 4}, "layer 3 reads keys and values of layer 4"),
        ({"kv_heads": 3}, "whose heads have another shape"),
    ],
)
def test_an_owner_that_cannot_be_one_is_refused(change: dict[str, int], said: str) -> None:
    from dataclasses import replace

    spec = load_recipe(str(RECIPE)).make_spec(Raw(json.loads(CONFIG.read_text())))
    over = {k: v for k, v in change.items() if k in ("kv_layer", "kv_heads")}
    layers = list(spec.layers)
    layers[3] = replace(layers[3], mixer=replace(layers[3].mixer, **over))
    assert any(said in fault for fault in unsound(replace(spec, layers=tuple(layers))))
