"""The sparse index on a GPU at sizes the cases do not reach: ties by the thousand at the cut, long rows, graphs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.decl import packed_row
from dayzero.ops.bind import resolve
from dayzero.ops.bounds import MATMUL_F32
from dayzero.ops.catalog import CATALOG
from dayzero.ops.contract import relative_l2
from dayzero.ops.records import packed
from dayzero.ops.sparse_index import Pooling, only_near_the_cut, only_pools_near_the_cut, pool, score, top_k
from dayzero.ops.sparse_index import tokens as reference
from dayzero.view import Paged, Span

pytestmark = pytest.mark.gpu
PAGE, HEADS, DIM = 64, 16, 128
RECORDS = ("", "idx_fp8_128", "idx_mxfp8_32")
LENGTHS = (1, 63, 65, 2047, 2048, 2049, 16_385, 70_001, 300_000)


def _variant(contract: str, name: str = "cuda") -> Any:
    return resolve(CATALOG.lines[contract, name])


def _keys(spans: list[tuple[int, int]], rows: Tensor, record: str = "") -> Paged:
    """Pages in no order. rows: [pages, PAGE, D] of the tokens in order, one row of the step after another."""
    made, packed_at = [], 0
    for number, (start, count) in enumerate(spans):
        made.append(Span(number, packed_at, count, start))
        packed_at += count
    pages = [-(-(start + count) // PAGE) for start, count in spans]
    order = torch.randperm(sum(pages), device="cuda")
    pool = torch.full_like(torch.cat((rows, rows[:1])), torch.nan)
    pool[order] = rows
    table = torch.full((len(spans), max(pages) + 2), sum(pages), dtype=torch.int32, device="cuda")
    for number, num in enumerate(pages):
        table[number, :num] = order[sum(pages[:number]) :][:num].int()
    starts = torch.tensor([s for s, _ in spans], dtype=torch.int32, device="cuda")
    query_start = torch.tensor([*(s.first for s in made), packed_at], dtype=torch.int32, device="cuda")
    paged = Paged(pool, table, torch.zeros_like(starts), query_start, starts, tuple(made))
    row = packed_row(record, (DIM,))
    return paged if row is None else packed(paged, row)


def _inputs(spans: list[tuple[int, int]], record: str = "", *, whole: bool = False, k: int = 2048) -> dict[str, Any]:
    """Arguments of ``tokens``. whole: small whole numbers, so that float32 sums are exact and many scores are equal."""
    total = sum(count for _, count in spans)
    pages = sum(-(-(start + count) // PAGE) for start, count in spans)
    rows = torch.randn(pages, PAGE, DIM, device="cuda") * torch.exp2(torch.randint(-3, 3, (DIM,), device="cuda"))
    q_THD, weights_TH = torch.randn(total, HEADS, DIM, device="cuda"), torch.randn(total, HEADS, device="cuda")
    if whole:
        rows, weights_TH = rows.sign() * (torch.rand_like(rows) < 0.02), weights_TH.round()
        q_THD = q_THD.round()
        rows[..., 0] = 448  # a scale of one
        q_THD[..., 0] = 0
    inputs = {"q_THD": q_THD.bfloat16(), "weights_TH": weights_TH, "scale": 0.25, "k": k}
    return inputs | {"keys": _keys(spans, rows.bfloat16(), record)}


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("k", [1, 7, 2048])
def test_the_choice_is_exact(length: int, k: int) -> None:
    run, queries = _variant("sparse_index.top_k"), 3
    normal = torch.randn(queries, length, device="cuda")
    odd = normal.clone()
    odd[:, ::3], odd[:, 1::5], odd[:, 2::7], odd[:, 3::7] = -torch.inf, torch.nan, torch.inf, -0.0
    few = torch.full_like(normal, torch.nan)
    few[:, ::97] = 1.0
    for scores in (normal, normal.relu(), normal.round(), torch.ones_like(normal), odd, few):
        for options in ({}, {"sinks": 3, "window": 65}, {"sinks": 1, "tail": 7}):
            start = max(-1, length - queries)
            want = top_k.body(scores, k, start=start, **options)
            got = run(scores, k, start=start, **options)
            assert torch.equal(got, want)
            assert torch.equal(run(scores, k, start=start, **options), got)


@pytest.mark.parametrize("record", RECORDS)
def test_scores_stay_within_their_bound_and_lists_are_exact_of_them(record: str) -> None:
    from dayzero.ops.cuda.sparse_index import score_queries

    spans = [(n - 1, 1) for n in LENGTHS[:7]]
    inputs = _inputs(spans, record)
    keys, scale = inputs["keys"], inputs["scale"]
    scores = torch.full((len(spans), max(LENGTHS[:7])), torch.nan, device="cuda")
    score_queries(inputs["q_THD"], inputs["weights_TH"], keys, scores, scale=scale, first_query=0)
    got = _variant("sparse_index.tokens")(**inputs)
    for t, span in enumerate(keys.spans):
        one = slice(t, t + 1)
        k_LD, length = keys.history(span)[0], span.start + 1
        want = score.body(inputs["q_THD"][one], k_LD, inputs["weights_TH"][one], start=span.start, scale=scale)
        assert relative_l2(scores[one, :length], want) <= MATMUL_F32["bf16"].value
        assert scores[t, length:].isnan().all(), "written behind the end"
        assert torch.equal(got[one], top_k.body(scores[one, :length], inputs["k"], start=span.start))


@pytest.mark.parametrize("variant", ["cuda", "triton"])
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("queries", [1, 37])
def test_lists_differ_from_the_reference_only_near_the_cut(variant: str, record: str, queries: int) -> None:
    spans = [(4999, queries), (63, queries), (0, queries), (20_000, queries)]
    for options in ({}, {"sinks": 5, "window": 70}):
        inputs = _inputs(spans, record, k=512) | options
        assert (
            only_near_the_cut(inputs, [_variant("sparse_index.tokens", variant)(**inputs)], [reference.body(**inputs)])
            == ""
        )


@pytest.mark.parametrize("variant", ["cuda", "triton"])
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("queries", [1, 3])
def test_ties_by_the_thousand(variant: str, record: str, queries: int) -> None:
    """Sums of small whole numbers are exact in float32 too: the lists are the reference's to the last row."""
    inputs = _inputs([(30_000, queries), (2047, queries), (2048, queries)], record, whole=True)
    run = _variant("sparse_index.tokens", variant)
    assert torch.equal(run(**inputs), reference.body(**inputs))
    same = inputs | {"weights_TH": torch.zeros_like(inputs["weights_TH"])}
    assert torch.equal(run(**same), reference.body(**same))


