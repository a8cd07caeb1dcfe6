"""Dense attention over pages at sizes of real steps: against float64, in graphs, and whatever else is in the step.

R rows, H query heads, K key heads, D key width, V value width.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from dayzero.cache.layout import lay_out
from dayzero.cache.views import PoolTokens, PoolViews, device_numbers
from dayzero.decl import CacheNeed
from dayzero.ops import latent as latent_operators
from dayzero.ops.bind import bind
from dayzero.ops.cases_paged import paged_inputs
from dayzero.ops.cuda import paged_decode, paged_prefill
from dayzero.ops.paged import paged
from dayzero.ops.random_inputs import Inputs
from dayzero.view import Paged, Span
from tests.parity import close, moved

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
BOUND = paged.bound["bf16"].value
VARIANTS = ("triton", "cuda")
Rows = tuple[tuple[int, int], ...]


def inputs(
    rows: Rows, heads: tuple[int, int], widths: tuple[int, int], *, latent: bool = False, sinks: bool = False,
    seed: int = 0, **more: Any,
) -> dict[str, Any]:  # fmt: skip
    """On the GPU; what lies behind the end of a row, and between blocks, is NaN."""
    r = Inputs(seed)
    made = paged_inputs(r, rows, heads, widths, BF16, page=more.pop("page", 64), **more)
    if latent:
        made |= {"values": None, "value_dim": widths[1]}
    if sinks:
        made["sinks_H"] = r.normal(heads[0]) * 3
    return moved(made, "cuda")


def of(variant: str) -> Any:
    return bind("attention.paged", "test", {"attention.paged": variant})


def compare(variant: str, given: dict[str, Any], bound: float = BOUND) -> None:
    got, want = of(variant)(**given), paged.body(**given)
    close(got[0], want[0], bound)
    close(got[1], want[1], 1e-3)  # sums of float32 over exact products; logits are up to 10
    assert got[0].dtype == want[0].dtype and got[1].dtype == torch.float32


MIXED: Rows = (
    (3000, 1), (0, 1), (63, 1), (1023, 1), (1024, 1), (4095, 1), (100, 33), (0, 257), (640, 64), (2047, 130), (4300, 1)
)  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "four on one of 128": {"heads": (8, 2), "widths": (128, 128)},
    "eight on one of 64, sinks": {"heads": (16, 2), "widths": (64, 64), "sinks": True},
    "eight on one of 64, window and sinks": {"heads": (16, 2), "widths": (64, 64), "sinks": True, "window": 128},
    "wider keys": {"heads": (4, 4), "widths": (192, 128)},
    "256 wide": {"heads": (4, 1), "widths": (256, 256)},
    "latent": {"heads": (96, 1), "widths": (576, 512), "latent": True},
    "latent, pages of 16": {"heads": (32, 1), "widths": (576, 512), "latent": True, "page": 16},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SHAPES)
def test_long_ragged_batches(variant: str, name: str) -> None:
    compare(variant, inputs(MIXED, **SHAPES[name]))


@pytest.mark.parametrize("variant", VARIANTS)
def test_more_rows_than_a_block_has_threads(variant: str) -> None:
    rows = tuple((7 * number % 60, 1 + (number % 9 == 4)) for number in range(300))
    compare(variant, inputs(rows, (8, 2), (64, 64), page=16))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [1, 64, 127, 128, 129])
def test_the_edges_of_a_window(variant: str, window: int) -> None:
    """Rows just below, at and just above the window, at the ends of pages and tiles."""
    rows = tuple((start, count) for start in (126, 127, 128, 129, 191, 192, 255, 256) for count in (1, 2, 66))
    compare(variant, inputs(rows, (8, 1), (64, 64), window=window, sinks=True))


@pytest.mark.parametrize("variant", VARIANTS)
def test_queries_in_float32_over_bf16_records(variant: str) -> None:
    """As between the projections of absorbed latent attention: products take them in bf16, results are float32."""
    given = inputs(((1000, 1), (300, 5)), (64, 1), (576, 512), latent=True)
    compare(variant, given | {"q_THD": given["q_THD"].float()})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", [name for name in SHAPES if "latent" not in name])
def test_a_row_does_not_depend_on_the_rows_beside_it(variant: str, name: str) -> None:
    given = inputs(MIXED, **SHAPES[name])
    together = of(variant)(**given)
    for number in (0, 3, 5, 7, 9, 10):
        alone = of(variant)(**_only(given, number))
        rows = given["keys"].spans[number].rows
        assert all(torch.equal(one, both[rows]) for one, both in zip(alone, together, strict=True)), number


def _only(given: dict[str, Any], number: int) -> dict[str, Any]:
    span = given["keys"].spans[number]

    def cut(pages: Paged) -> Paged:
        ends = torch.tensor([0, span.count], dtype=torch.int32, device="cuda")
        row = slice(number, number + 1)
        return replace(
            pages, table=pages.table[row], first=pages.first[row], query_start=ends, start=pages.start[row],
            spans=(Span(0, 0, span.count, span.start),),
        )  # fmt: skip

    out = {key: cut(value) if isinstance(value, Paged) else value for key, value in given.items()}
    return out | {"q_THD": given["q_THD"][span.rows]}


@pytest.mark.parametrize("width", [64, 128])
def test_a_step_over_the_engines_pool(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of one layer among others, in blocks that lie apart; the kernels in CUDA C++ take them."""
    needs = [CacheNeed(f"layers.{i}.{n}", (2, width), "bf16", "kv_bf16") for i in range(3) for n in ("k", "v")]
    layout = lay_out(needs, dtype="bf16")
    views, group = PoolViews(layout, 24, device="cuda", poison=True), layout.token_groups[0]
    starts, counts = (0, 130, 700), (333, 65, 1)
    pages = [-(-(start + count) // 64) for start, count in zip(starts, counts, strict=True)]
    made = torch.Generator("cuda").manual_seed(0)
    numbers = torch.from_numpy(device_numbers(layout, group, torch.randperm(24)[: sum(pages)].numpy())).cuda()
    table = torch.nn.utils.rnn.pad_sequence(list(numbers.split(pages)), batch_first=True)
    ends = torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32, device="cuda")
    start = torch.tensor(starts, dtype=torch.int32, device="cuda")
    spans = tuple(Span(i, int(ends[i]), counts[i], starts[i]) for i in range(3))

    def filled(name: str) -> Paged:
        store = views.stores[f"layers.1.{name}"]
        assert isinstance(store, PoolTokens)
        for row, span in enumerate(spans):
            for at in range(span.start + span.count):
                record = store.rows[int(table[row, at // 64]), at % 64]
                record.copy_(torch.randn(record.shape, generator=made, device="cuda"))
        return Paged(store.rows, table, torch.zeros_like(start), ends, start, spans)

    launched: list[str] = []

    def counted(module: ModuleType, name: str) -> None:
        function = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given: launched.append(name) or function(*given))

    counted(paged_decode, "decode")
    counted(paged_prefill, "chunks")
    q = torch.randn(sum(counts), 8, width, generator=made, device="cuda").to(BF16)
    compare("cuda", {"q_THD": q, "keys": filled("k"), "values": filled("v"), "scale": width**-0.5})
    assert launched == ["decode", "chunks"]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", ["four on one of 128", "eight on one of 64, window and sinks", "latent"])
def test_a_graph_follows_lengths_that_only_the_device_knows(variant: str, name: str) -> None:
    given = inputs(((3000, 1), (0, 1), (64, 1), (2000, 1)), **SHAPES[name])
    if "window" in SHAPES[name]:  # its pages go on to the right with the row
        given = inputs(((127, 1), (0, 1), (64, 1), (100, 1)), **SHAPES[name])
    function, keys = of(variant), given["keys"]
    function(**given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = function(**given)
    for shift in (0, 1, 17):
        keys.start.copy_(torch.tensor([max(0, span.start - shift) for span in keys.spans], dtype=torch.int32))
        for one in out:
            one.fill_(torch.nan)
        graph.replay()
        eager = function(**given)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(out, eager, strict=True)), shift


def test_projections_around_latent_attention_equal_the_expanded_form() -> None:
    """At widths of a large model: queries into the latent, attention over latent rows, values out of it."""
    heads, nope, rank, value, tokens, before = 16, 128, 512, 128, 40, 200
    made = torch.Generator("cuda").manual_seed(0)
    q, cache, kv_b = (
        torch.randn(*sizes, generator=made, device="cuda").to(BF16)
        for sizes in ((tokens, heads, nope + 64), (before + tokens, rank + 64), (heads * (nope + value), rank))
    )
    kv_b = kv_b / rank**0.5
    want, _ = latent_operators.attend_expanded.body(q, cache, kv_b, start=before, scale=192**-0.5)
    w_uk, w_uv = latent_operators.absorb.body(kv_b, heads, nope, value)
    pages = -(-(before + tokens) // 64)
    pool = torch.full((pages, 64, 1, rank + 64), torch.nan, dtype=BF16, device="cuda")
    pool.view(-1, rank + 64)[: before + tokens] = cache
    zero = torch.zeros(1, dtype=torch.int32, device="cuda")
    table = torch.arange(pages, dtype=torch.int32, device="cuda")[None]
    ends = torch.tensor([0, tokens], dtype=torch.int32, device="cuda")
    keys = Paged(pool, table, zero, ends, zero + before, (Span(0, 0, tokens, before),))
    into, out_of = (bind(name, "test", {name: "triton"}) for name in ("latent.queries", "latent.values"))
    latent, _ = of("cuda")(into(q, w_uk), keys, None, scale=192**-0.5, value_dim=rank)
    # Queries and sums of attention are rounded to bf16 between the products; the expanded form rounds nothing there.
    close(out_of(latent, w_uv, BF16), want, 2 * BOUND)
