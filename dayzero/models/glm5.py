"""GLM-5 to 5.3: the DeepSeek-V3.2 shape with an interleaved index, no groups, and (5.2 on) index sharing.

A layer of kind ``shared`` owns no index tensors and attends what the last ``full`` layer chose (arXiv 2603.12201).
"""

from __future__ import annotations

from dataclasses import replace

from dayzero.arch.index import Index
from dayzero.arch.mixers import MLA
from dayzero.arch.raw import Raw
from dayzero.arch.spec import ModelSpec
from dayzero.errors import ConfigError
from dayzero.models.common import kinds_by_layer, restates, twin
from dayzero.models.deepseek_v32 import LAYER_KINDS
from dayzero.models.latent import extra_lineage_rules, lineage_rules, read_lineage
from dayzero.models.recipe import Oracle, Traits

ARCHITECTURES = ("GlmMoeDsaForCausalLM",)
MODEL_TYPES = ("glm_moe_dsa",)
TRAITS = Traits(
    needs=("kv_lora_rank", "n_routed_experts", "index_topk", "index_n_heads", "index_head_dim"),
    lacks=("linear_attn_config", "dsa_config", "index_kpool", "hc_mult"),
)
ORACLE = Oracle("GlmMoeDsaForCausalLM", router="model.layers.{i}.mlp.gate", index="model.layers.{i}.self_attn.indexer")


def spec(raw: Raw) -> ModelSpec:
    made = read_lineage(raw, "glm5", index_style="interleaved")
    num_layers = len(made.layers)
    restates(raw, "indexer_rope_interleave", True)
    kinds_by_layer(raw, "layer_types", LAYER_KINDS, num_layers)  # one kind only; refuses any other
    raw.ignore("index_share_for_mtp_iteration", why="concerns draft layers only")
    layers = []
    for layer, shared in zip(made.layers, _shared(raw, num_layers), strict=True):
        assert isinstance(layer.mixer, MLA) and isinstance(layer.mixer.index, Index)
        index = replace(layer.mixer.index, shared=shared)
        layers.append(replace(layer, mixer=replace(layer.mixer, index=index)))
    return replace(made, layers=tuple(layers))


def _shared(raw: Raw, num_layers: int) -> list[bool]:
    """Which layers reuse an earlier choice: by list, by pattern string, or every ``freq`` layers after ``offset``."""
    kinds = kinds_by_layer(raw, "indexer_types", {"full": "F", "shared": "S"}, num_layers)
    rest = ("index_topk_pattern", "index_topk_freq", "index_skip_topk_offset")
    if kinds is None and raw.has("index_topk_pattern"):
        pattern = raw.whole("index_topk_pattern")
        kinds = [{"full": "F", "shared": "S"}.get(kind, kind) for kind in pattern]
        if len(kinds) != num_layers or set(kinds) - {"F", "S"}:
            raise ConfigError(
                f"config.json: {raw.full('index_topk_pattern')} must name {num_layers} layers by F and S, "
                f"but is {pattern!r}."
            )
    if kinds is None:
        freq, offset = raw.int("index_topk_freq", default=1, least=1), raw.int("index_skip_topk_offset", default=2)
        kinds = ["F" if max(i - offset + 1, 0) % freq == 0 else "S" for i in range(num_layers)]
    raw.ignore(*(key for key in rest if raw.full(key) not in raw.ledger.read), why="an explicit list decides instead")
    if kinds[0] == "S":
        raise ConfigError("config.json: the first layer is to share an index, but no layer before it has one.")
    return [kind == "S" for kind in kinds]


rules = lineage_rules
extra_rules = extra_lineage_rules

# Eight layers, so that the schedule of every fourth (offset three) gives full 0, 1, 2, 6 and shared 3, 4, 5, 7.
TWIN = twin(
    {
        "hidden_size": 160,
        "intermediate_size": 288,
        "moe_intermediate_size": 96,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 72,
        "kv_lora_rank": 48,
        "qk_nope_head_dim": 24,
        "qk_rope_head_dim": 8,
        "v_head_dim": 32,
        "n_routed_experts": 16,
        "num_experts_per_tok": 4,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 8,
        "vocab_size": 512,
        "max_position_embeddings": 4096,
        "?head_dim": 8,
        "?qk_head_dim": 32,
        "?mlp_layer_types": ["dense"] * 3 + ["sparse"] * 5,
        "?layer_types": ["indexed_attention"] * 8,
        "?indexer_types": ["full", "full", "full", "shared", "shared", "shared", "full", "shared"],
        "?index_topk_pattern": "FFFSSSFS",
    }
)
