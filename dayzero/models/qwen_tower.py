"""Qwen3.5's vision tower: what its config says, and its tensors' names. Source: transformers' model of the same name.

A still image stands for ``temporal_patch_size`` equal frames. Videos are not served.
"""

from __future__ import annotations

from math import isqrt

from dayzero.arch.norms import Norm
from dayzero.arch.pixels import RoundToGrid
from dayzero.arch.raw import Raw
from dayzero.arch.vision import PatchTower
from dayzero.checkpoint.rules import Ignore, Rule, RuleLike
from dayzero.errors import ConfigError
from dayzero.models.common import restates

NORM_EPS = 1e-6
# shortest_edge and longest_edge of the release's processor are areas: 65,536 and 16,777,216 pixels, 32 x 32 a token.
MIN_TOKENS, MAX_TOKENS = 64, 16384
VIDEO = ("video_token_id", "vision_start_token_id", "vision_end_token_id")


def read_tower(outer: Raw, text_dim: int) -> PatchTower | None:
    """The tower of a multimodal config, None without vision_config. What no known tower does is refused."""
    outer.ignore(*VIDEO, why="written by the chat template; a prompt's images are its image_token_id")
    if not outer.has("vision_config"):
        outer.ignore("vision_config", "image_token_id", why="no vision tower")
        return None
    raw = outer.sub("vision_config")
    dim, merge, patch = (raw.int(key, least=1) for key in ("hidden_size", "spatial_merge_size", "patch_size"))
    places = raw.int("num_position_embeddings", least=1)
    side = isqrt(places)
    if side * side != places:
        raise ConfigError(f"config.json: {raw.full('num_position_embeddings')} is {places}, which is no square.")
    raw.one_of("hidden_act", allowed=("gelu_pytorch_tanh",))
    raw.one_of("in_channels", allowed=(3,), default=3)
    restates(raw, "deepstack_visual_indexes", [])
    restates(raw, "out_hidden_size", text_dim)
    raw.ignore("initializer_range", "model_type", why="changes nothing that is computed")
    whole = patch * merge
    return PatchTower(
        dim=dim,
        inner=raw.int("intermediate_size", least=1),
        heads=raw.int("num_heads", least=1),
        layers=raw.int("depth", least=1),
        qkv_dim=dim,
        patch=patch,
        grid=(side, side),
        merge=merge,
        out_dim=text_dim,
        norm=Norm(dim, NORM_EPS, "layer", bias=True),
        out_norm=None,
        pixels=RoundToGrid(patch, merge, MIN_TOKENS * whole**2, MAX_TOKENS * whole**2),
        pad_id=outer.int("image_token_id", least=0),
        bias=True,
        frames=raw.int("temporal_patch_size", least=1),
        flat=True,
        corners=True,
        style="half",
        first="row",
        theta=_theta(raw),
        place="grid",
    )


def _theta(raw: Raw) -> float:
    rope = raw.sub_or_none("rope_parameters") if raw.has("rope_parameters") else None
    if rope is None:
        raw.ignore("rope_parameters", why="null: rows and columns turn by the usual frequencies")
        return 10000.0
    rope.one_of("rope_type", allowed=("axial",), default="axial")
    return rope.float("rope_theta", default=10000.0)


def tower_rules(tower: PatchTower | None, root: str = "model.visual.") -> tuple[RuleLike, ...]:
    """Tensors of tower and merger."""
    if tower is None:
        return (Ignore(f"{root}*", why="the config has no vision_config"),)
    block, merger = root + "blocks.{i}.", root + "merger."
    names = {
        "norm1": "norm0", "norm2": "norm1", "attn.qkv": "qkv", "attn.proj": "o", "mlp.linear_fc1": "fc0",
        "mlp.linear_fc2": "fc1",
    }  # fmt: skip
    pairs = [
        (root + "patch_embed.proj", "vision.patch"),
        *((block + name, f"vision.blocks.{{i}}.{param}") for name, param in names.items()),
        (merger + "norm", "vision.final_norm"),
        (merger + "linear_fc1", "projector.fc0"),
        (merger + "linear_fc2", "projector.fc1"),
    ]
    return (
        Rule(root + "pos_embed.weight", "vision.positions"),
        *(Rule(f"{tensor}.weight", param) for tensor, param in pairs),
        *(Rule(f"{tensor}.bias", f"{param}_bias") for tensor, param in pairs),
    )


TWIN_TOWER = {
    "/?vision_config.depth": 2,
    "/?vision_config.hidden_size": 36,
    "/?vision_config.intermediate_size": 56,
    "/?vision_config.num_heads": 3,
    "/?vision_config.patch_size": 4,
    "/?vision_config.num_position_embeddings": 36,
    "/?vision_config.out_hidden_size": 96,
}
