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
from dayzero.ops.cuda.tensor_map import can_map, in_pieces_of_16, is_page, map_of, map_of_heads
from dayzero.view import Paged

TILE = 128
GROUPS = {64: 3, 128: 2}  # computing warpgroups by width: as many as have registers
STAGES = {64: 4, 128: 3}  # tiles of keys, and of values, in shared memory
_PTR, _I32 = ctypes.c_void_p, ctypes.c_int32


class _Call(ctypes.Structure):
    _fields_ = (
        [(n, _PTR) for n in ("table", "first", "query_start", "start", "sinks", "out", "lse", "taken")]
        + [(n, _I32) for n in ("num_rows", "heads", "key_heads", "table_stride", "page_shift", "window", "num_blocks")]
        + [("scale", ctypes.c_float)]
    )


def takes(q_THD: Tensor, keys: Paged, values: Paged) -> bool:
    """Whether the kernel reads such rows: bf16, keys as wide as values, 64 or 128, pages as in ``is_page``."""
    rows = keys.rows
    if keys.codec is not None or values.codec is not None:
        return False
    # How many blocks there are is another matter: two needs of one pool differ in it, as their places in a block do.
    fits = rows.dim() == 4 and rows.shape[1:] == values.rows.shape[1:]
    fits = fits and rows.shape[3] in GROUPS and is_page(rows.shape[1])
    few = q_THD.shape[1] // rows.shape[2] <= 64
    return fits and few and can_map(rows) and can_map(values.rows) and q_THD.dtype == torch.bfloat16


def chunks(
    q_THD: Tensor, keys: Paged, values: Paged, out_THD: Tensor, lse_TH: Tensor, options: Mapping[str, Any]
) -> None:
    """Write out and lse of all rows that have several tokens, leave others alone. options: scale, window, sinks_H."""
    q_THD = in_pieces_of_16(q_THD)
    _, page, key_heads, width = keys.rows.shape
    heads, groups, stages = q_THD.shape[1], GROUPS[width], STAGES[width]
    group, queries = heads // key_heads, 64 * groups
    tokens = queries // group
    num_blocks = sum(-(-span.count // tokens) for span in keys.spans if span.count > 1)
    window, sinks_H = options["window"], options["sinks_H"]
    sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
    taken = torch.zeros(1, dtype=torch.int32, device=q_THD.device)
    call = _Call(
        keys.table.data_ptr(), keys.first.data_ptr(), keys.query_start.data_ptr(), keys.start.data_ptr(),
        None if sinks_H is None else sinks_H.data_ptr(), out_THD.data_ptr(), lse_TH.data_ptr(), taken.data_ptr(),
        keys.start.shape[0], heads, key_heads, keys.table.stride(0), page.bit_length() - 1, window or 0, num_blocks,
        options["scale"],
    )  # fmt: skip
    defines = {"WIDTH": width, "GROUP": group, "GROUPS": groups, "STAGES": stages, "WINDOW": int(window is not None)}
    shared = (queries + 2 * stages * TILE) * width * 2 + 1024 + 512  # and alignment, barriers
    kernel = load("paged_prefill.cu", "paged_prefill", defines=defines, shared_bytes=shared)
    maps = map_of_heads(q_THD, group, tokens), map_of(keys.rows, TILE), map_of(values.rows, TILE)
    most = torch.cuda.get_device_properties(q_THD.device).multi_processor_count
    kernel((min(most, num_blocks * key_heads),), 128 * (groups + 1), (*maps, call))
