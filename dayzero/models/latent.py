"""What the recipes with latent attention share: its sizes, sparse index, router and experts, and their tensor names.

Sources: DeepSeek-V2/V3/V3.2 reports and code; the class defaults of transformers for those families.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from dayzero.arch.channels import GLU, Channel, MoE, Router
from dayzero.arch.index import Index
from dayzero.arch.mixers import MLA
from dayzero.arch.norms import Activation, Norm
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import Plain
from dayzero.arch.rope import Rope, RopeConfig, Yarn, read_rope, yarn_magnitude
from dayzero.arch.spec import Draft, LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Rule, RuleLike, Stored
from dayzero.errors import ConfigError
from dayzero.models.common import (
    assemble,
    expert_rules,
    extra_of,
    frame_rules,
    glu_rules,
    kinds_by_layer,
    restates,
)

# The publishers build the norms of both latents without an eps, so the norm class's default counts, not rms_norm_eps.
LATENT_NORM_EPS = 1e-6
MLP_KINDS = {"dense": "dense", "sparse": "sparse"}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of latent attention. shared: width of the key part that all heads share."""

    dim: int
    heads: int
    q_rank: int | None
    kv_rank: int
    nope: int
    shared: int
    v_dim: int

    def mixer(self, rope: Rope | None, magnitude: float = 1.0, index: Index | None = None, gate: bool = False) -> MLA:
        """magnitude: YaRN's attention temperature, squared into the softmax scale."""
        scale = (self.nope + self.shared) ** -0.5 * magnitude**2
        return MLA(
            self.dim, self.heads, self.q_rank, self.kv_rank, self.nope, self.shared, self.v_dim, rope, scale,
            LATENT_NORM_EPS, gate, index,
        )  # fmt: skip


def read_sizes(raw: Raw) -> Sizes:
    """Sizes of latent attention; keys that restate them are checked."""
    heads = raw.int("num_attention_heads", least=1)
    nope, shared = raw.int("qk_nope_head_dim", least=1), raw.int("qk_rope_head_dim", least=1)
    restates(raw, "num_key_value_heads", heads)
    restates(raw, "qk_head_dim", nope + shared)
    restates(raw, "attention_bias", False)
    return Sizes(
        dim=raw.int("hidden_size", least=1),
        heads=heads,
        q_rank=raw.int_or_none("q_lora_rank", least=1),
        kv_rank=raw.int("kv_lora_rank", least=1),
        nope=nope,
        shared=shared,
        v_dim=raw.int("v_head_dim", least=1),
    )


def softmax_magnitude(rope: RopeConfig) -> float:
    """DeepSeek's reading of YaRN: with mscale_all_dim the softmax scale carries the temperature."""
    if isinstance(rope.scaling, Yarn) and rope.mscale_all_dim:
        return yarn_magnitude(rope.scaling.factor, rope.mscale_all_dim)
    return 1.0


def read_index(raw: Raw, sizes: Sizes, rope: Rope | None) -> Index:
    """The lightning indexer of the DeepSeek lineage: LayerNorm with bias over the key, eps 1e-6."""
    head_dim = raw.int("index_head_dim", least=1)
    if sizes.q_rank is None:
        raise ConfigError("config.json: q_lora_rank is null, but the sparse index reads the query's latent.")
    return Index(
        dim=sizes.dim,
        query_dim=sizes.q_rank,
        heads=raw.int("index_n_heads", least=1),
        head_dim=head_dim,
        top_k=raw.int("index_topk", least=1),
        rope=rope,
        key_norm=Norm(head_dim, 1e-6, "layer", bias=True),
    )


def read_router(raw: Raw) -> Router:
    """Sigmoid scores, a bias that only chooses, groups of experts; old and new spellings."""
    restates(raw, "topk_method", "noaux_tc")
    raw.one_of("scoring_func", "moe_router_activation_func", allowed=("sigmoid",), default="sigmoid")
    restates(raw, "moe_router_dtype", "float32")
    groups = raw.int("n_group", "num_expert_group", least=1)
    if raw.has("use_grouped_topk"):
        # With one group of experts the grouped and the plain choice are the same.
        raw.one_of("use_grouped_topk", allowed=(True,) if groups > 1 else (True, False))
    raw.ignore("use_grouped_topk", why="null")
    return Router(
        experts=raw.int("n_routed_experts", "num_experts", "num_local_experts", least=1),
        top_k=raw.int("num_experts_per_tok", "num_experts_per_token", least=1),
        score="sigmoid",
        bias="select",
        groups=groups,
        top_groups=raw.int("topk_group", least=1),
        renormalise=raw.bool("norm_topk_prob", "moe_renormalize", default=True),
        scale=raw.float("routed_scaling_factor"),
    )


def read_channels(raw: Raw, dim: int, num_layers: int, moe: Callable[[Router], MoE], act: Activation) -> list[Channel]:
    """One channel for each layer: the first are dense, the others ``moe``; by list or by first_k_dense_replace."""
    restates(raw, "moe_layer_freq", 1)
    restates(raw, "mlp_bias", False)
    dense, sparse = GLU(dim, raw.int("intermediate_size", least=1), act), moe(read_router(raw))
    kinds = kinds_by_layer(raw, "mlp_layer_types", MLP_KINDS, num_layers)
    first = raw.int_or_none("first_k_dense_replace")
    if kinds is None:
        if first is None:
            raise ConfigError("config.json has neither first_k_dense_replace nor mlp_layer_types.")
        kinds = ["dense" if i < first else "sparse" for i in range(num_layers)]
    return [dense if kind == "dense" else sparse for kind in kinds]


