"""Attention of rows of one token over pages of keys and values, both 64 or 128 wide, bf16, up to 8 query heads on a key
head: parts of a row's keys, and their merging. Two launches.

T tokens, H query heads, K key heads, D width.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.cuda.build import load
from dayzero.ops.cuda.tensor_map import in_pieces_of_16
from dayzero.view import Paged

SPLITS, LEAST = 16, 256  # a row has at most so many parts, of at least so many keys
WARPS, KEYS = 4, 16  # of a block; keys of a warp's tile
RESIDENT = {64: 6, 128: 4}  # blocks of a multiprocessor by width: as many as have registers
MOST_HEADS = 8  # that share a key head: columns of a matrix product
TRIED = {"NEAREST": 0, "FUSED": 0, "OVERLAP": 0}  # see paged_decode.cu
MOST_SHARED = 227 << 10  # bytes of shared memory that a block may have
_SINKS = {torch.float32: 1, torch.bfloat16: 2}
_PTR, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Call(ctypes.Structure):
    _fields_ = (
        [(n, _PTR) for n in ("q", "keys", "values", "table", "first", "query_start", "start", "sinks")]
        + [(n, _PTR) for n in ("out", "lse", "parts", "part_lses", "done")]
        + [(n, _I64) for n in ("q_token", "q_head", "key_block", "key_row", "key_head")]
        + [(n, _I64) for n in ("value_block", "value_row", "value_head")]
        + [(n, _I32) for n in ("num_rows", "heads", "key_heads", "table_stride", "page_shift", "window", "max_splits")]
        + [("scale", ctypes.c_float)]
    )


def takes(q_THD: Tensor, keys: Paged) -> bool:
    """Whether the kernels read such rows, which ``paged_prefill.takes``: up to 8 query heads on a key head, and no more
    rows than a block's shared memory has room to order."""
    return q_THD.shape[1] <= MOST_HEADS * keys.rows.shape[2] and _shared_bytes(q_THD, keys) <= MOST_SHARED


def _shared_bytes(q_THD: Tensor, keys: Paged) -> int:
    group, num_rows = q_THD.shape[1] // keys.rows.shape[2], keys.start.shape[0]
    room = max(256, 1 << (num_rows - 1).bit_length())  # few sizes, as each is a kernel of its own
    return WARPS * (group * (keys.rows.shape[3] + 4) * 4 + 64 + 4) + 4 + 8 * room


@cache
def _done(device: torch.device, num: int) -> Tensor:
    """So many zeros, which every launch leaves as such: launches that use them may not run at once."""
    return torch.zeros(num, dtype=torch.int32, device=device)


def decode(
    q_THD: Tensor, keys: Paged, values: Paged, out_THD: Tensor, lse_TH: Tensor, options: Mapping[str, Any]
) -> None:
    """Write out and lse of all rows that have one token, leave others alone. options: scale, window, sinks_H.

    Only shapes decide what is launched: it can be captured in a graph.
    """
    q_THD = in_pieces_of_16(q_THD)
    num_rows, heads = keys.start.shape[0], q_THD.shape[1]
    _, page, key_heads, width = keys.rows.shape
    group, resident = heads // key_heads, RESIDENT[width]
    window, sinks_H = options["window"], options["sinks_H"]
    if sinks_H is not None:
        sinks_H = sinks_H.contiguous() if sinks_H.dtype in _SINKS else sinks_H.float().contiguous()
    longest = keys.table.shape[1] * page
    if window is not None:
        longest = min(longest, window + KEYS)
    max_splits = max(1, min(SPLITS, -(-longest // LEAST)))
    held = max_splits if max_splits > 1 else 0
    parts = torch.empty(num_rows, heads, held, width, dtype=torch.float32, device=q_THD.device)
    part_lses = torch.empty(num_rows, heads, held, dtype=torch.float32, device=q_THD.device)
    call = _Call(
        *(x.data_ptr() for x in (q_THD, keys.rows, values.rows, keys.table, keys.first, keys.query_start, keys.start)),
        None if sinks_H is None else sinks_H.data_ptr(),
        *(x.data_ptr() for x in (out_THD, lse_TH, parts, part_lses)),
        _done(q_THD.device, 1 << (num_rows * key_heads).bit_length()).data_ptr() if TRIED["FUSED"] else None,
        q_THD.stride(0), q_THD.stride(1), *keys.rows.stride()[:3], *values.rows.stride()[:3],
        num_rows, heads, key_heads, keys.table.stride(0), page.bit_length() - 1, window or 0, max_splits,
        options["scale"],
    )  # fmt: skip
    defines = {
        "WIDTH": width, "GROUP": group, "WINDOW": int(window is not None),
        "SINKS": 0 if sinks_H is None else _SINKS[sinks_H.dtype],
        "SPLITS": SPLITS, "LEAST": LEAST, "WARPS": WARPS, "RESIDENT": resident, **TRIED,
    }  # fmt: skip
    most = torch.cuda.get_device_properties(q_THD.device).multi_processor_count * resident
    kernel = load("paged_decode.cu", "paged_decode", defines=defines, shared_bytes=_shared_bytes(q_THD, keys))
    kernel((min(most, num_rows * key_heads * max_splits),), 32 * WARPS, (call,), overlap=bool(TRIED["OVERLAP"]))
    if max_splits > 1 and not TRIED["FUSED"]:
        merge = load("paged_decode.cu", "paged_decode_merge", defines=defines)
        merge((-(-num_rows * heads // 4),), 128, (call,), overlap=True)
