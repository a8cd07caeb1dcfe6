"""Checkpoints and traces for tests of alignment: a tiny seeded folder, and our own stack in the oracle's place."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from random_models import loader, random_params
from safetensors.torch import save_file
from torch import Tensor

import dayzero
from dayzero.acceptance.compare import compare_logits, free_bound
from dayzero.acceptance.trace import Trace
from dayzero.acceptance.walk import Ladder, Walk
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.stack import Stack

ORACLES = Path(dayzero.__file__).parent / "oracles"
VOCAB, DIM, INNER, LAYERS = 101, 40, 56, 3
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": DIM, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCAB,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "attention_bias": False, "mlp_bias": False,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def script(name: str) -> ModuleType:
    """A file of ``dayzero/oracles`` as a module, loaded by path as the oracle's process does."""
    spec = importlib.util.spec_from_file_location(name, ORACLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_dense(folder: Path, changes: Mapping[str, Any] | None = None, seed: int = 0) -> Path:
    """A tiny dense checkpoint in bf16 under the publisher's names."""
    folder.mkdir(parents=True)
    config = CONFIG | dict(changes or {})
    draw = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=draw) * columns**-0.5

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(DIM, generator=draw)

    tensors = {"model.embed_tokens.weight": torch.randn(VOCAB, DIM, generator=draw), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(VOCAB, DIM)
    for i in range(LAYERS):
        at = f"model.layers.{i}."
        tensors |= {f"{at}{n}.weight": norm() for n in ("input_layernorm", "post_attention_layernorm")}
        for name, rows in (("q", 40), ("k", 8), ("v", 8), ("o", DIM)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = matrix(rows, DIM)
        tensors |= {f"{at}mlp.{n}_proj.weight": matrix(INNER, DIM) for n in ("gate", "up")}
        tensors[f"{at}mlp.down_proj.weight"] = matrix(DIM, INNER)
    save_file({n: v.to(torch.bfloat16) for n, v in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_recipe(path: Path, change: str) -> str:
    """A recipe beside the package's own: ``change`` is Python that may rebind spec, RULES or ORACLE."""
    path.write_text(
        "from dataclasses import replace\n"
        "from dayzero.checkpoint.rules import Rule\n"
        "from dayzero.models import llama as base\n"
        "from dayzero.models.recipe import Oracle\n"
        "from dayzero.models.llama import ARCHITECTURES, ORACLE, RULES, TRAITS, spec\n"
        "def change_layers(made, change, which=None):\n"
        "    return replace(made, layers=tuple(\n"
        "        change(x) if which in (None, i) else x for i, x in enumerate(made.layers)))\n" + change + "\n"
    )
    return str(path)


def self_trace(spec: ModelSpec, params: dict[str, Tensor], tokens: list[int], path: Path) -> Trace:
    """A trace in which our own stack is the oracle, carries included."""
    wire = script("wire")
    with wire.TraceWriter(path, wire.header_room(len(spec.layers), len(tokens))) as writer:
        stack = Stack(spec, loader(params), tap=lambda site, value: writer.put(site, value))
        view = LocalCache(spec, torch.float32).view(tokens)
        carry = stack.open(view)
        for number, layer in enumerate(spec.layers):
            carry = stack.layer(number, carry, view)
            for part in layer.residual.carry()[1:]:
                writer.put(f"layers.{number}.carry.{part.name}", carry[part.name])
        stack.head(stack.close(carry))
        writer.close(wire.base_meta(tokens, {"kind": "test", "name": "our own stack", "versions": {}}, []))
    return Trace(path)


def walk(spec: ModelSpec, params: dict[str, Tensor], trace: Trace) -> Ladder:
    made = Walk(spec, loader(params), trace, trace.tokens)
    assert list(made.steps())[-1] == "head"
    return made.ladder


def aligned(spec: ModelSpec, params: dict[str, Tensor], trace: Trace) -> Ladder:
    """A walk that must pass in everything."""
    found = walk(spec, params, trace)
    assert all(s.passed for s in found.sites) and all(c.passed for c in found.choices)
    assert found.logits_TV is not None
    bound = free_bound(spec, len(trace.tokens))
    logits = compare_logits(found.logits_TV, trace.get("logits"), trace.tokens, bound, found.exact_tokens)
    assert logits.passed
    return found


__all__ = ["aligned", "loader", "random_params", "script", "self_trace", "walk", "write_dense", "write_recipe"]
