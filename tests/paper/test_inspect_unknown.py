"""Models that no recipe covers: what differs from the nearest family, and nothing else; its reading where it holds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import dayzero
from dayzero.planner.inspect import InspectReport, inspect_source
from tests.paper.inspect_checkpoints import CONFIGS, config_of, renamed, table_of, write_folder
from tests.paper.test_inspect_findings import fails, small_dense, small_moe

ROOT = Path(dayzero.__file__).parent.parent
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
NOVA = {"architectures": ["NovaForCausalLM"], "model_type": "nova"}
MASKED = "config.json contradicts itself: layer_types has windows, use_sliding_window is false."


def nova(name: str, **changes: Any) -> dict[str, Any]:
    """A released config under a name that no recipe knows, with changes as ``config_of`` takes them."""
    config = config_of(name, **changes) | NOVA
    config.get("text_config", {}).pop("architectures", None)
    return config


def run(folder: Path, config: dict[str, Any]) -> InspectReport:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return inspect_source(str(folder))


def near(report: InspectReport) -> dict[str, Any]:
    assert report.family is None and report.nearest is not None and report.verdict == "fail"
    return report.nearest


def differences(report: InspectReport) -> tuple[str, list[str], list[str]]:
    """(nearest family, keys only here, sentences about what is absent or refused)."""
    config = near(report)["config"]
    return near(report)["family"], config["only_here"], config["absent_or_refused"]


def keys_of(report: InspectReport, word: str) -> list[tuple[str | None, list[str]]]:
    """(contract, keys) of the operators that a key speaks of."""
    return [(entry["contract"], entry["keys"]) for entry in report.operators[word] if "keys" in entry]


def stated_kinds(report: InspectReport) -> list[tuple[str, str, str, int]]:
    """(key, kind, layers, count) of the kinds that the config names and the nearest family does not."""
    rows = [row for row in near(report)["layer_kinds"] if row["kind"] is not None]
    return [(row["key"], row["kind"], row["layers"], row["count"]) for row in rows]


def mixers(report: InspectReport) -> list[str]:
    return [layer["mixer"] for layer in report.layers]


@pytest.mark.parametrize("name", NAMES)
def test_a_known_model_under_another_name_is_read_the_same(name: str, tmp_path: Path) -> None:
    known, other = run(tmp_path / "a", config_of(name)), run(tmp_path / "b", nova(name))
    assert differences(other) == (known.family, [], [])
    assert other.reading == known.reading == known.family
    for field in ("layers", "parameters", "cache", "context_tokens", "modality", "operators", "config", "stop_ids"):
        if field != "config":
            assert getattr(other, field) == getattr(known, field), field
    assert {**other.config, "read": 0, "ignored": 0} == {**known.config, "read": 0, "ignored": 0}
    assert {f.kind for f in other.findings if f.layer == "config"} >= {"family.unknown", "family.reading"}


def test_windows_do_not_make_another_family(tmp_path: Path) -> None:
    """Traits alone called this gpt_oss-like, which has experts, sinks and biases."""
    kinds = ["sliding_attention", "full_attention"] * 15
    report = run(tmp_path, nova("smollm2_135m", sliding_window=4096, layer_types=kinds))
    assert differences(report) == ("llama", ["sliding_window", "layer_types"], [])
    assert report.parameters == {"total": 134_515_008, "active": 134_515_008, "extra": 0}
    assert report.cache["per_token_bytes"] == {"bf16": 30 * 2 * 3 * 64 * 2, "fp8": 30 * 2 * 3 * (64 + 4)}
    # The list is no operator: it stands with the layer kinds, and its words say which operators they need.
    assert keys_of(report, "build") == []
    assert [keys for _, keys in keys_of(report, "reuse")] == [["sliding_window", "layer_types"], ["layer_types"]]
    assert stated_kinds(report) == [
        ("layer_types", "sliding_attention", "0, 2, … 28", 15), ("layer_types", "full_attention", "1, 3, … 29", 15)
    ]  # fmt: skip
    assert "14 of the config's 16 keys" in report.why and "llama's reading" in report.why


def test_a_foreign_kind_of_layer(tmp_path: Path) -> None:
    config = nova("qwen3_5_27b_text", mamba_d_state=128)
    config["layer_types"] = ["mamba" if i % 8 == 0 else kind for i, kind in enumerate(config["layer_types"])]
    report, known = run(tmp_path / "a", config), run(tmp_path / "b", config_of("qwen3_5_27b_text"))
    said = "config.json: layer_types has 'mamba'; this family knows linear_attention, full_attention."
    assert differences(report) == ("qwen3_5", ["mamba_d_state"], [said])
    assert keys_of(report, "build") == [("recurrence.state_space", ["mamba_d_state", "layer_types"])]
    assert keys_of(report, "extend") == [] and stated_kinds(report) == [("layer_types", "mamba", "0, 8, … 56", 8)]
    # Every eighth layer was a delta layer before, and the most frequent kind of the list stands in.
    assert mixers(report)[:4] == [f"{mixers(known)[0]}, in place of 'mamba'", *mixers(known)[1:4]]
    assert (report.parameters, report.cache) == (known.parameters, known.cache)
    assert report.config["effective"]["attention"] == known.config["effective"]["attention"]
    text = "'linear_attention' in place of 'mamba' (entries 0, 8, … 56)"
    assert report.config["stand_ins"] == {"layer_types": text}
    note = next(f for f in report.findings if f.kind == "config.stand_in")
    assert note.verdict == "note" and note.evidence == (f"layer_types: {text}",)


def test_two_foreign_kinds_are_both_told(tmp_path: Path) -> None:
    config = nova("qwen3_5_27b_text")
    config["layer_types"][0], config["layer_types"][7] = "mamba", "moba"
    report = run(tmp_path, config)
    family, only_here, absent = differences(report)
    assert (family, only_here, len(absent)) == ("qwen3_5", [], 2)
    assert "'mamba'" in absent[0] and "'moba'" in absent[1]
    assert [word.partition(", in place of ")[2] for word in mixers(report)[:8]] == ["'mamba'", *[""] * 6, "'moba'"]


@pytest.mark.parametrize("name", ["qwen3_8b", "gpt_oss_20b", "qwen3_5_27b_text", "kimi_linear_48b_a3b", "glm_5_2"])
def test_where_all_kinds_are_foreign_the_recipe_goes_on_without_the_list(name: str, tmp_path: Path) -> None:
    """What it takes without one is less of a guess than a kind that nobody stated; each layer says what it replaces."""
    layers = config_of(name)["num_hidden_layers"]
    report = run(tmp_path / "a", nova(name, layer_types=["moba", "odd"] * (layers // 2) + ["odd"] * (layers % 2)))
    known = run(tmp_path / "b", config_of(name, layer_types=None))
    assert (report.parameters, report.cache) == (known.parameters, known.cache)
    foreign = ["moba" if i % 2 == 0 and i < layers - layers % 2 else "odd" for i in range(layers)]
    said = [f"{mixer}, in place of {kind!r}" for mixer, kind in zip(mixers(known), foreign, strict=True)]
    assert mixers(report) == said and [x["channel"] for x in report.layers] == [x["channel"] for x in known.layers]
    assert report.config["effective"]["attention"] == known.config["effective"]["attention"]
    family, only_here, absent = differences(report)
    assert (family, only_here) == (known.family, []) and all("layer_types has" in text for text in absent)
    assert report.config["stand_ins"]["layer_types"].startswith("left out, for 'moba' (entries 0, 2")
    assert keys_of(report, "build") == keys_of(report, "extend") == []
    assert {kind for _, kind, _, _ in stated_kinds(report)} == {"moba", "odd"}
    told = next(f for f in report.findings if f.kind == "family.unknown").evidence
    assert len([line for line in told if line.startswith("kind of layer that no operator is known for")]) == 2


def test_another_activation_and_a_missing_key(tmp_path: Path) -> None:
    config = nova("qwen3_8b", hidden_act="gelu_pytorch_tanh", num_key_value_heads=None)
    report, known = run(tmp_path / "a", config), run(tmp_path / "b", config_of("qwen3_8b"))
    assert differences(report) == (
        "qwen3", [],
        ["config.json has no num_key_value_heads, which this family needs.",
         "config.json: hidden_act is 'gelu_pytorch_tanh', but this family's recipe knows only 'silu'."],
    )  # fmt: skip
    assert keys_of(report, "build") == []
    assert keys_of(report, "extend") == [("activation.glu", ["hidden_act"])]
    assert report.layers == known.layers and report.context_tokens == known.context_tokens
    assert report.parameters == {"total": None, "active": None, "extra": 0} and report.cache["by_record"] == []
    attention = report.config["effective"]["attention"][0]
    assert (attention["heads"], attention["head_dim"]) == (32, 128) and "kv_heads" not in attention
    assert report.config["effective"]["rope"] == known.config["effective"]["rope"]


def test_values_of_the_wrong_kind(tmp_path: Path) -> None:
    """A number in quotes is read as it is meant; a negative count can only be guessed."""
    config = nova("qwen3_30b_a3b", hidden_size="2048", num_experts=-1, norm_topk_prob="yes")
    report, known = run(tmp_path / "a", config), run(tmp_path / "b", config_of("qwen3_30b_a3b"))
    family, only_here, absent = differences(report)
    assert (family, only_here) == ("qwen3", []) and len(absent) == 3
    assert report.config["stand_ins"]["hidden_size"] == "2048 in place of '2048'"
    assert report.config["stand_ins"]["norm_topk_prob"] == "False in place of 'yes'"
    assert "guess" in report.config["stand_ins"]["num_experts"]
    assert report.cache == known.cache and report.parameters["total"] is None
    assert set(mixers(report)) == {"attention"} and {layer["channel"] for layer in report.layers} == {"?"}
    assert keys_of(report, "build") == keys_of(report, "extend") == []


def test_what_the_recipe_itself_stops_on(tmp_path: Path) -> None:
    """Without rope_scaling the recipe stops; the keys that it would read with one are not foreign to it."""
    report, known = (
        run(tmp_path / "a", nova("gpt_oss_20b", rope_scaling=None)),
        run(tmp_path / "b", nova("gpt_oss_20b")),
    )
    said = "config.json has no rope_scaling or rope_parameters; without one the stretch is a guess."
    assert differences(report) == ("gpt_oss", [], [said])
    assert (report.parameters, report.cache, report.layers) == (known.parameters, known.cache, known.layers)
    (rope,) = report.config["effective"]["rope"]
    assert rope["theta"] == 150000 and "scaling" not in rope and "inv_freq" not in rope
    assert report.operators["build"] == []


def test_another_rope(tmp_path: Path) -> None:
    scaling = {"type": "longrope", "factor": 4.0, "long_factor": [1.0], "short_factor": [1.0]}
    report = run(tmp_path, nova("deepseek_v3", rope_scaling=scaling))
    family, only_here, (said,) = differences(report)
    # ``factor`` is read for kinds of scaling that the family does know.
    assert (family, only_here) == ("deepseek_v3", ["rope_scaling.long_factor", "rope_scaling.short_factor"])
    assert "'longrope'" in said and report.parameters["total"] == 671_026_419_200


def test_an_added_key_a_missing_one_and_a_refused_one(tmp_path: Path) -> None:
    changes = {
        "n_group": None,
        "scoring_func": "softmax",
        "engram_layers": [1, 2],
        "flux_ratio": 0.5,
        "dead_flag": False,
    }
    report = run(tmp_path, nova("deepseek_v3", **changes))
    known = run(tmp_path / "b", config_of("deepseek_v3"))
    family, only_here, absent = differences(report)
    assert (family, only_here) == ("deepseek_v3", ["engram_layers", "flux_ratio", "dead_flag"])
    assert [("n_group" in said, "scoring_func" in said) for said in absent] == [(False, True), (True, False)]
    assert keys_of(report, "build") == [("embed.ngram", ["engram_layers"]), (None, ["flux_ratio"])]
    # The operator has a softmax score already; only the recipe does not read it.
    assert keys_of(report, "extend") == [] and ("moe.route", ["scoring_func"]) in keys_of(report, "reuse")
    assert (report.parameters, report.cache, report.layers) == (known.parameters, known.cache, known.layers)


def test_a_list_of_the_wrong_length(tmp_path: Path) -> None:
    report = run(tmp_path, nova("qwen3_8b", layer_types=["full_attention"] * 35))
    family, only_here, absent = differences(report)
    assert (family, only_here) == ("qwen3", [])
    assert absent == ["config.json: layer_types names 35 layers, but there are 36."]
    assert len(report.layers) == 36 and report.parameters["total"] == 8_190_735_360
    assert report.operators["extend"] == report.operators["build"] == []


def test_lists_that_do_not_cover_the_layers(tmp_path: Path) -> None:
    config = nova("kimi_linear_48b_a3b", linear_attn_config__full_attn_layers=[0, 4], odd_key=1)
    family, only_here, absent = differences(run(tmp_path, config))
    assert (family, only_here) == ("kimi_linear", ["odd_key"])
    assert "counted from 1" in absent[0]


def test_another_vision_tower_does_not_hide_the_text_model(tmp_path: Path) -> None:
    config = nova("kimi_k3", vision_config={"hidden_size": 1024, "depth": 27, "patch_size": 14})
    report, known = run(tmp_path / "a", config), run(tmp_path / "b", config_of("kimi_k3"))
    family, only_here, absent = differences(report)
    assert (family, only_here) == ("kimi_k3", ["vision_config.hidden_size", "vision_config.depth"])
    assert all("vision_config." in said for said in absent)
    assert keys_of(report, "build") == [("vision.tower", only_here)]
    assert (report.layers, report.cache) == (known.layers, known.cache)
    assert report.parameters == {"total": None, "active": known.parameters["active"], "extra": 0}


def test_a_text_model_in_an_unknown_wrapper(tmp_path: Path) -> None:
    text = config_of("qwen3_8b", architectures=None)
    outer = {"architectures": ["NovaVLForConditionalGeneration"], "model_type": "nova_vl", "text_config": text,
             "vision_config": {"hidden_size": 1024}, "image_token_id": 151655, "torch_dtype": "bfloat16",
             "tie_word_embeddings": False}  # fmt: skip
    report, known = run(tmp_path / "a", outer), run(tmp_path / "b", config_of("qwen3_8b"))
    assert differences(report) == ("qwen3", ["vision_config", "image_token_id"], [])
    assert "for its text_config" in report.why
    assert (report.layers, report.parameters, report.cache) == (known.layers, known.parameters, known.cache)
    assert "text_config.hidden_size" in report.config["read"]
    assert keys_of(report, "build") == [("vision.tower", ["vision_config", "image_token_id"])]


def test_a_config_of_other_words_gives_no_numbers(tmp_path: Path) -> None:
    config = NOVA | {"n_layer": 24, "n_head": 16, "n_embd": 1024, "vocab_size": 50257, "layer_norm_epsilon": 1e-5}
    report = run(tmp_path, config)
    family, only_here, absent = differences(report)
    assert only_here == ["n_layer", "n_head", "n_embd", "layer_norm_epsilon"] and family == "llama"
    # Only what is absent: no sentence about numbers that were guessed in its place.
    assert len(absent) == 4 and all("which this family needs" in said for said in absent)
    assert (
        report.layers == [] and report.parameters["total"] is None and report.cache["per_token_bytes"]["bf16"] is None
    )
    assert report.config["effective"]["attention"] == report.config["effective"]["rope"] == []


def test_nothing_known_at_all(tmp_path: Path) -> None:
    for number, config in enumerate(({}, {"a": 1}, NOVA | {"text_config": {}}, {"text_config": 5, "hidden_size": []})):
        report = run(tmp_path / str(number), config)
        assert differences(report)[0] and report.parameters["total"] is None


def test_bookkeeping_is_no_operator(tmp_path: Path) -> None:
    keys = {"ep_size": 1, "torch_dtype": "bfloat16", "tie_word_embeddings": True, "num_nextn_predict_layers": 1,
            "use_cache": True, "bos_token_id": 5, "output_router_logits": True}  # fmt: skip
    for number, stop in enumerate(({}, {"mlp_layer_types": ["other"] * 61}, {"topk_method": "greedy"})):
        report = run(tmp_path / str(number), nova("deepseek_v3", **keys, **stop))
        assert differences(report)[:2] == ("deepseek_v3", [])
        assert report.operators["build"] == []


def test_a_library_option_that_is_not_neutral_is_a_difference(tmp_path: Path) -> None:
    report = run(tmp_path, nova("qwen3_8b", is_encoder_decoder=True))
    assert differences(report) == ("qwen3", ["is_encoder_decoder"], [])
    assert keys_of(report, "build") == [(None, ["is_encoder_decoder"])]


def test_an_object_nobody_knows_is_one_question(tmp_path: Path) -> None:
    report = run(tmp_path, nova("qwen3_8b", flux={"alpha": 1, "index_topk": 64, "beta": {"c": 2}}))
    assert differences(report) == ("qwen3", ["flux"], [])
    assert keys_of(report, "build") == [(None, ["flux"])]
    assert ["flux.index_topk"] in [keys for _, keys in keys_of(report, "reuse")]


# --- with files ---------------------------------------------------------------------------------------------------

WINDOWS: dict[str, Any] = {
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}
NORMS = {f"model.layers.{i}.self_attn.{n}_norm.weight": ("BF16", (16,), None) for i in range(3) for n in "qk"}


def checked(folder: Path, config: dict[str, Any], table: dict[str, Any]) -> InspectReport:
    return inspect_source(str(write_folder(folder, config | NOVA, table)))


def test_tensor_names_say_which_family_is_near(tmp_path: Path) -> None:
    """The same keys twice; only the files tell norms over q and k."""
    config, table = small_dense(**WINDOWS, head_dim=16), table_of(small_dense())
    plain, normed = checked(tmp_path / "a", config, table), checked(tmp_path / "b", config, table | NORMS)
    assert differences(plain) == ("llama", ["sliding_window", "layer_types"], [])
    assert differences(normed) == ("qwen3", ["mlp_bias", "rope_interleaved"], [MASKED])
    for report in (plain, normed):
        assert near(report)["tensors"] == {"only_here": [], "only_there": []}
        assert report.tensors["unknown"] == report.tensors["missing"] == []
    # The layer list stands: what the config does not say, use_sliding_window, is what is added.
    assert mixers(normed) == ["attention window 64", "attention", "attention"]
    assert normed.config["stand_ins"] == {"use_sliding_window": "True, though it is absent"}
    assert normed.cache["per_token_bytes"]["bf16"] == 2 * 2 * 2 * 16 * 2


def test_names_that_begin_otherwise_are_no_difference(tmp_path: Path) -> None:
    table = renamed(table_of(small_dense()), lambda name: name.replace("model.", "backbone."))
    report = checked(tmp_path, small_dense(), table)
    assert near(report)["tensors"] == {"only_here": [], "only_there": []}
    assert report.tensors["unknown"] == [] and report.tensors["roots"] == {"model.": "backbone."}
    assert [kind["unknown_tensors"] for kind in near(report)["layer_kinds"]] == [[]]


def test_draft_layers_that_the_family_has_are_no_difference(tmp_path: Path) -> None:
    drafts = {f"model.layers.4.{n}.weight": ("BF16", (256,), None) for n in ("enorm", "hnorm")}
    report = checked(tmp_path, small_moe(), table_of(small_moe()) | drafts)
    assert near(report)["tensors"] == {"only_here": [], "only_there": []}
    assert report.tensors["unknown"] == [] and report.tensors["extra"] == 2


def test_tensors_of_a_stopped_reading_are_compared(tmp_path: Path) -> None:
    table = table_of(small_moe()) | {"model.layers.1.flux.weight": ("BF16", (256,), None)}
    del table["model.layers.2.mlp.gate.weight"]
    report = checked(tmp_path, small_moe(mlp_layer_types=["dense", "sparse", "hashed", "sparse"]), table)
    assert differences(report)[1] == []
    assert near(report)["tensors"] == {"only_here": ["model.layers.#.flux.weight"], "only_there": []}
    assert report.tensors["unknown"] == ["model.layers.1.flux.weight"]
    assert report.tensors["missing"] == ["model.layers.2.mlp.gate.weight"]
    words = [layer["channel"] for layer in report.layers]
    assert words[2] == f"{words[1]}, in place of 'hashed'" and mixers(report) == ["latent"] * 4


def test_a_guessed_size_makes_no_misfits(tmp_path: Path) -> None:
    table = table_of(small_moe())
    table["model.norm.weight"] = ("BF16", (255,), None)
    report = checked(tmp_path, small_moe(moe_intermediate_size=None), table)
    assert list(report.tensors["misfit"]) == ["model.norm.weight"]
    assert report.tensors["unknown"] == report.tensors["missing"] == []
    lost = checked(tmp_path / "b", small_moe(num_hidden_layers=None), table_of(small_moe()))
    assert lost.tensors["misfit"] == {} and lost.tensors["missing"] == lost.tensors["unknown"] == []
    assert near(lost)["tensors"] == {"only_here": [], "only_there": []}


# --- the same answer, in time -------------------------------------------------------------------------------------


def test_the_answer_does_not_depend_on_the_order_of_sets(tmp_path: Path) -> None:
    config = nova("qwen3_5_35b_a3b", text_config__hidden_act="relu2", odd=1, text_config__num_experts=None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import sys, json; from dayzero.console import plain; from dayzero.planner.inspect import inspect_source; "
        "print(json.dumps(plain(inspect_source(sys.argv[1]).to_json())))"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1


def test_an_unknown_model_takes_no_longer_than_a_second(tmp_path: Path) -> None:
    config = nova("glm_5_2", indexer_types=["odd"] * 78, text_config={}, hidden_act="relu2", q_lora_rank=None)
    start = time.process_time()
    assert fails(run(tmp_path, config))
    assert time.process_time() - start < 1


def test_what_tools_write_beside_the_model_is_no_operator_to_build(tmp_path: Path) -> None:
    """Libraries and hubs leave such keys in config.json; none of them changes a forward pass."""
    extra = {
        "_commit_hash": "0a1b", "license": "mit", "library_name": "x", "tags": ["a"], "base_model": "b",
        "unsloth_version": "1", "transformers_weights": "w", "num_labels": 3, "keys_to_ignore_at_inference": ["p"],
    }  # fmt: skip
    said = run(tmp_path / "m", nova("smollm2_135m") | extra).to_json()
    assert said["operators"]["build"] == [] and set(extra) <= set(said["config"]["ignored"])
    assert not set(extra) & set(said["config"]["unread"])
