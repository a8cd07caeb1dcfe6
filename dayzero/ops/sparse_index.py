"""Which rows a query attends: lightning-indexer scores and an exact top-k (DeepSeek V3.2 and its lineage).

T queries, L keys, H index heads, D index width, N chosen rows. ``start`` as in ``ops/attention``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.attention import NEGATIVE_INFINITY, visible
from dayzero.ops.bounds import EXACT, MATMUL_F32
from dayzero.ops.contract import contract


@contract("sparse_index.score", bound=MATMUL_F32)
def score(q_THD: Tensor, k_LD: Tensor, weights_TH: Tensor, *, start: int, scale: float) -> Tensor:
    """[T, L] f32: sum over heads of w * relu(q.k) * scale; -inf for rows the query may not see.

    weights are f32 and already carry their own factor (heads^-0.5). Head sums run in f64.
    """
    s_TL = torch.zeros(q_THD.shape[0], k_LD.shape[0], dtype=torch.float64, device=q_THD.device)
    for head in range(q_THD.shape[1]):
        s_TL += weights_TH[:, head, None].double() * torch.relu(q_THD[:, head].double() @ k_LD.double().T) * scale
    seen_TL = visible(q_THD.shape[0], k_LD.shape[0], start, None, q_THD.device)
    return s_TL.float().masked_fill(~seen_TL, NEGATIVE_INFINITY)


@contract(
    "sparse_index.top_k",
    bound=EXACT,
    traits={"order": ("position", "score"), "sinks": ("int",), "window": ("int",), "tail": ("int",)},
)
def top_k(
    scores_TL: Tensor,
    k: int,
    *,
    start: int,
    order: str = "position",
    sinks: int = 0,
    window: int = 0,
    tail: int = 0,
) -> Tensor:
    """[T, k] int64 rows of the k largest scores of each query, exact; the lower row on ties; -1 pads at the end.

    A score of -inf and a row after the query are never chosen. order ``position``: ascending rows; ``score``: best
    first. Forced rows come before all others and count towards k: the first ``sinks`` rows, the last ``window`` rows
    up to and including the query's own, and with ``tail`` = pool size the rows of the pool the query leaves incomplete.
    """
    if order not in ("position", "score"):
        raise ValueError(f"order is 'position' or 'score', not {order!r}")
    num_queries, num_keys = scores_TL.shape
    device = scores_TL.device
    own_T1 = torch.arange(start, start + num_queries, device=device)[:, None]
    rows_L = torch.arange(num_keys, device=device)
    forced_TL = (rows_L < sinks) | (rows_L > own_T1 - window)
    if tail:
        forced_TL = forced_TL | (rows_L >= (own_T1 + 1) // tail * tail)
    legal_TL = (rows_L <= own_T1) & (scores_TL > NEGATIVE_INFINITY)
    keyed_TL = scores_TL.masked_fill(forced_TL, torch.inf).masked_fill(~legal_TL, NEGATIVE_INFINITY)
    best = torch.sort(keyed_TL, dim=-1, descending=True, stable=True)
    ids_TN = best.indices[:, :k].masked_fill(best.values[:, :k] == NEGATIVE_INFINITY, -1)
    ids_TN = torch.nn.functional.pad(ids_TN, (0, k - ids_TN.shape[1]), value=-1)
    if order == "score":
        return ids_TN
    last = torch.where(ids_TN < 0, num_keys, ids_TN).sort(-1).values
    return last.masked_fill(last == num_keys, -1)
