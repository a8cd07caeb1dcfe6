"""Attention of chunks of queries over pages of keys and values, both 64 or 128 wide, bf16.

T tokens, H query heads, K key heads, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.cuda.build import load
from dayzero.ops.cuda.tensor_map import can_map, is_page, map_of
from dayzero.view import Paged

TILE = 128
GROUPS = {64: 3, 128: 2}  # computing warpgroups by width: as many as have registers
_PTR, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Call(ctypes.Structure):
    _fields_ = (
        [(n, _PTR) for n in ("q", "table", "first", "query_start", "start", "sinks", "out", "lse")]
        + [(n, _I64) for n in ("q_token", "q_head")]
        + [(n, _I32) for n in ("num_rows", "heads", "key_heads", "table_stride", "page_shift", "window", "num_blocks")]
        + [("scale", ctypes.c_float)]
    )


def takes(q_THD: Tensor, keys: Paged, values: Paged) -> bool:
    """Whether the kernel reads such rows: bf16, keys as wide as values, 64 or 128, pages as in ``is_page``."""
    rows = keys.rows
    if keys.codec is not None or values.codec is not None:
        return False
    fits = rows.dim() == 4 and rows.shape == values.rows.shape and rows.shape[3] in GROUPS and is_page(rows.shape[1])
    few = q_THD.shape[1] // rows.shape[2] <= 64
    return fits and few and can_map(rows) and can_map(values.rows) and q_THD.dtype == torch.bfloat16


def chunks(
    q_THD: Tensor, keys: Paged, values: Paged, out_THD: Tensor, lse_TH: Tensor, options: Mapping[str, Any],
    groups: int = 0,
) -> None:  # fmt: skip
    """Write out and lse of all rows that have several tokens, leave others alone. options: scale, window, sinks_H."""
    if q_THD.stride(2) != 1 or q_THD.stride(0) % 8 or q_THD.stride(1) % 8 or q_THD.data_ptr() % 16:
        q_THD = q_THD.contiguous()
    _, page, key_heads, width = keys.rows.shape
    heads, groups = q_THD.shape[1], groups or GROUPS[width]
    group, queries = heads // key_heads, 64 * groups
    tokens = queries // group
    num_blocks = sum(-(-span.count // tokens) for span in keys.spans if span.count > 1)
    window, sinks_H = options["window"], options["sinks_H"]
    sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
    call = _Call(
        q_THD.data_ptr(), keys.table.data_ptr(), keys.first.data_ptr(), keys.query_start.data_ptr(),
        keys.start.data_ptr(), None if sinks_H is None else sinks_H.data_ptr(), out_THD.data_ptr(), lse_TH.data_ptr(),
        q_THD.stride(0), q_THD.stride(1), keys.start.shape[0], heads, key_heads, keys.table.stride(0),
        page.bit_length() - 1, window or 0, num_blocks, options["scale"],
    )  # fmt: skip
    defines = {"WIDTH": width, "GROUP": group, "GROUPS": groups, "WINDOW": int(window is not None)}
    shared = (queries + 4 * TILE) * width * 2 + 1024 + 256
    kernel = load("paged_prefill.cu", "paged_prefill", defines=defines, shared_bytes=shared)
    maps = map_of(keys.rows, TILE), map_of(values.rows, TILE)
    kernel((num_blocks * key_heads,), 128 * (groups + 1), (*maps, call))
