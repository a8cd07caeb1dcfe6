"""The vision tower of Kimi K3 as a plain forward: pixels to rows of the text model's width.

Letters: F frames, N patches of all frames, D width, H heads, K size of a head, P pairs of a head, M rows after merging.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TOWER_EPS = 2.0**-23  # the tower's norms name none: float32's own, also for bf16 inputs
THETA = 10000.0

Config = dict[str, Any]
Emit = Callable[[str, Tensor], None]


def normalised(image_YXC: Tensor) -> Tensor:
    """One frame [1, 3, height, width] in [-1, 1] of uint8 pixels [height, width, 3]."""
    return ((image_YXC.float() / 255 - 0.5) / 0.5).permute(2, 0, 1)[None]


def image_rows(reader: Any, config: Config, images: Sequence[Tensor], emit: Emit | None = None) -> Tensor:
    """Rows [M, text width] float32 of all images, one after another; they do not see each other.

    images: normalised pixels [F, 3, height, width]; height and width are whole numbers of merged patches. emit takes
    ``vision.embed``, ``vision.blocks.{i}`` (patches of all images) and ``vision``, the rows.
    """
    sites: dict[str, list[Tensor]] = {}
    for pixels in images:
        rows = one_image(reader, config["vision_config"], pixels, lambda s, v: sites.setdefault(s, []).append(v))
        sites.setdefault("vision", []).append(rows)
    for site, values in sites.items():
        if emit is not None:
            emit(site, torch.cat(values))
    return torch.cat(sites["vision"])


def one_image(reader: Any, vision: Config, pixels: Tensor, emit: Emit) -> Tensor:
    patches, height, width = patchify(pixels.float(), int(vision["patch_size"]))
    frames = len(pixels)
    kernel = reader.tensor("vision_tower.patch_embed.proj.weight")
    x_ND = patches @ kernel.flatten(1).T
    table = reader.tensor("vision_tower.patch_embed.pos_emb.weight")
    x_ND = x_ND + positions(table, frames, height, width)
    emit("vision.embed", x_ND)
    turns = angles(frames, height, width, int(vision["qkv_hidden_size"]) // int(vision["vt_num_attention_heads"]))
    for number in range(int(vision["vt_num_hidden_layers"])):
        x_ND = block(reader, f"vision_tower.encoder.blocks.{number}.", vision, x_ND, turns)
        emit(f"vision.blocks.{number}", x_ND)
    x_ND = rms(x_ND, reader.tensor("vision_tower.encoder.final_layernorm.weight"), TOWER_EPS)
    merged = merge(x_ND.unflatten(0, (frames, height, width)).mean(0), vision["merge_kernel_size"])
    return project(reader, vision, merged)


def patchify(pixels: Tensor, size: int) -> tuple[Tensor, int, int]:
    """(patches [N, 3 size size], rows, columns): row by row over the whole grid, frame after frame."""
    frames, _, height, width = pixels.shape
    if height % size or width % size:
        raise ValueError(f"an image of {width}x{height} pixels is no whole number of {size}-pixel patches")
    rows, columns = height // size, width // size
    out = [
        pixels[f, :, r * size : (r + 1) * size, c * size : (c + 1) * size].flatten()
        for f in range(frames) for r in range(rows) for c in range(columns)
    ]  # fmt: skip
    return torch.stack(out), rows, columns


def positions(table_RCD: Tensor, frames: int, height: int, width: int) -> Tensor:
    """What is added to the patches [N, D]: the learned grid brought to this size, and a wave a frame if there are more.

    One frame gets no wave. Frame f: sin in the first half and cos in the second, of f 10000^(-2i/D).
    """
    grid = table_RCD if table_RCD.shape[:2] == (height, width) else stretch(table_RCD, height, width)
    flat = grid.flatten(0, 1)
    if frames == 1:
        return flat
    half = flat.shape[1] // 2
    angle = torch.outer(torch.arange(frames).double(), THETA ** (-torch.arange(half).double() / half))
    wave_FD = torch.cat((angle.sin(), angle.cos()), 1).float()
    return (flat[None] + wave_FD[:, None]).flatten(0, 1)


def stretch(table_RCD: Tensor, height: int, width: int) -> Tensor:
    """Bilinear, pixel centres at half steps, no smoothing: along rows, then along columns."""
    r0, r1, rest_r = _between(table_RCD.shape[0], height)
    tall = table_RCD[r0] * (1 - rest_r)[:, None, None] + table_RCD[r1] * rest_r[:, None, None]
    c0, c1, rest_c = _between(table_RCD.shape[1], width)
    return tall[:, c0] * (1 - rest_c)[None, :, None] + tall[:, c1] * rest_c[None, :, None]


def _between(have: int, want: int) -> tuple[Tensor, Tensor, Tensor]:
    """For each of ``want`` places: the two neighbours among ``have``, and the second one's share."""
    where = ((torch.arange(want).double() + 0.5) * have / want - 0.5).clamp_min(0)
    low = where.floor().long()
    return low, (low + 1).clamp_max(have - 1), (where - low).float()


