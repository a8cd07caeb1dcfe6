"""Faults of the files: names, shards, headers, config keys, quantisation claims, tokenizer. Found by ``inspect``."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cpu.faults.catalogue import Edit, Fault
from tests.cpu.faults.edit import (
    INDEX,
    add,
    config,
    copied,
    drop,
    header,
    read_json,
    read_shards,
    remove,
    rename,
    replace_in_names,
    resize,
    without,
    write_json,
    write_shards,
)

SECOND, THIRD = "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"
ONE = ("BF16", (1,), b"\0\0")


def _other_shard(folder: Path) -> None:
    """The index names another shard for one tensor than the one that holds it."""
    content = read_json(folder, INDEX)
    content["weight_map"]["model.norm.weight"] = (
        SECOND if content["weight_map"]["model.norm.weight"] == THIRD else THIRD
    )
    write_json(folder, content, INDEX)


def _not_in_index(folder: Path) -> None:
    content = read_json(folder, INDEX)
    del content["weight_map"]["model.layers.1.mlp.up_proj.weight"]
    write_json(folder, content, INDEX)


def _overlap(content: dict[str, Any]) -> None:
    """Two tensors of the same size share their bytes."""
    by_size: dict[int, str] = {}
    for name, entry in content.items():
        if name != "__metadata__":
            size = entry["data_offsets"][1] - entry["data_offsets"][0]
            if size in by_size:
                entry["data_offsets"] = content[by_size[size]]["data_offsets"]
                return
            by_size[size] = name
    raise AssertionError("no two tensors are equally large")


def _twice(content: dict[str, Any]) -> str:
    """The first tensor's name stands twice."""
    text = json.dumps(content)
    name = next(n for n in content if n != "__metadata__")
    return text[:-1] + f", {json.dumps(name)}: {json.dumps(content[name])}" + "}"


def _wrong_shape(content: dict[str, Any]) -> None:
    """A matrix under the transposed shape: the bytes are as many."""
    entry = next(e for n, e in content.items() if n != "__metadata__" and len(set(e["shape"])) == 2)
    entry["shape"] = entry["shape"][::-1]


def _length(folder: Path) -> None:
    path = folder / SECOND
    path.write_bytes((1 << 63).to_bytes(8, "little") + path.read_bytes()[8:])


def _root(new: str) -> Edit:
    return rename(lambda name: name if name == "lm_head.weight" else name.replace("model.", new, 1))


def _claim(change: Callable[[dict[str, Any]], None]) -> Edit:
    """Change quantization_config, at the root or in text_config."""

    def edit(folder: Path) -> None:
        content = read_json(folder)
        claim = content.get("quantization_config") or content["text_config"]["quantization_config"]
        before = json.dumps(claim)
        change(claim)
        assert json.dumps(claim) != before
        write_json(folder, content)

    return edit


def _as_bf16(module: str) -> Edit:
    """Store one quantised module in bf16, without its scales."""

    def edit(folder: Path) -> None:
        shards = read_shards(folder)
        for tensors in shards.values():
            for name in list(tensors):
                if name == f"{module}.weight":
                    shape = tensors[name][1]
                    tensors[name] = ("BF16", shape, b"\x80\x3c" * (shape[0] * shape[1]))
                elif name.startswith(f"{module}.weight_scale"):
                    del tensors[name]
        write_shards(folder, shards)

    return edit


def _strip_re(claim: dict[str, Any]) -> None:
    claim["ignore"] = [entry.removeprefix("re:") for entry in claim["ignore"]]


def _other_root(claim: dict[str, Any]) -> None:
    claim["modules_to_not_convert"] = ["backbone." + entry for entry in claim["modules_to_not_convert"]]


def _one_more(claim: dict[str, Any]) -> None:
    claim["modules_to_not_convert"].append("model.layers.*.mlp.gate_proj_of_another_model")


def _ignore_experts(claim: dict[str, Any]) -> None:
    claim["modules_to_not_convert"].append("model.layers.1.mlp.experts")


def _unread_claim(claim: dict[str, Any]) -> None:
    claim["rotate_inputs"] = True


def _eos(folder: Path) -> None:
    """The config names one stop id, generation_config two."""
    first = read_json(folder)["eos_token_id"]
    write_json(folder, {"eos_token_id": [first, 301]}, "generation_config.json")


def _no_template(folder: Path) -> None:
    without("chat_template", file="tokenizer_config.json")(folder)


def _second_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")


def _big_id(content: dict[str, Any]) -> dict[str, Any]:
    content["added_tokens"].append({**content["added_tokens"][0], "id": 900, "content": "<|beyond|>"})
    return content


def _beyond(folder: Path) -> None:
    write_json(folder, _big_id(read_json(folder, "tokenizer.json")), "tokenizer.json")


def _cut_text(file: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / file).write_text((folder / file).read_text()[:-40])

    return edit


def _add_key(**keys: Any) -> Edit:
    def edit(folder: Path) -> None:
        content = read_json(folder)
        part = content.get("text_config", content)
        assert not set(keys) & set(part)
        part.update(keys)
        write_json(folder, content)

    return edit


