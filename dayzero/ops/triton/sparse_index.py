"""``sparse_index.score`` over pages, in Triton: all heads of a tile of keys in one product, summed where they are made.

T queries, H index heads, D index width, L keys, K listed rows, R rows of a step. A program holds a tile of keys and
goes through some queries of one row. Scores of some queries at a time lie in a workspace of at most SCORE_BYTES; the
best of them are chosen there: by ``torch.topk`` of 64-bit keys here, by a kernel in CUDA C++ in ``cuda/sparse_index``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from dayzero.ops.attention import NEGATIVE_INFINITY
from dayzero.ops.sparse_index import Pooling, ascending, best_of_pools
from dayzero.ops.sparse_select import pack, unpack
from dayzero.ops.triton.machine import INTERPRETED, check_machine
from dayzero.view import Paged

__all__ = ["check_machine", "pool", "score_rows", "tokens"]

SCORE_BYTES = 512 << 20  # of the workspace of one round; a single query may take more
RECORDS = {"": 0, "idx_fp8_128": 1, "idx_mxfp8_32": 2}
_TILE = 256 if INTERPRETED else 128  # keys of a program
_QUERIES = 32  # of one row that a program goes through
Score = Callable[[Tensor, int], None]  # scores [T', L] to write, number of the first query
Choose = Callable[[Tensor, Tensor, int], None]  # scores [T', L], lists [T', K] to write, number of the first query


@triton.jit
def _keys_tile(pool, table_row, last, tile, block_bytes, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr,
               KIND: tl.constexpr, TILE: tl.constexpr, UPCAST: tl.constexpr):  # fmt: skip
    """(keys [TILE, DP], the factor of each key's scores [TILE]) of positions from tile * TILE on."""
    at = tl.minimum(tile * TILE + tl.arange(0, TILE), last)
    channel = tl.arange(0, DP)
    block = tl.load(table_row + at // PAGE).to(tl.int64)
    row = at % PAGE
    seen = channel[None, :] < D
    factor = tl.full((TILE,), 1.0, tl.float32)
    if KIND == 0:
        k = tl.load(pool + (block * block_bytes + row * D)[:, None] + channel[None, :], mask=seen, other=0.0)
    else:
        base = pool + block * block_bytes
        codes = tl.load(base[:, None] + (row * D)[:, None] + channel[None, :], mask=seen, other=0)
        k = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        if KIND == 1:
            per_row: tl.constexpr = (D + 127) // 128
            scales = (base + PAGE * D).to(tl.pointer_type(tl.float32)) + row * per_row
            if per_row == 1:
                factor = tl.load(scales)
            else:
                k *= tl.load(scales[:, None] + channel[None, :] // 128, mask=seen, other=0.0)
        else:
            per_block: tl.constexpr = (D + 31) // 32
            raw = tl.load((base + PAGE * D + row * per_block)[:, None] + channel[None, :] // 32, mask=seen, other=127)
            bits = raw.to(tl.int32)
            bits = tl.where(bits == 255, 0x7FC00000, tl.where(bits == 0, 0x400000, bits << 23))
            k *= bits.to(tl.float32, bitcast=True)
    if UPCAST or (KIND == 1 and D > 128):  # a key of several scales is exact in f32 only
        k = k.to(tl.float32)
    elif KIND > 0:
        k = k.to(tl.bfloat16)
    return k, factor


@triton.jit(do_not_specialize=["first_query", "end_query", "num_rows"])  # else compiled anew for multiples of 16
def _score(
    q, weights, pool, table, query_start, start, out, first_query, end_query, num_rows, block_bytes,
    q_t, q_h, q_d, w_t, w_h, table_r, out_t, scale,
    H: tl.constexpr, HP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, KIND: tl.constexpr,
    TILE: tl.constexpr, QUERIES: tl.constexpr, RP: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One (tile of keys, up to QUERIES queries of one row). Queries [first_query, end_query) of the step."""
    tile, group = tl.program_id(0), tl.program_id(1)
    rows = tl.arange(0, RP)
    begins = tl.load(query_start + rows, mask=rows < num_rows, other=0)
    ends = tl.load(query_start + rows + 1, mask=rows < num_rows, other=0)
    begins = tl.maximum(begins, first_query)
    ends = tl.maximum(tl.minimum(ends, end_query), begins)
    groups = (ends - begins + QUERIES - 1) // QUERIES
    after = tl.cumsum(groups, 0)
    row = tl.sum((after <= group).to(tl.int32))
    if row < num_rows:
        mine = rows == row
        first = tl.sum(tl.where(mine, begins + (group - after + groups) * QUERIES, 0))
        count = tl.minimum(QUERIES, tl.sum(tl.where(mine, ends, 0)) - first)
        own = tl.load(start + row) + first - tl.load(query_start + row)
        if tile * TILE < own + count:
            k, factor = _keys_tile(
                pool, table + row.to(tl.int64) * table_r, own + count - 1, tile, block_bytes, D, DP, PAGE, KIND, TILE,
                UPCAST,
            )  # fmt: skip
            factor = factor * scale
            at = tile * TILE + tl.arange(0, TILE)
            head, channel = tl.arange(0, HP), tl.arange(0, DP)
            real = (channel[:, None] < D) & (head[None, :] < H)
            for i in range(QUERIES):
                t, there = (first + i).to(tl.int64), i < count
                q_at = q + t * q_t + head[None, :] * q_h + channel[:, None] * q_d
                q_DH = tl.load(q_at, mask=real & there, other=0.0).to(k.dtype)
                dots = tl.dot(k, q_DH, input_precision="ieee")
                w = tl.load(weights + t * w_t + head * w_h, mask=(head < H) & there, other=0.0)
                positive = tl.where(dots < 0, 0.0, dots)  # a NaN stays one
                s = tl.sum(tl.where(head[None, :] < H, positive * w[None, :], 0.0), 1)
                tl.store(out + (t - first_query) * out_t + at, s * factor, mask=(at <= own + i) & there)


def score_rows(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, scores_TL: Tensor, *, scale: float, first_query: int
) -> None:  # fmt: skip
    """Write to scores_TL (f32) what queries from ``first_query`` on score; only keys up to a query's own are written.

    keys: plain rows, or records of RECORDS.
    """
    heads, dim = q_THD.shape[1:]
    num, length = scores_TL.shape
    rows = keys.start.shape[0]
    queries = 1 if q_THD.shape[0] == rows else _QUERIES
    groups = num if queries == 1 else num // queries + rows
    upcast = INTERPRETED or q_THD.dtype == torch.float32 or keys.rows.dtype == torch.float32
    _score[(triton.cdiv(length, _TILE), groups)](
        q_THD, weights_TH, keys.rows, keys.table, keys.query_start, keys.start, scores_TL, first_query,
        first_query + num, rows, keys.rows.stride(0), *q_THD.stride(), *weights_TH.stride(), keys.table.stride(0),
        scores_TL.stride(0), scale,
        H=heads, HP=max(16, triton.next_power_of_2(heads)), D=dim, DP=max(16, triton.next_power_of_2(dim)),
        PAGE=keys.page, KIND=RECORDS[keys.record], TILE=_TILE, QUERIES=queries,
        RP=triton.next_power_of_2(max(16, rows)), UPCAST=upcast, num_warps=8, num_stages=3,
    )  # fmt: skip


def longest(keys: Paged, num_queries: int) -> int:
    """Keys that a query may see. Where each row has one query, as in a step of a graph, what the table holds."""
    if num_queries == keys.start.shape[0]:
        return keys.table.shape[1] * keys.page
    return max(span.start + span.count for span in keys.spans)


def rounds(q_THD: Tensor, keys: Paged, k: int, score: Score, choose: Choose) -> Tensor:
    """[T, k] int64: so many queries at a time that their scores stay below SCORE_BYTES."""
    total = q_THD.shape[0]
    lists_TK = torch.empty(total, k, dtype=torch.int64, device=q_THD.device)
    if not lists_TK.numel():
        return lists_TK
    length = longest(keys, total)
    at_once = max(1, min(total, SCORE_BYTES // (4 * length)))
    scores_TL = torch.empty(at_once, length, dtype=torch.float32, device=q_THD.device)
    for first in range(0, total, at_once):
        num = min(at_once, total - first)
        score(scores_TL[:num], first)
        choose(scores_TL[:num], lists_TK[first : first + num], first)
    return lists_TK


def own_positions(keys: Paged, num_queries: int) -> Tensor:
    """[T] int64 position of each query in its own sequence, found on the device."""
    token_T = torch.arange(num_queries, device=keys.start.device)
    row_T = torch.searchsorted(keys.query_start[1:].long(), token_T, right=True)
    return keys.start.long()[row_T] + token_T - keys.query_start.long()[row_T]


def tokens(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, *, scale: float, k: int, sinks: int = 0, window: int = 0
) -> Tensor:
    """``sparse_index.tokens``. Scores are summed in f32, so that rows whose scores differ by less than that may change
    places at the cut; what is chosen from them is exact."""
    own_T1 = own_positions(keys, q_THD.shape[0])[:, None]

    def score(scores_TL: Tensor, first: int) -> None:
        score_rows(q_THD, weights_TH, keys, scores_TL, scale=scale, first_query=first)

    def choose(scores_TL: Tensor, lists_TK: Tensor, first: int) -> None:
        own = own_T1[first : first + scores_TL.shape[0]]
        rows_L = torch.arange(scores_TL.shape[1], device=own.device)
        forced_TL = ((rows_L < sinks) | (rows_L > own - window)) & (scores_TL > NEGATIVE_INFINITY)
        keyed_TL = scores_TL.masked_fill(forced_TL, torch.inf).masked_fill(rows_L > own, NEGATIVE_INFINITY)
        best(keyed_TL, lists_TK)

    return rounds(q_THD, keys, k, score, choose)


def best(scores_TN: Tensor, lists_TK: Tensor) -> None:
    """Write to lists_TK the numbers of the K best scores, ascending, -1 pads at the end."""
    k, num = lists_TK.shape[1], scores_TN.shape[1]
    best_TK = pack(scores_TN, 0).topk(min(k, num), dim=1, sorted=False).values
    lists_TK.copy_(pad(ascending(unpack(best_TK)), (0, max(0, k - num)), value=-1))


def pools_by(
    q_THD: Tensor, keys: Paged, pooling: Pooling, pools: int, score: Score, choose: Callable[[Tensor, Tensor], None]
) -> Tensor:  # fmt: skip
    """[T, width] rows of the best pools, each of which scores what its best row scores. choose: as ``best``."""
    own_T = own_positions(keys, q_THD.shape[0])

    def choose_pools(scores_TL: Tensor, lists_TK: Tensor, first: int) -> None:
        own = own_T[first : first + scores_TL.shape[0]]
        rows_L = torch.arange(scores_TL.shape[1], device=own.device)
        seen_TL = scores_TL.masked_fill_(rows_L > own[:, None], NEGATIVE_INFINITY)
        choose(pooling.judged(best_of_pools(seen_TL, pooling.size), own, 0), lists_TK)

    return pooling.expanded(rounds(q_THD, keys, pools, score, choose_pools), own_T)


def pool(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, pooling: Pooling, *, scale: float, pools: int
) -> Tensor:  # fmt: skip
    """``sparse_index.pool`` without gates; scores as in ``tokens``."""
    assert pooling.gates is None, "gated keys are not for this variant"

    def score(scores_TL: Tensor, first: int) -> None:
        score_rows(q_THD, weights_TH, keys, scores_TL, scale=scale, first_query=first)

    return pools_by(q_THD, keys, pooling, pools, score, best)
