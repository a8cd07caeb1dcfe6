"""What the two Kimi recipes share: layer kinds, delta attention, text layers and tensor names.

Source: arXiv 2510.26692 (Kimi Linear). Layer lists in the configs count from 1.
"""

from __future__ import annotations

from dayzero.arch.mixers import Delta
from dayzero.arch.norms import Norm
from dayzero.arch.raw import Raw
from dayzero.checkpoint.rules import Rule, RuleLike
from dayzero.errors import ConfigError
from dayzero.models.common import frame_rules, glu_rules, kinds_by_layer, restates
from dayzero.models.latent import latent_rules, moe_rules

KINDS = {"full_attention": "latent", "linear_attention": "delta"}


def read_kinds(raw: Raw, num_layers: int) -> list[str]:
    """``latent`` or ``delta`` for each layer, from linear_attn_config's lists (from 1) or layer_types; both agree."""
    by_name = kinds_by_layer(raw, "layer_types", KINDS, num_layers)
    lists = raw.sub_or_none("linear_attn_config")
    by_list: list[str] | None = None
    if lists is not None and (lists.has("full_attn_layers") or lists.has("kda_layers")):
        full, delta = lists.ints("full_attn_layers"), lists.ints("kda_layers")
        if sorted(full + delta) != list(range(1, num_layers + 1)):
            raise ConfigError(
                "config.json: linear_attn_config.full_attn_layers and kda_layers together must name each of the "
                f"{num_layers} layers once, counted from 1."
            )
        by_list = ["latent" if i + 1 in full else "delta" for i in range(num_layers)]
    kinds = by_list or by_name
    if kinds is None:
        raise ConfigError(
            "config.json: neither linear_attn_config nor layer_types says which layers are of which kind."
        )
    if by_list and by_name and by_list != by_name:
        raise ConfigError("config.json contradicts itself: layer_types and linear_attn_config name other layers.")
    return kinds


def read_delta(raw: Raw, dim: int, eps: float, *, bounded: bool = False) -> Delta:
    """Delta attention from linear_attn_config, or from the flat keys that a library writes instead.

    bounded: the family's decay has a lower bound, which must be given: without it another function would be computed,
    and its text would read well for a while.
    """
    part = raw.sub_or_none("linear_attn_config")
    flat = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    if part is None:
        heads, head_dim, conv = (raw.int(key, least=1) for key in flat)
    else:
        heads, head_dim = part.int("num_heads", least=1), part.int("head_dim", least=1)
        conv = part.int("short_conv_kernel_size", least=1)
        for key, value in zip(flat, (heads, head_dim, conv), strict=True):
            restates(raw, key, value)
    full_rank = part is not None and part.has("use_full_rank_gate") and part.bool("use_full_rank_gate")
    bounded = bounded or (part is not None and part.has("gate_lower_bound"))
    return Delta(
        dim=dim,
        heads=heads,
        key_heads=heads,
        key_dim=head_dim,
        value_dim=head_dim,
        conv=conv,
        decay="channel",
        norm_eps=eps,
        out_gate="sigmoid",
        decay_rank=head_dim,
        gate_rank=None if full_rank else head_dim,
        lower=part.float("gate_lower_bound") if part is not None and bounded else None,
    )


def read_no_rope(raw: Raw) -> None:
    """Latent attention without rotation; anything else is refused."""
    raw.one_of("mla_use_nope", allowed=(True,), default=True)
    raw.ignore(
        "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "rope_interleave",
        why="nothing is rotated: mla_use_nope",
    )  # fmt: skip
    raw.ignore("head_dim", why="unused: both kinds of attention have sizes of their own")


def read_norm(raw: Raw, dim: int) -> Norm:
    return Norm(dim, raw.float("rms_norm_eps"))


def text_rules(root: str, head: str, decay_log: RuleLike) -> tuple[RuleLike, ...]:
    """Tensors of the text layers. root: ``model.``. decay_log: how A_log is stored, which differs between the two."""
    attn, moe = root + "layers.{i}.self_attn.", root + "layers.{i}.block_sparse_moe."
    delta = {
        "k_proj": "k", "v_proj": "v", "f_a_proj": "f_a", "f_b_proj": "f_b", "b_proj": "beta", "g_proj": "gate",
        "g_a_proj": "gate_a", "g_b_proj": "gate_b", "o_norm": "o_norm", "o_proj": "o",
    }  # fmt: skip
    return (
        *frame_rules(root, head),
        # q_proj, g_proj and o_proj name the same role in both kinds of layer; latent_rules has q_proj.
        *latent_rules(attn),
        *(Rule(f"{attn}{name}.weight", f"layers.{{i}}.mixer.{param}") for name, param in delta.items()),
        *(
            Rule(f"{attn}{n}_conv1d.weight", f"layers.{{i}}.mixer.{n}_conv", ("d0", 1, "d1"), also=(("d0", "d1"),))
            for n in "qkv"
        ),
        decay_log,
        Rule(attn + "dt_bias", "layers.{i}.mixer.dt_bias"),
        *glu_rules(root + "layers.{i}.mlp."),
        *moe_rules(moe, ("w1", "w3", "w2")),
    )
