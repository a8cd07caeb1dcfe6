"""Where a stored tensor, or a part of it, lies in the files."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import torch

from dayzero.checkpoint.coverage import Source as Stored
from dayzero.checkpoint.header import TensorEntry
from dayzero.errors import CheckpointError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}  # fmt: skip
Extent = tuple[str, int, int, torch.dtype, tuple[int, ...]]  # see ``extent_of``


def extent_of(entries: Mapping[str, TensorEntry], name: str, part: int | range | None) -> Extent:
    """(file, first byte, bytes, element type, shape) of a stored tensor, or of its slice or rows ``part`` along
    dimension 0. CheckpointError where it cannot be decoded."""
    entry = entries[name]
    if entry.dtype not in DTYPES:
        raise CheckpointError(f"{name} in {entry.file} has element type {entry.dtype}, which cannot be decoded.")
    dtype = DTYPES[entry.dtype]
    if entry.nbytes != prod(entry.shape) * dtype.itemsize:
        raise CheckpointError(f"{name} in {entry.file} has {entry.nbytes} bytes, which do not fit its shape.")
    shape, size, first = entry.shape, entry.nbytes, entry.start
    if part is not None:
        rows = range(part, part + 1) if isinstance(part, int) else part
        first += rows.start * (size // shape[0])
        size = len(rows) * (size // shape[0])
        shape = shape[1:] if isinstance(part, int) else (len(rows), *shape[1:])
    return entry.file, first, size, dtype, shape


def decoding(stored: Stored) -> list[tuple[str, str]]:
    """(role, tensor) of the stored parts that decoding needs."""
    return [(role, name) for role, name in stored.parts if role != "input_scale"]
