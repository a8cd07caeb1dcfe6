"""Pond: latent attention over what an index lists, another generator in every layer: best pools with the newest forced,
gated pools with their tail (and a layer that shares them), a window, a window with the first rows, tokens with forced
rows."""

from __future__ import annotations

from dataclasses import replace

from dayzero.arch.channels import GLU
from dayzero.arch.index import AnyIndex, Index, LocalIndex, Pool
from dayzero.arch.mixers import MLA
from dayzero.arch.norms import Norm
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import Plain
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Rule, RuleLike
from dayzero.models import common
from dayzero.models.recipe import Traits

ARCHITECTURES = ("PondForCausalLM",)
TRAITS = Traits(needs=("layer_index", "index_pool"))


def spec(raw: Raw) -> ModelSpec:
    dim, norm = raw.int("hidden_size", least=1), Norm(raw.int("hidden_size"), raw.float("rms_norm_eps"))
    raw.one_of("hidden_act", allowed=("silu",))
    raw.int("num_hidden_layers", least=1)
    width, shared = raw.int("head_dim", least=1), raw.int("shared_dim", least=1)
    indexes = _indexes(raw, dim)
    glu = GLU(dim, raw.int("intermediate_size", least=1))
    latent = MLA(
        dim, raw.int("num_attention_heads", least=1), raw.int("q_lora_rank"), raw.int("kv_lora_rank"),
        width - shared, shared, raw.int("v_head_dim"), None, width**-0.5, norm.eps,
    )  # fmt: skip
    layers = [LayerSpec(replace(latent, index=indexes[kind]), glu, Plain(norm)) for kind in raw.list("layer_index")]
    return common.assemble("pond", raw, None, layers, raw.int("max_position_embeddings", least=1))


def _indexes(raw: Raw, dim: int) -> dict[str, AnyIndex]:
    heads, head_dim, top_k = (raw.int(f"index_{n}", least=1) for n in ("heads", "head_dim", "topk"))
    size, window, first = (raw.int(f"index_{n}", least=1) for n in ("pool", "window", "first"))
    key_norm = Norm(head_dim, 1e-6, "layer", bias=True)

    def index(**more: object) -> Index:
        return Index(dim, raw.int("q_lora_rank"), heads, head_dim, top_k, None, key_norm, **more)  # type: ignore[arg-type]

    return {
        "pools": index(pool=Pool(size, "max", local=1, tail="scored")),
        "gated_pools": index(pool=Pool(size, "gated")),
        "shared": index(pool=Pool(size, "gated"), shared=True),
        "near": LocalIndex(window),
        "near_and_first": LocalIndex(window, first),
        "forced": index(sinks=first, window=window),
    }


AT, MIXER = "model.layers.{i}.self_attn.", "layers.{i}.mixer."
PARTS = {"q": "wq", "k": "wk", "weights": "weights", "pool_gate": "gate"}
RULES: tuple[RuleLike, ...] = (
    *common.frame_rules(),
    *(Rule(f"{AT}{n}_proj.weight", MIXER + n) for n in ("q_a", "q_b", "kv_a", "kv_b", "o")),
    *(Rule(f"{AT}{n}_norm.weight", f"{MIXER}{n}_norm") for n in ("q_a", "kv_a")),
    *(Rule(f"{AT}indexer.{b}.weight", f"{MIXER}index.{a}") for a, b in PARTS.items()),
    Rule(AT + "indexer.k_norm.weight", MIXER + "index.k_norm"),
    Rule(AT + "indexer.k_norm.bias", MIXER + "index.k_norm_bias"),
    Rule(AT + "indexer.place_bias", MIXER + "index.pool_bias"),
    *common.glu_rules("model.layers.{i}.mlp."),
)
TWIN = common.twin({})
