"""Kimi-Linear-48B-A3B (arXiv 2510.26692): delta attention, one latent layer in four, nothing rotated, plain residual.

Kimi K3's text config carries the same architecture name; what tells it apart is in TRAITS.
"""

from __future__ import annotations

from dayzero.arch.mixers import Mixer
from dayzero.arch.norms import Activation
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import Plain
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Rule, RuleLike, Stored
from dayzero.decl import F32
from dayzero.models.common import assemble, draft_layers, twin
from dayzero.models.kimi import read_delta, read_kinds, read_no_rope, read_norm, text_rules
from dayzero.models.latent import read_channels, read_moe, read_sizes
from dayzero.models.recipe import Oracle, Traits

ARCHITECTURES = ("KimiLinearForCausalLM",)
MODEL_TYPES = ("kimi_linear",)
TRAITS = Traits(
    needs=("kv_lora_rank", "qk_nope_head_dim", "moe_intermediate_size"),
    lacks=(
        "attn_res_block_size", "routed_expert_hidden_size", "latent_moe_use_norm", "activation_situ_beta", "dsa_config",
        "mla_use_output_gate", "index_topk", "quantization_config.config_groups",
    ),
)  # fmt: skip
ORACLE = Oracle("KimiLinearForCausalLM", router="model.layers.{i}.mlp.gate")


def spec(raw: Raw) -> ModelSpec:
    num_layers, sizes = raw.int("num_hidden_layers", least=1), read_sizes(raw)
    read_no_rope(raw)
    norm = read_norm(raw, sizes.dim)
    kinds = read_kinds(raw, num_layers)
    mixers: dict[str, Mixer] = {"latent": sizes.mixer(rope=None), "delta": read_delta(raw, sizes.dim, norm.eps)}
    channels = read_channels(raw, sizes.dim, num_layers, read_moe(raw, sizes.dim), Activation())
    layers = [LayerSpec(mixers[kind], channel, Plain(norm)) for kind, channel in zip(kinds, channels, strict=True)]
    positions = raw.int("model_max_length", "max_position_embeddings", least=1)
    num_drafts = raw.int("num_nextn_predict_layers", default=0)
    return assemble("kimi_linear", raw, None, layers, positions, facts={"draft_layers": num_drafts})


def rules(spec: ModelSpec) -> tuple[RuleLike, ...]:
    decay_log = Rule(
        "model.layers.{i}.self_attn.A_log", "layers.{i}.mixer.a_log", stored=(1, 1, "d0", 1), also=(("d0",),)
    )
    return (
        *text_rules("model.", "lm_head.weight", decay_log),
        *draft_layers("model.", len(spec.layers), int(spec.facts["draft_layers"])),
        Stored("*.self_attn.A_log", F32, why="decay rates are published in float32"),
        Stored("*.self_attn.dt_bias", F32, why="decay rates are published in float32"),
    )


# The pattern of the last five layers is kept: the last latent layer comes after two delta layers, not three.
TWIN = twin(
    {
        "hidden_size": 160,
        "intermediate_size": 288,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 7,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 16,
        "v_head_dim": 24,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "vocab_size": 512,
        "model_max_length": 4096,
        "linear_attn_config.num_heads": 4,
        "linear_attn_config.head_dim": 32,
        "linear_attn_config.full_attn_layers": [4, 7],
        "linear_attn_config.kda_layers": [1, 2, 3, 5, 6],
        "?head_dim": 40,
        "?layer_types": [("full" if i in (3, 6) else "linear") + "_attention" for i in range(7)],
        "?mlp_layer_types": ["dense"] + ["sparse"] * 6,
    }
)
