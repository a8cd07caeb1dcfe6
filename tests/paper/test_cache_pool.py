"""The pool: room is told exactly, slabs come back, the least recently used goes first."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings

from dayzero.cache.layout import lay_out
from dayzero.cache.pool import Pool
from tests.paper.cache_world import state_need, tokens_need

# Groups of 2, 3 and 12 blocks a slab.
LAYOUT = lay_out(
    [tokens_need("a.k", 96), tokens_need("b.k", 64, window=4), state_need("layers.0.s", 64)],
    dtype="bf16",
    page_tokens=8,
)


class Watched:
    """A pool and what it evicted."""

    def __init__(self, num_slabs: int) -> None:
        self.evicted: list[tuple[int, int]] = []
        self.pool = Pool(LAYOUT, num_slabs, lambda group, block: self.evicted.append((group, block)))

    def take(self, group: int, count: int, *, dense: bool = False) -> list[int]:
        taken = self.pool.take({group: count}, dense=dense)
        assert taken is not None
        self.pool.check()
        return taken[group]

    def cache(self, group: int, blocks: Sequence[int]) -> None:
        """They become evictable, in order."""
        for block in blocks:
            self.pool.keep(group, block)
        self.pool.release(group, blocks)
        self.pool.check()


def test_the_layout_of_these_tests() -> None:
    assert [g.blocks_per_slab for g in LAYOUT.groups] == [2, 3, 12]


def test_blocks_fill_slabs_and_slabs_come_back() -> None:
    w = Watched(2)
    assert w.take(0, 3) == [0, 1, 2]
    assert w.pool.take({1: 1}) is None and w.pool.take({0: 2}) is None
    assert w.pool.usage() == 0.75
    w.pool.release(0, [2])
    assert w.take(1, 3) == [3, 4, 5], "slab 1 serves another group now"
    w.pool.release(0, [0, 1])
    w.pool.release(1, [3, 4, 5])
    w.pool.check()
    assert w.pool.sums()["slabs.free"] == 2 and w.pool.usage() == 0.0 and not w.evicted


def test_a_shared_block_is_free_after_its_last_reference() -> None:
    w = Watched(1)
    w.take(0, 2)
    w.pool.share(0, [0])
    w.pool.release(0, [0, 1])
    assert w.take(0, 1) == [1] and w.pool.take({0: 1}) is None
    before = w.pool.released
    w.pool.release(0, [0])
    assert w.pool.released == before + 1 and w.take(0, 1) == [0]


def test_own_blocks_go_least_recently_used_first() -> None:
    w = Watched(2)
    w.cache(0, w.take(0, 4))
    w.pool.share(0, [0])
    w.pool.release(0, [0])
    w.pool.touch(0, [1])
    assert w.take(0, 3) == [2, 3, 0] and w.evicted == [(0, 2), (0, 3), (0, 0)]


def test_free_slabs_go_before_cached_blocks() -> None:
    w = Watched(2)
    w.cache(0, w.take(0, 2))
    assert w.take(0, 1) == [2] and not w.evicted


def test_an_idle_slab_of_another_group_goes_when_all_of_it_is_older() -> None:
    w = Watched(3)
    first, second, third = w.take(0, 2), w.take(1, 3), w.take(0, 2)
    w.cache(0, first)
    w.cache(1, second)
    w.cache(0, third)
    assert w.take(1, 1)[0] // 3 == 0, "slab 0 was idle for longest"
    assert w.evicted == [(0, 0), (0, 1)]
    w.evicted.clear()
    w.take(1, 2)
    assert not w.evicted, "the rest of that slab is free"
    w.take(1, 1)
    assert w.evicted == [(1, second[0])], "its own oldest block is older than the slab of group 0"


def test_cached_blocks_beside_referenced_ones_of_another_group_stay() -> None:
    """Evicting them would give no slab."""
    w = Watched(1)
    w.cache(0, w.take(0, 2)[:1])
    assert w.pool.take({1: 1}) is None and not w.evicted
    assert w.take(0, 1) == [0]


def test_what_one_group_can_do_without_goes_to_the_other() -> None:
    """Greedily, group 0 would evict its oldest block, in the slab that group 1 needs."""
    w = Watched(2)
    blocks = w.take(0, 4)
    w.pool.release(0, [3])
    for block in blocks[:3]:
        w.pool.keep(0, block)
    w.pool.release(0, [0, 1])
    w.pool.share(0, [0])
    w.pool.release(0, [0, 2])
    w.pool.share(0, [2])
    w.pool.touch(0, [0])
    assert w.pool.take({0: 1, 1: 3}) == {0: [3], 1: [0, 1, 2]}
    w.pool.check()


def test_dense_takes_spare_blocks_before_slabs_once_these_are_scarce() -> None:
    w = Watched(8)
    blocks = w.take(0, 12)  # six of eight slabs: two are free, a quarter of the pool
    w.cache(0, [blocks[1], blocks[3]])
    other = copy.deepcopy(w)
    assert w.take(0, 2)[0] // 2 >= 6 and not w.evicted
    assert sorted(other.take(0, 2, dense=True)) == [1, 3]
    assert other.pool.sums()["slabs.free"] == 2


def test_nothing_cached_goes_while_slabs_abound() -> None:
    w = Watched(9)
    blocks = w.take(0, 12)
    w.cache(0, [blocks[1], blocks[3]])
    assert w.take(0, 2, dense=True)[0] // 2 >= 6 and not w.evicted


def room_when_all_is_evicted(pool: Pool, wants: dict[int, int]) -> bool:
    """Counted on a copy without any cached block, slab by slab."""
    bare = copy.deepcopy(pool)
    for group, shelf in enumerate(bare.shelves):
        for block in list(shelf.evictable):
            bare.drop(group, block)
    sums, slabs = bare.sums(), 0
    for group, count in wants.items():
        shelf = bare.shelves[group]
        slabs += -(-max(0, count - sums[f"{shelf.name}.free"]) // shelf.blocks_per_slab)
    return slabs <= sums["slabs.free"]


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_slabs=st.integers(1, 5))
def test_room_is_told_exactly(data: st.DataObject, num_slabs: int) -> None:
    pool = Pool(LAYOUT, num_slabs, lambda group, block: None)
    for _ in range(data.draw(st.integers(1, 25))):
        group = data.draw(st.integers(0, 2))
        held = sorted(pool.shelves[group].references)
        what = data.draw(st.sampled_from(["take", "take", "release", "cache", "share", "touch"]))
        if what == "take":
            wants = {g: data.draw(st.integers(0, 7)) for g in range(3)}
            before = pool.sums()
            expected = room_when_all_is_evicted(pool, wants)
            taken = pool.take(wants, dense=data.draw(st.booleans()))
            assert (taken is not None) == expected
            if taken is None:
                assert pool.sums() == before
            else:
                assert {g: len(set(blocks)) for g, blocks in taken.items()} == wants
        elif held:
            some = data.draw(st.lists(st.sampled_from(held), unique=True))
            for block in some:
                if what == "share" or (what == "cache" and block not in pool.shelves[group].cached):
                    pool.share(group, [block]) if what == "share" else pool.keep(group, block)
            if what in ("release", "cache"):
                pool.release(group, some)
            pool.touch(group, sorted(pool.shelves[group].evictable)[:2] if what == "touch" else [])
        pool.check()
