"""Which rows a query attends to: the generators of sparse attention, and the steps they are made of.

T queries, L keys, H index heads, D index width, K listed rows, P pools. ``start`` as in ``ops/attention``. A generator
reads the keys of all rows of a step where they lie and lists, for each query, positions in its own sequence: ascending,
-1 pads at the end. The order of rows is the same everywhere: the higher score first, the lower row on ties; -0.0 and
0.0 are the same score; -inf and NaN are never chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from dayzero.ops.attention import NEGATIVE_INFINITY, visible
from dayzero.ops.bounds import EXACT, MATMUL_F32
from dayzero.ops.contract import contract
from dayzero.ops.line import INDEX_RECORDS
from dayzero.view import Paged, Span

_QUERIES_AT_ONCE = 16  # bounds the scores [queries, L] of the references


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

    A score of -inf or NaN and a row after the query are never chosen. order ``position``: ascending rows; ``score``:
    best first. Forced rows come before all others and count towards k: the first ``sinks`` rows, the last ``window``
    rows up to and including the query's own, and with ``tail`` = pool size the rows of the pool the query leaves
    incomplete.
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
    ids_TN = pad(ids_TN, (0, k - ids_TN.shape[1]), value=-1)
    return ids_TN if order == "score" else ascending(ids_TN)


def ascending(ids_TK: Tensor) -> Tensor:
    """Each list in rising order, -1 pads at the end."""
    last = torch.iinfo(ids_TK.dtype).max
    sorted_TK = ids_TK.masked_fill(ids_TK < 0, last).sort(-1).values
    return sorted_TK.masked_fill(sorted_TK == last, -1)


def query_blocks(keys: Paged, count: int) -> Iterator[tuple[Span, slice, int]]:
    """(span, packed rows, position of the first of them) for blocks of at most ``count`` queries of one sequence."""
    for span in keys.spans:
        for begin in range(0, span.count, count):
            rows = slice(span.first + begin, span.first + min(begin + count, span.count))
            yield span, rows, span.start + begin


def _whole(keys: Paged, span: Span) -> Tensor:
    k_LD, first = keys.history(span)
    assert first == 0, "an index sees the whole sequence"
    return k_LD


def only_near_the_cut(inputs: Mapping[str, Any], gots: list[Tensor], wants: list[Tensor]) -> str:
    """The rule for lists of ``tokens`` from scores that were summed in float32: what is wrong with them, or nothing.

    A score s is off by at most b = MATMUL_F32 * scale * sum over heads of |w| * sum over channels of |q k|: relu passes
    no more than it is given, and each term's roundings are counted there. An exact choice from such scores lists a row
    x in the place of a row y of the reference only if s(x) + b(x) >= s(y) - b(y). Held here for every such pair of each
    query, both sums in float64. Rows with the same key have the same sum, so that among them the lower one comes first.
    Everything else is as the reference has it: as many rows, ascending, each once, none that is forced missing, none
    whose score is -inf or NaN, pads at the end.
    """
    for rows, own_T1, k_LD, s_TL, b_TL in _scores_and_bounds(inputs):
        rows_L = torch.arange(s_TL.shape[1], device=s_TL.device)
        got_TL, want_TL = (_listed(lists[0][rows], s_TL.shape[1]) for lists in (gots, wants))
        forced_TL = (rows_L < inputs.get("sinks", 0)) | (rows_L > own_T1 - inputs.get("window", 0))
        never_TL = (rows_L > own_T1) | ~(s_TL > NEGATIVE_INFINITY)
        wrong = _shape_wrong(gots[0], wants[0], rows, s_TL.shape[1])
        wrong = wrong or _swapped_wrong((s_TL, b_TL), got_TL, want_TL, forced_TL, never_TL)
        lost_TL, more_TL = want_TL & ~got_TL, got_TL & ~want_TL
        for t in torch.nonzero(lost_TL.any(1)).flatten().tolist():
            lost_X, more_Y = (torch.nonzero(one_TL[t]).flatten() for one_TL in (lost_TL, more_TL))
            same_XY = (k_LD[lost_X, None] == k_LD[None, more_Y]).all(-1)
            if (same_XY & (lost_X[:, None] < more_Y)).any():
                wrong = wrong or "of two rows with the same key, the higher one is listed"
        if wrong:
            return f"queries {rows.start} to {rows.stop}: {wrong}"
    return ""


def only_pools_near_the_cut(inputs: Mapping[str, Any], gots: list[Tensor], wants: list[Tensor]) -> str:
    """The same rule for ``pool``, where pools score what their best row scores: a pool's score is off by no more than
    the largest b of its rows. A listed pool is listed with all rows that the query may see. Gated pools must be equal.
    """
    pooling: Pooling = inputs["pooling"]
    if pooling.gates is not None:
        return "" if torch.equal(gots[0], wants[0]) else "gated pools are chosen from sums in float64"
    for rows, own_T1, _, s_TL, b_TL in _scores_and_bounds(inputs):
        own_T, rows_L = own_T1[:, 0], torch.arange(s_TL.shape[1], device=s_TL.device)
        s_TL = s_TL.masked_fill(rows_L > own_T1, NEGATIVE_INFINITY)
        b_TP = best_of_pools(b_TL.masked_fill(rows_L > own_T1, 0), pooling.size)
        s_TP = pooling.judged(best_of_pools(s_TL, pooling.size), own_T, 0)
        seen_TL = rows_L <= own_T1
        tail_TL = seen_TL & (rows_L >= (own_T1 + 1) // pooling.size * pooling.size) & (pooling.tail == "always")
        wrong, chosen = _shape_wrong(gots[0], wants[0], rows, s_TL.shape[1]), []
        for lists in (gots, wants):
            listed_TL = _listed(lists[0][rows], s_TL.shape[1])
            chosen_TP = best_of_pools((listed_TL & ~tail_TL).float(), pooling.size) > 0
            whole_TL = chosen_TP.repeat_interleave(pooling.size, 1)[:, : s_TL.shape[1]] & seen_TL | tail_TL
            if not torch.equal(whole_TL, listed_TL):
                wrong = wrong or "a pool is listed in part"
            chosen.append(chosen_TP)
        wrong = wrong or _swapped_wrong(
            (s_TP, b_TP), chosen[0], chosen[1], s_TP == torch.inf, ~(s_TP > NEGATIVE_INFINITY)
        )
        if wrong:
            return f"queries {rows.start} to {rows.stop}: {wrong}"
    return ""


def _scores_and_bounds(inputs: Mapping[str, Any]) -> Iterator[tuple[slice, Tensor, Tensor, Tensor, Tensor]]:
    """(packed rows, own positions [T, 1], keys [L, D], scores [T, L], how far each may be off), in f64, by blocks."""
    q_THD, weights_TH, keys, scale = (inputs[name] for name in ("q_THD", "weights_TH", "keys", "scale"))
    for span, rows, start in query_blocks(keys, _QUERIES_AT_ONCE):
        end = start + rows.stop - rows.start
        k_LD = _whole(keys, span)[:end].double()
        s_TL, b_TL = torch.zeros(2, end - start, end, dtype=torch.float64, device=q_THD.device)
        for head in range(q_THD.shape[1]):
            q_TD, w_T1 = q_THD[rows, head].double(), weights_TH[rows, head, None].double() * scale
            s_TL += w_T1 * torch.relu(q_TD @ k_LD.T)
            b_TL += w_T1.abs() * (q_TD.abs() @ k_LD.abs().T) * MATMUL_F32["f32"].value
        yield rows, torch.arange(start, end, device=q_THD.device)[:, None], k_LD, s_TL, b_TL


def _shape_wrong(got_TK: Tensor, want_TK: Tensor, rows: slice, num_keys: int) -> str:
    """Lists are ascending, name each row once and none out of reach, and have pads at the end."""
    if got_TK.shape != want_TK.shape or not torch.equal(got_TK[rows], ascending(got_TK[rows])):
        return "a list is not ascending with pads at the end"
    there_T = _listed(got_TK[rows], num_keys).sum(1)
    return "" if torch.equal(there_T, (got_TK[rows] >= 0).sum(1)) else "a row is listed twice or is out of reach"


def _swapped_wrong(
    scores: tuple[Tensor, Tensor], got_TN: Tensor, want_TN: Tensor, forced_TN: Tensor, never_TN: Tensor
) -> str:
    """What is chosen in the place of something else had to be as good, within the bounds of both scores."""
    s_TN, b_TN = scores
    lost_TN, more_TN = want_TN & ~got_TN, got_TN & ~want_TN
    if not torch.equal(got_TN.sum(1), want_TN.sum(1)):
        return "more or fewer are listed than in the reference"
    if (lost_TN & forced_TN).any() or (more_TN & (forced_TN | never_TN)).any():
        return "what is forced is missing or misplaced, or something is listed that may not be"
    least_T = (s_TN + b_TN).masked_fill(~more_TN, torch.inf).amin(1)
    most_T = (s_TN - b_TN).masked_fill(~lost_TN, NEGATIVE_INFINITY).amax(1)
    return "one is further below the cut than sums in float32 explain" if (least_T < most_T).any() else ""


def _listed(ids_TK: Tensor, num_keys: int) -> Tensor:
    """[T, L] whether a row is listed; rows from L on are dropped."""
    ids_TK = ids_TK.masked_fill((ids_TK < 0) | (ids_TK > num_keys), num_keys)
    found_TL = torch.zeros(ids_TK.shape[0], num_keys + 1, dtype=torch.bool, device=ids_TK.device)
    return found_TL.scatter_(1, ids_TK, True)[:, :num_keys]


@contract(
    "sparse_index.tokens",
    bound=EXACT,
    traits={"sinks": (False, True), "window": (False, True), "record": INDEX_RECORDS},
    compare=only_near_the_cut,
)
def tokens(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, *, scale: float, k: int, sinks: int = 0, window: int = 0
) -> Tensor:
    """[T, k] int64: ``top_k`` of ``score``. keys: records [D] of every token of each row, the step's included.

    sinks, window: so many first and last rows are forced and count towards k. weights as in ``score``.
    """
    out_TK = torch.full((q_THD.shape[0], k), -1, dtype=torch.int64, device=q_THD.device)
    for span, rows, start in query_blocks(keys, _QUERIES_AT_ONCE):
        k_LD = _whole(keys, span)[: start + rows.stop - rows.start]
        scores_TL = score.body(q_THD[rows], k_LD, weights_TH[rows], start=start, scale=scale)
        out_TK[rows] = top_k.body(scores_TL, k, start=start, sinks=sinks, window=window)
    return out_TK


def pooled_keys(k_LD: Tensor, gate_LD: Tensor, bias_SD: Tensor) -> Tensor:
    """[L // S, D] f64: of each complete pool of S rows, the keys weighted channel by channel with softmax(gate + bias).

    Source: the index of GLM-5.3-Flash.
    """
    size = bias_SD.shape[0]
    whole = k_LD.shape[0] // size * size
    weight_PSD = torch.softmax(gate_LD[:whole].double().unflatten(0, (-1, size)) + bias_SD.double(), dim=1)
    return (weight_PSD * k_LD[:whole].double().unflatten(0, (-1, size))).sum(1)


@dataclass(frozen=True, slots=True)
class Pooling:
    """How rows form pools: ``arch.index.Pool`` as operators see it. size: rows of a pool, counted from the first.

    gates, bias [S, D]: what weights a pool's keys (see ``pooled_keys``); None where a pool scores what its best visible
    row scores. local: so many of the newest pools that compete are forced. tail: whether the rows of the pool that the
    query leaves incomplete are ``always`` listed on top, ``never``, or compete as a pool (``scored``).
    """

    size: int
    local: int = 0
    tail: str = "always"
    gates: Paged | None = None
    bias_SD: Tensor | None = None

    def __post_init__(self) -> None:
        if (self.gates is None) != (self.bias_SD is None):
            raise ValueError("gates and the bias of their pool go together")
        if self.gates is not None and self.tail == "scored":
            raise ValueError("a pool that is not complete has no gated key, so that it cannot compete")

    def width(self, pools: int) -> int:
        """Length of the lists."""
        return pools * self.size + (self.size - 1 if self.tail == "always" else 0)

    def count(self, rows: int) -> int:
        """Pools of that many rows: complete ones where keys are gated, else all."""
        return rows // self.size if self.gates is not None else -(-rows // self.size)

    def judged(self, scores_TP: Tensor, own_T: Tensor, first: int) -> Tensor:
        """Scores with -inf for pools that may not compete and inf for forced ones. first: number of the first pool."""
        numbers_P = torch.arange(first, first + scores_TP.shape[1], device=scores_TP.device)
        newest_T1 = (own_T if self.tail == "scored" else own_T + 1 - self.size)[:, None] // self.size
        forced_TP = (numbers_P > newest_T1 - self.local) & (numbers_P <= newest_T1)
        return scores_TP.masked_fill(forced_TP, torch.inf).masked_fill(numbers_P > newest_T1, NEGATIVE_INFINITY)

    def expanded(self, pools_TP: Tensor, own_T: Tensor) -> Tensor:
        """[T, width] rows of the listed pools (-1: none) that each query may see, and its tail; ascending, -1 pads."""
        rows_TPS = pools_TP[:, :, None] * self.size + torch.arange(self.size, device=pools_TP.device)
        gone = (pools_TP[:, :, None] < 0) | (rows_TPS > own_T[:, None, None])
        rows_TK = rows_TPS.masked_fill(gone, -1).flatten(1)
        if self.tail == "always":
            open_T1 = ((own_T + 1) // self.size * self.size)[:, None]
            more = open_T1 + torch.arange(self.size - 1, device=own_T.device)
            rows_TK = torch.cat((rows_TK, more.masked_fill(more > own_T[:, None], -1)), dim=1)
        return ascending(rows_TK)


@contract(
    "sparse_index.pool",
    bound=EXACT,
    traits={
        "how": ("max", "gated"),
        "local": (False, True),
        "tail": ("always", "never", "scored"),
        "record": INDEX_RECORDS,
    },
    compare=only_pools_near_the_cut,
)
def pool(
    q_THD: Tensor, weights_TH: Tensor, keys: Paged, pooling: Pooling, *, scale: float, pools: int
) -> Tensor:  # fmt: skip
    """[T, pooling.width(pools)] int64: rows of the best ``pools`` pools by ``pooling``. weights: see ``score``."""
    size, gates, bias_SD = pooling.size, pooling.gates, pooling.bias_SD
    out_TK = torch.full((q_THD.shape[0], pooling.width(pools)), -1, dtype=torch.int64, device=q_THD.device)
    for span, rows, start in query_blocks(keys, _QUERIES_AT_ONCE):
        end = start + rows.stop - rows.start
        k_LD, own_T = _whole(keys, span)[:end], torch.arange(start, end, device=q_THD.device)
        if gates is not None and bias_SD is not None:
            pooled_PD = pooled_keys(k_LD, _whole(gates, span)[:end], bias_SD)
            scores_TP = score.body(q_THD[rows], pooled_PD, weights_TH[rows], start=pooled_PD.shape[0], scale=scale)
        else:
            scores_TL = score.body(q_THD[rows], k_LD, weights_TH[rows], start=start, scale=scale)
            scores_TP = best_of_pools(scores_TL, size)
        scores_TP = pooling.judged(scores_TP, own_T, 0)
        chosen_TP = top_k.body(scores_TP, pools, start=scores_TP.shape[1])
        out_TK[rows] = pooling.expanded(chosen_TP, own_T)
    return out_TK


def best_of_pools(scores_TL: Tensor, size: int) -> Tensor:
    """[T, P] largest score of each pool, the last one possibly short. A NaN counts for nothing."""
    known_TL = scores_TL.masked_fill(scores_TL.isnan(), NEGATIVE_INFINITY)
    return pad(known_TL, (0, -known_TL.shape[1] % size), value=NEGATIVE_INFINITY).unflatten(1, (-1, size)).amax(-1)


@contract("sparse_index.window", bound=EXACT, traits={"sinks": (False, True)})
def window(own_T: Tensor, *, window: int, sinks: int = 0) -> Tensor:
    """[T, sinks + window] int64: the first ``sinks`` rows, and the last ``window`` up to the query's own.

    own [T] int64: each query's position in its sequence.
    """
    if window < 1 or sinks < 0:
        raise ValueError(f"a window of {window} rows and {sinks} first rows is none")
    last_TW = own_T[:, None] - torch.arange(window - 1, -1, -1, device=own_T.device)
    first_TS = torch.arange(sinks, device=own_T.device).expand(own_T.shape[0], -1)
    # Where window and first rows overlap, the window names them.
    first_TS = first_TS.masked_fill(first_TS > own_T[:, None] - window, -1)
    return ascending(torch.cat((first_TS, last_TW.masked_fill(last_TW < 0, -1)), dim=1))


@contract("sparse_index.grid", bound=EXACT, traits={"reach": ("block", "near")})
def grid(rows: int, columns: int, *, height: int, width: int, reach: str, device: torch.device | None = None) -> Tensor:
    """[rows * columns, height * width] int64: the cells of a grid (row by row) that each cell attends to, both ways.

    reach ``block``: the cells of its own block, where blocks of height x width tile the grid from its first cell and
    are cut at its edges. ``near``: the cells at most height // 2 rows and width // 2 columns away; both must be odd.
    -1 pads at the end.
    """
    if min(rows, columns, height, width) < 1 or (reach == "near" and not height % 2 == width % 2 == 1):
        raise ValueError(f"no windows of {height} x {width} by {reach!r} over a grid of {rows} x {columns}")
    if reach not in ("block", "near"):
        raise ValueError(f"reach is 'block' or 'near', not {reach!r}")
    lines = [
        torch.arange(count, device=device) // size * size if reach == "block"
        else torch.arange(count, device=device) - size // 2
        for count, size in ((rows, height), (columns, width))
    ]  # fmt: skip
    y_YA = lines[0][:, None] + torch.arange(height, device=device)
    x_XB = lines[1][:, None] + torch.arange(width, device=device)
    cells = y_YA[:, None, :, None] * columns + x_XB[None, :, None, :]
    inside = ((y_YA >= 0) & (y_YA < rows))[:, None, :, None] & ((x_XB >= 0) & (x_XB < columns))[None, :, None, :]
    return ascending(cells.masked_fill(~inside, -1).reshape(rows * columns, height * width))
