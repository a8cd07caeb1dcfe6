"""Qwen3.5, dense and routed (3.5 to 3.8): gated delta net with one gated attention layer in four, 1 + w norms, and a
vision tower whose tokens have a row and a column position (m-rope). Draft layers are claimed and run by nothing yet.
"""

from __future__ import annotations

from dayzero.arch.channels import GLU, Channel, MoE, Router
from dayzero.arch.mixers import Attention, Delta, Mixer
from dayzero.arch.norms import Norm
from dayzero.arch.raw import Raw
from dayzero.arch.residuals import Plain
from dayzero.arch.rope import Rope, read_rope
from dayzero.arch.spec import Draft, LayerSpec, ModelSpec
from dayzero.checkpoint.rules import Beside, Either, Rule, RuleLike, Split, Stored
from dayzero.models import common
from dayzero.models.common import restates
from dayzero.models.qwen_tower import TWIN_TOWER, VIDEO, read_tower, tower_rules
from dayzero.models.recipe import Oracle, Traits

TEXT_CLASS = {
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM": "Qwen3_5MoeForCausalLM",
}
ARCHITECTURES = tuple(TEXT_CLASS)
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe")
TRAITS = Traits(
    needs=("linear_num_value_heads", "linear_key_head_dim", "num_key_value_heads"),
    lacks=("kv_lora_rank", "linear_attn_config", "indexer_n_heads", "hc_mult", "ngram_vocab_size_base"),
)
ORACLE = Oracle(
    class_of=TEXT_CLASS,
    mixer_of_kind={"delta": "model.layers.{i}.linear_attn"},
    router="model.layers.{i}.mlp.gate",
)
KINDS = {"linear_attention": "delta", "full_attention": "attention"}


def spec(raw: Raw) -> ModelSpec:
    text, outer = common.text_part(raw)
    dim, num_layers = text.int("hidden_size", least=1), text.int("num_hidden_layers", least=1)
    positions = text.int("max_position_embeddings", default=32768)
    norm = _norm(text, dim)
    kinds = common.kinds_by_layer(text, "layer_types", KINDS, num_layers)
    if kinds is None:
        every = text.int("full_attention_interval", default=4, least=1)
        kinds = ["delta" if (i + 1) % every else "attention" for i in range(num_layers)]
    else:
        text.ignore("full_attention_interval", why="layer_types names each layer")
    mixers: dict[str, Mixer] = {"delta": _delta(text, dim, norm.eps), "attention": _attention(text, dim, positions)}
    text.one_of("hidden_act", allowed=("silu",), default="silu")
    channel = _channel(text, dim)
    text.one_of("mtp_use_dedicated_embeddings", allowed=(False,), default=False)
    text.ignore("vision_config", "image_token_id", *VIDEO, why="of the tower, which a text model does not have")
    layers = [LayerSpec(mixers[kind], channel, Plain(norm)) for kind in kinds]
    root = "model." if outer is None else "model.language_model."
    num_drafts = text.int("mtp_num_hidden_layers", default=0)
    draft = LayerSpec(mixers["attention"], channel, Plain(norm))
    vocab = text.int("vocab_size", least=1)
    extra = Draft(norm, vocab, dict.fromkeys(range(num_drafts), draft), shared=True) if num_drafts else None
    tower = read_tower(outer, dim) if outer is not None else None
    return common.assemble("qwen3_5", text, outer, layers, positions, tower, facts={"tensor_root": root}, extra=extra)


def _norm(text: Raw, dim: int) -> Norm:
    return Norm(dim, text.float("rms_norm_eps", default=1e-6), offset=True, scale_in="f32")


def _attention(text: Raw, dim: int, positions: int) -> Attention:
    heads, head_dim = text.int("num_attention_heads", least=1), text.int("head_dim", default=256, least=2)
    rope = read_rope(text, max_positions=positions, theta_default=10000.0, partial=True, sections=True)
    share = rope.partial if rope.partial is not None else text.float("partial_rotary_factor", default=0.25)
    restates(text, "attn_output_gate", True)
    turned = Rope(int(head_dim * share), rope.theta, scaling=rope.scaling, sections=rope.sections)
    bias = text.bool("attention_bias", default=False)
    return Attention(
        dim, heads, text.int("num_key_value_heads", least=1), head_dim, turned, head_dim**-0.5,
        qk_norm=_norm(text, head_dim), gate=True, bias=bias, out_bias=bias,
    )  # fmt: skip


