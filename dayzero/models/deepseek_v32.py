"""DeepSeek-V3.2: DeepSeek-V3 with a sparse index in every layer.

The index turns the first dims of its heads half-split although latent attention turns interleaved; its key norm is a
LayerNorm with bias. Source: the reference in the released repository as corrected in November 2025.
"""

from __future__ import annotations

from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.models import deepseek_v3
from dayzero.models.common import kinds_by_layer, twin
from dayzero.models.latent import extra_lineage_rules, lineage_rules, read_lineage
from dayzero.models.recipe import Oracle, Traits

ARCHITECTURES = ("DeepseekV32ForCausalLM",)
MODEL_TYPES = ("deepseek_v32",)
TRAITS = Traits(
    needs=("kv_lora_rank", "n_routed_experts", "index_topk", "index_n_heads", "index_head_dim"),
    lacks=("indexer_rope_interleave", "indexer_types", "index_topk_freq", "index_topk_pattern", "linear_attn_config"),
)
ORACLE = Oracle(
    "DeepseekV32ForCausalLM", router="model.layers.{i}.mlp.gate", index="model.layers.{i}.self_attn.indexer"
)
LAYER_KINDS = {"indexed_attention": "indexed", "deepseek_sparse_attention": "indexed"}


def spec(raw: Raw) -> ModelSpec:
    made = read_lineage(raw, "deepseek_v32", index_style="half")
    kinds_by_layer(raw, "layer_types", LAYER_KINDS, len(made.layers))  # one kind only; refuses any other
    return made


rules = lineage_rules
extra_rules = extra_lineage_rules

# Sixteen index heads: with few, a score is exactly zero where relu cuts all of them, and such ties sit at the cut.
TWIN = twin(
    {
        **deepseek_v3.SIZES,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "?layer_types": ["indexed_attention"] * 5,
    }
)
