"""Qwen3 dense and Qwen3-MoE (arXiv 2505.09388): grouped-query attention with norms over q and k, softmax routing."""

from __future__ import annotations

from dayzero.arch.channels import GLU, Channel, MoE, Router
from dayzero.arch.mixers import Attention
from dayzero.arch.norms import Norm
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import Plain
from dayzero.arch.rope import Rope, read_rope
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Rule
from dayzero.errors import ConfigError
from dayzero.models.common import (
    assemble,
    attention_rules,
    expert_rules,
    frame_rules,
    glu_rules,
    kinds_by_layer,
    twin,
)
from dayzero.models.recipe import Oracle, Traits

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
MODEL_TYPES = ("qwen3", "qwen3_moe")
TRAITS = Traits(
    needs=("hidden_size", "num_key_value_heads"),
    lacks=(
        "kv_lora_rank", "linear_attn_config", "linear_num_value_heads", "attn_output_gate", "n_shared_experts",
        "shared_expert_intermediate_size", "text_config",
    ),
)  # fmt: skip
ORACLE = Oracle(class_of={name: name for name in ARCHITECTURES}, router="model.layers.{i}.mlp.gate")
KINDS = {"full_attention": "full", "sliding_attention": "window"}


def spec(raw: Raw) -> ModelSpec:
    dim, num_layers = raw.int("hidden_size", least=1), raw.int("num_hidden_layers", least=1)
    positions = raw.int("max_position_embeddings", default=32768)
    routed = raw.has("num_experts") or raw.has("num_local_experts")
    eps = raw.float("rms_norm_eps", default=1e-6)
    norm = Norm(dim, eps)
    rope = read_rope(raw, max_positions=positions, theta_default=10000.0)
    heads = raw.int("num_attention_heads", least=1)
    head_dim = raw.int_or_none("head_dim", least=2) or (dim // heads if routed else raw.int("head_dim", default=128))
    kv_heads, bias = raw.int("num_key_value_heads", least=1), raw.bool("attention_bias", default=False)
    turned = Rope(head_dim, rope.theta, scaling=rope.scaling)
    mixers = [
        Attention(
            dim, heads, kv_heads, head_dim, turned, head_dim**-0.5, window, qk_norm=Norm(head_dim, eps), bias=bias,
            out_bias=bias,
        )
        for window in _windows(raw, num_layers, routed)
    ]  # fmt: skip
    raw.one_of("hidden_act", allowed=("silu",), default="silu")
    channels = _channels(raw, dim, num_layers, routed)
    layers = [LayerSpec(mixer, channel, Plain(norm)) for mixer, channel in zip(mixers, channels, strict=True)]
    return assemble("qwen3", raw, None, layers, positions)


def _windows(raw: Raw, num_layers: int, routed: bool) -> list[int | None]:
    """Each layer's window. The routed class has no schedule of windows, so there they are refused."""
    allowed = (False,) if routed else (False, True)
    used = raw.one_of("use_sliding_window", allowed=allowed, default=False)
    kinds = kinds_by_layer(raw, "layer_types", KINDS, num_layers)
    if not used:
        raw.ignore("sliding_window", "max_window_layers", why="use_sliding_window is false")
        if kinds is not None and "window" in kinds:
            raise ConfigError("config.json contradicts itself: layer_types has windows, use_sliding_window is false.")
        return [None] * num_layers
    window, first = raw.int("sliding_window", least=1), raw.int("max_window_layers", default=28)
    kinds = kinds or ["window" if i >= first else "full" for i in range(num_layers)]
    return [window if kind == "window" else None for kind in kinds]


def _channels(raw: Raw, dim: int, num_layers: int, routed: bool) -> list[Channel]:
    dense = GLU(dim, raw.int("intermediate_size", least=1))
    if not routed:
        return [dense] * num_layers
    router = Router(
        experts=raw.int("num_experts", "num_local_experts", least=1),
        top_k=raw.int("num_experts_per_tok", least=1),
        score="softmax",
        renormalise=raw.bool("norm_topk_prob", default=False),
    )
    moe = MoE(dim, raw.int("moe_intermediate_size", least=1), router)
    step, only_dense = raw.int("decoder_sparse_step", default=1, least=1), raw.ints("mlp_only_layers", default=())
    return [moe if i not in only_dense and (i + 1) % step == 0 else dense for i in range(num_layers)]


MLP = "model.layers.{i}.mlp."
RULES = (
    *frame_rules(),
    *attention_rules("model.layers.{i}.self_attn."),
    *glu_rules(MLP),
    Rule(MLP + "gate.weight", "layers.{i}.channel.router"),
    *expert_rules(MLP),
)

TWIN = twin(
    {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "?moe_intermediate_size": 64,
        "?num_experts": 16,
        "?num_local_experts": 16,
        "?num_experts_per_tok": 4,
        "?sliding_window": 8,
        "?max_window_layers": 2,
        "?layer_types": ["full_attention"] * 4,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
    }
)
