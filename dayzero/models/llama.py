"""Llama-shaped dense models (Llama 2/3, SmolLM2): grouped-query attention, half-split rope, SwiGLU, plain residual."""

from __future__ import annotations

from dayzero.arch.channels import GLU
from dayzero.arch.mixers import Attention
from dayzero.arch.norms import Norm
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import Plain
from dayzero.arch.rope import Rope, read_rope
from dayzero.arch.spec import LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Alias, Ignore, Rule
from dayzero.models.common import read_stop_ids, read_tie, read_usual, restates
from dayzero.models.recipe import Oracle, Traits

ARCHITECTURES = ("LlamaForCausalLM",)
TRAITS = Traits(
    needs=("hidden_size", "num_attention_heads"),
    lacks=("kv_lora_rank", "linear_attn_config", "layer_types", "num_experts", "num_local_experts", "sliding_window"),
)
ORACLE = Oracle("LlamaForCausalLM")
TWIN = {
    "hidden_size": 96, "intermediate_size": 112, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
    "num_hidden_layers": 4, "vocab_size": 520, "eos_token_id": 258, "bos_token_id": 257,
    "max_position_embeddings": 1024,
}  # fmt: skip


def spec(raw: Raw) -> ModelSpec:
    dim, heads = raw.int("hidden_size", least=1), raw.int("num_attention_heads", least=1)
    head_dim = raw.int_or_none("head_dim", least=2) or dim // heads
    positions = raw.int("max_position_embeddings", default=2048)
    rope = read_rope(raw, max_positions=positions, theta_default=10000.0)
    raw.one_of("hidden_act", allowed=("silu",), default="silu")
    norm = Norm(dim, raw.float("rms_norm_eps", default=1e-6))
    raw.one_of("mlp_bias", allowed=(False,), default=False)
    restates(raw, "rope_interleaved", False)  # the other order is stored in other rows, which no rule here puts right
    bias = raw.bool("attention_bias", default=False)
    mixer = Attention(
        dim,
        heads,
        raw.int("num_key_value_heads", default=heads),
        head_dim,
        Rope(head_dim, rope.theta, scaling=rope.scaling),
        head_dim**-0.5,
        bias=bias,
        out_bias=bias,
    )
    layer = LayerSpec(mixer, GLU(dim, raw.int("intermediate_size", least=1)), Plain(norm))
    read_usual(raw)
    return ModelSpec(
        family="llama",
        dim=dim,
        vocab=raw.int("vocab_size", least=1),
        layers=(layer,) * raw.int("num_hidden_layers", least=1),
        final_norm=norm,
        tie=read_tie(raw, default=False),
        max_positions=positions,
        stop_ids=read_stop_ids(raw),
    )


LAYER = "model.layers.{i}."
RULES = (
    Rule("model.embed_tokens.weight", "embed"),
    Rule("model.norm.weight", "final_norm"),
    Rule("lm_head.weight", "head"),
    Alias("lm_head.weight", "embed", why="tied: the head is the embedding"),
    Rule(LAYER + "input_layernorm.weight", "layers.{i}.mixer_norm"),
    Rule(LAYER + "post_attention_layernorm.weight", "layers.{i}.channel_norm"),
    *(Rule(f"{LAYER}self_attn.{n}_proj.weight", f"layers.{{i}}.mixer.{n}") for n in "qkvo"),
    *(Rule(f"{LAYER}self_attn.{n}_proj.bias", f"layers.{{i}}.mixer.{n}_bias") for n in "qkvo"),
    *(Rule(f"{LAYER}mlp.{n}_proj.weight", f"layers.{{i}}.channel.{n}") for n in ("gate", "up", "down")),
    Ignore("*.rotary_emb.inv_freq", why="recomputed from the config"),
)
