"""The pool's stores against the growing cache: same blocks, same parameters, other memory; every bit equal."""

from __future__ import annotations

import random

import pytest
import torch

from dayzero.blocks.local_cache import LocalCache
from dayzero.cache.layout import Layout, lay_out
from dayzero.cache.views import PoolViews, device_numbers
from dayzero.engine.slots import Slots
from dayzero.engine.step import GroupRows, Row, Step
from tests.cpu.random_models import CHANNELS, MIXERS, RESIDUALS, model, stack_of, token_ids

PAGE = 16
NEWEST = torch.zeros(8, dtype=torch.int64)


class Hand:
    """Blocks dealt by hand, in an order that follows nothing."""

    def __init__(self, layout: Layout, num_slabs: int, seed: int = 5) -> None:
        self.layout, deal = layout, random.Random(seed)
        slabs = list(range(num_slabs))
        deal.shuffle(slabs)
        self.free: dict[str, list[int]] = {}
        share = num_slabs // len(layout.groups)
        for number, group in enumerate(layout.groups):
            mine = slabs[number * share : (number + 1) * share]
            ids = [slab * group.blocks_per_slab + i for slab in mine for i in range(group.blocks_per_slab)]
            deal.shuffle(ids)
            self.free[group.name] = ids
        self.held: dict[str, dict[str, list[int]]] = {}

    def rows(self, request: str, end: int) -> dict[str, tuple[tuple[int, ...], int]]:
        held, out = self.held.setdefault(request, {g.name: [] for g in self.layout.groups}), {}
        for group in self.layout.groups:
            wanted = group.sequence_blocks or -(-end // group.page_tokens)
            while len(held[group.name]) < wanted:
                held[group.name].append(self.free[group.name].pop())
            out[group.name] = (tuple(held[group.name]), 0)
        return out


def step_of(hand: Hand, number: int, parts: list[tuple[str, int, list[int]]], late: tuple[str, ...] = ()) -> Step:
    """parts: (request, start, its tokens); requests in ``late`` leave the last one to the device."""
    rows, placed = [], []
    for request, start, tokens in parts:
        known = tuple(tokens[:-1] if request in late else tokens)
        rows.append(Row(request, int(request), start, len(tokens), known, True))
        placed.append(hand.rows(request, start + len(tokens)))
    groups = {
        g.name: GroupRows(tuple(p[g.name][0] for p in placed), tuple(p[g.name][1] for p in placed))
        for g in hand.layout.groups
    }
    return Step(number, tuple(rows), groups)


@pytest.mark.parametrize("name", list(MIXERS))
def test_a_pool_gives_what_a_growing_cache_gives(name: str) -> None:
    spec = model(MIXERS[name], (CHANNELS["glu"],), RESIDUALS["plain"]())
    stack, cache = stack_of(spec), LocalCache(spec, torch.float32)
    layout = lay_out(spec.cache(), dtype="f32", page_tokens=PAGE)
    views = PoolViews(layout, 40 * len(layout.groups), poison=True, checked=True)
    slots, hand = Slots(views, NEWEST), Hand(layout, 40 * len(layout.groups))
    sequences = {request: token_ids(50, int(request)).tolist() for request in "037"}
    done = dict.fromkeys(sequences, 0)
    for number, counts in enumerate(((1, 17, 5), (16, 1, 30), (33, 32, 15))):
        parts = [
            (request, done[request], tokens[done[request] : done[request] + count])
            for (request, tokens), count in zip(sequences.items(), counts, strict=True)
        ]
        got = stack.forward(slots.view(step_of(hand, number, parts)))
        want = stack.forward(cache.views([(int(request), tokens) for request, _, tokens in parts]))
        assert torch.equal(got, want)
        done = {request: done[request] + len(tokens) for request, _, tokens in parts}


def test_a_late_token_is_the_slots_newest_sample() -> None:
    spec = model(MIXERS["attention"], (CHANNELS["glu"],), RESIDUALS["plain"]())
    layout = lay_out(spec.cache(), dtype="f32", page_tokens=PAGE)
    slots, hand = Slots(PoolViews(layout, 20), torch.tensor([0, 0, 0, 41, 0, 42])), Hand(layout, 20)
    view = slots.view(step_of(hand, 0, [("5", 0, [9]), ("3", 0, [7, 8, 9]), ("1", 0, [6])], late=("3", "5")))
    assert view.tokens.tolist() == [42, 7, 8, 41, 6]
    assert view.positions.tolist() == [0, 0, 1, 2, 0] and view.num_single == 1


def test_a_write_outside_the_pool_or_twice_to_one_place_is_refused() -> None:
    spec = model(MIXERS["attention"], (CHANNELS["glu"],), RESIDUALS["plain"]())
    layout = lay_out(spec.cache(), dtype="f32", page_tokens=PAGE)
    views = PoolViews(layout, 2, checked=True)
    slots, store = Slots(views, NEWEST), views.stores["layers.0.mixer.k"]
    hand = Hand(layout, 2)
    hand.held["1"] = {"tokens": [99]}
    view = slots.view(step_of(hand, 0, [("1", 0, [4])]))
    with pytest.raises(AssertionError, match="outside the pool"):
        store.append(view, torch.zeros(1, *views.groups["tokens"].places[0].shape))
    hand.held = {"1": {"tokens": [1]}, "2": {"tokens": [1]}}
    view = slots.view(step_of(hand, 1, [("1", 0, [4]), ("2", 0, [4])]))
    with pytest.raises(AssertionError, match="written to one place"):
        store.append(view, torch.zeros(2, *views.groups["tokens"].places[0].shape))


def test_states_are_copied_block_by_block() -> None:
    spec = model(MIXERS["delta_softplus"], (CHANNELS["glu"],), RESIDUALS["plain"]())
    layout = lay_out(spec.cache(), dtype="f32", page_tokens=PAGE)
    views = PoolViews(layout, 30, poison=True)
    slots, hand, stack = Slots(views, NEWEST), Hand(layout, 30), stack_of(spec)
    tokens = token_ids(20, 3).tolist()
    stack.forward(slots.view(step_of(hand, 0, [("1", 0, tokens[:13])])))
    hand.rows("2", 13)
    for group in layout.state_groups:
        views.copy_blocks(group.name, hand.held["1"][group.name], hand.held["2"][group.name])
    for group in layout.token_groups:
        hand.held["2"][group.name] = hand.held["1"][group.name]
    want = stack.forward(slots.view(step_of(hand, 1, [("1", 13, tokens[13:])])))
    assert torch.equal(stack.forward(slots.view(step_of(hand, 2, [("2", 13, tokens[13:])]))), want)


def test_copies_of_one_call_read_before_they_write_and_touch_nothing_else() -> None:
    """Blocks go round in a ring: each gets what its source held before the call."""
    spec = model(MIXERS["delta_softplus"], (CHANNELS["glu"],), RESIDUALS["plain"]())
    layout = lay_out(spec.cache(), dtype="f32", page_tokens=PAGE)
    views, group = PoolViews(layout, 8), layout.state_groups[0]
    views.pool.copy_(torch.randint(0, 256, views.pool.shape, dtype=torch.uint8))
    before = views.pool.clone()
    ring = [0, 1, 2]
    begins = [int(n) * 256 for n in device_numbers(layout, group, ring)]
    views.copy_blocks(group.name, ring, [1, 2, 0])
    want = before.clone()
    for source, target in zip(begins, (begins[1], begins[2], begins[0])):
        want[target : target + group.block_bytes] = before[source : source + group.block_bytes]
    assert torch.equal(views.pool, want) and not torch.equal(want, before)
