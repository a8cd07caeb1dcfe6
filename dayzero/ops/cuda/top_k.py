"""The k largest scores of each query as ascending rows, exact, in one launch: see ``top_k.cu``.

T queries, L keys, K listed rows.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.cuda.build import check_machine as check_machine
from dayzero.ops.cuda.build import load

_THREADS, _WARPS = 1024, 32
_CACHED, _LISTED = 512, 256  # keys and candidates of a warp in shared memory
_SENT = 12_288  # candidates that a cluster's blocks may send each other
_SHARED = 33_280  # bytes of the counts and what else a block shares
FINE = 0  # see top_k.cu
_BLOCK_KEYS = 2048  # a cluster gets no more blocks than give each so many keys
_MOST = 8  # blocks of a cluster that every card of this kind can place


@dataclass(frozen=True, slots=True)
class Queries:
    """Where the queries stand: at ``first`` + query, or, where starts are given, as the step's rows say. first_query:
    number in the step of the first of them."""

    first: int = 0
    first_query: int = 0
    query_start: Tensor | None = None
    start: Tensor | None = None


def blocks_of_a_query(queries: int, keys: int, processors: int) -> int:
    """A power of two: as many as run at once, each with enough keys to be worth it. A part of the multiprocessors is
    left out of account: clusters have to lie within groups of them, which they do not fill."""
    most = max(1, min(processors * 7 // 8 // max(1, queries), keys // _BLOCK_KEYS, _MOST))
    return 1 << (most.bit_length() - 1)


def choose(
    scores_TL: Tensor, out_TK: Tensor, queries: Queries, *, sinks: int = 0, window: int = 0, tail: int = 0,
    maxima_TG: Tensor | None = None,
) -> None:  # fmt: skip
    """Write each query's list to ``out_TK`` (int64, contiguous). scores: f32 with rows of stride 1; what lies behind a
    query's own position is not read. maxima: the largest of every 16 scores, NaN only where all are."""
    num_queries, num_keys = scores_TL.shape
    assert scores_TL.dtype == torch.float32 and out_TK.is_contiguous() and out_TK.dtype == torch.int64
    processors = torch.cuda.get_device_properties(scores_TL.device).multi_processor_count
    cluster = blocks_of_a_query(num_queries, num_keys, processors)
    defines = {
        "CLUSTER": cluster, "CACHED": _CACHED, "LISTED": _LISTED, "SENT": _SENT // cluster, "FINE": FINE,
        "MAXIMA": int(maxima_TG is not None),
    }  # fmt: skip
    kernel = load(
        "top_k.cu", "top_k", defines=defines,
        shared_bytes=_SHARED + FINE * 8192 + 4 * _WARPS * (_CACHED + 2 * _LISTED) + 4 * _SENT,
    )  # fmt: skip
    rows = 0 if queries.start is None else queries.start.shape[0]
    arguments: list[Any] = [
        scores_TL, ctypes.c_int64(scores_TL.stride(0)), num_keys, out_TK, out_TK.shape[1], queries.query_start,
        queries.start, rows, queries.first_query, queries.first, sinks, window, tail, maxima_TG,
        ctypes.c_int64(0 if maxima_TG is None else maxima_TG.stride(0)),
    ]  # fmt: skip
    kernel((num_queries * cluster,), _THREADS, arguments, cluster=cluster, overlap=True)


def top_k(
    scores_TL: Tensor, k: int, *, start: int, order: str = "position", sinks: int = 0, window: int = 0, tail: int = 0
) -> Tensor:  # fmt: skip
    """``sparse_index.top_k``."""
    out_TK = torch.empty(scores_TL.shape[0], k, dtype=torch.int64, device=scores_TL.device)
    if out_TK.numel() == 0:
        return out_TK
    whole_TL = scores_TL.float()
    whole_TL = whole_TL if whole_TL.stride(1) == 1 else whole_TL.contiguous()
    choose(whole_TL, out_TK, Queries(start), sinks=sinks, window=window, tail=tail)
    return out_TK if order == "position" else _best_first(out_TK, whole_TL, start, sinks, window, tail)


def _best_first(rows_TK: Tensor, scores_TL: Tensor, start: int, sinks: int, window: int, tail: int) -> Tensor:
    """The same rows, the highest score first. They come in ascending order, which a stable sort keeps on ties."""
    own_T1 = torch.arange(start, start + rows_TK.shape[0], device=rows_TK.device)[:, None]
    forced_TK = (rows_TK < sinks) | (rows_TK > own_T1 - window)
    if tail:
        forced_TK |= rows_TK >= (own_T1 + 1) // tail * tail
    keyed_TK = scores_TL.gather(1, rows_TK.clamp(min=0)) + 0.0  # -0.0 + 0.0 is 0.0
    keyed_TK = keyed_TK.masked_fill(forced_TK, torch.inf).masked_fill(rows_TK < 0, -torch.inf)
    return rows_TK.gather(1, torch.sort(keyed_TK, dim=1, descending=True, stable=True).indices)