def angles(frames: int, height: int, width: int, size: int) -> Tensor:
    """Turn of each pair [N, P]: even pairs by the column, odd pairs by the row, the same rate for two neighbours."""
    rate = THETA ** (-4.0 * torch.arange(size // 4).double() / size)
    row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    by_column = column.flatten().double()[:, None] * rate
    by_row = row.flatten().double()[:, None] * rate
    return torch.stack((by_column, by_row), -1).flatten(1).repeat(frames, 1)


def turn(x_NHK: Tensor, angle_NP: Tensor) -> Tensor:
    """Pairs of neighbours (x[2p], x[2p+1]) as complex numbers, each turned by its angle."""
    a, b = x_NHK[..., 0::2], x_NHK[..., 1::2]
    cos, sin = angle_NP.cos().float()[:, None], angle_NP.sin().float()[:, None]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def block(reader: Any, at: str, vision: Config, x_ND: Tensor, angle_NP: Tensor) -> Tensor:
    heads = int(vision["vt_num_attention_heads"])
    y = rms(x_ND, reader.tensor(f"{at}norm0.weight"), TOWER_EPS) @ reader.tensor(f"{at}wqkv.weight").T
    q, k, v = y.unflatten(1, (3, heads, -1)).unbind(1)
    q, k = turn(q, angle_NP), turn(k, angle_NP)
    outs = [torch.softmax(q[:, h] @ k[:, h].T / math.sqrt(q.shape[2]), -1) @ v[:, h] for h in range(heads)]
    x_ND = x_ND + torch.cat(outs, 1) @ reader.tensor(f"{at}wo.weight").T
    y = rms(x_ND, reader.tensor(f"{at}norm1.weight"), TOWER_EPS) @ reader.tensor(f"{at}mlp.fc0.weight").T
    y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    return x_ND + y @ reader.tensor(f"{at}mlp.fc1.weight").T


def merge(x_RCD: Tensor, kernel: Sequence[int]) -> Tensor:
    """Neighbouring patches side by side: row by row within the kernel, then row by row over the image."""
    down, across = int(kernel[0]), int(kernel[1])
    rows, columns, _ = x_RCD.shape
    if rows % down or columns % across:
        raise ValueError(f"{rows}x{columns} patches cannot be merged {down} by {across}")
    out = [
        x_RCD[r : r + down, c : c + across].flatten()
        for r in range(0, rows, down) for c in range(0, columns, across)
    ]  # fmt: skip
    return torch.stack(out)


def project(reader: Any, vision: Config, x_MD: Tensor) -> Tensor:
    y = x_MD @ reader.tensor("mm_projector.proj.0.weight").T
    y = 0.5 * y * (1 + torch.erf(y / math.sqrt(2)))
    y = y @ reader.tensor("mm_projector.proj.2.weight").T
    return rms(y, reader.tensor("mm_projector.post_norm.weight"), float(vision["projector_ln_eps"]))


def rms(x_ND: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    return x_ND / torch.sqrt((x_ND * x_ND).mean(-1, keepdim=True) + eps) * weight_D


def splice(h_TD: Tensor, here_T: Tensor, rows_ND: Tensor) -> Tensor:
    """``h`` with the marked rows replaced, in order. ValueError when there are not as many."""
    if int(here_T.sum()) != len(rows_ND):
        raise ValueError(f"{int(here_T.sum())} placeholder tokens, but the images give {len(rows_ND)} rows")
    h_TD = h_TD.clone()
    h_TD[here_T] = rows_ND
    return h_TD
