"""``sparse_index.tokens``, in two launches a round, and ``sparse_index.pool``: scores (``index_score.cu`` where every
row has one query, else in Triton), and the best of them (``top_k.cu``).

T queries, H index heads, D index width, L keys, P pools, K listed rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.cuda.build import check_machine as check_machine
from dayzero.ops.cuda.index_score import MOST_QUERIES, fits, score_single
from dayzero.ops.cuda.top_k import Queries
from dayzero.ops.cuda.top_k import choose as choose_best
from dayzero.ops.sparse_index import Pooling
from dayzero.ops.triton.sparse_index import pools_by, rounds, score_rows
from dayzero.view import Paged

MAXIMA = False  # whether the scores' kernel also writes the largest of every 16, which the choice then begins with


def tokens(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, *, scale: float, k: int, sinks: int = 0, window: int = 0
) -> Tensor:
    """``sparse_index.tokens``. Scores are summed in f32, so that rows whose scores differ by less than that may change
    places at the cut; what is chosen from them is exact."""

    maxima: list[Tensor | None] = [None]

    def score(scores_TL: Tensor, first: int) -> None:
        if MAXIMA and _single(q_THD, keys):
            maxima[0] = scores_TL.new_empty(scores_TL.shape[0], -(-scores_TL.shape[1] // 16))
        score_queries(q_THD, weights_TH, keys, scores_TL, scale=scale, first_query=first, maxima_TG=maxima[0])

    def choose(scores_TL: Tensor, lists_TK: Tensor, first: int) -> None:
        queries = Queries(first_query=first, query_start=keys.query_start, start=keys.start)
        choose_best(scores_TL, lists_TK, queries, sinks=sinks, window=window, maxima_TG=maxima[0])

    return rounds(q_THD, keys, k, score, choose)


def pool(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, pooling: Pooling, *, scale: float, pools: int
) -> Tensor:  # fmt: skip
    """``sparse_index.pool`` without gates; scores as in ``tokens``. What lies between scores and choice is torch's."""
    assert pooling.gates is None, "gated keys are not for this variant"

    def score(scores_TL: Tensor, first: int) -> None:
        score_queries(q_THD, weights_TH, keys, scores_TL, scale=scale, first_query=first)

    def choose(scores_TP: Tensor, lists_TK: Tensor) -> None:
        choose_best(scores_TP, lists_TK, Queries(first=scores_TP.shape[1]))

    return pools_by(q_THD, keys, pooling, pools, score, choose)


def _single(q_THD: Tensor, keys: Paged) -> bool:
    return q_THD.shape[0] == keys.start.shape[0] and fits(q_THD, keys)


def score_queries(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, scores_TL: Tensor, *, scale: float, first_query: int,
    maxima_TG: Tensor | None = None,
) -> None:  # fmt: skip
    """Write to scores_TL (f32) what queries from ``first_query`` on score, for keys up to their own positions; maxima
    as in ``score_single``, where that one is taken."""
    if not _single(q_THD, keys):
        score_rows(q_THD, weights_TH, keys, scores_TL, scale=scale, first_query=first_query)
        return
    if q_THD.stride(2) != 1 or q_THD.stride(0) % 8 or q_THD.stride(1) % 8 or q_THD.data_ptr() % 16:
        q_THD = q_THD.clone(memory_format=torch.contiguous_format)  # the kernel loads 16 bytes at a time
    for begin in range(0, scores_TL.shape[0], MOST_QUERIES):
        here = slice(begin, min(begin + MOST_QUERIES, scores_TL.shape[0]))
        some = slice(first_query + here.start, first_query + here.stop)
        score_single(
            q_THD[some], weights_TH[some], keys, scores_TL[here], scale=scale, first_row=some.start,
            maxima_TG=None if maxima_TG is None else maxima_TG[here],
        )  # fmt: skip
