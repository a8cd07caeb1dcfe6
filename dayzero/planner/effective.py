"""Effective values: what the config comes to once defaults, spellings and scalings are worked out.

Raw keys mislead (a rope base at the wrong level, a scaling that nothing applies); these are the numbers a forward pass
uses, each with the layers it holds for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from dayzero.arch.channels import GLU, MoE
from dayzero.arch.index import AnyIndex, LocalIndex
from dayzero.arch.mixers import MLA, Attention, Delta
from dayzero.arch.norms import Activation, Norm
from dayzero.arch.outside import OutsideChannel, OutsideMixer
from dayzero.arch.rope import Rope
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.config_json import stated_dtype
from dayzero.errors import ConfigError
from dayzero.planner.layer_text import numbers_text

NUM_FREQUENCIES_SHOWN = 4
MAX_ROPE_DIMS = 1 << 16

Value = dict[str, Any]


def effective_values(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """rope, attention, norms, activations, routers: lists of values with their layers; and the single values."""
    grouped: dict[str, dict[str, tuple[Value, list[int]]]] = {}
    for i, layer in enumerate(spec.layers):
        for section, value in _of_layer(layer):
            kept = grouped.setdefault(section, {}).setdefault(repr(sorted(value.items(), key=str)), (value, []))
            kept[1].append(i)
    out: dict[str, Any] = {
        section: [{**value, "layers": numbers_text(numbers)} for value, numbers in values.values()]
        for section, values in grouped.items()
    }
    out.setdefault("norms", []).append({"site": "final_norm", **_norm(spec.final_norm), "layers": "after the last"})
    out["tie"] = {"tied": spec.tie.tied, "source": spec.tie.source}
    out["dtype"] = stated_dtype(config)
    out["max_positions"] = spec.max_positions
    out["embed_scale"] = spec.embed_scale
    out["facts"] = {str(k): v for k, v in spec.facts.items()}
    return out


def _of_layer(layer: LayerSpec) -> Iterator[tuple[str, Value]]:
    yield from _of_mixer(layer)
    yield "norms", {"site": "mixer_norm, channel_norm", **_norm(layer.residual.norm)}
    yield "residual", {k: v for k, v in asdict(layer.residual).items() if k != "norm"} | {"kind": layer.residual.kind}
    channel = layer.channel
    if isinstance(channel, MoE):
        yield "routers", asdict(channel.router)
        yield "activations", {"site": "experts", **_activation(channel.act)}
        if channel.shared is not None:
            yield "activations", {"site": "shared expert", **_activation(channel.shared.act)}
        if channel.latent_norm is not None:
            yield "norms", {"site": "latent_norm", **_norm(channel.latent_norm)}
    elif isinstance(channel, GLU):
        yield "activations", {"site": "dense", **_activation(channel.act)}
    else:
        yield from _of_outside(channel)


def _of_index(index: AnyIndex) -> Iterator[tuple[str, Value]]:
    if isinstance(index, LocalIndex):
        yield "index", {"generator": index.generator, "window": index.window, "sinks": index.sinks}
        return
    value: Value = {
        "heads": index.heads, "head_dim": index.head_dim, "top_k": index.top_k, "score_scale": index.scale,
        "shared": index.shared, "generator": index.generator, "sinks": index.sinks, "window": index.window,
    }  # fmt: skip
    yield "index", {**value, **({"pool": asdict(index.pool)} if index.pool is not None else {})}
    yield "rope", rope_value("index", index.rope, index.head_dim)
    yield "norms", {"site": "index key", **_norm(index.key_norm)}


def _of_mixer(layer: LayerSpec) -> Iterator[tuple[str, Value]]:
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        yield "attention", {
            "kind": "attention", "heads": mixer.heads, "kv_heads": mixer.kv_heads, "head_dim": mixer.head_dim,
            "softmax_scale": mixer.softmax_scale, "window": mixer.window, "sinks": mixer.sinks, "gate": mixer.gate,
            "bias": mixer.bias,
        }  # fmt: skip
        yield "rope", rope_value("attention", mixer.rope, mixer.head_dim)
        if mixer.qk_norm is not None:
            yield "norms", {"site": "q_norm, k_norm", **_norm(mixer.qk_norm)}
    elif isinstance(mixer, MLA):
        yield "attention", {
            "kind": "latent", "heads": mixer.heads, "head_dim": mixer.q_dim, "latent": mixer.kv_rank,
            "shared_key": mixer.shared, "softmax_scale": mixer.softmax_scale, "window": None, "gate": mixer.gate,
        }  # fmt: skip
        yield "rope", rope_value("attention", mixer.rope, mixer.q_dim)
        yield "norms", {"site": "q_a_norm, kv_a_norm", **_norm(mixer.norm(mixer.kv_rank)), "dim": "ranks"}
        if mixer.index is not None:
            yield from _of_index(mixer.index)
    elif isinstance(mixer, Delta):
        value = asdict(mixer)
        del value["dim"]
        yield "recurrence", {"kind": "delta", **value}
    else:
        yield from _of_outside(mixer)


def _of_outside(spec: OutsideMixer | OutsideChannel) -> Iterator[tuple[str, Value]]:
    """A spec from another package: its fields, if it is a dataclass."""
    if is_dataclass(spec) and not isinstance(spec, type):
        yield "outside", {"kind": spec.kind, **asdict(spec)}


def rope_value(module: str, rope: Rope | None, head_dim: int) -> Value:
    """A rope as numbers: rotary dims of the head's, style, base, scaling, first and last angular frequencies."""
    if rope is None:
        return {"module": module, "dims": 0, "head_dim": head_dim, "style": "none"}
    if rope.dims > MAX_ROPE_DIMS:
        raise ConfigError(f"config.json: {rope.dims} rotary dims for {module} are more than any head has.")
    freq = rope.inv_freq()
    scaling = None if rope.scaling is None else {"kind": type(rope.scaling).__name__, **asdict(rope.scaling)}
    return {
        "module": module,
        "dims": rope.dims,
        "head_dim": head_dim,
        "style": rope.style,
        "place": rope.place,
        "theta": rope.theta,
        "scaling": scaling,
        "magnitude": rope.magnitude(),
        "sections": list(rope.sections) if rope.sections else None,
        "inv_freq": {
            "count": len(freq),
            "first": list(freq[:NUM_FREQUENCIES_SHOWN]),
            "last": list(freq[-NUM_FREQUENCIES_SHOWN:]),
        },
    }


def _norm(norm: Norm) -> Value:
    return asdict(norm)


def _activation(act: Activation) -> Value:
    used = {"silu": (), "clamped": ("limit", "alpha"), "silu_clamped": ("limit",), "situ": ("beta", "linear_beta")}
    return {"kind": act.kind, **{name: getattr(act, name) for name in used[act.kind]}}
