"""Rotary position embedding.

T tokens, H heads, D head width, F frequencies (2F dimensions of a head are rotated).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.bounds import ELEMENTWISE
from dayzero.ops.contract import contract


def angles(positions: Tensor, inv_freq_F: Tensor, sections: tuple[int, int, int] | None = None) -> Tensor:
    """[T, F] f32 angles of positions [T], or [3, T] (time, height, width) with interleaved ``sections``.

    The product is taken in f32, as the publishers' code takes it: at position 10^6 an f64 product would differ from
    what the model was trained with by up to 0.03 rad. With sections (Qwen3-VL, Qwen3.5) frequency i belongs to axis
    i % 3 while i < 3 * sections[axis], and to time beyond that.
    """
    freq_F = inv_freq_F.to(device=positions.device, dtype=torch.float32)
    if positions.dim() == 1:
        return positions.float()[:, None] * freq_F
    if sections is None:
        raise ValueError("positions [3, T] need sections, the number of frequencies of time, height and width")
    axis_F = torch.zeros(freq_F.shape[0], dtype=torch.int64, device=positions.device)
    for axis in (1, 2):
        axis_F[axis : 3 * sections[axis] : 3] = axis
    return positions.float()[axis_F].T * freq_F


@contract(
    "rope.apply",
    bound=ELEMENTWISE,
    traits={
        "style": ("half", "interleaved"), "place": ("first", "last"), "mrope": (False, True), "inverse": (False, True),
    },
)  # fmt: skip
def apply(
    x_THD: Tensor,
    positions: Tensor,
    inv_freq_F: Tensor,
    *,
    style: str,
    part: str = "first",
    factor: float = 1.0,
    sections: tuple[int, int, int] | None = None,
    inverse: bool = False,
) -> Tensor:
    """x with 2F dimensions of every head rotated; same shape and dtype, f32 inside.

    positions: [T] int64, or [3, T] with ``sections``. style ``half``: dimension i turns with i + F; ``interleaved``:
    2i turns with 2i + 1, and the result keeps that order. part: which end of the head the 2F dimensions are.
    factor multiplies cos and sin (YaRN's attention factor). inverse: turn back.
    """
    if style not in ("half", "interleaved") or part not in ("first", "last"):
        raise ValueError(f"style is 'half' or 'interleaved' and part 'first' or 'last', not {style!r} and {part!r}")
    dims, width = 2 * inv_freq_F.shape[0], x_THD.shape[-1]
    if dims > width:
        raise ValueError(f"{dims} dimensions cannot be rotated in a head of {width}")
    angle_TF = angles(positions, inv_freq_F, sections).double()
    cos_T1F = (angle_TF.cos() * factor).float()[:, None]
    sin_T1F = (angle_TF.sin() * (-factor if inverse else factor)).float()[:, None]
    begin = 0 if part == "first" else width - dims
    turned = x_THD[..., begin : begin + dims].float()
    half = dims // 2
    one, two = (slice(0, half), slice(half, dims)) if style == "half" else (slice(0, None, 2), slice(1, None, 2))
    y = x_THD.clone()
    y[..., begin : begin + dims][..., one] = (turned[..., one] * cos_T1F - turned[..., two] * sin_T1F).to(x_THD.dtype)
    y[..., begin : begin + dims][..., two] = (turned[..., two] * cos_T1F + turned[..., one] * sin_T1F).to(x_THD.dtype)
    return y
