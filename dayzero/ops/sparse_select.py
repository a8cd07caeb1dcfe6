"""Index generators a tile of keys at a time: the same lists as the references, without scores of all keys at once.

Candidates are kept as 64-bit keys that hold the score above and the complement of the row below, so that no two are
equal, and any top-k of integers gives the one right set: the higher score, then the lower row. Scores are summed in
float64 and rounded once, as in the reference. T queries of a block, H heads, D index width, L rows of a tile, S pool
size, K listed rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dayzero.ops import tiles
from dayzero.ops.attention import NEGATIVE_INFINITY
from dayzero.ops.sparse_index import Pooling, ascending, best_of_pools, pooled_keys, query_blocks
from dayzero.view import Paged, Span

_NONE = torch.iinfo(torch.int64).min
_LOW = (1 << 32) - 1


def pack(scores_TL: Tensor, first: int) -> Tensor:
    """int64 keys that sort by (score, -row): f32 scores of rows ``first`` on; -inf and NaN give the least of all."""
    bits_TL = (scores_TL + 0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    bits_TL ^= (bits_TL >> 31).bitwise_and_(0x7FFFFFFF)  # of negative numbers the larger bits are the lower score
    rows_L = torch.arange(first, first + scores_TL.shape[1], device=scores_TL.device)
    keys_TL = bits_TL.long().bitwise_left_shift_(32).add_(_LOW - rows_L)
    return keys_TL.masked_fill_(~(scores_TL > NEGATIVE_INFINITY), _NONE)  # a NaN is not larger


def unpack(keys_TK: Tensor) -> Tensor:
    """The rows of ``pack``; -1 for the least key."""
    return (_LOW - (keys_TK & _LOW)).masked_fill_(keys_TK == _NONE, -1)


def running_top_k(num_queries: int, k: int, num_rows: int, step: int, scores: Callable[[int, int], Tensor]) -> Tensor:
    """[T, k] int64 rows, ascending: the best of ``num_rows`` by scores(begin, end) [T, end - begin] f32.

    step: rows that ``scores`` is asked for at once.
    """
    merge = max(step, tiles.MERGE_KEYS // step * step)
    held_TC: Tensor | None = None  # the best so far, then candidates
    filled = 0
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        if held_TC is not None and filled + end - begin > held_TC.shape[1]:
            held_TC[:, :k] = held_TC[:, :filled].topk(k, dim=1, sorted=False).values
            filled = k
        scores_TL = scores(begin, end)
        if held_TC is None:
            held_TC = scores_TL.new_empty(num_queries, min(num_rows, k + merge), dtype=torch.int64)
        held_TC[:, filled : filled + end - begin] = pack(scores_TL, begin)
        filled += end - begin
        del scores_TL  # before the next tile is made
    if held_TC is None:
        return torch.full((num_queries, k), -1, dtype=torch.int64)
    best_TK = held_TC[:, :filled].topk(min(k, filled), dim=1, sorted=False).values
    del held_TC
    rows_TK = ascending(unpack(best_TK))
    return torch.nn.functional.pad(rows_TK, (0, k - rows_TK.shape[1]), value=-1)


def weighted_scores(q_HTD: Tensor, k_LD: Tensor, weights_HT: Tensor) -> Tensor:
    """[T, L] f32 of f64 inputs: sum over heads of w * relu(q.k). Products never exceed [QUERIES, L] or one head's."""
    heads, num_queries = weights_HT.shape
    k_DL = k_LD.T
    s_TL = k_LD.new_zeros(num_queries, k_LD.shape[0])
    at_once = max(1, tiles.QUERIES // max(1, num_queries))
    for first in range(0, heads, at_once):
        some = slice(first, first + at_once)
        p_HTL = (q_HTD[some].flatten(0, 1) @ k_DL).relu_().unflatten(0, (-1, num_queries))
        if at_once == 1:
            s_TL.addcmul_(p_HTL[0], weights_HT[first][:, None])
        else:
            s_TL += p_HTL.mul_(weights_HT[some, :, None]).sum(0)
        del p_HTL  # before the next one is made
    return s_TL.float()


def _block(q_THD: Tensor, weights_TH: Tensor, rows: slice, scale: float) -> tuple[Tensor, Tensor]:
    """(q [H, T, D], weights * scale [H, T]) of some queries in f64."""
    return q_THD[rows].transpose(0, 1).double().contiguous(), weights_TH[rows].T.double() * scale


def tokens_tiled(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, *, scale: float, k: int, sinks: int = 0, window: int = 0
) -> Tensor:
    """``sparse_index.tokens``."""
    device = q_THD.device
    out_TK = torch.empty(q_THD.shape[0], k, dtype=torch.int64, device=device)
    for span, rows, start in query_blocks(keys, tiles.QUERIES):
        end = start + rows.stop - rows.start
        q_HTD, weights_HT = _block(q_THD, weights_TH, rows, scale)
        own_T1 = torch.arange(start, end, device=device)[:, None]

        def scores(begin: int, stop: int, span: Span = span, q: Tensor = q_HTD, w: Tensor = weights_HT,
                   own_T1: Tensor = own_T1, start: int = start) -> Tensor:  # fmt: skip
            s_TL = weighted_scores(q, keys.part(span, begin, stop).double(), w)
            if begin < sinks or stop > start - window:  # all other tiles hold past rows only, none of them forced
                rows_L = torch.arange(begin, stop, device=device)
                forced_TL = ((rows_L < sinks) | (rows_L > own_T1 - window)) & (s_TL > NEGATIVE_INFINITY)
                s_TL = s_TL.masked_fill_(forced_TL, torch.inf).masked_fill_(rows_L > own_T1, NEGATIVE_INFINITY)
            return s_TL

        out_TK[rows] = running_top_k(rows.stop - rows.start, k, end, tiles.KEYS, scores)
    return out_TK


def pool_tiled(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, pooling: Pooling, *, scale: float, pools: int
) -> Tensor:  # fmt: skip
    """``sparse_index.pool``."""
    device, size, gates, bias_SD = q_THD.device, pooling.size, pooling.gates, pooling.bias_SD
    out_TK = torch.empty(q_THD.shape[0], pooling.width(pools), dtype=torch.int64, device=device)
    for span, rows, start in query_blocks(keys, tiles.QUERIES):
        end = start + rows.stop - rows.start
        q_HTD, weights_HT = _block(q_THD, weights_TH, rows, scale)
        own_T = torch.arange(start, end, device=device)

        def scores(begin: int, stop: int, span: Span = span, q: Tensor = q_HTD, w: Tensor = weights_HT,
                   own_T: Tensor = own_T, end: int = end) -> Tensor:  # fmt: skip
            places = (begin * size, min(stop * size, end))
            k_LD = keys.part(span, *places).double()
            if gates is not None and bias_SD is not None:
                s_TP = weighted_scores(q, pooled_keys(k_LD, gates.part(span, *places), bias_SD), w)
            else:
                rows_L = torch.arange(*places, device=device)
                s_TL = weighted_scores(q, k_LD, w).masked_fill_(rows_L > own_T[:, None], NEGATIVE_INFINITY)
                s_TP = best_of_pools(s_TL, size)
            return pooling.judged(s_TP, own_T, begin)

        step = max(1, tiles.KEYS // size)
        chosen_TP = running_top_k(rows.stop - rows.start, pools, pooling.count(end), step, scores)
        out_TK[rows] = pooling.expanded(chosen_TP.to(device), own_T)
    return out_TK
