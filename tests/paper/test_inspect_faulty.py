"""A known family's config with a fault: all faults told at once, only foreign keys unread, values that can be known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dayzero.planner.inspect import InspectReport, inspect_source
from tests.paper.inspect_checkpoints import config_of, table_of, write_folder
from tests.paper.test_inspect_findings import fails, small_dense
from tests.paper.test_models_given_recipe import recipe


def run(folder: Path, config: dict[str, Any], **options: Any) -> InspectReport:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return inspect_source(str(folder), **options)


def claims(report: InspectReport, kind: str) -> list[str]:
    return [f.claim for f in report.findings if f.kind == kind]


# released config, changes, kind of the fault, what it says
FAULTS: list[tuple[str, dict[str, Any], str, str]] = [
    ("qwen3_8b", {"layer_types": ["odd"] * 36}, "config.value", "layer_types"),
    ("qwen3_8b", {"layer_types": ["full_attention"] * 35}, "config.value", "layer_types"),
    ("qwen3_8b", {"layer_types": ["sliding_attention"] * 36}, "config.contradiction", "layer_types"),
    ("qwen3_8b", {"rope_parameters": {"rope_theta": 5.0}}, "config.contradiction", "rope_theta"),
    ("qwen3_8b", {"hidden_act": "gelu"}, "config.value", "hidden_act"),
    ("qwen3_8b", {"torch_dtype": "bfloat16", "dtype": "float16"}, "config.contradiction", "dtype"),
    ("deepseek_v3", {"topk_method": "greedy"}, "config.value", "topk_method"),
    ("deepseek_v3", {"first_k_dense_replace": None}, "config.value", "first_k_dense_replace"),
    ("deepseek_v3", {"moe_layer_freq": "all"}, "config.value", "moe_layer_freq"),
    ("deepseek_v32", {"q_lora_rank": None}, "config.value", "q_lora_rank"),
    ("glm_5", {"index_topk_pattern": 5}, "config.value", "TypeError"),
    ("glm_5", {"indexer_types": ["shared"] * 78}, "config.value", "first layer"),
    ("gpt_oss_20b", {"rope_scaling": None}, "config.value", "rope_scaling"),
    ("gpt_oss_20b", {"sliding_window": "wide"}, "config.value", "sliding_window"),
    ("kimi_linear_48b_a3b", {"layer_types": ["linear_attention"] * 27}, "config.contradiction", "layer_types"),
    ("kimi_linear_48b_a3b", {"linear_attn_config__kda_layers": [1]}, "config.value", "kda_layers"),
    ("kimi_k3", {"text_config__hidden_act": "silu"}, "config.value", "hidden_act"),
    ("kimi_k3", {"vision_config__merge_kernel_size": [2, 3]}, "config.value", "merge_kernel_size"),
    ("kimi_k3_1", {"text_config__dsa_config__dsa_layers": [1]}, "config.value", "dsa_config"),
    ("qwen3_5_35b_a3b", {"text_config__rms_norm_eps": 0.5}, "config.value", "rms_norm_eps"),
    ("qwen3_5_35b_a3b", {"text_config__num_key_value_heads": 3}, "config.value", "num_key_value_heads"),
]


@pytest.mark.parametrize(("name", "changes", "kind", "said"), FAULTS)
def test_only_foreign_keys_are_unread_after_a_fault(
    name: str, changes: dict[str, Any], kind: str, said: str, tmp_path: Path
) -> None:
    place = "text_config." if "text_config" in config_of(name) else ""
    config = config_of(name, **changes, **{f"{place.replace('.', '__')}odd_key": 1})
    report = run(tmp_path, config)
    assert any(said in claim for claim in claims(report, kind)), [(f.kind, f.claim) for f in report.findings]
    foreign = [f"{place}odd_key"]
    assert report.config["unread"] == foreign
    assert [f.evidence for f in report.findings if f.kind == "config.unread"] == [(f"{foreign[0]} = 1",)]
    assert report.family is not None and report.reading == report.family and report.nearest is None
    sound = run(tmp_path, config_of(name)).config["effective"]
    found = report.config["effective"]
    if said == "kda_layers":  # which layers are of which kind is then a guess
        assert not found.get("attention") and not found.get("recurrence")
        return
    # An index on layers that cannot have one is left out whole, and config.stand_ins says so.
    assert set(sound) - set(found) == ({"index"} if said == "dsa_config" else set())
    for value in ("max_positions", "stop_ids", "tie", "embed_scale", "facts"):
        assert found[value] == sound[value]
    assert not claims(report, "operators.build") and not claims(report, "operators.extend")


def test_every_fault_is_told_at_once(tmp_path: Path) -> None:
    changes = {"hidden_act": "gelu", "vocab_size": "many", "num_attention_heads": None, "tie_word_embeddings": "no"}
    report = run(tmp_path, config_of("qwen3_8b", **changes))
    told = claims(report, "config.value")
    assert len(told) == 4 and all(any(key in claim for claim in told) for key in changes)
    assert report.config["unread"] == []
    sound = run(tmp_path, config_of("qwen3_8b"))
    assert report.layers == sound.layers and report.cache == sound.cache
    assert report.parameters["total"] is None and report.parameters["active"] is None
    assert report.config["effective"]["rope"] == sound.config["effective"]["rope"]
    assert report.config["effective"]["tie"] == {"tied": False, "source": "a stand-in: the config does not say"}


def test_a_fault_that_is_only_a_guess_is_not_told(tmp_path: Path) -> None:
    """128 KV heads contradict the number of heads only if that is guessed."""
    report = run(tmp_path, config_of("deepseek_v3", num_attention_heads=None))
    assert claims(report, "config.value") == ["config.json has no num_attention_heads, which this family needs."]


def test_numbers_that_do_not_go_together_leave_the_rest_known(tmp_path: Path) -> None:
    report, sound = run(tmp_path, config_of("qwen3_8b", rope_theta=0.0)), run(tmp_path, config_of("qwen3_8b"))
    assert "rope_theta is 0" in fails(report)["config.value"].claim
    assert report.config["unread"] == [] and report.layers == sound.layers
    report = run(tmp_path, config_of("qwen3_8b", num_key_value_heads=3))
    assert report.config["effective"]["attention"][0]["kv_heads"] == 3
    assert report.config["stand_ins"] == {}


def test_a_sound_config_has_no_stand_ins(tmp_path: Path) -> None:
    report = run(tmp_path, config_of("qwen3_8b"))
    assert report.config["stand_ins"] == {} and not claims(report, "config.stand_in")


def test_stop_ids_are_held_against_a_known_vocabulary_only(tmp_path: Path) -> None:
    beyond = {"eos_token_id": 151936, "hidden_act": "gelu"}
    assert "stop_ids.out_of_range" in fails(run(tmp_path, config_of("qwen3_8b", **beyond)))
    assert "stop_ids.out_of_range" not in fails(run(tmp_path, config_of("qwen3_8b", **beyond, vocab_size=None)))


def test_a_recipe_that_never_ends_leaves_its_keys_open(tmp_path: Path) -> None:
    """What it would have read next is not known, so nothing is called unread."""
    where = recipe(tmp_path, "def spec(raw):\n    raw.int('hidden_size')\n    raise RuntimeError('no')\n")
    report = run(tmp_path / "model", small_dense(odd=1), recipe=where)
    assert list(fails(report)) == ["config.value"] and report.config["unread"] == []
    assert report.reading is None and report.config["effective"] == {} and report.layers == []


def test_values_are_known_when_only_the_rules_fail(tmp_path: Path) -> None:
    where = recipe(tmp_path, "RULES = (5,)\n")
    write_folder(tmp_path / "model", small_dense(), table_of(small_dense()))
    report = inspect_source(str(tmp_path / "model"), recipe=where)
    assert list(fails(report)) == ["recipe.rules"]
    assert report.config["effective"]["rope"] and len(report.layers) == 3 and report.parameters["total"]
