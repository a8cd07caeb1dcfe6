"""Moonshot's vision tower (MoonViT-3d) and projector: what its config says, and its tensors' names.

Videos (several frames of one clip) are in the publisher's code and in no service; nothing here makes them.
"""

from __future__ import annotations

from dayzero.arch.norms import Norm
from dayzero.arch.pixels import FitAndPad
from dayzero.arch.raw import Raw
from dayzero.arch.vision import PatchTower
from dayzero.checkpoint.rules import Rule, RuleLike
from dayzero.errors import ConfigError
from dayzero.models.common import restates

# torch's RMSNorm without an eps takes that of float32, for inputs in bfloat16 too.
TOWER_EPS = 2.0**-23
MAX_PATCHES, MAX_SIDE_PATCHES = 65536, 512  # in_patch_limit and patch_limit_on_one_side of the release


def read_tower(outer: Raw, text_dim: int) -> PatchTower | None:
    """The tower of a multimodal config, None without vision_config. What no known tower does is refused."""
    outer.ignore(
        "image_placeholder", "video_placeholder", "use_unified_vision_chunk",
        why="words of the publisher's processor: here an encoder writes the placeholder ids",
    )  # fmt: skip
    if not outer.has("vision_config"):
        outer.ignore("vision_config", "media_placeholder_token_id", why="no vision tower")
        return None
    raw = outer.sub("vision_config")
    dim, layers = raw.int("vt_hidden_size", least=1), raw.int("vt_num_hidden_layers", least=1)
    merge = raw.ints("merge_kernel_size")
    if len(set(merge)) != 1 or len(merge) != 2 or merge[0] < 1:
        raise ConfigError(f"config.json: {raw.full('merge_kernel_size')} must be two equal sizes, but is {merge}.")
    raw.one_of("norm_type", allowed=("rmsnorm",))
    for key in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
        raw.one_of(key, allowed=(False,))
    raw.one_of("mlp_type", allowed=("mlp2",))
    raw.one_of("activation_func", allowed=("gelu_pytorch_tanh",))
    raw.one_of("pos_emb_type", allowed=("divided_fixed",))
    raw.one_of("pos_emb_interpolation_mode", allowed=("bilinear",))
    raw.one_of("merge_type", allowed=("sd2_tpool",))
    raw.one_of("mm_projector_type", allowed=("patchmergerv2",))
    raw.one_of("projector_hidden_act", allowed=("gelu",))
    eps = raw.float("projector_ln_eps")
    restates(raw, "mm_hidden_size", dim)
    restates(raw, "text_hidden_size", text_dim)
    raw.ignore("init_pos_emb_time", why="frames of a video; positions in time are computed, not stored")
    patch = raw.int("patch_size", least=1)
    return PatchTower(
        dim=dim,
        inner=raw.int("vt_intermediate_size", least=1),
        heads=raw.int("vt_num_attention_heads", least=1),
        layers=layers,
        qkv_dim=raw.int("qkv_hidden_size", least=1),
        patch=patch,
        grid=(raw.int("init_pos_emb_height", least=1), raw.int("init_pos_emb_width", least=1)),
        merge=merge[0],
        out_dim=text_dim,
        norm=Norm(dim, TOWER_EPS, scale_in="f32"),
        out_norm=Norm(text_dim, eps, scale_in="f32"),
        pixels=FitAndPad(patch, merge[0], MAX_PATCHES, MAX_SIDE_PATCHES),
        pad_id=outer.int("media_placeholder_token_id", least=0),
    )


def tower_rules() -> tuple[RuleLike, ...]:
    """Tensors of tower and projector."""
    block = "vision_tower.encoder.blocks.{i}."
    names = {"norm0": "norm0", "norm1": "norm1", "wqkv": "qkv", "wo": "o", "mlp.fc0": "fc0", "mlp.fc1": "fc1"}
    return (
        Rule("vision_tower.patch_embed.proj.weight", "vision.patch"),
        Rule("vision_tower.patch_embed.pos_emb.weight", "vision.positions"),
        *(Rule(f"{block}{name}.weight", f"vision.blocks.{{i}}.{param}") for name, param in names.items()),
        Rule("vision_tower.encoder.final_layernorm.weight", "vision.final_norm"),
        Rule("mm_projector.proj.0.weight", "projector.fc0"),
        Rule("mm_projector.proj.2.weight", "projector.fc1"),
        Rule("mm_projector.post_norm.weight", "projector.norm"),
    )


TWIN_TOWER = {
    "/?vision_config.patch_size": 4,
    "/?vision_config.vt_hidden_size": 32,
    "/?vision_config.vt_intermediate_size": 48,
    "/?vision_config.vt_num_attention_heads": 3,
    "/?vision_config.vt_num_hidden_layers": 2,
    "/?vision_config.qkv_hidden_size": 48,
    "/?vision_config.init_pos_emb_height": 8,
    "/?vision_config.init_pos_emb_width": 8,
    "/?vision_config.mm_hidden_size": 32,
    "/?vision_config.text_hidden_size": 160,
}
