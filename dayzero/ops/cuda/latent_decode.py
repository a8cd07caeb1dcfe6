"""Attention over latent rows of 512 + 64 numbers, which all query heads share: rows of one token and chunks alike.

Records are bf16, or of 656 bytes (``mla_fp8_656``): e4m3 codes with scales, and 64 bf16 numbers.

T tokens, H query heads, R latent width (512), P shared key width (64), C = R + P, S parts.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dayzero.ops.cuda.build import load
from dayzero.ops.cuda.tensor_map import TensorMap, can_map, in_pieces_of_16, is_page, map_of
from dayzero.view import Paged

WIDTH, VALUE = 576, 512
RECORD, RECORD_BYTES = "mla_fp8_656", 656
TILE, HEADS, THREADS, MERGING = 64, 64, 384, 128
LEAST_TILES = 4  # of a part
_SHARED = 3 * TILE * WIDTH * 2 + 1024 + 2048
_PTR, _I64, _I32 = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32


class _Call(ctypes.Structure):
    _fields_ = (
        [(n, _PTR) for n in ("q", "codes", "table", "first", "query_start", "start", "sinks")]
        + [(n, _PTR) for n in ("out", "lse", "parts", "part_lses")]
        + [(n, _I64) for n in ("q_token", "q_head", "block_bytes")]
        + [(n, _I32) for n in ("num_rows", "heads", "table_stride", "page_shift", "parts_each", "least_tiles")]
        + [("scale", ctypes.c_float)]
    )


def takes(q_THC: Tensor, keys: Paged, value_dim: int) -> bool:
    """Whether these kernels read such rows: one head of 576 numbers, the values 512, pages as in ``is_page``."""
    rows = keys.rows
    fits = tuple(keys.shape) == (1, WIDTH) and value_dim == VALUE and is_page(rows.shape[1])
    if not fits or q_THC.dtype not in (torch.float32, torch.bfloat16):
        return False
    if keys.codec is None:
        return can_map(rows)
    return _is_coded(keys) and rows.shape[2:] == (RECORD_BYTES,) and rows.data_ptr() % 16 == rows.stride(0) % 16 == 0


def _is_coded(keys: Paged) -> bool:
    return keys.record == RECORD


def latent(
    q_THC: Tensor, keys: Paged, *, scale: float, sinks_H: Tensor | None = None, parts: int = 0
) -> tuple[Tensor, Tensor]:
    """(out [T, H, R] in q's dtype, lse [T, H] f32): each query over all rows of its sequence up to its own.

    parts: in how many a row is split at most; 0: so many that the device is busy.
    """
    tokens, heads = q_THC.shape[:2]
    q_THC = in_pieces_of_16(q_THC)
    out_THR = q_THC.new_empty(tokens, heads, VALUE)
    lse_TH = torch.empty(tokens, heads, dtype=torch.float32, device=q_THC.device)
    if tokens == 0:
        return out_THR, lse_TH
    blocks, page = tokens * -(-heads // HEADS), keys.rows.shape[1]
    processors = torch.cuda.get_device_properties(q_THC.device).multi_processor_count
    longest = -(-keys.table.shape[1] * page // TILE)
    parts = max(1, min(parts or processors // blocks, -(-longest // LEAST_TILES), MERGING))
    part_THSR = torch.empty(tokens, heads, parts if parts > 1 else 0, VALUE, dtype=torch.float32, device=q_THC.device)
    lse_THS = torch.empty(part_THSR.shape[:3], dtype=torch.float32, device=q_THC.device)
    sinks_H = None if sinks_H is None else sinks_H.float().contiguous()
    call = _Call(
        *(x.data_ptr() for x in (q_THC, keys.rows, keys.table, keys.first, keys.query_start, keys.start)),
        None if sinks_H is None else sinks_H.data_ptr(), out_THR.data_ptr(), lse_TH.data_ptr(),
        part_THSR.data_ptr(), lse_THS.data_ptr(), q_THC.stride(0), q_THC.stride(1), keys.rows.stride(0),
        keys.start.shape[0], heads,
        keys.table.stride(0), page.bit_length() - 1, parts, LEAST_TILES, scale,
    )  # fmt: skip
    defines = {"FP8": int(_is_coded(keys)), "WIDE": int(q_THC.dtype == torch.float32)}
    boxes = TensorMap() if _is_coded(keys) else map_of(keys.rows, TILE)
    run = load("latent_decode.cu", "latent_decode", defines=defines, shared_bytes=_SHARED)
    run((blocks * parts,), THREADS, (boxes, call))
    if parts > 1:
        load("latent_decode.cu", "latent_merge", defines=defines)((tokens * heads,), MERGING, (call,), overlap=True)
    return out_THR, lse_TH
