"""Mutations of sound checkpoints on paper: each must be named by a finding, and the sound ones must fail nothing."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest

from dayzero.finding import Finding
from dayzero.planner.inspect import InspectReport, inspect_source
from tests.paper.inspect_checkpoints import CONFIGS, Table, config_of, renamed, table_of, write_folder

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 128, "head_dim": None,
}  # fmt: skip


def small_dense(**changes: Any) -> dict[str, Any]:
    return config_of("smollm2_135m", **{**SMALL, **changes})


def small_moe(**changes: Any) -> dict[str, Any]:
    """A latent-attention family with FP8 blocks, sigmoid router with a float32 bias, and a draft layer."""
    sizes = {
        "hidden_size": 256, "intermediate_size": 192, "moe_intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "n_routed_experts": 8,
        "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "vocab_size": 160, "first_k_dense_replace": 1,
    }  # fmt: skip
    return config_of("deepseek_v3", **{**sizes, **changes})


def run(folder: Path, **options: Any) -> InspectReport:
    return inspect_source(str(folder), **options)


def fails(report: InspectReport) -> dict[str, Finding]:
    return {f.kind: f for f in report.findings if f.verdict == "fail"}


def said(finding: Finding) -> str:
    return " ".join([finding.claim, *finding.evidence, finding.remedy])


@pytest.mark.parametrize("name", sorted(p.stem for p in CONFIGS.glob("*.json") if "kimi_k3" not in p.stem))
def test_every_released_config_alone_is_no_fail(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    for where in (tmp_path, tmp_path / "config.json"):
        report = run(where)
        assert not fails(report), fails(report)
        assert report.family is not None
        assert report.tensors["missing"] == report.tensors["unknown"] == []
        assert [f.verdict for f in report.findings if f.kind == "weights.absent"] == ["note"]
        assert report.parameters["total"]
        assert not report.operators["build"]


@pytest.mark.parametrize("make", [small_dense, small_moe])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_sound_checkpoints_fail_nothing(make: Callable[[], dict[str, Any]], num_shards: int, tmp_path: Path) -> None:
    config = make()
    # zeros in place of scales are a fail of their own, so these get real ones
    table = {n: (d, s, _ones(d, s) if "scale" in n else None) for n, (d, s, _) in table_of(config).items()}
    report = run(write_folder(tmp_path, config, table, num_shards))
    assert not fails(report), fails(report)
    assert report.verdict == "note"
    assert report.tensors["used"] == len(table)


def _ones(dtype: str, shape: tuple[int, ...]) -> bytes:
    count = 1
    for size in shape:
        count *= size
    assert dtype == "F32"
    return struct.pack("<f", 1.0) * count


def drop(part: str) -> Callable[[Table], Table]:
    def change(table: Table) -> Table:
        left = {name: entry for name, entry in table.items() if part not in name}
        assert len(left) < len(table)
        return left

    return change


def rename(old: str, new: str) -> Callable[[Table], Table]:
    return lambda table: renamed(table, lambda name: name.replace(old, new))


def cast(part: str, dtype: str) -> Callable[[Table], Table]:
    return lambda table: {n: (dtype if part in n else d, s, b) for n, (d, s, b) in table.items()}


def reshape(part: str, turn: Callable[[tuple[int, ...]], tuple[int, ...]]) -> Callable[[Table], Table]:
    return lambda table: {n: (d, turn(s) if part in n else s, b) for n, (d, s, b) in table.items()}


def add(name: str, dtype: str = "BF16", shape: tuple[int, ...] = (64,)) -> Callable[[Table], Table]:
    return lambda table: {**table, name: (dtype, shape, None)}


LAYER = "model.layers.1."
MUTATIONS: list[tuple[str, Callable[..., dict[str, Any]], Callable[[Table], Table], str, str]] = [
    (
        "a norm is gone",
        small_dense,
        drop(LAYER + "input_layernorm"),
        "tensors.missing",
        LAYER + "input_layernorm.weight",
    ),
    (
        "a layer is gone",
        small_dense,
        drop("model.layers.2."),
        "config.layer_count",
        "config says 3 layers, files hold 2",
    ),
    ("a bias nobody reads", small_dense, add(LAYER + "self_attn.q_proj.bias"), "tensors.unknown", "q_proj.bias"),
    ("a gate nobody reads", small_dense, add(LAYER + "self_attn.g_proj.weight"), "tensors.unknown", "g_proj"),
    ("q is renamed", small_dense, rename("q_proj", "query"), "tensors.renamed", "q_proj"),
    ("the matrix is transposed", small_dense, reshape("down_proj", lambda s: s[::-1]), "tensors.misfit", "down_proj"),
    ("integers for weights", small_dense, cast(LAYER + "mlp.up_proj", "I16"), "tensors.misfit", "up_proj"),
    (
        "half a root is renamed",
        small_dense,
        rename("model.layers.0", "backbone.layers.0"),
        "tensors.missing",
        "layers.0",
    ),
    ("an expert is gone", small_moe, drop("experts.5."), "tensors.missing", "experts.5.gate_proj"),
    ("a scale is gone", small_moe, drop("o_proj.weight_scale_inv"), "tensors.missing", "o_proj.weight_scale_inv"),
    (
        "the router bias is bf16",
        small_moe,
        cast("e_score_correction_bias", "BF16"),
        "tensors.narrowed",
        "chooses other",
    ),
    (
        "a scale is transposed",
        small_moe,
        reshape("q_b_proj.weight_scale_inv", lambda s: (*s[::-1], 1)),
        "tensors.misfit",
        "q_b_proj.weight_scale_inv",
    ),
    (
        "blocks were floored",
        small_moe,
        reshape("kv_a_proj_with_mqa.weight_scale_inv", lambda s: (s[0], s[1] - 1)),
        "tensors.misfit",
        "kv_a_proj",
    ),
    (
        "scales have another name",
        small_moe,
        rename("weight_scale_inv", "scale_inv"),
        "tensors.missing",
        "weight_scale_inv",
    ),
]


@pytest.mark.parametrize(("what", "make", "change", "kind", "word"), MUTATIONS, ids=[m[0] for m in MUTATIONS])
def test_tensor_mutations_are_named(
    what: str,
    make: Callable[..., dict[str, Any]],
    change: Callable[[Table], Table],
    kind: str,
    word: str,
    tmp_path: Path,
) -> None:
    del what
    config = make()
    found = fails(run(write_folder(tmp_path, config, change(table_of(config)))))
    assert kind in found, found
    assert word in said(found[kind])


@pytest.mark.parametrize(
    ("make", "sizes", "change", "layer"),
    [
        (small_dense, {"intermediate_size": 192}, lambda table: table, "config"),
        (small_moe, {"v_head_dim": 64}, lambda table: table, "config"),
        (small_dense, {}, reshape(LAYER + "mlp.up_proj", lambda s: (s[0] - 1, s[1])), "weights"),
        (small_dense, {}, reshape("down_proj", lambda s: s[::-1]), "weights"),
        (small_dense, {}, reshape("model.embed_tokens", lambda s: (s[0] + 1, s[1])), "weights"),
        (small_dense, {"intermediate_size": 192}, cast(LAYER + "input_layernorm", "I16"), "weights"),
        (small_moe, {}, reshape("kv_a_proj_with_mqa.weight_scale_inv", lambda s: (s[0], s[1] - 1)), "weights"),
    ],
    ids=["a size of the config", "of latents in FP8", "one tensor", "turned in every layer", "the only one of its name",
         "a dtype besides", "scales alone"],
)  # fmt: skip
def test_sizes_that_all_siblings_contradict_are_the_configs(
    make: Callable[..., dict[str, Any]], sizes: dict[str, int], change: Callable[[Table], Table], layer: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    found = fails(run(write_folder(tmp_path, make(**sizes), change(table_of(make())))))
    assert found["tensors.misfit"].layer == layer, found["tensors.misfit"]


@pytest.mark.parametrize("delta", [1, -1])
def test_one_layer_more_or_less_is_said_in_the_sentence(delta: int, tmp_path: Path) -> None:
    table = table_of(small_dense())
    folder = write_folder(tmp_path, small_dense(num_hidden_layers=3 + delta), table)
    found = fails(run(folder))
    assert f"config says {3 + delta} layers, files hold 3" in found["config.layer_count"].claim
    assert ("tensors.missing" if delta > 0 else "tensors.unknown") in found


def test_packed_experts_under_a_renamed_root_pair_up(tmp_path: Path) -> None:
    config = small_moe()
    table = rename(".weight_scale_inv", ".weight_scale")(rename("mlp.experts.", "feed.experts.")(table_of(config)))
    report = run(write_folder(tmp_path, config, table))
    pair = fails(report)["tensors.renamed"]
    assert "mlp.experts.#" in said(pair)
    assert "feed.experts.#" in said(pair)
    assert len(report.tensors["missing"]) >= 3 * 8


@pytest.mark.parametrize("root", ["backbone.", "language_model.model.", "transformer.model."])
def test_another_root_that_explains_everything_is_a_note(root: str, tmp_path: Path) -> None:
    config = small_dense()
    table = renamed(table_of(config), lambda name: name.replace("model.", root, 1))
    report = run(write_folder(tmp_path, config, table))
    assert not fails(report)
    assert report.tensors["roots"] == {"model.": root}
    assert [f.verdict for f in report.findings if f.kind == "tensors.root"] == ["note"]


def test_a_root_that_leaves_something_over_is_proposed_and_fails(tmp_path: Path) -> None:
    config = small_dense()
    table = renamed(drop("model.norm")(table_of(config)), lambda name: name.replace("model.", "backbone.", 1))
    found = fails(run(write_folder(tmp_path, config, table)))
    assert "'backbone.'" in said(found["tensors.root"])
    assert "backbone.norm.weight" in said(found["tensors.missing"])


@pytest.mark.parametrize(
    ("tied", "head", "kind", "verdict"),
    [(True, None, None, None), (True, "same", "tie.copy", "note"), (True, "other", "tie.contradiction", "fail"),
     (True, "shape", "tie.contradiction", "fail"), (False, None, "tie.head_missing", "fail"),
     (False, "other", None, None)],
)  # fmt: skip
def test_the_four_outcomes_of_tying(
    tied: bool, head: str | None, kind: str | None, verdict: str | None, tmp_path: Path
) -> None:
    config = small_dense(tie_word_embeddings=tied)
    table: Table = dict(table_of(small_dense(tie_word_embeddings=True)))
    dtype, shape, _ = table["model.embed_tokens.weight"]
    values = bytes(range(256)) * (2 * shape[0] * shape[1] // 256)
    table["model.embed_tokens.weight"] = (dtype, shape, values)
    if head is not None:
        late = values[:-1] + b"\x01"  # the last byte of the last row
        table["lm_head.weight"] = (
            dtype,
            (64, 64) if head == "shape" else shape,
            {"same": values, "other": late}.get(head),
        )
    report = run(write_folder(tmp_path, config, table))
    ties = [(f.kind, f.verdict) for f in report.findings if f.kind.startswith("tie.")]
    assert ties == ([(kind, verdict)] if kind else [])
    assert report.config["effective"]["tie"] == {"tied": tied, "source": "tie_word_embeddings"}
    assert bool(fails(report)) == (verdict == "fail")


def test_a_lost_shard_is_named_for_quantised_models_too(tmp_path: Path) -> None:
    config = small_moe()
    write_folder(tmp_path, config, table_of(config), 3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    found = fails(run(tmp_path))
    assert any("model-00002-of-00003.safetensors" in said(f) for k, f in found.items() if k.startswith("integrity."))
    assert found["tensors.missing"].measured > 10


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_sick_scale_is_found_and_named(bad: float, tmp_path: Path) -> None:
    config = small_moe()
    name = "model.layers.2.mlp.experts.5.up_proj.weight_scale_inv"
    table = table_of(config)
    dtype, shape, _ = table[name]
    table[name] = (dtype, shape, _ones(dtype, shape)[:-4] + struct.pack("<f", bad))
    found = fails(run(write_folder(tmp_path, config, table, 2)))
    assert name in found["quantization.scale"].claim
    assert "model-0000" in found["quantization.scale"].claim


def test_scales_that_are_all_zero_fail_unless_the_file_is_a_paper_twin(tmp_path: Path) -> None:
    config = small_moe()
    paper = table_of(config)
    assert not fails(run(write_folder(tmp_path / "paper", config, paper)))
    bits = {"BF16": 2, "F32": 4, "F8_E4M3": 1}
    written: Table = {n: (d, s, bytes(prod(s) * bits[d])) for n, (d, s, _) in paper.items()}
    found = fails(run(write_folder(tmp_path / "full", config, written)))
    assert "zero" in found["quantization.scale"].claim


def test_a_claim_that_the_files_contradict_fails(tmp_path: Path) -> None:
    config = small_moe()
    plain = {n: (d, s, b) for n, (d, s, b) in table_of(small_moe(quantization_config=None)).items()}
    found = fails(run(write_folder(tmp_path, config, plain)))
    assert "claimed fp8_block, stored bf16" in said(found["quantization.contradiction"])
    quantised = table_of(config)
    found = fails(run(write_folder(tmp_path / "b", small_moe(quantization_config=None), quantised)))
    assert "claimed unquantised, stored fp8_block" in said(found["quantization.contradiction"])


def test_entries_that_name_nothing(tmp_path: Path) -> None:
    claim = {**small_moe()["quantization_config"], "modules_to_not_convert": ["lm_head", "model.layer.0.mlp"]}
    config = small_moe(quantization_config=claim)
    report = run(write_folder(tmp_path, config, table_of(config)))
    note = next(f for f in report.findings if f.kind == "quantization.no_hit")
    assert (note.verdict, note.measured) == ("note", 1)
    assert "model.layer.0.mlp" in said(note)
    claim["modules_to_not_convert"] = ["backbone.head", "backbone.layers.0.mlp"]
    config = small_moe(quantization_config=claim)
    report = run(write_folder(tmp_path / "b", config, table_of(config)))
    assert "other names" in fails(report)["quantization.no_hit"].claim


def test_an_unread_quantisation_key_fails(tmp_path: Path) -> None:
    claim = {**small_moe()["quantization_config"], "rotation": "hadamard"}
    config = small_moe(quantization_config=claim)
    found = fails(run(write_folder(tmp_path, config, table_of(small_moe()))))
    assert "quantization_config.rotation" in said(found["quantization.unread"])


def test_an_unread_key_fails_and_shows_its_value(tmp_path: Path) -> None:
    config = small_dense(attention_value_scale=0.707)
    found = fails(run(write_folder(tmp_path, config, table_of(small_dense()))))
    assert "attention_value_scale = 0.707" in said(found["config.unread"])


def test_a_default_is_a_note_with_its_value(tmp_path: Path) -> None:
    config = small_dense(rope_theta=None)
    report = run(write_folder(tmp_path, config, table_of(config)))
    note = next(f for f in report.findings if f.kind == "config.defaulted")
    assert "rope_theta = 10000.0" in said(note)
    assert report.config["defaulted"]["rope_theta"] == 10000.0
    assert report.config["effective"]["rope"][0]["theta"] == 10000.0


def test_two_bases_for_one_rope_contradict(tmp_path: Path) -> None:
    config = small_dense(rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    found = fails(run(write_folder(tmp_path, config, table_of(small_dense()))))
    assert "rope_theta" in found["config.contradiction"].claim
    config = small_dense(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e6})
    report = run(write_folder(tmp_path / "b", config, table_of(small_dense())))
    assert not fails(report)
    assert report.config["effective"]["rope"][0]["theta"] == 5e6


def test_a_tie_flag_that_disagrees_with_the_inner_config(tmp_path: Path) -> None:
    config = config_of("kimi_k3", text_config__tie_word_embeddings=True, tie_word_embeddings=False)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "tie_word_embeddings" in fails(run(tmp_path))["config.contradiction"].claim


def test_an_unknown_rope_type_is_refused_by_name(tmp_path: Path) -> None:
    config = small_dense(rope_scaling={"rope_type": "longrope", "factor": 8.0})
    found = fails(run(write_folder(tmp_path, config, table_of(small_dense()))))
    assert "longrope" in found["config.value"].claim


def test_a_recipe_that_forgets_a_parameter_is_told(tmp_path: Path) -> None:
    recipe = tmp_path / "nova.py"
    recipe.write_text(
        "from dayzero.models import llama\n"
        "ARCHITECTURES = ('Nova',)\nspec = llama.spec\n"
        "RULES = tuple(r for r in llama.RULES if getattr(r, 'tensor', '') != 'model.norm.weight')\n"
    )
    config = small_dense(architectures=["Nova"])
    folder = write_folder(tmp_path / "c", config, table_of(small_dense()))
    report = run(folder, recipe=str(recipe))
    found = fails(report)
    assert "final_norm" in said(found["recipe.without_rule"])
    assert "model.norm.weight" in said(found["tensors.unknown"])
    assert report.family == "nova"
