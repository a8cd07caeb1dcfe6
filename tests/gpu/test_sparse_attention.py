"""Attention to listed rows at real sizes on a GPU: lengths of lists, company, graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.decl import LATENT_PARTS, packed_row
from dayzero.ops.bind import resolve
from dayzero.ops.catalog import CATALOG
from dayzero.ops.contract import relative_l2
from dayzero.ops.records import packed
from dayzero.ops.sparse_attention import sparse
from dayzero.view import Paged, Span

pytestmark = pytest.mark.gpu
BOUND = sparse.bound["bf16"].value
LENGTHS = (0, 1, 63, 64, 65, 127, 129, 511, 513, 1000, 2047, 2048)
OPTIONS = {"scale": 192**-0.5, "value_dim": 512}
RECORDS = ("", "mla_fp8_656")


def records(histories: tuple[tuple[int, int], ...], record: str, seed: int = 0) -> Paged:
    """Rows (start, count) in pages out of order; what no row has is NaN."""
    torch.manual_seed(seed)
    pages = [-(-(start + count) // 64) for start, count in histories]
    order = (torch.randperm(sum(pages) + 5)[: sum(pages)] + 1).int().split(pages)
    table = torch.zeros(len(histories), max(pages) + 1, dtype=torch.int32)
    pool = torch.full((sum(pages) + 7, 64, 576), torch.nan, dtype=torch.bfloat16)
    spans, packed_tokens = [], 0
    for row, (start, count) in enumerate(histories):
        table[row, : pages[row]] = order[row]
        for page in range(pages[row]):
            real = min(64, start + count - page * 64)
            pool[int(order[row][page]), :real] = torch.randn(real, 576).bfloat16()
        spans.append(Span(row, packed_tokens, count, start))
        packed_tokens += count
    ends = torch.tensor([*(s.first for s in spans), packed_tokens], dtype=torch.int32)
    start = torch.tensor([s.start for s in spans], dtype=torch.int32)
    first = torch.zeros(len(spans), dtype=torch.int32)
    keys = Paged(*(x.cuda() for x in (pool, table, first, ends, start)), tuple(spans))
    row_of = packed_row(record, (576,), LATENT_PARTS) if record else None
    return (keys if row_of is None else packed(keys, row_of)).headed()


def lists(lengths: list[int], histories: list[int], width: int = 2048) -> Tensor:
    """[T, width]: so many of each query's first rows, at random."""
    out = torch.full((len(lengths), width), -1, dtype=torch.int64)
    for at, (length, history) in enumerate(zip(lengths, histories, strict=True)):
        out[at, :length] = torch.randperm(history)[:length].sort().values
    return out.cuda()


def variant(name: str) -> Callable[..., Any]:
    return resolve(CATALOG.lines["attention.sparse", name])


def close(got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor]) -> None:
    for one, other in zip(got, want, strict=True):
        gone = torch.isinf(other)
        assert torch.equal(torch.isinf(one), gone)
        assert relative_l2(one.masked_fill(gone, 0), other.masked_fill(gone, 0)) <= BOUND


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("heads", (128, 64, 32, 96, 5))
def test_lists_of_every_length(record: str, heads: int) -> None:
    """Rows of one token and a chunk in one step, whose lists end anywhere in a tile and in a part."""
    histories = tuple((2100 + 37 * i, 1) for i in range(len(LENGTHS))) + ((2300, len(LENGTHS)),)
    keys = records(histories, record)
    lengths = [*LENGTHS, *LENGTHS]
    listed = lists(lengths, [h for h, _ in histories[:-1]] + [2300] * len(LENGTHS))
    q = torch.randn(len(lengths), heads, 576, device="cuda").bfloat16()
    want = sparse.body(q, keys, None, listed, **OPTIONS)
    names = ("cuda", "cuda_by_load") if record else ("cuda", "cuda_by_load", "triton")
    for name in names:
        got = variant(name)(q, keys, None, listed, **OPTIONS)
        close(got, want)
        for length, out, lse in zip(lengths, *got, strict=True):
            assert (length > 0) == bool(out.any()) == bool(torch.isfinite(lse).all())
    wide = variant("cuda")(q.float(), keys, None, listed, **OPTIONS)
    assert wide[0].dtype == torch.float32
    close(wide, sparse.body(q.float(), keys, None, listed, **OPTIONS))


