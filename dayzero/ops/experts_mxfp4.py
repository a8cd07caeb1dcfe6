"""Matrices that stay in 4 bits (MXFP4): widened exactly to a float type, or turned exactly into e4m3.

R rows (out), C columns (in), G = C / 32 groups that share an exponent, B = ceil(C / 128) blocks of four groups.

An e2m1 code is one of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; its value is that times 2^k, k being the exponent
of its group. As e4m3 with the scale 2^(K - 6), K the largest exponent of a group of the block that is not all zero,
the code becomes code * 2^(6 - d), d = K - k. The largest, 6 * 2^6 = 384, is below e4m3's 448. The smallest code, 0.5,
becomes 2^(5 - d), and the last bit of 1.5 has the same weight. e4m3 is normal down to 2^-6 (0.5 up to d = 11) and its
subnormals end at 2^-9: d = 14. So a group is exact for all codes if and only if d <= 14. Beyond, the codes go one by
one: 0.5 and 1.5 at d = 15, 1 and 3 at 16, 2 and 6 at 17, 4 at 18, rounded to the nearest, ties to even.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from dayzero.decl import Mxfp4, Packed
from dayzero.ops.fp8_blocks import widened

GROUP, BLOCK = 32, 128  # columns that share a stored exponent; columns that share a scale of the e4m3 form
REACH = 14  # largest distance d at which every code is exact
TOP = 6  # the largest live group is scaled by 2^TOP
TILE_ELEMENTS = 1 << 17  # of a widened tile: it stays in a core's cache
_VANISHED = 20  # distance from which on every code has become zero
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def tile_rows(num_columns: int) -> int:
    """Rows of a tile of about ``TILE_ELEMENTS``, at least one."""
    return max(1, TILE_ELEMENTS // num_columns)


def widen(matrix: Mxfp4, dtype: torch.dtype) -> Tensor:
    """The values [..., R, C] in ``dtype``: exact in f32 and bf16, which hold 2 significant bits at any exponent of
    e8m0 (a value beyond their range becomes infinite; loaders refuse those)."""
    codes, scales = matrix.codes, matrix.scales
    pairs, powers = _pairs(dtype, codes.device), _powers(dtype, codes.device)
    values = pairs.index_select(0, codes.reshape(-1).int()).view(dtype).view(-1, GROUP)
    values.mul_(powers.index_select(0, scales.reshape(-1).int())[:, None])
    return values.view(matrix.shape)


def dense(matrix: Tensor | Packed, dtype: torch.dtype) -> Tensor:
    """A plain matrix as it is, one in 4 bits as values of ``dtype``, one in blocks of 8 bits as values in f32."""
    if isinstance(matrix, Tensor):
        return matrix
    return widen(matrix, dtype) if isinstance(matrix, Mxfp4) else widened(matrix)


def live_groups(matrix: Mxfp4) -> Tensor:
    """bool [..., R, G]: groups with a code other than zero (of either sign)."""
    codes = matrix.codes.unflatten(-1, (-1, GROUP // 2))
    return ((codes & 0x77) != 0).any(-1)


def distances(matrix: Mxfp4) -> tuple[Tensor, Tensor]:
    """(d int32 [..., R, G], K int32 [..., R, B]) of the live groups; all-zero groups have d = 0, and blocks without a
    live one K = 6 (a scale of 2^0). K is unbiased."""
    num_groups = matrix.scales.shape[-1]
    exponents = torch.where(live_groups(matrix), matrix.scales.int() - 127, -1000)
    short = -num_groups % (BLOCK // GROUP)
    padded = torch.nn.functional.pad(exponents, (0, short), value=-1000)
    top = padded.unflatten(-1, (-1, BLOCK // GROUP)).amax(-1)
    distance = (top.repeat_interleave(BLOCK // GROUP, -1)[..., :num_groups] - exponents).where(exponents > -1000, 0)
    return distance, top.where(top > -1000, TOP)


def groups_outside(matrix: Mxfp4) -> int:
    """Live groups further than ``REACH`` from the largest live one of their block: those e4m3 cannot hold for every
    code. Where the stored exponents of a block, dead groups included, lie within reach, no code is looked at."""
    num_groups = matrix.scales.shape[-1]
    if num_groups == 0 or _spread(matrix.scales) <= REACH:
        return 0
    return int((distances(matrix)[0] > REACH).sum())


def _spread(scales: Tensor) -> int:
    """Largest difference of exponents within a block."""
    blocks = [part.int() for part in scales.split(BLOCK // GROUP, dim=-1)]
    return max((int((b.amax(-1) - b.amin(-1)).amax()) for b in blocks if b.numel()), default=0)


def to_e4m3(matrix: Mxfp4, out_RC: Tensor, scale_RB: Tensor) -> int:
    """Write the e4m3 form of [R, C] into ``out`` (float8_e4m3fn) and its scales 2^(K - 6) into ``scale`` (f32).

    value = out * scale, exactly so unless the returned number of groups outside is above zero; their codes are then
    rounded to the nearest. Both outputs are overwritten; scratch stays at the size of a tile.
    """
    outside, step = 0, tile_rows(out_RC.shape[1])
    for start in range(0, len(matrix), step):
        rows = slice(start, start + step)
        outside += _rows_to_e4m3(matrix[rows], out_RC[rows], scale_RB[rows])
    return outside


def _rows_to_e4m3(matrix: Mxfp4, out_RC: Tensor, scale_RB: Tensor) -> int:
    distance, top = distances(matrix)
    half = GROUP // 2
    first_RG1 = (distance.clamp(max=_VANISHED) * 256)[..., None]
    at = (matrix.codes.unflatten(-1, (-1, half)).int() + first_RG1).view(-1)
    out_RC.view(torch.int16).copy_(_e4m3_pairs(out_RC.device).index_select(0, at).view(len(matrix), -1))
    # Every K - 6 from -133 up is a float32, the lowest ones subnormal.
    scale_RB.copy_(torch.ldexp(torch.ones_like(top, dtype=torch.float64), top - TOP))
    return int((distance > REACH).sum())


def widen_e4m3(codes_RC: Tensor, scale_RB: Tensor) -> Tensor:
    """f32 [R, C]: e4m3 elements times the scale of their row and block of 128 columns. Exact."""
    values = codes_RC.float()
    for b, part in enumerate(values.split(BLOCK, dim=-1)):
        part.mul_(scale_RB[:, b : b + 1])
    return values


@lru_cache(maxsize=16)
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256] of the integer type that is two elements wide: the two values of each byte."""
    byte = torch.arange(256)
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1).to(dtype)
    wide = {2: torch.int32, 4: torch.int64}.get(dtype.itemsize)
    assert wide is not None, f"4-bit matrices are widened to 16 or 32 bits, not to {dtype}"
    return pairs.contiguous().view(wide).flatten().to(device)


@lru_cache(maxsize=16)
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    """[256]: 2^(code - 127), NaN for 255."""
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    powers[255] = torch.nan
    return powers.to(dtype).to(device)


@lru_cache(maxsize=4)
def _e4m3_pairs(device: torch.device) -> Tensor:
    """int16 [21 * 256]: for each distance and byte, its two codes as e4m3."""
    byte = torch.arange(256)
    values = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=-1)
    scaled = pairs * torch.exp2(TOP - torch.arange(_VANISHED + 1.0))[:, None, None]
    return scaled.to(torch.float8_e4m3fn).view(torch.int16).flatten().to(device)
