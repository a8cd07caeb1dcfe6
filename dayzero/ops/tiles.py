"""Sizes in which sparse attention works through a long history, and the bytes that this takes. No torch.

Nothing that selection or attention makes grows with queries x keys: both go through blocks of queries and tiles of
keys. The planner counts the workspace with the same numbers that the operators use.
"""

from __future__ import annotations

from collections.abc import Mapping

QUERIES = 128  # queries that are scored at once; also rows of one product, where a query has several heads
KEYS = 1024  # keys of one product: [QUERIES, KEYS] float64 is 1 MiB, which stays in a core's cache
MERGE_KEYS = 8 * KEYS  # keys after which candidates are cut down to the best k again
ROWS = 512  # query heads of a block of masked-dense attention
GATHERED = 1 << 15  # records that are gathered at once

# For chunks of up to this many times top-k rows, masked-dense attention over all of them is faster than gathering the
# chosen ones; a single query always gathers. By device, and by the form of the records: rows that all heads share
# (``latent``), or keys and values of their own (``grouped``). Measured, in the log: the CPU by
# benchmarks/sparse_attention.py, the H200 by ops.bench: shared rows are gathered faster however short the sequence is;
# for grouped heads masking wins by 10 % where a list has every row.
CROSSOVER: Mapping[str, Mapping[str, float]] = {
    "cpu": {"latent": 2.0, "grouped": 2.0},
    "h200": {"latent": 0.0, "grouped": 1.0},
}

_INT64, _F64, _F32 = 8, 8, 4


def crossover_of(device: str, form: str) -> float:
    """Of a device by its hardware word; one that was not measured gathers."""
    return CROSSOVER.get(device, {}).get(form, 0.0)


def queries_by_heads(heads: int) -> int:
    """Queries of one block of masked-dense attention."""
    return max(1, ROWS // heads)


def queries_by_list(width: int) -> int:
    """Queries whose listed records are gathered at once."""
    return max(1, GATHERED // max(1, width))


def chosen_bytes(tokens: int, width: int) -> int:
    """The lists of a step of that many tokens: what layers that share an index read."""
    return _INT64 * tokens * width


def select_bytes(tokens: int, heads: int, head_dim: int, width: int, context: int) -> int:
    """Most that selecting takes beside its lists: candidates, the queries in float64, and a tile on its way into
    64-bit keys or a cut of the candidates with its places."""
    queries = min(tokens, QUERIES)
    held = min(context, width + MERGE_KEYS)
    tile = min(context, KEYS) * (3 * _F32 + _INT64 + 1)
    cut = 2 * _INT64 * min(width, context)
    return queries * (_INT64 * held + max(tile, cut) + _F64 * heads * (head_dim + 2))


def attend_bytes(tokens: int, heads: int, key_dim: int, value_dim: int, width: int, element: int) -> int:
    """Most that attention over listed rows takes, its queries and results in twice the width included. element: bytes
    of a stored number, which is widened to float32."""
    queries = min(tokens, queries_by_list(width))
    record = key_dim * (element if element == _F32 else element + _F32)
    gathered = queries * width * (record + max(4 * _INT64, _INT64 + heads * _F32))  # places, or one and the scores
    rows = min(tokens, queries_by_heads(heads))
    masked = rows * (2 * _INT64 * width + heads * KEYS * _F32)
    return max(gathered, masked) + tokens * heads * (key_dim + value_dim) * 2 * element