@pytest.mark.parametrize("record", RECORDS)
def test_log_sum_exp_against_float64(record: str) -> None:
    keys = records(((3000, 1), (2900, 3)), record)
    listed = lists([2048, 900, 2048, 17], [3000, 2900, 2900, 2900])
    q = torch.randn(4, 128, 576, device="cuda").bfloat16()
    _, want = sparse.body(q.double(), keys, None, listed, **OPTIONS)
    _, got = variant("cuda")(q, keys, None, listed, **OPTIONS)
    assert (got - want).abs().max() < 1e-4  # sums in float32 of exact products, weights rounded only before P @ V


@pytest.mark.parametrize("name, record", (("cuda", ""), ("cuda", "mla_fp8_656"), ("triton", "")))
def test_alone_as_in_company(name: str, record: str) -> None:
    """Each row of a step by itself gives the same bits."""
    histories = tuple((2100 + 61 * i, 1) for i in range(40)) + ((2200, 9), (2500, 30))
    keys = records(histories, record)
    spans = keys.spans
    total = spans[-1].first + spans[-1].count
    lengths = [int(x) for x in torch.randint(0, 2049, (total,))]
    listed = lists(lengths, [s.start for s in spans for _ in range(s.count)])
    q = torch.randn(total, 128, 576, device="cuda").bfloat16()
    function = variant(name)
    together = function(q, keys, None, listed, **OPTIONS)
    for span in (spans[0], spans[7], spans[39], spans[40], spans[41]):
        ends = torch.tensor([0, span.count], dtype=torch.int32, device="cuda")
        only = slice(span.row, span.row + 1)
        alone = replace(
            keys, table=keys.table[only], first=keys.first[only], start=keys.start[only], query_start=ends,
            spans=(Span(0, 0, span.count, span.start),),
        )  # fmt: skip
        got = function(q[span.rows], alone, None, listed[span.rows], **OPTIONS)
        assert all(torch.equal(one, other[span.rows]) for one, other in zip(got, together, strict=True))


@pytest.mark.parametrize("record", RECORDS)
def test_a_graph_gives_what_eager_gives(record: str) -> None:
    """Replayed over other lists, pages and queries than those of its capture."""
    histories = tuple((2100 + 61 * i, 1) for i in range(6))
    keys, later = records(histories, record), records(histories, record, seed=1)
    listed = lists([5, 700, 2048, 1, 0, 65], [h for h, _ in histories])
    q = torch.randn(6, 64, 576, device="cuda").bfloat16()
    function = variant("cuda")
    function(q, keys, None, listed, **OPTIONS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = function(q, keys, None, listed, **OPTIONS)
    keys.rows.copy_(later.rows)
    keys.table.copy_(later.table)
    listed.copy_(lists([2048, 64, 3, 0, 999, 2047], [h for h, _ in histories]))
    q.copy_(torch.randn(6, 64, 576, device="cuda"))
    graph.replay()
    want = function(q, keys, None, listed, **OPTIONS)
    assert all(torch.equal(one, other) for one, other in zip(got, want, strict=True))
    close(got, sparse.body(q, keys, None, listed, **OPTIONS))


def test_a_nan_that_is_listed_shows() -> None:
    for record in RECORDS:
        keys = records(((100, 1), (100, 1)), record)
        codes = keys.rows[int(keys.table[1, 0]), 7]
        if record:
            codes[3] = 0x7F
        else:
            codes[0, 3] = torch.nan
        listed = lists([60, 60], [60, 60])
        q = torch.randn(2, 64, 576, device="cuda").bfloat16()
        out, lse = variant("cuda")(q, keys, None, listed, **OPTIONS)
        assert out[1].isnan().all() and lse[1].isnan().all() and not out[0].isnan().any()


def test_grouped_heads_at_real_width() -> None:
    torch.manual_seed(0)
    pool = torch.randn(70, 64, 2, 4, 128, device="cuda").bfloat16()
    table = torch.randperm(70, device="cuda").int().view(2, 35)
    ends, start = torch.tensor([0, 1, 6]).int().cuda(), torch.tensor([2200, 2100]).int().cuda()
    spans = (Span(0, 0, 1, 2200), Span(1, 1, 5, 2100))
    keys, values = (Paged(pool[:, :, i].contiguous(), table, start * 0, ends, start, spans) for i in range(2))
    listed = lists([1500, 2048, 3, 64, 0, 1001], [2100] * 6)
    q = torch.randn(6, 32, 128, device="cuda").bfloat16()
    options = {"scale": 128**-0.5, "sinks_H": torch.randn(32, device="cuda")}
    close(variant("triton")(q, keys, values, listed, **options), sparse.body(q, keys, values, listed, **options))
