"""``seeded:CONFIG`` on paper: how it is spelled, what a cut leaves of a config, what plan and inspect make of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from model_configs import FOLDER, NAMES

from dayzero.arch.channels import GLU, MoE
from dayzero.arch.mixers import MLA, Delta
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import AttnRes
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.config_cut import cut_config
from dayzero.checkpoint.seeded_source import Seeded, SeededSource, parse_seeded, served_name
from dayzero.checkpoint.source import open_source
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
from dayzero.errors import ConfigError, UsageError
from dayzero.models.blueprint import blueprint, read_config, require_recipe
from dayzero.models.recipe import read_spec
from dayzero.planner.inspect import inspect_source
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.planner import plan_source


def spec_of(where: str) -> ModelSpec:
    source = open_source(where)
    config = read_config(source)
    recipe = require_recipe(config)
    return blueprint(config, recipe, source=source).spec


def of(name: str, query: str = "") -> str:
    return f"seeded:{FOLDER / name}.json{query}"


def test_the_text_is_read_as_data() -> None:
    assert parse_seeded("seeded:a/b.json") == Seeded("a/b.json")
    asked = parse_seeded('seeded:s3://x/y?layers=8&experts=128&seed=3&a.b=[1,2]&c="t"')
    assert asked == Seeded("s3://x/y", 3, 8, 128, {"a.b": [1, 2], "c": "t"})
    assert served_name("seeded:x/nova/config.json?layers=2") == "nova"
    assert served_name("seeded:x/nova.json") == "nova"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seeded:", "CONFIG"), ("seeded:seeded:x", "CONFIG"), ("seeded:x?layers", "KEY=VALUE"),
        ("seeded:x?layers=two", "JSON"), ("seeded:x?layers=0", "at least 1"), ("seeded:x?seed=-1", "at least 0"),
        ("seeded:x?seed=true", "whole number"), ("seeded:x?seed=1&seed=2", "twice"),
    ],
)  # fmt: skip
def test_another_form_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        parse_seeded(text)


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_keeps_the_first_layers_as_they_are(name: str) -> None:
    whole = spec_of(str(FOLDER / f"{name}.json"))
    for layers in (4, len(whole.layers) - 1, len(whole.layers)):  # 4: the first with every kind
        cut = spec_of(of(name, f"?layers={layers}"))
        assert len(cut.layers) == layers
        for ours, theirs in zip(cut.layers, whole.layers, strict=False):
            assert (ours.mixer, ours.channel) == (theirs.mixer, theirs.channel)
        assert (cut.dim, cut.vocab, cut.tie, cut.stop_ids) == (whole.dim, whole.vocab, whole.tie, whole.stop_ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_cut_changes_the_number_of_experts_alone(name: str) -> None:
    whole = spec_of(str(FOLDER / f"{name}.json"))
    if not any(isinstance(layer.channel, MoE) for layer in whole.layers):
        with pytest.raises(UsageError, match="number of experts"):
            spec_of(of(name, "?experts=16"))
        return
    for layer in spec_of(of(name, "?experts=16")).layers:
        assert not isinstance(layer.channel, MoE) or layer.channel.router.experts == 16


def test_the_named_cuts() -> None:
    all_experts = spec_of(of("kimi_k3", "?layers=8"))
    assert [isinstance(layer.mixer, Delta) for layer in all_experts.layers] == [True, True, True, False] * 2
    last = all_experts.layers[-1].channel
    assert isinstance(last, MoE) and last.router.experts == 896
    few = spec_of(of("kimi_k3_1", "?layers=26&experts=128"))
    residual = few.layers[0].residual
    assert isinstance(residual, AttnRes) and residual.bank == 3
    indexed = [i for i, layer in enumerate(few.layers) if isinstance(layer.mixer, MLA) and layer.mixer.index]
    assert indexed == [3, 7, 11, 15, 19, 23]
    dense = spec_of(of("deepseek_v32", "?layers=4&first_k_dense_replace=1"))
    assert [isinstance(layer.channel, GLU) for layer in dense.layers] == [True, False, False, False]


@pytest.mark.parametrize(
    ("query", "said"),
    [("?layers=94", "give 1 to 93"), ("?experts=897", "give 1 to 896"), ("?nothing=1", "no key nothing")],
)
def test_a_cut_that_cannot_be_is_refused(query: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_source(of("kimi_k3", query))


@pytest.mark.parametrize(
    ("name", "query", "said"),
    [
        ("gpt_oss_20b", "?experts=3", r"experts=3, but a token chooses 4 of them \(num_experts_per_tok\)"),
        ("kimi_k3", "?experts=4", r"a token chooses \d+ of them \(num_experts_per_token\); give at least so many"),
        ("deepseek_v32", "?experts=12", r"8 groups \(n_group\) .* multiple of 8 from 16 on"),
        ("deepseek_v32", "?experts=8", "judged by their best two"),
        ("deepseek_v32", "?experts=16&topk_group=3", r"out of 3 groups \(topk_group\), which then hold 6"),
        ("gpt_oss_20b", "?experts=8&num_experts_per_tok=9", "chooses 9 of them"),
    ],
)
def test_fewer_experts_than_a_token_chooses_are_refused(name: str, query: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_source(of(name, query))


def test_a_choice_that_is_changed_too_can_be_smaller() -> None:
    for name, query in (
        ("gpt_oss_20b", "?experts=2&num_experts_per_tok=2&experts_per_token=2"),
        ("deepseek_v32", "?experts=16"),
    ):
        spec = spec_of(of(name, query))
        routers = {layer.channel.router.experts for layer in spec.layers if isinstance(layer.channel, MoE)}
        assert routers == {int(query.split("=")[1].split("&")[0])}


def test_lists_of_numbers_count_from_what_they_hold() -> None:
    config: dict[str, Any] = {"num_hidden_layers": 6, "full_layers": [0, 3], "sliding_layers": [1, 2, 4, 5]}
    assert cut_config(config, 4, None, {}, "x")["full_layers"] == [0, 3]
    assert cut_config(config, 4, None, {}, "x")["sliding_layers"] == [1, 2]
    shifted = {"num_hidden_layers": 6, "full_layers": [1, 4], "sliding_layers": [2, 3, 5, 6]}
    assert cut_config(shifted, 4, None, {}, "x")["full_layers"] == [1, 4]
    either = {"num_hidden_layers": 6, "full_layers": [2, 4]}
    with pytest.raises(UsageError, match=r"full_layers=\[…\]"):
        cut_config(either, 4, None, {}, "x")
    assert cut_config(either, 4, None, {"full_layers": [2]}, "x")["full_layers"] == [2]
    assert either["full_layers"] == [2, 4], "the config given is not changed"


def test_of_a_folder_all_but_the_weights_is_seen(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((FOLDER / "qwen3_8b.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"not read")
    (tmp_path / "model.safetensors.index.json").write_text("not read")
    source = open_source(f"seeded:{tmp_path}?layers=2")
    assert isinstance(source, SeededSource)
    assert set(source.files()) == {"config.json", "tokenizer.json"}
    assert json.loads(source.text("config.json"))["num_hidden_layers"] == 2
    assert source.full["num_hidden_layers"] == 36
    assert source.path("config.json") is None and source.path("tokenizer.json") == tmp_path / "tokenizer.json"
    assert source.stamp("config.json") != open_source(f"seeded:{tmp_path}?layers=3").stamp("config.json")
    source.add({"made.txt": "made"})
    assert source.text("made.txt") == "made" and source.exists("tokenizer.json")


def test_a_config_that_states_a_key_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vocab_size": 1, "vocab_size": 2}')
    with pytest.raises(ConfigError, match="twice: vocab_size"):
        open_source(f"seeded:{tmp_path}")


def test_plan_and_inspect_read_the_cut() -> None:
    where = of("kimi_k3", "?layers=8")
    report = plan_source(where, PlanOptions("h200", context=4096))
    assert report.verdict != "fail" and report.chosen is not None
    assert report.weight_bytes == plan_source(of("kimi_k3", "?layers=8&seed=9"), PlanOptions("h200")).weight_bytes
    seen = inspect_source(where)
    assert seen.verdict != "fail" and seen.family == "kimi_k3"


def test_lost_layer_kinds_are_those_behind_the_cut() -> None:
    config = read_config(open_source(str(FOLDER / "kimi_k3.json")))
    cut = cut_config(config, 3, None, {}, "x")
    spec = read_spec(require_recipe(cut), Raw(cut))
    assert all(isinstance(layer.mixer, Delta) for layer in spec.layers)


def test_the_publishers_code_cannot_run_what_has_no_files() -> None:
    with pytest.raises(UsageError, match="--upstream"):
        LaunchSpec(source=of("qwen3_8b"), config=EngineConfig(), executor="upstream")
