"""Cache records: rows as plain elements, or as e4m3 codes with scales (``decl.PackedRow``), written where they belong.

T tokens, S = shape of a token's values, N block numbers, P tokens of a page, C codes and G scales of a row.

A tile's scale is its largest magnitude over 448 in f32 (at least 1e-4 over 448, so that a tile of zeros has one too),
for ``pow2`` and ``e8m0`` rounded up to a power of two; a code is the e4m3 number nearest to x * (1 / scale), both in
f32, ties to even. A NaN stays one, as the code 0x7F or the bf16 number 0x7FC0, and counts for nothing in the largest
magnitude; an infinity makes its tile NaN.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.decl import PackedRow
from dayzero.ops.bounds import EXACT
from dayzero.ops.contract import contract
from dayzero.ops.experts_fp8 import LARGEST, LEAST_AMAX
from dayzero.ops.line import INDEX_RECORDS, KV_RECORDS, LATENT_RECORDS
from dayzero.view import Paged

RECORDS = (*LATENT_RECORDS, *INDEX_RECORDS, *KV_RECORDS)
NAN_CODE = 0x7F  # of e4m3
_MANTISSA, _EXPONENT_BITS = 0x7FFFFF, 23  # of f32


class Parts(NamedTuple):
    """Bytes of rows, uint8: codes [..., C], scales [..., bytes of G scales], plain [..., 2 * elements], maybe none."""

    codes: Tensor
    scales: Tensor
    plain: Tensor


def tile_scales(amax: Tensor, kind: str) -> Tensor:
    """f32 scales of tiles whose largest magnitudes are ``amax``, f32. kind: ``f32``, or a power of two."""
    scale = amax.clamp(min=LEAST_AMAX) / torch.full_like(amax, LARGEST)  # by a number CUDA multiplies by its inverse
    if kind == "f32":
        return scale
    bits = scale.view(torch.int32)  # one step of the exponent where any bit of the mantissa is set
    return (((bits + _MANTISSA) >> _EXPONENT_BITS) << _EXPONENT_BITS).view(torch.float32)


def encode(values: Tensor, row: PackedRow) -> Parts:
    """values [..., *S], any float type, as bytes. Pads between the parts of a row are the caller's."""
    x = values.flatten(-len(row.shape)).float().contiguous()
    num = row.num_codes
    tiles = F.pad(x[..., :num], (0, -num % row.tile)).unflatten(-1, (row.num_scales, row.tile))
    scale = tile_scales(tiles.abs().nan_to_num(nan=0.0, posinf=torch.inf).amax(-1), row.scale)
    over = tiles * (torch.ones_like(scale) / scale)[..., None]
    codes = over.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(torch.uint8)
    codes = codes.masked_fill(over.isnan(), NAN_CODE).flatten(-2)[..., :num].contiguous()
    if row.scale == "e8m0":
        scales = (scale.view(torch.int32) >> _EXPONENT_BITS).to(torch.uint8)
    else:
        scales = scale.contiguous().view(torch.uint8)
    plain = x[..., num:].bfloat16().contiguous()
    return Parts(codes, scales, plain.masked_fill(plain.isnan(), torch.nan).view(torch.uint8))


def decode(parts: Parts, row: PackedRow) -> Tensor:
    """float32 [..., *S]: code times scale, rounded once where the scale is no power of two."""
    if row.scale == "e8m0":
        bits = parts.scales.int() << _EXPONENT_BITS
        scale = bits.masked_fill(parts.scales == 255, 0x7FC00000).view(torch.float32)
    else:
        scale = parts.scales.contiguous().view(torch.float32)
    codes = parts.codes.contiguous().view(torch.float8_e4m3fn).float()
    values = codes * scale.repeat_interleave(row.tile, dim=-1)[..., : row.num_codes]
    if row.plain:
        values = torch.cat((values, parts.plain.contiguous().view(torch.bfloat16).float()), dim=-1)
    return values.unflatten(-1, row.shape)


@dataclass(frozen=True, slots=True)
class RowCodec:
    """``view.Codec`` of packed rows."""

    row: PackedRow

    @property
    def record(self) -> str:
        return self.row.record

    @property
    def shape(self) -> tuple[int, ...]:
        return self.row.shape

    def headed(self) -> RowCodec:
        return RowCodec(replace(self.row, shape=(1, *self.row.shape)))

    def parts(self, rows: Tensor) -> Parts:
        """Views [N, P, …] of the parts of all rows, in ``rows`` uint8 [N, P, bytes]; pads are left out."""
        row, page = self.row, rows.shape[1]
        assert rows.dtype == torch.uint8 and rows.shape[2] == row.num_bytes, (rows.dtype, rows.shape, row)
        if row.planar:
            blocks, num = rows.flatten(1), page * row.num_codes
            planes = (blocks[:, :num], row.num_codes), (blocks[:, num:], row.scale_bytes)
            codes, scales = (plane.unflatten(1, (page, width)) for plane, width in planes)
            return Parts(codes, scales, rows[:, :, :0])
        scales = rows[:, :, row.scales_at : row.plain_at]
        return Parts(rows[:, :, : row.num_codes], scales, rows[:, :, row.plain_at : row.plain_at + 2 * row.plain])

    def write(self, rows: Tensor, blocks: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Pads become zeros."""
        if self.row.padded:
            rows[blocks, offsets] = rows.new_zeros(())
        for whole, part in zip(self.parts(rows), encode(values, self.row), strict=True):
            whole[blocks, offsets] = part

    def read(self, rows: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        return decode(Parts(*(part[blocks, offsets] for part in self.parts(rows))), self.row)

    def pages(self, rows: Tensor, blocks: Tensor) -> Tensor:
        return decode(Parts(*(part[blocks] for part in self.parts(rows))), self.row)


def codec_of(row: PackedRow | None) -> RowCodec | None:
    return None if row is None else RowCodec(row)


def packed(plain: Paged, row: PackedRow) -> Paged:
    """Plain records [N, P, *S] as packed ones, with gaps between blocks; whatever is NaN stays NaN."""
    num, page = plain.rows.shape[:2]
    held = -(-page * row.num_bytes // 256) * 256
    memory = torch.full((num, 2 * held), 0xFF, dtype=torch.uint8, device=plain.rows.device)
    rows = memory[:, : page * row.num_bytes].unflatten(1, (page, row.num_bytes))
    codec = RowCodec(row)
    for whole, part in zip(codec.parts(rows), encode(plain.rows, row), strict=True):
        whole.copy_(part)
    return replace(plain, rows=rows, codec=codec)


@contract("cache.write", bound=EXACT, traits={"record": RECORDS}, mutates=("rows",))
def write(
    values_TS: Tensor, rows: Tensor, blocks_T: Tensor, offsets_T: Tensor, codec: RowCodec | None = None
) -> None:  # fmt: skip
    """Write values [T, *S] at (blocks, offsets) [T] int64 into ``rows``, which is mutated; places are all different.

    rows: [N, P, *S] in any float type, values are rounded to it; with a codec uint8 [N, P, bytes]. Blocks may overlap
    (``view.Paged``); nothing but the places of the tokens is written.
    """
    if codec is None:
        rows[blocks_T, offsets_T] = values_TS.to(rows.dtype)
    else:
        codec.write(rows, blocks_T, offsets_T, values_TS)
