"""Which operator a config key speaks of: for models that no recipe covers yet, so that a porter knows what to build.

A key says nothing about how it is meant; it says which contract to look at first. Keys are compared without regard to
where they stand (root, text_config, or a nested object). A list with one kind a layer speaks through its entries.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class KeyTrait:
    """keys: fnmatch patterns of config keys. contract: operator (may not exist yet). traits: options it must have.

    about: what the key usually switches on.
    """

    keys: tuple[str, ...]
    contract: str
    about: str
    traits: Mapping[str, object] = field(default_factory=dict)


KEY_TRAITS: tuple[KeyTrait, ...] = (
    KeyTrait(
        ("rms_norm_eps", "layer_norm_eps", "norm_eps", "rms_norm_epsilon"), "norm.rms", "normalisation before each site"
    ),
    KeyTrait(
        ("zero_centered_norm", "norm_offset", "rms_norm_add_unit_offset"),
        "norm.rms",
        "weight stored around zero",
        {"offset": True},
    ),
    KeyTrait(("hidden_size", "intermediate_size", "ffn_hidden_size"), "linear.matmul", "projections"),
    KeyTrait(("vocab_size", "embedding_multiplier", "scale_embeddings"), "embed.lookup", "token embedding"),
    KeyTrait(
        ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rotary_dim", "rope_*"),
        "rope.apply",
        "rotary positions",
    ),
    KeyTrait(("num_attention_heads", "num_key_value_heads", "head_dim"), "attention.paged", "grouped-query attention"),
    KeyTrait(
        ("sliding_window", "sliding_window_size", "attention_window", "swa_*", "window_size"),
        "attention.paged",
        "a window of visible tokens",
        {"window": 128},
    ),
    KeyTrait(
        (
            "attention_sink*",
            "use_sinks",
            "attn_sink*",
            "sink_*",
            "add_swa_attention_sink_bias",
            "add_full_attention_sink_bias",
        ),
        "attention.paged",
        "a learned logit beside the scores",
        {"sinks": True},
    ),
    KeyTrait(
        ("attn_logit_softcapping", "attention_logit_cap", "attn_softcap*"),
        "attention.paged",
        "scores bounded by tanh",
        {"softcap": 30.0},
    ),
    KeyTrait(
        (
            "attn_output_gate",
            "attention_output_gate",
            "mla_use_output_gate",
            "use_head_wise_attn_gate",
            "attn_gate*",
            "gated_attention*",
        ),
        "attention.gate",
        "a gate on the heads' output",
        {"per": "channel"},
    ),
    KeyTrait(("attention_value_scale", "value_scale"), "attention.value_scale", "values multiplied by a constant"),
    KeyTrait(
        ("relative_bias*", "position_bias*", "rel_extent"),
        "attention.relative_bias",
        "a bias by distance on the scores",
    ),
    KeyTrait(
        ("ssmax*", "attn_temperature_tuning", "floor_scale", "log_scaling*", "query_scale*"),
        "attention.query_scale",
        "queries scaled by position",
    ),
    KeyTrait(("attention_k_eq_v",), "attention.shared_key_value", "keys that are the values"),
    KeyTrait(
        ("num_kv_shared_layers", "kv_source_layers", "kv_reuse*"),
        "cache.shared_layers",
        "layers that read another layer's cache",
    ),
    KeyTrait(
        ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
        "attention.paged",
        "latent attention",
        {"latent": True},
    ),
    KeyTrait(("o_lora_rank", "o_groups"), "linear.grouped", "block-diagonal output projection"),
    KeyTrait(
        ("compress_rates", "compress_ratio*", "kv_compress*", "compressed_*"),
        "cache.compress",
        "cache entries that stand for several tokens",
    ),
    KeyTrait(
        ("index_topk", "index_n_heads", "index_head_dim", "dsa_config"),
        "sparse_index.tokens",
        "a sparse index over the context",
    ),
    KeyTrait(("index_topk", "dsa_config"), "attention.sparse", "attention to the context's best tokens"),
    KeyTrait(
        ("index_topk_freq", "indexer_types", "index_topk_pattern", "index_share*", "index_skip_topk_offset"),
        "attention.sparse",
        "layers that reuse a selection",
    ),
    KeyTrait(
        ("index_pool*", "index_kpool*", "index_block*", "sparse_block*", "block_topk", "csa_*"),
        "sparse_index.pool",
        "an index over blocks of tokens",
    ),
    KeyTrait(
        ("linear_attn_config", "linear_num_*", "linear_key_head_dim", "linear_value_head_dim", "kda_*", "gdn_*"),
        "recurrence.paged",
        "gated delta rule",
    ),
    KeyTrait(
        ("gate_lower_bound", "kda_safe_gate", "kda_lower_bound"),
        "recurrence.paged",
        "a decay with a lower bound",
        {"gate": "bounded"},
    ),
    KeyTrait(
        ("linear_conv_kernel_dim", "short_conv_kernel_size", "conv_kernel", "conv_L_cache", "conv_kernel_size"),
        "conv.causal",
        "short causal convolution",
        {"act": "silu"},
    ),
    KeyTrait(
        ("mamba_*", "ssm_*", "state_size", "ssm_cfg", "time_step_*", "mamba2_*"),
        "recurrence.state_space",
        "selective state space",
    ),
    KeyTrait(
        ("lightning_*", "linear_slope*", "block_decay*"),
        "recurrence.fixed_decay",
        "linear attention with a fixed decay",
    ),
    KeyTrait(
        (
            "num_experts",
            "n_routed_experts",
            "num_local_experts",
            "num_experts_per_tok",
            "num_experts_per_token",
            "moe_*",
        ),
        "moe.experts",
        "routed experts",
    ),
    KeyTrait(
        (
            "scoring_func",
            "topk_method",
            "n_group",
            "topk_group",
            "norm_topk_prob",
            "routed_scaling_factor",
            "moe_router_activation_func",
        ),
        "moe.route",
        "choice of experts",
    ),
    KeyTrait(("hash_layers", "num_hash_layers", "hash_router*"), "moe.route_hashed", "experts chosen by token id"),
    KeyTrait(("num_zero_experts", "zero_expert_*"), "moe.zero_experts", "experts that pass their input on"),
    KeyTrait(
        ("routed_expert_hidden_size", "moe_latent_size", "moe_latent_*"),
        "linear.matmul",
        "experts that work in a latent width",
    ),
    KeyTrait(("hidden_act", "hidden_activation", "activation_func"), "activation.glu", "gated activation"),
    KeyTrait(
        ("swiglu_limit", "swiglu_alpha", "clamp_limit", "activation_situ_*"),
        "activation.glu",
        "gated activation with bounds",
    ),
    KeyTrait(
        ("hc_mult", "hc_*", "num_residual_streams", "mhc_*", "hyper_connection*"),
        "residual.streams_enter",
        "several residual streams",
    ),
    KeyTrait(
        ("hc_mult", "hc_*", "num_residual_streams", "mhc_*", "hyper_connection*"),
        "residual.streams_leave",
        "several residual streams",
    ),
    KeyTrait(
        ("hc_mult", "num_residual_streams", "mhc_*", "hyper_connection*"),
        "residual.streams_close",
        "streams collapsed at the end",
        {"collapse": "mean"},
    ),
    KeyTrait(("attn_res_block_size", "attn_res_*"), "residual.attn_mix", "residual mixed from earlier block sums"),
    KeyTrait(
        ("residual_multiplier", "residual_scale*", "layer_scale*", "depth_scale*", "residual_gate*"),
        "residual.scaled",
        "a scaled residual",
    ),
    KeyTrait(
        ("engram_*", "ngram_*", "num_ngram*", "ple_*", "hidden_size_per_layer_input", "vocab_size_per_layer_input"),
        "embed.ngram",
        "hashed n-gram or per-layer embeddings",
    ),
    KeyTrait(
        ("final_logit_softcapping", "logits_scaling", "logit_scale", "logits_multiplier"),
        "head.scaled",
        "logits scaled or bounded",
    ),
    KeyTrait(("num_loops", "loop_*", "num_passes"), "stack.loop", "layers that run several times"),
    KeyTrait(
        ("num_nextn_predict_layers", "mtp_*", "num_mtp_*", "draft_*"),
        "draft.next_tokens",
        "draft layers in the checkpoint",
    ),
    KeyTrait(("vision_config", "image_token_id", "*_placeholder", "vision_*"), "vision.tower", "images"),
    KeyTrait(("audio_config", "audio_*"), "audio.tower", "audio"),
)

# Keys of lists that name a kind for each layer, and those among them that are about the channel.
LAYER_LISTS = (
    "layer_types", "*_layer_types", "layers_block_type", "block_types", "attn_type_list", "indexer_types",
    "hybrid_layer_pattern", "layer_pattern",
)  # fmt: skip
CHANNEL_LISTS = ("mlp_*", "moe_*", "ffn_*")

# keys: patterns of the words that such a list holds.
KIND_TRAITS: tuple[KeyTrait, ...] = (
    KeyTrait(
        ("full_attention", "attention", "full", "global*", "global_attention"), "attention.paged", "attention layers"
    ),
    KeyTrait(
        ("sliding*", "local*", "*window*", "swa*"), "attention.paged", "a window of visible tokens", {"window": 128}
    ),
    KeyTrait(("linear_attention", "*delta*", "kda", "gdn"), "recurrence.paged", "gated delta rule"),
    KeyTrait(("mamba*", "ssm*", "*_mamba"), "recurrence.state_space", "selective state space"),
    KeyTrait(("lightning*",), "recurrence.fixed_decay", "linear attention with a fixed decay"),
    KeyTrait(("conv*", "short_conv"), "conv.causal", "short causal convolution", {"act": "silu"}),
    KeyTrait(("latent*", "mla*"), "attention.paged", "latent attention", {"latent": True}),
    KeyTrait(
        ("indexed_attention", "*sparse_attention"), "sparse_index.top_k", "a sparse index over the context",
        {"order": "position"},
    ),
    KeyTrait(("sparse", "moe", "*experts*"), "moe.experts", "routed experts"),
    KeyTrait(("dense", "mlp"), "activation.glu", "gated activation"),
)  # fmt: skip


def is_layer_list(key: str, value: Any, num_layers: int | None = None) -> bool:
    """Whether ``value`` names a kind for each layer, judged by the last part of ``key``; any list of words of just the
    model's length where that is known."""
    if not isinstance(value, list) or not value or not all(isinstance(kind, str) for kind in value):
        return False
    return len(value) == num_layers or names_layers(key)


def names_layers(key: str) -> bool:
    """Whether a key is that of a list with one kind a layer, whatever its value."""
    word = key.rpartition(".")[2]
    return any(fnmatch.fnmatchcase(word, pattern) for pattern in LAYER_LISTS)


def layer_part(key: str) -> str:
    """Which part of a layer such a list is about: ``mixer`` or ``channel``."""
    word = key.rpartition(".")[2]
    return "channel" if any(fnmatch.fnmatchcase(word, pattern) for pattern in CHANNEL_LISTS) else "mixer"


def rows_of(word: str, table: tuple[KeyTrait, ...]) -> list[KeyTrait]:
    """Rows of a table that a key, or a kind of layer, speaks of."""
    return [row for row in table if any(fnmatch.fnmatchcase(word, pattern) for pattern in row.keys)]