def _delta(text: Raw, dim: int, eps: float) -> Delta:
    restates(text, "mamba_ssm_dtype", "float32")
    return Delta(
        dim=dim,
        heads=text.int("linear_num_value_heads", least=1),
        key_heads=text.int("linear_num_key_heads", least=1),
        key_dim=text.int("linear_key_head_dim", least=1),
        value_dim=text.int("linear_value_head_dim", least=1),
        conv=text.int("linear_conv_kernel_dim", default=4, least=1),
        decay="head",
        norm_eps=eps,
        out_gate="silu",
    )


def _channel(text: Raw, dim: int) -> Channel:
    if not text.has("num_experts"):
        return GLU(dim, text.int("intermediate_size", least=1))
    text.ignore("intermediate_size", why="no layer is dense")
    restates(text, "mlp_only_layers", [])
    restates(text, "decoder_sparse_step", 1)
    restates(text, "norm_topk_prob", True)
    router = Router(text.int("num_experts", least=1), text.int("num_experts_per_tok", least=1), "softmax")
    shared = GLU(dim, text.int("shared_expert_intermediate_size", least=1))
    return MoE(dim, text.int("moe_intermediate_size", least=1), router, shared=shared, shared_gate=True)


def rules(spec: ModelSpec) -> tuple[RuleLike, ...]:
    root = str(spec.facts["tensor_root"])
    layer, mixer, experts = root + "layers.{i}.", "layers.{i}.mixer.", "layers.{i}.channel.experts."
    net, mlp = layer + "linear_attn.", layer + "mlp."
    names = {"in_proj_z": "gate", "in_proj_b": "beta", "in_proj_a": "a", "norm": "o_norm", "out_proj": "o"}
    delta: tuple[RuleLike, ...] = (
        Split(net + "in_proj_qkv.weight", tuple(mixer + n for n in "qkv")),
        Split(net + "conv1d.weight", tuple(f"{mixer}{n}_conv" for n in "qkv"), stored=("d0", 1, "d1")),
        *(Rule(f"{net}{name}.weight", mixer + param) for name, param in names.items()),
        Rule(net + "A_log", mixer + "a_log"),
        Rule(net + "dt_bias", mixer + "dt_bias"),
    )
    fused = (
        Split(mlp + "experts.gate_up_proj", (experts + "gate", experts + "up"), dim=1),
        Rule(mlp + "experts.down_proj", experts + "down"),
    )
    return (
        *common.frame_rules(root),
        Beside(mixer + "q_norm", common.attention_rules(layer + "self_attn.")),
        Beside(mixer + "a_log", delta),
        *common.glu_rules(mlp),
        Rule(mlp + "gate.weight", "layers.{i}.channel.router"),
        Either((fused, common.expert_rules(mlp))),  # released BF16 files fuse; FP8 files and a library's own do not
        *common.glu_rules(mlp + "shared_expert.", "layers.{i}.channel.shared."),
        Rule(mlp + "shared_expert_gate.weight", "layers.{i}.channel.shared_gate"),
        *tower_rules(spec.vision),
        Stored("mtp.fc.weight", None, why="published in BF16, whether or not the config's quantisation excepts it"),
    )


def extra_rules(spec: ModelSpec) -> tuple[tuple[RuleLike, ...], tuple[RuleLike, ...]]:
    """Draft layers, all with full attention, under one join and one set of norms. They hold no copies."""
    names = {
        "fc": "join", "pre_fc_norm_embedding": "embed_norm", "pre_fc_norm_hidden": "hidden_norm", "norm": "final_norm",
    }  # fmt: skip
    own = tuple(Rule(f"mtp.{name}.weight", f"extra.{param}") for name, param in names.items())
    return (*common.extra_of(rules(spec), str(spec.facts["tensor_root"]), "mtp."), *own), ()


TWIN = common.twin(
    {
        "hidden_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 16, "linear_value_head_dim": 24,
        "?intermediate_size": 160, "?moe_intermediate_size": 64, "?shared_expert_intermediate_size": 48,
        "?num_experts": 16, "?num_experts_per_tok": 4, "vocab_size": 512, "max_position_embeddings": 4096,
        "?rope_parameters.mrope_section": [2, 1, 1], "?rope_scaling.mrope_section": [2, 1, 1],
        "?layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, **TWIN_TOWER,
    }
)  # fmt: skip
