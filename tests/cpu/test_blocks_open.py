"""Opening a checkpoint: everything fits, or one sentence that names what does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dayzero.blocks.open import open_model
from dayzero.errors import CheckpointError, ConfigError, ModelError, UsageError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 24, "intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 40,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path, change: Callable[[dict[str, Any], dict[str, torch.Tensor]], None] | None = None) -> str:
    """A sound two-layer checkpoint in ``folder``, after ``change`` had its way with config and tensors."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens": (40, 24), "lm_head": (40, 24), "model.norm": (24,)}
    for i in range(2):
        p = f"model.layers.{i}."
        shapes |= {p + "input_layernorm": (24,), p + "post_attention_layernorm": (24,)}
        shapes |= {f"{p}self_attn.{n}_proj": (24 if n in "qo" else 12, 24) for n in "qkvo"}
        shapes |= {f"{p}mlp.{n}_proj": (24, 32) if n == "down" else (32, 24) for n in ("gate", "up", "down")}
    tensors = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        tensors[f"{name}.weight"] = 1 + 0.1 * noise if "norm" in name else noise / 5
    config = dict(CONFIG)
    if change is not None:
        change(config, tensors)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def test_a_sound_checkpoint_opens_and_loads(tmp_path: Path) -> None:
    model = open_model(write(tmp_path), dtype=torch.bfloat16)
    assert model.recipe.name == "llama" and len(model.spec.layers) == 2
    layer = model.loader.load("layers.1")
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(layer["layers.1.mixer.k"], stored["model.layers.1.self_attn.k_proj.weight"].bfloat16())
    assert len(layer) == 9 and model.loader.findings == []


def drop(name: str) -> Callable[[dict[str, Any], dict[str, torch.Tensor]], None]:
    return lambda config, tensors: tensors.__delitem__(name)


REFUSALS: dict[str, tuple[Callable[[dict[str, Any], dict[str, torch.Tensor]], Any], type[Exception], str]] = {
    "missing": (
        drop("model.layers.1.mlp.up_proj.weight"), CheckpointError, r"lacks tensors: model\.layers\.1\.mlp\.up_proj",
    ),
    "unknown": (
        lambda c, t: t.update({"model.layers.0.self_attn.sinks": torch.zeros(4)}),
        CheckpointError, r"no rule uses: model\.layers\.0\.self_attn\.sinks",
    ),
    "misfit": (
        lambda c, t: t.update({"model.norm.weight": torch.ones(25)}),
        CheckpointError, r"do not fit: model\.norm\.weight",
    ),
    "unread key": (lambda c, t: c.update({"residual_beta": 0.5}), ConfigError, "does not read: residual_beta"),
    "quantisation key": (
        lambda c, t: c.update(
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "swizzle": 1}}
        ),
        ConfigError, r"quantisation keys that nothing reads: quantization_config\.swizzle",
    ),
    "claim": (
        lambda c, t: c.update({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}),
        CheckpointError, "otherwise than its config claims",
    ),
    "no family": (lambda c, t: c.update({"architectures": ["NovaForCausalLM"]}), ModelError, "no recipe knows Nova"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_one_sentence(case: str, tmp_path: Path) -> None:
    change, error, words = REFUSALS[case]
    with pytest.raises(error, match=words) as caught:
        open_model(write(tmp_path, change))
    assert "\n" not in str(caught.value)


def test_a_damaged_shard_is_refused(tmp_path: Path) -> None:
    where = write(tmp_path)
    shard = tmp_path / "model.safetensors"
    shard.write_bytes(shard.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match="is damaged"):
        open_model(where)


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "is not JSON"), ("[1]", "must hold an object"), ("[" * 99_999, "too deeply"), ("NaN", "not JSON")],
)
def test_a_config_that_is_none_is_refused(text: str, words: str, tmp_path: Path) -> None:
    where = write(tmp_path)
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        open_model(where)


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        open_model(str(tmp_path / "nothing" / "here" / "at" / "all"))
