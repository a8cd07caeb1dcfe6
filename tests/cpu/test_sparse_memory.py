"""Nothing that selection or attention over lists makes grows with queries x keys, and it takes what the plan counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.live_tensors import LiveTensors
from dayzero.ops import latent, paged, sparse_attention, sparse_index, sparse_select, tiles
from dayzero.ops.sparse_attention import whole
from dayzero.ops.sparse_index import Pooling
from dayzero.view import Paged, Span

CHUNK, LENGTH = 300, 20_011  # the last queries of a long sequence
HEADS, WIDTH, TOP_K = 4, 16, 500
DRAW = torch.Generator().manual_seed(2)


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=DRAW)


def pages(rows: Tensor) -> Paged:
    """``rows`` as one sequence whose last CHUNK tokens are the step."""
    return replace(whole(rows), spans=(Span(0, 0, CHUNK, LENGTH - CHUNK),))


KEYS = pages(normal(LENGTH, WIDTH))
ASKED = (normal(CHUNK, HEADS, WIDTH), normal(CHUNK, HEADS), KEYS)
GATED = Pooling(4, gates=pages(normal(LENGTH, WIDTH)), bias_SD=normal(4, WIDTH))
LISTS = torch.stack([torch.randperm(LENGTH - CHUNK, generator=DRAW)[:TOP_K].sort().values for _ in range(CHUNK)])
ROWS = pages(normal(LENGTH, 1, WIDTH + 8))
LATENT = (normal(CHUNK, HEADS, WIDTH + 8), ROWS, None, LISTS)

MAKERS: dict[str, Callable[[], Any]] = {
    "tokens": lambda: sparse_index.tokens.body(*ASKED, scale=1.0, k=TOP_K),
    "tokens tiled": lambda: sparse_select.tokens_tiled(*ASKED, scale=1.0, k=TOP_K),
    "best pools": lambda: sparse_index.pool.body(*ASKED, Pooling(4), scale=1.0, pools=TOP_K // 4),
    "best pools tiled": lambda: sparse_select.pool_tiled(*ASKED, Pooling(4), scale=1.0, pools=TOP_K // 4),
    "gated pools": lambda: sparse_index.pool.body(*ASKED, GATED, scale=1.0, pools=TOP_K // 4),
    "gated pools tiled": lambda: sparse_select.pool_tiled(*ASKED, GATED, scale=1.0, pools=TOP_K // 4),
    "attention": lambda: sparse_attention.sparse.body(*LATENT, scale=0.2, value_dim=WIDTH),
    "attention, gathered": lambda: sparse_attention.sparse_gather(*LATENT, scale=0.2, value_dim=WIDTH),
    "attention, masked": lambda: sparse_attention.sparse_masked(*LATENT, scale=0.2, value_dim=WIDTH),
    "dense tiled": lambda: paged.paged_tiled(*LATENT[:3], scale=0.2, value_dim=WIDTH),
    "latent, expanded": lambda: latent.attend_expanded.body(
        normal(CHUNK, HEADS, 12 + 8), ROWS.rows[0, :, 0], normal(HEADS * (12 + 20), WIDTH),
        start=LENGTH - CHUNK, scale=0.2, allowed_TA=LISTS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MAKERS)
def test_no_tensor_grows_with_queries_times_keys(name: str) -> None:
    """Neither scores or masks of the chunk over all rows, nor keys and values of all rows for every head."""
    with LiveTensors() as memory:
        MAKERS[name]()
    assert memory.most_numbers < CHUNK * LENGTH // 2, memory.largest
    if name.startswith("latent"):
        assert memory.most_numbers < LENGTH * HEADS * 20, memory.largest
    if name.endswith(("tiled", "masked")):
        assert memory.most_numbers <= tiles.QUERIES * (TOP_K + tiles.MERGE_KEYS), memory.largest


def test_the_plan_counts_what_selecting_takes() -> None:
    counted = tiles.chosen_bytes(CHUNK, TOP_K) + tiles.select_bytes(CHUNK, HEADS, WIDTH, TOP_K, LENGTH)
    with LiveTensors() as memory:
        sparse_select.tokens_tiled(*ASKED, scale=1.0, k=TOP_K)
    assert 0.9 * counted <= memory.peak_bytes <= 1.02 * counted, memory.peak_bytes / counted


def test_the_plan_counts_what_attending_takes() -> None:
    """Queries in float64, as a latent layer in float32 gives them."""
    counted = tiles.attend_bytes(CHUNK, HEADS, WIDTH + 8, WIDTH, TOP_K, 4)
    q_THC = LATENT[0].double()
    with LiveTensors() as memory:
        sparse_attention.sparse_by_length(q_THC, ROWS, None, LISTS, scale=0.2, value_dim=WIDTH)
    taken = memory.peak_bytes + q_THC.nbytes
    assert 0.9 * counted <= taken <= 1.02 * counted, taken / counted


def test_a_list_reads_only_what_it_names() -> None:
    """Records that no list names may be anything: decode gathers, it does not pass over the cache."""
    rows = ROWS.rows.clone()
    named = torch.zeros(LENGTH, dtype=torch.bool)
    named[LISTS[-1]] = True
    rows[0, ~named] = torch.nan
    last = Span(0, 0, 1, LENGTH - 1)
    for attend in (sparse_attention.sparse.body, sparse_attention.sparse_by_length):
        poisoned, plain = (
            attend(LATENT[0][-1:], replace(ROWS, rows=r, spans=(last,)), None, LISTS[-1:], scale=0.2, value_dim=WIDTH)
            for r in (rows, ROWS.rows)
        )
        assert torch.equal(poisoned[0], plain[0]) and torch.isfinite(plain[0]).all()
