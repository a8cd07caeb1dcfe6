"""Lean: windowed and full attention in turn; the last layers read keys and values of an earlier layer of their kind."""

from __future__ import annotations

from dayzero.arch.channels import GLU
from dayzero.arch.mixers import Attention
from dayzero.arch.norms import Norm
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import Plain
from dayzero.arch.rope import Rope, read_rope
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Beside, Rule, RuleLike
from dayzero.models import common
from dayzero.models.recipe import Traits

ARCHITECTURES = ("LeanForCausalLM",)
TRAITS = Traits(needs=("num_kv_shared_layers", "layer_kinds"))


def spec(raw: Raw) -> ModelSpec:
    dim, norm = raw.int("hidden_size", least=1), Norm(raw.int("hidden_size"), raw.float("rms_norm_eps"))
    positions, count = raw.int("max_position_embeddings", least=1), raw.int("num_hidden_layers", least=1)
    raw.one_of("hidden_act", allowed=("silu",))
    kinds, window = raw.list("layer_kinds"), raw.int("window", least=1)
    own = count - raw.int("num_kv_shared_layers", least=0)
    head_dim, rope = raw.int("head_dim", least=2), read_rope(raw, max_positions=positions)
    heads, kv_heads = raw.int("num_attention_heads", least=1), raw.int("num_key_value_heads", least=1)
    glu = GLU(dim, raw.int("intermediate_size", least=1))
    layers = []
    for i, kind in enumerate(kinds):
        source = None if i < own else max(j for j in range(own) if kinds[j] == kind)
        mixer = Attention(
            dim, heads, kv_heads, head_dim, Rope(head_dim, rope.theta), head_dim**-0.5,
            window=window if kind == "window" else None, kv_layer=source,
        )  # fmt: skip
        layers.append(LayerSpec(mixer, glu, Plain(norm)))
    return common.assemble("lean", raw, None, layers, positions)


AT, MIXER = "model.layers.{i}.self_attn.", "layers.{i}.mixer."
RULES: tuple[RuleLike, ...] = (
    *common.frame_rules(),
    *(Rule(f"{AT}{n}_proj.weight", MIXER + n) for n in "qo"),
    Beside(MIXER + "k", tuple(Rule(f"{AT}{n}_proj.weight", MIXER + n) for n in "kv")),
    *common.glu_rules("model.layers.{i}.mlp."),
)
TWIN = common.twin({})