# (name, kind, report, twin, pattern, edit)
TABLE: tuple[tuple[str, str, str, str, str, Edit], ...] = (
    ("shard absent, bf16", "A", "vllm#34930", "dense", rf"{SECOND}", remove(SECOND)),
    ("shard absent, fp8", "A", "vllm#34859", "latent", rf"{SECOND}", remove(SECOND)),
    ("shard absent, mxfp4", "A", "sglang#32279", "sinks", rf"{SECOND}", remove(SECOND)),
    ("one layer more in the config", "A", "sglang#16235", "dense", "config says 5 layers, files hold 4.*layer 4",
     config(num_hidden_layers=5)),
    ("one layer fewer in the config", "A", "sglang#16235", "dense", "config says 3 layers, files hold 4.*uses layer 3",
     config(num_hidden_layers=3)),
    ("packed experts under another root", "A", "transformers#47410", "sinks",
     r"tensors\.renamed.*mlp\.experts.*↔.*ffn\.experts", replace_in_names(".mlp.", ".ffn.", "experts")),
    ("one tensor renamed", "A", "", "dense", r"layers\.1\.self_attn\.q_proj\.weight.*nearest.*query_proj",
     replace_in_names("1.self_attn.q_proj", "1.self_attn.query_proj")),
    ("one tensor dropped", "A", "", "dense", r"tensors\.missing.*layers\.2\.self_attn\.k_norm",
     drop("layers.2.self_attn.k_norm")),
    ("suffix doubled", "A", "vllm#57495", "nvfp4", r"experts\.3\.gate_proj\.weight",
     replace_in_names("experts.3.gate_proj.weight", "experts.3.gate_proj.weight.weight")),
    ("experts of a layer lost in a conversion", "A", "VeOmni#799", "latent",
     r"tensors\.missing.*layers\.4\.mlp\.experts\.",
     drop("layers.4.mlp.experts.")),
    ("orphan tensor", "A", "Model-Optimizer#2427", "dense", r"tensors\.unknown.*model\.mtp\.fc\.weight",
     add("model.mtp.fc.weight", ONE)),
    ("one root in the way of all names", "A", "tt-metal#54844", "dense", r"tensors\.root.*language_model\.model\.",
     _root("language_model.model.")),
    ("root of another family", "A", "vllm#31108", "dense", r"tensors\.root.*backbone\.", _root("backbone.")),
    ("shared layers said to own an index", "A", "ATOM#1260", "shared_index",
     r"tensors\.missing.*layers\.3\.self_attn\.indexer",
     config(index_topk_freq=1)),
    ("cache scale under a doubled segment", "A", "auto-round#2370", "dense", r"tensors\.unknown.*attn\.attn\.k_scale",
     add("model.layers.0.self_attn.attn.attn.k_scale", ONE)),
    ("latent width of the look-alike", "A", "sglang-jax#1559", "depth",
     r"tensors\.misfit.*block_sparse_moe\.experts.*expected \[96, 64\]",
     config(text_config__routed_expert_hidden_size=128)),
    ("low-rank gate of the look-alike", "A", "sglang-jax#1559", "depth", r"tensors\.missing.*g_a_proj",
     config(text_config__linear_attn_config__use_full_rank_gate=False)),
    ("direct queries of the look-alike", "A", "sglang-jax#1559", "depth", r"tensors\.unknown.*q_a_proj",
     config(text_config__q_lora_rank=None)),
    ("index names another shard", "A", "", "dense", r"model\.norm\.weight", _other_shard),
    ("tensor absent from the index", "A", "", "dense", r"model\.layers\.1\.mlp\.up_proj\.weight", _not_in_index),
    ("truncated shard", "A", "", "dense", rf"truncated.*{SECOND}", resize(SECOND, -100)),
    ("oversized shard", "A", "", "dense", rf"oversized.*{SECOND}", resize(SECOND, 100)),
    ("tensors that overlap", "A", "", "dense", r"overlap.*00001-of-00003", header(_overlap)),
    ("name twice in a header", "A", "", "dense", r"model-00001-of-00003.*twice|twice.*model-00001-of-00003",
     header(_twice)),
    ("header of 2^63 bytes", "A", "", "dense", rf"{SECOND}", _length),
    ("matrix under a transposed shape", "A", "", "dense", r"tensors\.misfit.*shape \[.*expected \[",
     header(_wrong_shape)),
    ("tied with only a head", "B", "transformers#38870", "tied", r"tensors\.missing.*model\.embed_tokens\.weight",
     replace_in_names("model.embed_tokens.weight", "lm_head.weight")),
    ("tied, and a head that differs", "B", "transformers#38870", "tied", r"tie\.contradiction.*lm_head\.weight",
     copied("model.embed_tokens.weight", "lm_head.weight", lambda data: data[2:] + data[:2])),
    ("untied without a head", "B", "parallax#444", "dense", r"tie\.head_missing.*lm_head\.weight", drop("lm_head")),
    ("tie flag says the contrary in the inner config", "B", "transformers#43429", "head_delta",
     r"config\.contradiction.*text_config\.tie_word_embeddings", _add_key(tie_word_embeddings=True)),
    ("module plain though claimed quantised", "C", "sglang#37848", "latent",
     r"quantization\.contradiction.*self_attn\.o_proj\.weight: claimed fp8_block, stored bf16",
     _as_bf16("model.layers.2.self_attn.o_proj")),
    ("module quantised though ignored", "C", "compressed-tensors#712", "sinks",
     r"quantization\.contradiction.*mlp\.experts.*claimed unquantised, stored mxfp4", _claim(_ignore_experts)),
    ("patterns of the ignore list read as names", "C", "vllm#48508", "depth",
     r"quantization\.contradiction.*self_attn", _claim(_strip_re)),
    ("ignore list for another root", "C", "Model-Optimizer#470", "sinks", r"quantization\.no_hit.*backbone\.",
     _claim(_other_root)),
    ("unread key of the quantisation", "C", "", "latent", r"quantization\.unread.*rotate_inputs",
     _claim(_unread_claim)),
    ("two bases of the rope", "E", "vllm#56066", "shared_index", r"config\.contradiction.*rope_theta",
     _add_key(rope_theta=10000.0)),
    ("legacy rotary_dim", "E", "transformers#48241", "dense", r"config\.unread.*rotary_dim = 16",
     _add_key(rotary_dim=16)),
    ("unknown rope_type", "E", "omlx#3594", "shared_index", r"config\.value.*rope_type.*longrope",
     config(rope_parameters__rope_type="longrope")),
    ("float for a count", "E", "", "dense", r"config\.value.*num_hidden_layers", config(num_hidden_layers=4.5)),
    ("text for a number", "E", "", "dense", r"config\.value.*rope_theta", config(rope_theta="1e6")),
    ("class default for a size", "E", "Automodel#3792", "sinks", r"tensors\.misfit.*self_attn\.q_proj",
     without("head_dim")),
    ("size that the files contradict", "E", "Automodel#3792", "latent", r"tensors\.misfit.*kv_b_proj",
     config(v_head_dim=32)),
    ("value scale that nothing reads", "F", "vllm#31175", "dense", r"config\.unread.*attention_value_scale = 0\.5",
     _add_key(attention_value_scale=0.5)),
    ("clamp limit that nothing reads", "F", "sglang#40035", "nvfp4", r"config\.unread.*swiglu_limit",
     _add_key(swiglu_limit=7.0)),
    ("other activation", "F", "", "dense", r"config\.value.*hidden_act.*gelu", config(hidden_act="gelu")),
    ("other score function", "G", "", "latent", r"config\.value.*scoring_func.*softmax",
     config(scoring_func="softmax")),
    ("stop id beyond the vocabulary", "H", "", "dense", r"stop_ids\.out_of_range.*99999", config(eos_token_id=99999)),
    ("tokenizer of a larger vocabulary", "H", "", "dense", r"tokenizer\.out_of_range.*900", _beyond),
    ("damaged tokenizer", "H", "llama.cpp#7338", "dense", r"tokenizer\.file.*tokenizer\.json",
     _cut_text("tokenizer.json")),
    ("damaged generation config", "H", "", "dense", r"tokenizer\.file.*generation_config\.json",
     _cut_text("generation_config.json")),
)  # fmt: skip

