"""Kimi K3 and K3.1 (arXiv 2607.24653): bounded delta attention, gated latent attention, block attention residuals,
experts in a latent width, MXFP4. K3.1 adds a sparse index to its latent layers.

The text config calls itself kimi_linear; TRAITS tell it from that model, which would load and compute something else.
"""

from __future__ import annotations

from dataclasses import replace

from dayzero.arch.channels import GLU, Channel, MoE
from dayzero.arch.index import Index
from dayzero.arch.mixers import MLA, Delta
from dayzero.arch.norms import Activation, Norm
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import AttnRes
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Narrow, Optional, Rule, RuleLike, Stored
from dayzero.decl import F32
from dayzero.errors import ConfigError
from dayzero.models.common import assemble, draft_layers, text_part, twin
from dayzero.models.kimi import read_delta, read_kinds, read_no_rope, read_norm, text_rules
from dayzero.models.latent import read_channels, read_sizes
from dayzero.models.moonvit import TWIN_TOWER, read_tower, tower_rules
from dayzero.models.recipe import Oracle, Traits

ARCHITECTURES = ("KimiK3ForConditionalGeneration", "KimiK31ForConditionalGeneration", "KimiLinearForCausalLM")
TRAITS = Traits(
    needs=("attn_res_block_size", "routed_expert_hidden_size", "activation_situ_beta", "linear_attn_config"),
    lacks=("index_topk",),
)
ORACLE = Oracle(file="kimi_k3.py", images=True)  # no library has the family

# The keys of dsa_config were reported, not read: further spellings are accepted, anything else stays unread and fails.
DSA_LAYERS = ("dsa_layers", "layers", "sparse_layers", "indexer_layers", "sparse_attn_layers")
DSA_HEADS = ("num_heads", "n_heads", "index_n_heads", "num_index_heads")
DSA_HEAD_DIM = ("head_dim", "index_head_dim")
DSA_TOP_K = ("top_k", "topk", "index_topk")
TWIN_DSA = ((DSA_LAYERS, [4, 8, 9]), (DSA_HEADS, 16), (DSA_HEAD_DIM, 32), (DSA_TOP_K, 8))
IN_F32 = ("*_conv*.weight", "A_log", "dt_bias", "o_norm.weight")


