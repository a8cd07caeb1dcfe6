"""Matrices in blocks of 8 bits (``decl.Fp8Blocks``): their values, and how several become one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import FP8_SIZE as BLOCK
from dayzero.decl import Fp8Blocks
from dayzero.units import ceil_div

_ROWS = 8192  # that are looked through at once


def widened(matrix: Fp8Blocks, rows: slice = slice(None), dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of some rows of a matrix [R, C]: code times scale in f32, rounded once where ``dtype`` is narrower."""
    start, stop, _ = rows.indices(matrix.shape[0])
    number_R = torch.arange(start, stop, device=matrix.codes.device) // BLOCK
    scales_RC = matrix.scales[number_R].repeat_interleave(BLOCK, dim=1)[:, : matrix.shape[1]]
    return (matrix.codes[start:stop].float() * scales_RC).to(dtype)


def pieces(matrix: Any, rows: int) -> Iterator[Tensor]:
    """The matrix, so many rows at a time; one in 8 bits widened to f32, any other by its own ``split``."""
    if not isinstance(matrix, Fp8Blocks):
        yield from matrix.split(rows)
        return
    for start in range(0, max(1, matrix.shape[0]), rows):
        yield widened(matrix, slice(start, start + rows))


def halves(matrix: Any) -> tuple[Any, Any]:
    """The first and the second half of the rows of a tensor, or of a matrix in 8 bits whose halves are whole blocks."""
    if not isinstance(matrix, Fp8Blocks):
        first, second = matrix.chunk(2)
        return first, second
    half, left = divmod(matrix.shape[0], 2)
    blocks = half // BLOCK
    assert not left and half == blocks * BLOCK, f"a matrix of {matrix.shape}: a block of scales lies in both halves"
    codes, scales = matrix.codes, matrix.scales
    return Fp8Blocks(codes[:half], scales[:blocks]), Fp8Blocks(codes[half:], scales[blocks:])


def joined(matrices: Sequence[Any]) -> Any | None:
    """The matrices one below the other, as they are stored; None where they are not stored alike, or where a block
    would have rows of two: so all in 8 bits but the last have whole blocks."""
    if not any(isinstance(one, Fp8Blocks) for one in matrices):
        return torch.cat(list(matrices))
    if not all(isinstance(one, Fp8Blocks) for one in matrices) or any(one.shape[0] % BLOCK for one in matrices[:-1]):
        return None
    codes = torch.cat([one.codes.view(torch.uint8) for one in matrices])
    return Fp8Blocks(codes.view(torch.float8_e4m3fn), torch.cat([one.scales for one in matrices]))


def packed_rows(matrix: Fp8Blocks) -> Fp8Blocks:
    """The matrix with codes and scales in one piece each. A block with a code that is NaN gets a scale that is: kernels
    that widen codes by their bits would read it as 480. ValueError for parts that do not fit each other."""
    codes, scales = matrix.codes.contiguous(), matrix.scales.float().contiguous()
    blocks = tuple(ceil_div(size, BLOCK) for size in matrix.shape)
    if codes.dtype != torch.float8_e4m3fn or tuple(scales.shape) != blocks:
        raise ValueError(f"a matrix {matrix.shape} of {codes.dtype} with scales {tuple(scales.shape)}, not {blocks}")
    for first in range(0, len(codes), _ROWS):
        nan_RC = (codes[first : first + _ROWS].view(torch.uint8) & 0x7F) == 0x7F
        if bool(nan_RC.any()):
            row, column = nan_RC.nonzero(as_tuple=True)
            scales = scales.clone() if scales.data_ptr() == matrix.scales.data_ptr() else scales
            scales[(row + first) // BLOCK, column // BLOCK] = torch.nan
    return Fp8Blocks(codes, scales)
