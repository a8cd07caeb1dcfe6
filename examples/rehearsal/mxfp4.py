"""MXFP4: numbers of 4 bits (E2M1) with one power of two for every 32 columns; rounding to them, packing, unpacking.

The scale is the smallest power of two that brings a group's largest number to at most 6, so that nothing is cut off.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP, MOST = 32, 6.0
SIZES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LEAST = 2.0**-100  # of a group that is all zeros


def split(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(multiples of the scale on the grid of E2M1 [..., G, 32], exponents [..., G, 1]) of [..., 32 G]."""
    groups = matrix.unflatten(-1, (-1, GROUP))
    most = groups.abs().amax(-1, keepdim=True).clamp_min(LEAST)
    _, exponent = torch.frexp(most / MOST)  # in [0.5, 1) times 2^exponent
    exponent = torch.where(power(exponent - 1, most.dtype) * MOST >= most, exponent - 1, exponent)
    x = groups * power(-exponent, groups.dtype)
    size = x.abs()
    near = torch.where(size < 2, torch.round(size * 2) / 2, torch.where(size < 4, size.round(), (size / 2).round() * 2))
    return torch.copysign(near, x), exponent


def rounded(matrix: Tensor) -> Tensor:
    """What the packed matrix holds; the gradient passes as if nothing had been rounded."""
    with torch.no_grad():
        near, exponent = split(matrix)
        moved = (near * power(exponent, near.dtype)).flatten(-2) - matrix
    return matrix + moved


def packed(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """(uint8 [O, I / 2], the even column in the low half; uint8 [O, I / 32], 127 + exponent) of a matrix [O, I]."""
    near, exponent = split(matrix.float())
    sizes = torch.tensor(SIZES, device=matrix.device)
    code = torch.searchsorted(sizes, near.abs().contiguous()) + 8 * (near < 0)
    code = code.flatten(-2).to(torch.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, (exponent[..., 0] + 127).to(torch.uint8)


def unpacked(codes: Tensor, scales: Tensor) -> Tensor:
    """float32 [O, I]."""
    code = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    value = torch.tensor((*SIZES, *(-size for size in SIZES)))[code]
    return value * power((scales.int() - 127).repeat_interleave(GROUP, 1), value.dtype)


def power(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent, exactly: float32 by its bits, since a device's own power function may be off by a bit."""
    return ((exponent.int() + 127) << 23).view(torch.float32).to(dtype)