def spec(raw: Raw) -> ModelSpec:
    text, outer = text_part(raw)
    num_layers, sizes = text.int("num_hidden_layers", least=1), read_sizes(text)
    read_no_rope(text)
    norm, every = read_norm(text, sizes.dim), text.int("attn_res_block_size", least=1)
    kinds = read_kinds(text, num_layers)
    delta = read_delta(text, sizes.dim, norm.eps, bounded=True)
    latent = sizes.mixer(rope=None, gate=text.bool("mla_use_output_gate"))
    indexed = _read_index(text, latent, kinds, norm.eps)
    channels = _read_channels(text, norm, num_layers)
    residual = AttnRes(norm, every, bank=-(-num_layers // every))
    layers = []
    for i, (kind, channel) in enumerate(zip(kinds, channels, strict=True)):
        mixer = delta if kind == "delta" else replace(latent, index=indexed.get(i))
        layers.append(LayerSpec(mixer, channel, residual))
    return assemble(
        "kimi_k3",
        text,
        outer,
        layers,
        positions=text.int("max_position_embeddings", "model_max_length", least=1),
        vision=read_tower(outer, sizes.dim) if outer is not None else None,
        facts={
            "draft_layers": text.int("num_nextn_predict_layers", default=0),
            "tensor_root": "language_model." if outer is not None else "",
        },
    )


def _read_channels(text: Raw, norm: Norm, num_layers: int) -> list[Channel]:
    text.one_of("hidden_act", allowed=("situ",))
    betas = text.float("activation_situ_beta"), text.float("activation_situ_linear_beta")
    act = Activation("situ", beta=betas[0], linear_beta=betas[1])
    inner, latent = text.int("moe_intermediate_size", least=1), text.int("routed_expert_hidden_size", least=1)
    shared = GLU(norm.dim, text.int("num_shared_experts", least=1) * inner, act)
    latent_norm = Norm(latent, norm.eps) if text.bool("latent_moe_use_norm") else None
    return read_channels(
        text,
        norm.dim,
        num_layers,
        lambda router: MoE(norm.dim, inner, router, act, shared, latent=latent, latent_norm=latent_norm),
        act,
    )


def _read_index(text: Raw, latent: MLA, kinds: list[str], eps: float) -> dict[int, Index]:
    """K3.1: layer (from 0) -> its sparse index; empty for K3."""
    dsa = text.sub_or_none("dsa_config") if text.has("dsa_config") else None
    if dsa is None:
        text.ignore("dsa_config", why="null: no sparse index")
        return {}
    if latent.q_rank is None:
        raise ConfigError(
            "config.json: text_config.q_lora_rank is null, but the sparse index reads the query's latent."
        )
    places = [n - 1 for n in dsa.ints(*DSA_LAYERS)]
    if not places or len(set(places)) < len(places):
        raise ConfigError(
            f"config.json: dsa_config must name the layers of its index, each once, not {[n + 1 for n in places]}."
        )
    wrong = [n + 1 for n in places if not 0 <= n < len(kinds) or kinds[n] != "latent"]
    if wrong:
        raise ConfigError(
            f"config.json: dsa_config puts a sparse index on layer {wrong[0]}, which has no latent attention."
        )
    heads, head_dim = dsa.int(*DSA_HEADS, least=1), dsa.int(*DSA_HEAD_DIM, least=1)
    key_norm = Norm(head_dim, eps, "layer", bias=True)
    index = Index(latent.dim, latent.q_rank, heads, head_dim, dsa.int(*DSA_TOP_K, least=1), None, key_norm)
    return dict.fromkeys(places, index)


def rules(spec: ModelSpec) -> tuple[RuleLike, ...]:
    outer = str(spec.facts["tensor_root"])
    root, layer = outer + "model.", outer + "model.layers.{i}."
    attn, moe = layer + "self_attn.", layer + "block_sparse_moe."
    # 96 decay rates stand in 128 places; the head size is taken for the padded length.
    padded = max((max(m.heads, m.key_dim) for m in (s.mixer for s in spec.layers) if isinstance(m, Delta)), default=0)
    unlisted = "BF16 in the files although the config's ignore list does not name it"
    mixes = {"self_attention": "mixer", "mlp": "channel"}
    return (
        *text_rules(root, outer + "lm_head.weight", Narrow(attn + "A_log", "layers.{i}.mixer.a_log", padded)),
        *(Rule(f"{layer}{a}_res_norm.weight", f"layers.{{i}}.{b}_mix_norm") for a, b in mixes.items()),
        *(Rule(f"{layer}{a}_res_proj.weight", f"layers.{{i}}.{b}_mix_proj") for a, b in mixes.items()),
        *(Rule(f"{root}output_attn_res_{p}.weight", f"close_mix_{p}") for p in ("norm", "proj")),
        *(Rule(f"{moe}routed_expert_{p}_proj.weight", f"layers.{{i}}.channel.latent_{p}") for p in ("down", "up")),
        Rule(moe + "routed_expert_norm.weight", "layers.{i}.channel.latent_norm"),
        Optional(
            attn + "indexer.k_norm.bias", "layers.{i}.mixer.index.k_norm_bias", 0.0,
            why="usual in this family, not known for K3.1: without the tensor the key norm has no bias",
        ),
        *tower_rules(),
        *draft_layers(root, len(spec.layers), int(spec.facts["draft_layers"])),
        *(Stored(f"*.routed_expert_{p}_proj.weight", None, why=unlisted) for p in ("down", "up")),
        Stored("*.block_sparse_moe.gate.weight", None, why=unlisted),
        Stored("*_res_proj.weight", None, why=unlisted),
        *(Stored(f"*.self_attn.{p}", F32, why="published in float32") for p in IN_F32),
    )  # fmt: skip


# Two periods, then a second latent layer as at the real end; three blocks of the residual, the last one short. The
# special ids stand behind 256 others, in the same order as the real ones do.
TWIN = twin(
    {
        "hidden_size": 160, "intermediate_size": 288, "moe_intermediate_size": 96, "routed_expert_hidden_size": 64,
        "num_hidden_layers": 9, "attn_res_block_size": 4, "num_attention_heads": 4, "num_key_value_heads": 4,
        "q_lora_rank": 72, "kv_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 24,
        "num_experts": 16, "num_experts_per_token": 4, "vocab_size": 512, "max_position_embeddings": 4096,
        "?bos_token_id": 256, "eos_token_id": 258, "/?media_placeholder_token_id": 277, "/?pad_token_id": 511,
        "linear_attn_config.num_heads": 4, "linear_attn_config.head_dim": 32,
        "linear_attn_config.full_attn_layers": [4, 8, 9], "linear_attn_config.kda_layers": [1, 2, 3, 5, 6, 7],
        **{f"?dsa_config.{key}": size for keys, size in TWIN_DSA for key in keys},
        **TWIN_TOWER,
    }
)  # fmt: skip
