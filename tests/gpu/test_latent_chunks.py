"""Dense latent attention at widths of real models: chunks in the expanded form against float64 and the absorbed form,
over some keys at a time, whatever else is in the step, without asking the device for anything."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("triton")
import torch
from torch import Tensor

from dayzero.decl import packed_row
from dayzero.ops import latent, latent_steps
from dayzero.ops.bind import bind
from dayzero.ops.cases_paged import paged_inputs
from dayzero.ops.cuda import latent_prefill
from dayzero.ops.latent_forms import Widths, attend_bytes, expands
from dayzero.ops.random_inputs import Inputs
from dayzero.ops.records import packed
from dayzero.ops.triton import latent as in_triton
from dayzero.ops.triton import latent_attend
from dayzero.view import Paged
from tests.parity import close, moved

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
BOUND = latent.attend.bound["bf16"].value
VARIANTS = ("triton", "cuda", "cuda_chunks")
NOPE, SHARED, RANK, VALUE = 128, 64, 512, 128
MIXED = ((3000, 1), (0, 1), (4095, 1), (100, 33), (0, 257), (640, 64), (2047, 330), (0, 128), (5, 129), (900, 2))


def inputs(rows: tuple[tuple[int, int], ...], heads: int, *, page: int = 64, record: str = "") -> dict[str, Any]:
    """On the GPU; what lies behind the end of a row, and between blocks, is NaN."""
    r = Inputs(len(rows) + heads)
    keys = paged_inputs(r, rows, (heads, 1), (RANK + SHARED, RANK), BF16, page=page)["keys"]
    kept = replace(keys, rows=keys.rows[:, :, 0])
    kept = coded(kept, record)
    made = {
        "q_THD": r.normal(sum(count for _, count in rows), heads, NOPE + SHARED, dtype=BF16), "rows": kept,
        "kv_b": (r.normal(heads * (NOPE + VALUE), RANK) / RANK**0.5).to(BF16), "scale": (NOPE + SHARED) ** -0.5,
    }  # fmt: skip
    return moved(made, "cuda")


def coded(kept: Paged, record: str) -> Paged:
    """The same rows as records; as they are without a name."""
    if not record:
        return kept
    row = packed_row(record, (RANK + SHARED,), (RANK, SHARED))
    assert row is not None
    return packed(kept, row)


def of(variant: str) -> Any:
    return bind("latent.attend", "test", {"latent.attend": variant})


def absorbed(q_THD: Tensor, rows: Paged, kv_b: Tensor, scale: float) -> Tensor:
    into, out_of = (bind(name, "test", {name: "triton"}) for name in ("latent.queries", "latent.values"))
    paged = bind("attention.paged", "test", {"attention.paged": "cuda"})
    w_uk, w_uv = latent.absorb.body(kv_b, q_THD.shape[1], NOPE, VALUE)
    found, _ = paged(into(q_THD, w_uk), rows.headed(), None, scale=scale, value_dim=RANK)
    return out_of(found, w_uv, BF16)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("heads", "page"), [(32, 64), (7, 16), (96, 64)])
def test_mixed_steps(variant: str, heads: int, page: int) -> None:
    given = inputs(MIXED, heads, page=page)
    got, want = of(variant)(**given), latent.attend.body(**given)
    for span in given["rows"].spans:
        close(got[span.rows], want[span.rows], BOUND)
    close(got, absorbed(**given), 2 * BOUND)
    assert {expands(s.count, s.start, Widths(heads, NOPE, SHARED, RANK, VALUE)) for s in given["rows"].spans} == {
        False, True,
    }  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_records_of_656_bytes(variant: str) -> None:
    given = inputs(MIXED, 16, record="mla_fp8_656")
    close(of(variant)(**given), latent.attend.body(**given), BOUND)


def chunk_of(variant: str) -> latent_steps.Chunk:
    """Of the expanded form."""
    from dayzero.ops.cuda import latent_attend as in_cuda

    return in_cuda.chunk if variant == "cuda_chunks" else latent_attend.chunk


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("start", "count"), [(0, 4100), (4096, 700), (1000, 3001), (8191, 129), (1, 2)])
def test_keys_some_at_a_time(variant: str, start: int, count: int) -> None:
    given = inputs(((start, count),), 8)
    rows, widths = given["rows"], Widths(8, NOPE, SHARED, RANK, VALUE)
    want = latent.attend.body(**given)
    for at_once in (1024, 2048, 0):
        got = torch.full_like(want, torch.nan)
        by = latent_steps.Projection(given["kv_b"], widths, given["scale"])
        latent_steps.expanded(
            given["q_THD"], rows, rows.spans[0], by, got, chunk=chunk_of(variant), at_once=at_once
        )  # fmt: skip
        for some in (slice(None), slice(-1, None), slice(0, 130)):
            close(got[some], want[some], BOUND)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_chunk_does_not_depend_on_the_rows_beside_it(variant: str) -> None:
    given = inputs(MIXED, 32)
    rows, widths = given["rows"], Widths(32, NOPE, SHARED, RANK, VALUE)
    together = of(variant)(**given)
    for span in rows.spans:
        if not expands(span.count, span.start, widths):
            continue
        alone = latent_steps._some(rows, span.row, span.row + 1)
        got = of(variant)(given["q_THD"][span.rows], alone, given["kv_b"], scale=given["scale"])
        assert torch.equal(got, together[span.rows]), span


@pytest.mark.parametrize(("variant", "record"), [*((one, "") for one in VARIANTS), ("cuda", "mla_fp8_656")])
def test_a_step_asks_the_device_for_nothing_and_takes_what_a_plan_counts(variant: str, record: str) -> None:
    start, count = 20_000, 4096
    r, pages = torch.Generator("cuda").manual_seed(0), -(-(start + count) // 64)
    given = inputs(((0, 128),), 32)
    rows = torch.randn(pages, 64, RANK + SHARED, generator=r, device="cuda").to(BF16)
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
    ends = torch.tensor([0, count], dtype=torch.int32, device="cuda")
    (span,) = given["rows"].spans
    kept = replace(
        given["rows"], rows=rows, table=table, query_start=ends, start=given["rows"].start + start,
        spans=(replace(span, count=count, start=start),),
    )  # fmt: skip
    kept = coded(kept, record)
    q = torch.randn(count, 32, NOPE + SHARED, generator=r, device="cuda").to(BF16)
    run = partial(of(variant), q, kept, given["kv_b"], scale=given["scale"])
    run()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    counted = attend_bytes(Widths(32, NOPE, SHARED, RANK, VALUE), count, start + count, 2)
    assert torch.cuda.max_memory_allocated() - before <= counted + (1 << 20)  # numbers of pages


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_tokens_in_a_graph(variant: str) -> None:
    given = inputs(((3000, 1), (0, 1), (64, 1), (2000, 1)), 32)
    function, rows = of(variant), given["rows"]
    function(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(**given)
    for shift in (0, 1, 17):
        rows.start.copy_(torch.tensor([max(0, span.start - shift) for span in rows.spans], dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        eager = function(**given)
        torch.cuda.synchronize()
        assert torch.equal(out, eager), shift


def test_the_kernel_in_cuda_takes_what_a_large_model_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks go through it, joined sums included."""
    launched: list[tuple[bool, bool]] = []
    run = latent_prefill.chunk

    def counted(*args: Any) -> None:
        launched.append((args[1].joins, args[1].last))
        run(*args)

    monkeypatch.setattr(latent_prefill, "chunk", counted)
    monkeypatch.setattr(latent_steps, "keys_at_once", lambda widths, page: 1024)
    given = inputs(((300, 2000),), 16)
    close(of("cuda_chunks")(**given), latent.attend.body(**given), BOUND)
    assert launched == [(False, False), (True, False), (True, True)]


def test_projections_are_not_compiled_anew_for_multiples_of_16() -> None:
    """A step that warms up has as many tokens as a prompt; what is projected may be all but its longer chunks."""
    w_uk = torch.randn(4, NOPE, RANK, device="cuda").to(BF16)
    compiled = {}
    for tokens in (65, 80, 127, 2048):
        q_THD = torch.randn(tokens, 4, NOPE + SHARED, device="cuda").to(BF16)
        in_triton.queries_into_latent(q_THD, w_uk)
        compiled[tokens] = len(in_triton._project.device_caches[torch.cuda.current_device()][0])
    assert len(set(compiled.values())) == 1, compiled
