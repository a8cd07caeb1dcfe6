"""Rows of one token of the delta rule on a GPU: in a graph as without, in place, at full width, far out in a pool."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.ops.bench.of_delta_decode import Shape, copied, inputs, some_rows
from dayzero.ops.bind import bind
from dayzero.ops.bounds import RECURRENCE
from dayzero.ops.contract import CONTRACTS
from dayzero.ops.delta_paged import Kept
from tests.parity import bitwise_equal, close

pytestmark = pytest.mark.gpu
VARIANTS = ("cuda", "triton")
KDA, GDN = Shape(7, 96, 96, lower=-5.0), Shape(5, 32, 16, per_head=True)
SHAPES = {
    "bounded": KDA, "softplus": Shape(3, 8, 8), "per head, grouped": GDN, "one row": Shape(1, 96, 96, lower=-5.0),
    "per head, bounded, fours": Shape(3, 16, 4, per_head=True, lower=-5.0), "many": Shape(40, 24, 24, lower=-5.0),
}  # fmt: skip


def run(variant: str, given: tuple[Any, ...], shape: Shape) -> Tensor:
    out = bind("recurrence.paged", "test", {"recurrence.paged": variant})(*given, **shape.options)
    assert isinstance(out, Tensor)
    return out


def reference(given: tuple[Any, ...], shape: Shape) -> Tensor:
    out = CONTRACTS["recurrence.paged"].body(*given, **shape.options)
    assert isinstance(out, Tensor)
    return out


def pools(kept: Kept) -> list[Tensor]:
    blocks = kept.table_R[kept.table_R >= 0].long()
    return [pool[blocks] for pool in (kept.state_NHKV, kept.q_NCS, kept.k_NCS, kept.v_NCS)]


def same(got: Kept, want: Kept) -> None:
    for one, two in zip(pools(got)[1:], pools(want)[1:], strict=True):
        assert torch.equal(one, two), "windows only move"
    close(pools(got)[0], pools(want)[0], RECURRENCE["f32"].value)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", SHAPES)
def test_the_reference_at_full_width(variant: str, name: str) -> None:
    shape = SHAPES[name]
    raw, weights, kept = inputs(shape, 1)
    twin = copied(kept)
    want = reference((raw, weights, twin), shape)
    close(run(variant, (raw, weights, kept), shape), want, RECURRENCE["bf16"].value)
    same(kept, twin)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [KDA, GDN], ids=["channel", "head"])
def test_many_steps_one_behind_another(variant: str, shape: Shape) -> None:
    """The same states step by step: what a launch overlaps must not be what it reads."""
    raw, weights, kept = inputs(shape, 2)
    for settled in (False, True):
        mine, theirs = replace(copied(kept), settled=False), copied(kept)
        for step in range(6):
            given = raw if step % 2 else type(raw)(*(getattr(raw, name) + step for name in type(raw).__slots__))
            torch.cuda.synchronize()
            got = run(variant, (given, weights, replace(mine, settled=settled and step == 0)), shape)
            close(got, reference((given, weights, theirs), shape), RECURRENCE["bf16"].value)
        same(mine, theirs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [KDA, GDN, Shape(1, 96, 96, lower=-5.0)], ids=["channel", "head", "one row"])
def test_a_graph_of_layers_gives_the_same_bits(variant: str, shape: Shape) -> None:
    layers = [inputs(shape, seed) for seed in range(4)]
    twins = [(raw, weights, copied(kept)) for raw, weights, kept in layers]
    for one in layers:  # compile; then back to the states they had
        run(variant, (one[0], one[1], copied(one[2])), shape)
    wants = [[run(variant, one, shape) for one in twins] for _ in range(3)]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = [run(variant, one, shape) for one in layers]
    for want in wants:
        for out in outs:
            out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        for got, wanted in zip(outs, want, strict=True):
            assert bitwise_equal(got, wanted)
    for (_, _, kept), (_, _, twin) in zip(layers, twins, strict=True):
        for one, two in zip(pools(kept), pools(twin), strict=True):
            assert bitwise_equal(one, two)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("shape", [KDA, GDN], ids=["channel", "head"])
def test_new_rows_and_rows_that_pad_a_step(variant: str, shape: Shape) -> None:
    """Inside a graph the host knows of neither: both are read on the device."""
    raw, weights, kept = inputs(shape, 3)
    start, table = kept.start.clone(), kept.table_R.clone()
    for row in (0, 2):
        start[row] = 0
        for pool in (kept.state_NHKV, kept.q_NCS, kept.k_NCS, kept.v_NCS):
            pool[int(table[row])] = torch.nan
    untouched = int(table[3])
    before = [pool[untouched].clone() for pool in (kept.state_NHKV, kept.q_NCS, kept.k_NCS, kept.v_NCS)]
    table[3] = -1
    spans = tuple(replace(span, start=int(start[span.row])) for span in kept.spans)
    mine = replace(kept, start=start, table_R=table, spans=spans)
    twin = copied(mine)
    want = reference((raw, weights, twin), shape)
    blind = replace(mine, spans=kept.spans)  # the host still thinks that all rows go on
    close(run(variant, (raw, weights, blind), shape), want, RECURRENCE["bf16"].value)
    same(mine, twin)
    for pool, old in zip((kept.state_NHKV, kept.q_NCS, kept.k_NCS, kept.v_NCS), before, strict=True):
        assert bitwise_equal(pool[untouched], old)


@pytest.mark.parametrize("variant", VARIANTS)
def test_states_beyond_two_billion_elements(variant: str) -> None:
    shape = Shape(2, 96, 96, lower=-5.0)
    raw, weights, kept = inputs(shape, 4, first_block=1400)
    assert int(kept.table_R.min()) * kept.state_NHKV.stride(0) > 2**31
    small = inputs(shape, 4)[2]
    blocks, others = kept.table_R.tolist(), small.table_R.tolist()
    for mine, pool in ((small.state_NHKV, kept.state_NHKV), (small.q_NCS, kept.q_NCS), (small.k_NCS, kept.k_NCS),
                       (small.v_NCS, kept.v_NCS)):  # fmt: skip
        for here, there in zip(others, blocks, strict=True):
            mine[here] = pool[there]
    want = reference((raw, weights, small), shape)
    close(run(variant, (raw, weights, kept), shape), want, RECURRENCE["bf16"].value)
    same(kept, small)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_does_not_depend_on_the_rows_beside_it(variant: str) -> None:
    raw, weights, kept = inputs(KDA, 5)
    few, kept_few = some_rows(raw, copied(kept), 2)
    alone = run(variant, (few, weights, kept_few), KDA)
    assert bitwise_equal(run(variant, (raw, weights, kept), KDA)[:2], alone)