# What the product goes on with, and says.
NOTED: tuple[tuple[str, str, str, str, str, Edit], ...] = (
    ("entry of the ignore list without a hit", "C", "Model-Optimizer#470", "sinks",
     r"quantization\.no_hit.*another_model",
     _claim(_one_more)),
    ("tied, and a head that is a copy", "B", "transformers#38870", "tied", r"tie\.copy.*lm_head\.weight",
     copied("model.embed_tokens.weight", "lm_head.weight")),
    ("no chat template", "H", "vllm#29849", "dense", r"chat\.absent", _no_template),
    ("second stop id in the generation config alone", "H", "mlx-vlm#309", "dense",
     r"stop_ids\.differ.*301: generation_config\.json", _eos),
    ("two chat templates", "H", "vllm-ascend-deepseekv4#72", "dense", r"chat\.templates_differ",
     _second_template),
)  # fmt: skip

RECOGNISED = ("one root in the way of all names", "root of another family")  # mended by the product, which says so

SAMPLING = "inspect prints it under `sampling`, but any value may be meant: whether requests heed it, a server shows"

FAULTS = (
    *(
        Fault(n, k, r, t, "inspect", p, edit=e, verdict="note" if n in RECOGNISED else "fail")
        for n, k, r, t, p, e in TABLE
    ),
    *(Fault(n, k, r, t, "inspect", p, edit=e, verdict="note") for n, k, r, t, p, e in NOTED),
    Fault(
        "generation defaults that pin the answer",
        "H",
        "vllm#15241",
        "dense",
        "inspect",
        "top_k",
        edit=config("generation_config.json", top_k=1, do_sample=True),
        missed=SAMPLING,
    ),
)
