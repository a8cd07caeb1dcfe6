"""Mutations of weights, config and tokenizer: what is wrong lies in the files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cpu.mutations.mutation import Mutation, Part

WEIGHTS = (Part("weights"),)
TEXT = "tokenizer+template"

# (fault of tests/cpu/faults, kind, layer at fault, base)
LIFTED: tuple[tuple[str, str, str, str], ...] = (
    ("shard absent, fp8", "A", "weights", "latent"),
    ("truncated shard", "A", "weights", "dense"),
    ("one tensor dropped", "A", "weights", "dense"),
    ("orphan tensor", "A", "weights", "dense"),
    ("packed experts under another root", "A", "weights", "sinks"),
    ("matrix under a transposed shape", "A", "weights", "dense"),
    ("tensor absent from the index", "A", "weights", "dense"),
    ("NaN in a matrix", "A", "weights", "dense"),
    ("one expert of zeros", "A", "weights", "head_delta"),
    ("one layer more in the config", "A", "config", "dense"),
    ("tied, and a head that differs", "B", "weights", "tied"),
    ("untied without a head", "B", "config", "dense"),
    ("tie flag says the contrary in the inner config", "B", "config", "head_delta"),
    ("module plain though claimed quantised", "C", "weights", "latent"),
    ("ignore list for another root", "C", "config", "sinks"),
    ("unread key of the quantisation", "C", "config", "latent"),
    ("scale missing", "D", "weights", "latent"),
    ("NaN scale, f32", "D", "weights", "latent"),
    ("all scales zero", "D", "weights", "latent"),
    ("scale grid counted by floor", "D", "weights", "latent"),
    ("two bases of the rope", "E", "config", "shared_index"),
    ("legacy rotary_dim", "E", "config", "dense"),
    ("unknown rope_type", "E", "config", "shared_index"),
    ("size that the files contradict", "E", "config", "latent"),
    ("value scale that nothing reads", "F", "config", "dense"),
    ("other activation", "F", "config", "dense"),
    ("plain norms stored around 0", "F", "weights", "dense"),
    ("decay rates stored in bf16", "F", "weights", "channel_delta"),
    ("other score function", "G", "config", "latent"),
    ("router bias stored in bf16", "G", "weights", "latent"),
    ("stop id beyond the vocabulary", "H", "config", "dense"),
    ("tokenizer of a larger vocabulary", "H", TEXT, "dense"),
    ("damaged tokenizer", "H", TEXT, "dense"),
)


def _json(file: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        found = json.loads((folder / file).read_text())
        before = json.dumps(found)
        change(found)
        assert json.dumps(found) != before, "the edit changed nothing"
        (folder / file).write_text(json.dumps(found))

    return edit


def _unknown_family(config: dict[str, Any]) -> None:
    config |= {"architectures": ["Nova4ForCausalLM"], "model_type": "nova4"}


def _twice(folder: Path) -> None:
    text = (folder / "config.json").read_text().rstrip()
    (folder / "config.json").write_text(text[:-1] + ', "rms_norm_eps": 0.001}')


def _no_size(config: dict[str, Any]) -> None:
    del config["intermediate_size"]


def _odd_width(config: dict[str, Any]) -> None:
    config["intermediate_size"] += 2


def _broken_template(settings: dict[str, Any]) -> None:
    settings["chat_template"] += "{% if %}"


def _normalised(tokenizer: dict[str, Any]) -> None:
    """Text is put into lower case before it is cut into tokens."""
    tokenizer["normalizer"] = {"type": "Lowercase"}


def _one_byte(folder: Path) -> None:
    """One bit of one value: every tensor is there and sound."""
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


MUTATIONS: tuple[Mutation, ...] = (
    *(Mutation(name, kind, layer, base, WEIGHTS, edit=f"fault:{name}") for name, kind, layer, base in LIFTED),
    Mutation("one bit of a shard whose SHA-256 is stated", "A", "weights", "published", WEIGHTS, edit=_one_byte),
    Mutation("a key of the config twice", "E", "config", "dense", WEIGHTS, edit=_twice),
    Mutation("a size that the config leaves out", "E", "config", "dense", WEIGHTS, "Automodel#3792",
             edit=_json("config.json", _no_size)),
    Mutation("a width that the experts' format cannot hold", "C", "config", "sinks", WEIGHTS,
             edit=_json("config.json", _odd_width)),
    Mutation("a family that nobody knows", "U", "config", "dense", WEIGHTS, "GLM-4#793",
             edit=_json("config.json", _unknown_family)),
    Mutation("a template that cannot be read", "H", TEXT, "small", WEIGHTS,
             edit=_json("tokenizer_config.json", _broken_template)),
    Mutation("text is put into lower case", "H", TEXT, "small", (Part("functional", ("tokenize.identity",)),),
             "llama.cpp#7338", edit=_json("tokenizer.json", _normalised)),
)  # fmt: skip
