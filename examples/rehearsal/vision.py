"""The vision tower and its projector: pictures of one size to rows of the text model's width.

Letters: P pictures, N patches of one, D width, K size of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from sizes import Config
from torch import Tensor

TOWER_EPS = 2.0**-23
THETA = 10000.0

Weights = dict[str, Tensor]


def patches(pixels: Tensor, size: int) -> Tensor:
    """uint8 [P, side, side, 3] to [P, N, 3 size size] in [-1, 1], row by row over the picture."""
    rows = pixels.unflatten(2, (-1, size)).unflatten(1, (-1, size))  # [P, R, size, C, size, 3]
    return rows.permute(0, 1, 3, 5, 2, 4).flatten(3).flatten(1, 2).float() / 127.5 - 1


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    vision = config["vision_config"]
    dim, inner, wide = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["qkv_hidden_size"]
    merged = dim * vision["merge_kernel_size"][0] ** 2
    grid = vision["init_pos_emb_height"], vision["init_pos_emb_width"]
    out: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (dim, 3, vision["patch_size"], vision["patch_size"]),
        "vision_tower.patch_embed.pos_emb.weight": (*grid, dim),
    }
    for i in range(vision["vt_num_hidden_layers"]):
        parts = {"norm0": (dim,), "norm1": (dim,), "wqkv": (3 * wide, dim), "wo": (dim, wide),
                 "mlp.fc0": (inner, dim), "mlp.fc1": (dim, inner)}  # fmt: skip
        out |= {f"vision_tower.encoder.blocks.{i}.{name}.weight": shape for name, shape in parts.items()}
    return out | {
        "vision_tower.encoder.final_layernorm.weight": (dim,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (vision["text_hidden_size"], merged),
        "mm_projector.post_norm.weight": (vision["text_hidden_size"],),
    }


def rows(pixels: Tensor, weights: Weights, config: Config, dtype: torch.dtype) -> Tensor:
    """[P, tokens of a picture, text width] in float32 or wider. pixels: uint8 [P, side, side, 3].

    The pictures' grid must be that of the position table: no other size is trained on.
    """
    vision = config["vision_config"]
    kernel = weights["vision_tower.patch_embed.proj.weight"].flatten(1)
    x = patches(pixels, vision["patch_size"]).to(dtype) @ kernel.to(dtype).T
    table = weights["vision_tower.patch_embed.pos_emb.weight"]
    side = table.shape[0]
    x = x.to(table.dtype) + table.flatten(0, 1)
    turns = angles(side, vision["qkv_hidden_size"] // vision["vt_num_attention_heads"], x)
    for number in range(vision["vt_num_hidden_layers"]):
        at = f"vision_tower.encoder.blocks.{number}."
        own = {name.removeprefix(at): value for name, value in weights.items() if name.startswith(at)}
        x = block(x, own, turns, vision["vt_num_attention_heads"])
    x = norm(x, weights["vision_tower.encoder.final_layernorm.weight"], TOWER_EPS)
    x = x.unflatten(1, (side // 2, 2, side // 2, 2)).transpose(2, 3).flatten(3).flatten(1, 2)
    y = x.to(dtype) @ weights["mm_projector.proj.0.weight"].T
    y = F.gelu(y) @ weights["mm_projector.proj.2.weight"].T
    return norm(y.to(x.dtype), weights["mm_projector.post_norm.weight"], vision["projector_ln_eps"])


def block(x: Tensor, own: Weights, turns: tuple[Tensor, Tensor], heads: int) -> Tensor:
    dtype = own["wqkv.weight"].dtype
    y = norm(x, own["norm0.weight"], TOWER_EPS).to(dtype) @ own["wqkv.weight"].T
    q, k, v = y.unflatten(2, (3, heads, -1)).unbind(2)
    q, k = turn(q, turns).to(dtype), turn(k, turns).to(dtype)
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    x = x + (o.flatten(2) @ own["wo.weight"].T).to(x.dtype)
    y = norm(x, own["norm1.weight"], TOWER_EPS).to(dtype) @ own["mlp.fc0.weight"].T
    return x + (F.gelu(y, approximate="tanh") @ own["mlp.fc1.weight"].T).to(x.dtype)


def angles(side: int, size: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [N, 1, size / 2] of the turn of each pair: even pairs by the column, odd ones by the row."""
    rate = THETA ** (-4.0 * torch.arange(size // 4, dtype=torch.float64, device=like.device) / size)
    place = torch.arange(side, dtype=torch.float64, device=like.device)
    row, column = torch.meshgrid(place, place, indexing="ij")
    angle = torch.stack((column.flatten()[:, None] * rate, row.flatten()[:, None] * rate), -1).flatten(1)[:, None]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def turn(x: Tensor, turns: tuple[Tensor, Tensor]) -> Tensor:
    """Neighbours (x[2p], x[2p + 1]) as complex numbers, each turned by its angle."""
    cos, sin = turns
    a, b = x[..., 0::2], x[..., 1::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight
