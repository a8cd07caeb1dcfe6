"""Maps of pools of records for the tensor copy engine: which bytes a box of columns and records of a block is."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

COLUMNS = 64  # of a box: 128 bytes, within which 16-byte pieces are permuted


class TensorMap(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint64 * 16),)


def is_page(records: int) -> bool:
    """Whether so many records a block are a power of two that tiles are made of, or that is made of them."""
    return records >= 16 and records & (records - 1) == 0


def can_map(rows: Tensor) -> bool:
    """Whether rows [N, page, K, D] are bf16 with each record in one piece, and all of it begins at 16 bytes."""
    aligned = rows.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in rows.stride()[:3])
    return rows.dtype == torch.bfloat16 and rows.stride(3) == 1 and aligned and rows.shape[3] % COLUMNS == 0


def in_pieces_of_16(x_THD: Tensor) -> Tensor:
    """x [T, H, D] itself where each head lies in one piece that begins at 16 bytes, whatever the dtype of at least 2
    bytes; else a packed copy."""
    aligned = x_THD.data_ptr() % 16 == 0 and x_THD.stride(0) % 8 == x_THD.stride(1) % 8 == 0
    if aligned and x_THD.stride(2) == 1:
        return x_THD
    return x_THD.clone(memory_format=torch.contiguous_format)  # what is packed already may begin anywhere


def map_of(rows: Tensor, records: int) -> TensorMap:
    """Of rows [N, page, K, D] for which ``can_map``, in boxes of 64 columns of up to so many records of one head."""
    return _encoded(rows.data_ptr(), tuple(rows.shape), rows.stride()[:3], (1, min(rows.shape[1], records), 1, COLUMNS))


def map_of_heads(x_THD: Tensor, heads: int, tokens: int) -> TensorMap:
    """Of x [T, H, D], bf16 with strides as ``can_map`` wants them, in boxes of 64 columns of so many heads of so many
    tokens. Behind the last token a box is filled with zeros."""
    return _encoded(x_THD.data_ptr(), tuple(x_THD.shape), x_THD.stride()[:2], (tokens, heads, COLUMNS))


def map_of_rows(x_LC: Tensor, rows: int) -> TensorMap:
    """Of x [L, C], bf16 with each row in one piece, all of which begin at 16 bytes, in boxes of 64 columns of so many
    rows. Behind the last row a box is filled with zeros."""
    return _encoded(x_LC.data_ptr(), tuple(x_LC.shape), x_LC.stride()[:1], (rows, COLUMNS))


@lru_cache(maxsize=1024)
def _encoded(address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]) -> TensorMap:
    """strides: in numbers, of all dimensions but the last."""
    from cuda.bindings import driver

    sizes = [driver.cuuint64_t(n) for n in reversed(shape)]
    steps = [driver.cuuint64_t(2 * n) for n in reversed(strides)]
    status, made = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, len(shape), address, sizes, steps,
        [driver.cuuint32_t(n) for n in reversed(box)], [driver.cuuint32_t(1)] * len(shape),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )  # fmt: skip
    assert int(status) == 0, f"rows {shape} with strides {strides} cannot be mapped: {status!r}"
    out = TensorMap()
    for number, word in enumerate(made.opaque):
        out.words[number] = int(word)
    return out