@pytest.mark.parametrize("record", RECORDS)
def test_a_graph_follows_the_lengths_of_its_step_and_rows_do_not_feel_each_other(record: str) -> None:
    run = _variant("sparse_index.tokens")
    lengths = [9000, 2049, 70, 1]
    inputs = _inputs([(n - 1, 1) for n in lengths], record, k=256)
    keys: Paged = inputs["keys"]
    run(**inputs)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        listed = run(**inputs)
    for cut in (0, 17, 1500):
        starts = [max(0, n - 1 - cut) for n in lengths]
        keys.start.copy_(torch.tensor(starts, dtype=torch.int32))
        graph.replay()
        eager = run(**inputs)
        assert torch.equal(listed, eager) and torch.equal(run(**inputs), eager)
        for t, start in enumerate(starts):
            one = slice(t, t + 1)
            alone = replace(
                keys, table=keys.table[one], first=keys.first[one], query_start=keys.query_start[:2],
                start=keys.start[one], spans=(Span(0, 0, 1, start),),
            )  # fmt: skip
            part = inputs | {"q_THD": inputs["q_THD"][one], "weights_TH": inputs["weights_TH"][one], "keys": alone}
            assert torch.equal(run(**part), eager[one])


def test_a_long_step_in_rounds_lists_what_it_lists_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from dayzero.ops.triton import sparse_index as in_triton

    inputs = _inputs([(500, 1), (3000, 200)], "idx_fp8_128", k=100)
    run = _variant("sparse_index.tokens")
    whole = run(**inputs)
    monkeypatch.setattr(in_triton, "SCORE_BYTES", 4 * 3200 * 33)
    assert torch.equal(run(**inputs), whole)


@pytest.mark.parametrize("variant", ["cuda", "triton"])
@pytest.mark.parametrize("options", [{"local": 2, "tail": "scored"}, {"tail": "never"}, {"tail": "always"}])
def test_pools_go_into_a_graph_and_follow_their_lengths(variant: str, options: dict[str, Any]) -> None:
    run = _variant("sparse_index.pool", variant)
    inputs = _inputs([(n - 1, 1) for n in (9000, 2049, 70, 1)], "idx_fp8_128")
    del inputs["k"]
    inputs |= {"pooling": Pooling(16, **options), "pools": 33}
    keys: Paged = inputs["keys"]
    run(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        listed = run(**inputs)
    for cut in (0, 17):
        starts = [max(0, span.start - cut) for span in keys.spans]
        keys.start.copy_(torch.tensor(starts, dtype=torch.int32))
        graph.replay()
        spans = tuple(replace(span, start=start) for span, start in zip(keys.spans, starts, strict=True))
        now = inputs | {"keys": replace(keys, spans=spans)}
        assert only_pools_near_the_cut(now, [listed], [pool.body(**now)]) == ""
