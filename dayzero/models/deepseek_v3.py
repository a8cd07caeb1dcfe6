"""DeepSeek-V3 and R1 (arXiv 2412.19437): latent attention with interleaved rope, grouped sigmoid routing, FP8."""

from __future__ import annotations

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.models.common import twin
from dayzero.models.latent import extra_lineage_rules, lineage_rules, read_lineage
from dayzero.models.recipe import Oracle, Traits

ARCHITECTURES = ("DeepseekV3ForCausalLM",)
MODEL_TYPES = ("deepseek_v3",)
TRAITS = Traits(
    needs=("kv_lora_rank", "qk_rope_head_dim", "n_routed_experts", "topk_group"),
    lacks=("index_topk", "index_n_heads", "linear_attn_config", "dsa_config", "text_config"),
)
ORACLE = Oracle("DeepseekV3ForCausalLM", router="model.layers.{i}.mlp.gate")


def spec(raw: Raw) -> ModelSpec:
    return read_lineage(raw, "deepseek_v3", index_style=None)


rules = lineage_rules
extra_rules = extra_lineage_rules

# Ragged FP8 blocks, four groups of which two stay, three dense layers, and YaRN over a length a test can pass.
SIZES = {
    "hidden_size": 160,
    "intermediate_size": 288,
    "moe_intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 72,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "vocab_size": 512,
    "max_position_embeddings": 2560,
    "rope_scaling.original_max_position_embeddings": 64,
    "rope_parameters.original_max_position_embeddings": 64,
    "?head_dim": 16,
    "?qk_head_dim": 40,
    "?mlp_layer_types": ["dense"] * 3 + ["sparse"] * 2,
}
TWIN = twin(SIZES)