def read_moe(raw: Raw, dim: int) -> Callable[[Router], MoE]:
    """SwiGLU experts with shared ones fused into one wide expert."""
    raw.one_of("hidden_act", allowed=("silu",), default="silu")
    inner, num_shared = raw.int("moe_intermediate_size", least=1), raw.int("n_shared_experts", "num_shared_experts")
    return lambda router: MoE(dim, inner, router, shared=GLU(dim, num_shared * inner) if num_shared else None)


def read_lineage(raw: Raw, family: str, index_style: Literal["half", "interleaved"] | None) -> ModelSpec:
    """A whole DeepSeek-shaped config. index_style: how the sparse index turns its heads, None where there is none."""
    num_layers, positions = raw.int("num_hidden_layers", least=1), raw.int("max_position_embeddings", least=1)
    sizes = read_sizes(raw)
    scaled = read_rope(raw, max_positions=positions, theta_default=10000.0)
    rope = Rope(sizes.shared, scaled.theta, "interleaved", scaling=scaled.scaling)
    if index_style is None and not raw.bool("rope_interleave", default=True):
        rope = replace(rope, style="half")
    elif index_style is not None:
        restates(raw, "rope_interleave", True)
    index = read_index(raw, sizes, replace(rope, style=index_style)) if index_style is not None else None
    mixer = sizes.mixer(rope, softmax_magnitude(scaled), index)
    norm = Norm(sizes.dim, raw.float("rms_norm_eps"))
    channels = read_channels(raw, sizes.dim, num_layers, read_moe(raw, sizes.dim), Activation())
    restates(raw, "head_dim", sizes.shared)
    raw.ignore("ep_size", why="how the publisher spread the experts")
    layers = [LayerSpec(mixer, channel, Plain(norm)) for channel in channels]
    num_drafts = raw.int("num_nextn_predict_layers", "num_mtp_layers", default=0)
    return assemble(
        family, raw, None, layers, positions, facts={"draft_layers": num_drafts},
        extra=_drafts(raw, layers[-1], num_drafts, num_layers),
    )  # fmt: skip


def _drafts(raw: Raw, last: LayerSpec, count: int, first: int) -> Draft | None:
    """Draft layers are stored behind the last one and are like it; each has an index of its own."""
    norm, vocab = last.residual.norm, raw.int("vocab_size", least=1)
    return Draft(norm, vocab, {first + n: last for n in range(count)}) if count else None


def latent_rules(module: str) -> tuple[RuleLike, ...]:
    """Latent attention and its sparse index. module: ``model.layers.{i}.self_attn.``; o_proj is left to the caller."""
    names = {
        "q_proj": "q", "q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a",
        "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "kv_b", "indexer.wq_b": "index.q", "indexer.wk": "index.k",
        "indexer.k_norm": "index.k_norm", "indexer.weights_proj": "index.weights",
    }  # fmt: skip
    return tuple(Rule(f"{module}{name}.weight", f"layers.{{i}}.mixer.{param}") for name, param in names.items())


def moe_rules(module: str, expert_names: tuple[str, str, str]) -> tuple[RuleLike, ...]:
    """Router, routed and shared experts. module: ``model.layers.{i}.mlp.``."""
    return (
        Rule(module + "gate.weight", "layers.{i}.channel.router"),
        Rule(module + "gate.e_score_correction_bias", "layers.{i}.channel.router_bias"),
        *expert_rules(module, expert_names),
        *glu_rules(module + "shared_experts.", "layers.{i}.channel.shared."),
    )


def lineage_rules(spec: ModelSpec) -> tuple[RuleLike, ...]:
    """Every tensor of a DeepSeek-shaped checkpoint."""
    attn, mlp = "model.layers.{i}.self_attn.", "model.layers.{i}.mlp."
    return (
        *frame_rules(),
        *latent_rules(attn),
        Rule(attn + "o_proj.weight", "layers.{i}.mixer.o"),
        Rule(attn + "indexer.k_norm.bias", "layers.{i}.mixer.index.k_norm_bias"),
        *glu_rules(mlp),
        *moe_rules(mlp, ("gate_proj", "up_proj", "down_proj")),
        Stored("*.eh_proj.weight", None, why="published in BF16 although the config's quantisation does not except it"),
    )


def extra_lineage_rules(spec: ModelSpec) -> tuple[tuple[RuleLike, ...], tuple[RuleLike, ...]]:
    """Every tensor of the draft layers; and the copies of embedding and head that files may hold among them."""
    layer = "model.layers.{i}."
    names = {"enorm": "embed_norm", "hnorm": "hidden_norm", "eh_proj": "join", "shared_head.norm": "final_norm"}
    copies = {"embed_tokens": "embed", "shared_head.head": "head"}
    own = tuple(Rule(f"{layer}{name}.weight", f"extra.{{i}}.{param}") for name, param in names.items())
    copied = tuple(Rule(f"{layer}{name}.weight", f"extra.{{i}}.{param}") for name, param in copies.items())
    return (*extra_of(lineage_rules(spec)), *own), copied
