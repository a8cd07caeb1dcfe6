"""Vision towers over patches: embedding of pixels, learned positions, rotation by place, attention among all patches.

An image has ``rows`` x ``columns`` patches, N in all, row by row. D tower width, H heads, K head width, F frequencies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.bounds import ATTENTION, ELEMENTWISE, MATMUL
from dayzero.ops.contract import contract

_SCORE_BYTES = 64 << 20  # of one tile of scores in f64


@contract("vision.patches", bound=MATMUL, traits={"bias": (False, True), "frames": ("int",)})
def patches(
    pixels_YXC: Tensor,
    weight: Tensor,
    bias_D: Tensor | None = None,
    *,
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
) -> Tensor:
    """[N, D] in the weight's dtype: each patch of an image times the weight.

    pixels: uint8 [rows * P, columns * P, 3]. weight: [D, 3, P, P], or [D, 3, F, P, P] where a still image stands for F
    equal frames. A pixel is (x / 255 - mean) / std of its channel in f32, then rounded to the weight's dtype, as the
    publishers' processors and models do. Sums run in f64 and are rounded once.
    """
    size = weight.shape[-1]
    height, width, _ = pixels_YXC.shape
    if height % size or width % size:
        raise ValueError(f"an image of {width}x{height} pixels is not made of patches of {size}")
    shade = [torch.tensor(values, dtype=torch.float32, device=pixels_YXC.device) for values in (mean, std)]
    x_YXC = ((pixels_YXC.float() / 255 - shade[0]) / shade[1]).to(weight.dtype)
    grid = x_YXC.unflatten(1, (-1, size)).unflatten(0, (-1, size))  # [rows, P, columns, P, 3]
    x_NCPP = grid.permute(0, 2, 4, 1, 3).flatten(0, 1)
    if weight.dim() == 5:
        x_NCPP = x_NCPP[:, :, None].expand(-1, -1, weight.shape[2], -1, -1)
    out_ND = x_NCPP.flatten(1).double() @ weight.flatten(1).double().T
    return (out_ND if bias_D is None else out_ND + bias_D.double()).to(weight.dtype)


@contract("vision.positions", bound=ELEMENTWISE, traits={"corners": (False, True)})
def positions(table_ABD: Tensor, *, rows: int, columns: int, corners: bool) -> Tensor:
    """[N, D] in the table's dtype: a learned grid [A, B, D] of positions stretched to an image's, bilinearly, without
    antialiasing. A grid of the same size is taken as it is.

    corners: the outermost entries lie at the centres of the outermost patches (Qwen's towers); else at those of the
    cells they stand for, so that patch i of n lies at (i + 1/2) * A / n - 1/2, cut off at the edge (MoonViT; torch's
    ``align_corners=False``).
    """
    high, wide, _ = table_ABD.shape
    if (high, wide) == (rows, columns):
        return table_ABD.flatten(0, 1)
    table = table_ABD.double()
    low, up, share = _places(rows, high, corners, table.device)
    table = torch.lerp(table[low], table[up], share[:, None, None])
    low, up, share = _places(columns, wide, corners, table.device)
    table = torch.lerp(table[:, low], table[:, up], share[None, :, None])
    return table.flatten(0, 1).to(table_ABD.dtype)


def _places(count: int, size: int, corners: bool, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(entry below, entry above, share of the one above) of each of ``count`` places along ``size`` entries."""
    at = torch.arange(count, dtype=torch.float64, device=device)
    at = at * ((size - 1) / max(count - 1, 1)) if corners else ((at + 0.5) * (size / count) - 0.5).clamp(min=0)
    low = at.floor().long().clamp(max=size - 1)
    return low, (low + 1).clamp(max=size - 1), at - low


@contract("rope.grid", bound=ELEMENTWISE, traits={"style": ("half", "interleaved"), "first": ("row", "column")})
def grid(x_NHK: Tensor, inv_freq_F: Tensor, *, columns: int, style: str, first: str) -> Tensor:
    """Every head turned by the place of its patch: half of the pairs by the row, half by the column, both with the F
    frequencies, K = 4F. Same shape and dtype, f32 inside.

    x: the patches of one image, row by row. style ``interleaved``: dimensions 2p and 2p + 1 are a pair; pair 2i turns
    by the ``first`` axis and pair 2i + 1 by the other, both with frequency i (MoonViT: the column is first, whatever
    its docstring says). ``half``: dimensions p and p + K/2 are a pair; the first half of the pairs turns by the
    ``first`` axis (Qwen's towers: the row).
    """
    if style not in ("half", "interleaved") or first not in ("row", "column"):
        raise ValueError(f"style is 'half' or 'interleaved' and first 'row' or 'column', not {style!r} and {first!r}")
    count, width = x_NHK.shape[0], x_NHK.shape[-1]
    if width != 4 * inv_freq_F.shape[0] or count % columns:
        raise ValueError(f"{count} patches in {columns} columns, heads of {width}, {inv_freq_F.shape[0]} frequencies")
    place_N = torch.arange(count, device=x_NHK.device)
    axes = {"row": place_N // columns, "column": place_N % columns}
    order = (first, "column" if first == "row" else "row")
    freq_F = inv_freq_F.to(device=x_NHK.device, dtype=torch.float32)
    both = [axes[axis].float()[:, None] * freq_F for axis in order]
    angle = (torch.stack(both, -1).flatten(1) if style == "interleaved" else torch.cat(both, 1)).double()
    cos, sin = angle.cos().float()[:, None], angle.sin().float()[:, None]
    half = width // 2
    one, two = (slice(0, half), slice(half, width)) if style == "half" else (slice(0, None, 2), slice(1, None, 2))
    a, b = x_NHK[..., one].float(), x_NHK[..., two].float()
    y_NHK = torch.empty_like(x_NHK)
    y_NHK[..., one] = (a * cos - b * sin).to(x_NHK.dtype)
    y_NHK[..., two] = (b * cos + a * sin).to(x_NHK.dtype)
    return y_NHK


@contract("attention.full", bound=ATTENTION)
def full(q_NHK: Tensor, k_MHK: Tensor, v_MHK: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """(out [N, H, K] in q's dtype, log-sum-exp [N, H] f32) of queries that see every one of M >= 1 keys.

    f64 inside, one rounding. Scores are made for as many queries at a time as a tile of 64 MiB holds, at least one.
    """
    k_HKM, v_HMK = k_MHK.double().permute(1, 2, 0), v_MHK.double().transpose(0, 1)
    heads, keys = k_HKM.shape[0], k_HKM.shape[2]
    step = max(1, _SCORE_BYTES // (8 * heads * keys))
    outs, sums = [], []
    for q in q_NHK.split(step):
        score_HTM = q.double().transpose(0, 1) @ k_HKM * scale
        lse_HT = score_HTM.logsumexp(-1)
        outs.append(((score_HTM - lse_HT[..., None]).exp() @ v_HMK).transpose(0, 1).to(q.dtype))
        sums.append(lse_HT.T.float())
    return torch.cat(outs), torch.cat(sums)
