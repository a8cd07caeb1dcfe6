"""``attention.sparse`` over latent rows of 576 numbers, in CUDA C++; other shapes go to the kernels in Triton.

T queries, H heads, C = 576, V = 512, N listed rows. Reads plain bf16 rows and the record ``mla_fp8_656``. The list of a
row of one token (such rows come first) is four segments, each by itself, which are joined two by two. How many blocks
share them out depends on how many rows there are; what is added to what does not, so that a result has the same bits
whatever rows are beside it. A chunk's queries are whole, as there are enough of them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.cuda.build import check_machine, load
from dayzero.ops.triton.sparse_attention import sparse_listed as in_triton
from dayzero.view import Paged

__all__ = ["check_machine", "sparse_by_load", "sparse_listed"]

SEGMENTS = 4  # of the list of a row of one token, where results have to be the same in any company
WIDTH, VALUE, HEAD_TILE, RECORD = 576, 512, 64, "mla_fp8_656"
_THREADS = 384
_SHARED_BYTES = 3 * 64 * 2 * WIDTH + 1024 + 7168  # queries, two tiles; alignment; barriers and running maxima
# Sums that a block puts aside: of two segments, 64 heads each, with maxima and totals. No Hopper has more than 144
# multiprocessors, each of which runs one block at a time.
_SCRATCH = 144 * 2 * (128 + 4) * 256
# Clusters of so many blocks that run at once on an H200; its 132 multiprocessors are in groups that none may straddle.
_CLUSTERS = {2: 66, 3: 39, 4: 30, 8: 15}


class _Arguments(ctypes.Structure):
    """``Call`` of the kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "rows", "listed", "table", "first", "query_start", "sinks", "out",
                                               "lse", "scratch")),
        *((name, ctypes.c_int64) for name in ("block_bytes", "listed_stride", "q_token", "q_head", "q_column")),
        *((name, ctypes.c_int32) for name in ("first_token", "num_rows", "heads", "width", "table_stride",
                                              "page_shift")),
        ("scale", ctypes.c_float),
    )  # fmt: skip


def _fits(
    q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor, value_dim: int, softcap: float | None
) -> bool:
    """Whether the kernel is made for these: addresses in steps of 16 bytes, pages of a power of two."""
    rows = keys.rows
    right = rows.dtype == torch.bfloat16 and rows.shape[2:] == (1, WIDTH) if keys.codec is None else (
        keys.record == RECORD
    )  # fmt: skip
    aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) * rows.element_size() % 16 == 0
    return (
        right and aligned and values is None and softcap is None and value_dim == VALUE
        and q_THD.shape[2] == WIDTH and q_THD.dtype in (torch.bfloat16, torch.float32)
        and keys.page & (keys.page - 1) == 0 and listed_TN.stride(1) == 1 and keys.table.stride(1) == 1
    )  # fmt: skip


def sparse_listed(
    q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """``attention.sparse``: (out [T, H, V] in q's dtype, lse [T, H] f32). Queries in float32 are rounded to bf16 where
    rows are bf16 or codes. A row's results are the same, to the bit, whatever rows are beside it."""
    return _listed(fixed_split, q_THD, keys, values, listed_TN, **options)


def sparse_by_load(
    q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """The same, faster: a list is split into as many pieces as there is room for, so that a row's last bits depend on
    how many rows are beside it."""
    return _listed(free_split, q_THD, keys, values, listed_TN, **options)


def fixed_split(tasks: int) -> tuple[int, int]:
    """(segments, blocks that share them) of one query and 64 heads, where there are so many of these: as many blocks as
    run at once."""
    return SEGMENTS, next((parts for parts in (4, 2) if tasks <= _CLUSTERS[parts]), 1)


def free_split(tasks: int) -> tuple[int, int]:
    """As ``fixed_split``, each block with one segment."""
    parts = next((parts for parts in (8, 4, 3, 2) if tasks <= _CLUSTERS[parts]), 1)
    return parts, parts


def _listed(
    split: Callable[[int], tuple[int, int]], q_THD: Tensor, keys: Paged, values: Paged | None, listed_TN: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    value_dim, softcap, sinks_H = (options.get(name) for name in ("value_dim", "softcap", "sinks_H"))
    if not _fits(q_THD, keys, values, listed_TN, value_dim or 0, softcap):
        return in_triton(q_THD, keys, values, listed_TN, **options)
    num, heads = q_THD.shape[:2]
    out_THV = q_THD.new_empty(num, heads, VALUE)
    lse_TH = q_THD.new_empty((num, heads), dtype=torch.float32)
    sinks = None if sinks_H is None else sinks_H.float().contiguous()
    tensors = (q_THD, keys.rows, listed_TN, keys.table, keys.first, keys.query_start)
    arguments = _Arguments(
        *(x.data_ptr() for x in tensors), 0 if sinks is None else sinks.data_ptr(), out_THV.data_ptr(),
        lse_TH.data_ptr(), 0, keys.rows.stride(0) * keys.rows.element_size(), listed_TN.stride(0), *q_THD.stride(), 0,
        keys.table.shape[0], heads, listed_TN.shape[1], keys.table.stride(0), keys.page.bit_length() - 1,
        options["scale"],
    )  # fmt: skip
    single = next((span.first for span in keys.spans if span.count != 1), num)
    blocks = -(-heads // HEAD_TILE)
    for first, end in ((0, single), (single, num)):
        if end > first:
            tasks = (end - first) * blocks
            segments, parts = split(tasks) if first < single else (1, 1)
            scratch = lse_TH.new_empty(_SCRATCH if segments > parts else 0)
            arguments.first_token, arguments.scratch = first, scratch.data_ptr()
            defines = {"FP8": int(keys.codec is not None), "WIDE": int(q_THD.dtype == torch.float32)}
            # Histories of many rows do not fit the L2 cache together; a chunk's does.
            defines |= {"SEGMENTS": segments, "PARTS": parts, "AHEAD": int(first < single and parts < 4)}
            kernel = load("sparse_attention.cu", "sparse_attention", defines=defines, shared_bytes=_SHARED_BYTES)
            kernel((tasks * parts,), _THREADS, (arguments,), cluster=parts, overlap=True)
    return out_THV, lse_TH
