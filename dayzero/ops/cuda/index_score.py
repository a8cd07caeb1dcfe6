"""Scores of single queries over paged index keys, and the lists of their best: see ``index_score.cu``, ``top_k.cu``.

T queries, H index heads, D index width, L keys, K listed rows, R rows of the step.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.cuda.build import check_machine as check_machine
from dayzero.ops.cuda.build import load
from dayzero.view import Paged

MOST_QUERIES = 1024  # of one launch
_KINDS = {"": 0, "idx_fp8_128": 1, "idx_mxfp8_32": 2}
_WARPGROUPS, _TILE = 4, 64  # that multiply; keys of one of their tiles
_SHARED_BYTES = 226 << 10  # of a block, the ring of tiles with it


def fits(q_THD: Tensor, keys: Paged) -> bool:
    """Whether the kernel has these sizes; any others are for Triton."""
    heads, dim = q_THD.shape[1:]
    dims = (128,) if keys.record == "idx_mxfp8_32" else (64, 128)
    plain = keys.record != "" or keys.rows.dtype == torch.bfloat16
    right = q_THD.dtype == torch.bfloat16 and plain and keys.record in _KINDS
    whole = keys.page in (16, 32) or keys.page % _TILE == 0
    return right and heads % 8 == 0 and heads <= 128 and dim in dims and whole


def score_single(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, scores_TL: Tensor, *, scale: float, first_row: int = 0,
    maxima_TG: Tensor | None = None,
) -> None:  # fmt: skip
    """Write to scores_TL (f32) those of each query's visible keys, and to maxima_TG the largest of every 16 of them;
    the rest of a row is left as it is.

    Query t, of at most MOST_QUERIES, is the only one of the step's row first_row + t. ``fits`` has to hold.
    """
    queries, heads, dim = q_THD.shape
    rows = slice(first_row, first_row + queries)
    table, start = keys.table[rows], keys.start[rows]
    groups, kind = -(-heads // 64), _KINDS[keys.record]
    stage = _TILE * (2 * dim if kind == 0 else dim + 4)
    other = groups * 64 * (2 * dim + 4) + 4 * MOST_QUERIES + 16 * _WARPGROUPS + 256
    stages = (_SHARED_BYTES - other) // (stage + 16) // _WARPGROUPS * _WARPGROUPS
    defines = {
        "KIND": kind, "DIM": dim, "HEADS": heads, "PAGE": keys.page, "GROUPS": groups, "WARPGROUPS": _WARPGROUPS,
        "STAGES": stages, "MAXIMA": int(maxima_TG is not None),
    }  # fmt: skip
    kernel = load("index_score.cu", "score_single", defines=defines, shared_bytes=stages * (stage + 16) + other)
    processors = torch.cuda.get_device_properties(q_THD.device).multi_processor_count
    arguments: list[Any] = [
        q_THD, ctypes.c_int64(q_THD.stride(0)), ctypes.c_int64(q_THD.stride(1)),
        weights_TH, ctypes.c_int64(weights_TH.stride(0)), ctypes.c_int64(weights_TH.stride(1)),
        keys.rows, ctypes.c_int64(keys.rows.stride(0) * keys.rows.element_size()),
        table, ctypes.c_int64(table.stride(0)), start, queries, scale, scores_TL, ctypes.c_int64(scores_TL.stride(0)),
        maxima_TG, ctypes.c_int64(0 if maxima_TG is None else maxima_TG.stride(0)),
    ]  # fmt: skip
    kernel((processors,), 128 * (_WARPGROUPS + 1), arguments, overlap=True)
