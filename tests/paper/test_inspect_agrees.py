"""What one inspection says in several places agrees: sentence and lists, layers and cache, faults and findings."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dayzero.arch.traits import layer_part
from dayzero.planner.inspect import InspectReport, inspect_source
from tests.paper.inspect_checkpoints import CONFIGS, config_of

NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
NOVA = {"architectures": ["NovaForCausalLM"], "model_type": "nova"}
COUNTS = re.compile(r"reads (\d+) of the config's (\d+) keys")
# Values that are one of a few words, and lists of them, in one or another of the families.
ENUMERATED = (
    "hidden_act", "layer_types", "mlp_layer_types", "indexer_types", "scoring_func", "topk_method", "dtype",
    "torch_dtype",
)  # fmt: skip


def run(folder: Path, config: dict[str, Any]) -> InspectReport:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return inspect_source(str(folder))


def part_of(config: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = config.get("text_config", config)
    return part


def foreign(name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(key, the config with a word there that no family knows), and once with one such entry in each list."""
    num_layers = part_of(config_of(name))["num_hidden_layers"]
    for key in ENUMERATED:
        stated = part_of(config_of(name)).get(key)
        words: list[Any] = [["moba"] * num_layers] if key.endswith("_types") else ["moba"] if stated else []
        if isinstance(stated, list):
            words.append([*stated[:2], "moba", *stated[3:]])
        for word in words:
            config = config_of(name)
            part_of(config)[key] = word
            yield key, config


def unknown(config: dict[str, Any]) -> dict[str, Any]:
    config.get("text_config", {}).pop("architectures", None)
    return config | NOVA


def check_agrees(report: InspectReport) -> None:
    """The invariants of any report."""
    config, layers = report.config, report.layers
    assert not set(config["unread"]) & {*config["read"], *config["ignored"]}
    assert all(layer["mixer"] and layer["channel"] and layer["residual"] for layer in layers)
    kinds = {word for layer in layers for word in (layer["mixer"], layer["channel"])}
    if layers and "?" not in kinds and not any("guess" in said for said in config["stand_ins"].values()):
        assert report.parameters["total"] is not None and report.cache["per_token_bytes"]["bf16"] is not None
    if report.cache["by_record"]:  # only layers that are known keep anything
        assert report.cache["per_token_bytes"]["bf16"] is not None
    if report.nearest is None:
        return
    only_here = report.nearest["config"]["only_here"]
    found = COUNTS.search(report.why)
    assert found is not None and int(found[2]) - int(found[1]) == len(only_here)
    assert only_here == config["unread"]
    listed = [key for entry in report.operators["build"] for key in entry.get("keys", ())]
    named = {row["key"] for row in report.nearest["layer_kinds"] if row["kind"]}
    assert all(any(key == k or key.startswith(f"{k}.") for k in only_here) or key in named for key in listed)
    assert not any(key.rpartition(".")[2].endswith("_types") for e in report.operators["build"] if e["contract"] is None
                   for key in e["keys"])  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_foreign_words_of_an_unknown_model(name: str, tmp_path: Path) -> None:
    for key, config in foreign(name):
        report = run(tmp_path / "unknown", unknown(config))
        check_agrees(report)
        assert report.nearest is not None
        differences = report.nearest["config"]
        told = [*differences["only_here"], *differences["absent_or_refused"]]
        assert len(told) == 1 and key in told[0], (key, told)
        labelled = {w for layer in report.layers for w in ("mixer", "channel") if "in place of 'moba'" in layer[w]}
        refused = bool(differences["absent_or_refused"]) and key.endswith("_types")
        assert labelled == ({layer_part(key)} if refused else set()), key
        if key.endswith("_types"):
            (row,) = [row for row in report.nearest["layer_kinds"] if row["kind"] == "moba"]
            assert row["key"].endswith(key) and row["count"] in (1, len(report.layers))


@pytest.mark.parametrize("name", NAMES)
def test_one_wrong_type_is_one_finding(name: str, tmp_path: Path) -> None:
    """Of a known family, and of an unknown one."""
    for key, wrong in (("layer_types", 5), ("rope_scaling", "yes"), ("eos_token_id", {"a": 1}), ("eos_token_id", -1),
                       ("rms_norm_eps", 5), ("linear_attn_config", 3), ("hidden_size", [1])):  # fmt: skip
        config = config_of(name)
        if key not in ("layer_types", "rope_scaling") and key not in part_of(config):
            continue
        part_of(config)[key] = wrong
        known = run(tmp_path / "known", config)
        check_agrees(known)
        if set(known.config["ignored"]) & {key, f"text_config.{key}"}:
            continue  # without rotary positions their scaling means nothing
        failed = [f for f in known.findings if f.verdict == "fail"]
        assert len(failed) == 1 and key in f"{failed[0].claim} {failed[0].evidence}", (key, failed)
        check_agrees(run(tmp_path / "unknown", unknown(config)))


def test_keys_of_an_object_count_one_by_one_where_some_are_unread(tmp_path: Path) -> None:
    """Ids and keys below an opened object are listed, so they are counted."""
    scaling = {"type": "longrope", "factor": 4.0, "long_factor": [1.0], "short_factor": [1.0]}
    config = config_of("deepseek_v3", rope_scaling=scaling, image_token_id=5, odd=None) | NOVA
    report = run(tmp_path, config | {"null_key": None})
    check_agrees(report)
    assert report.config["unread"] == [
        "rope_scaling.long_factor", "rope_scaling.short_factor", "image_token_id", "null_key"
    ]  # fmt: skip
