"""The pool: equal slabs that serve one group at a time, and the blocks in them. Paper.

A block is free, referenced (``references`` > 0), or cached: kept for reuse under a key that the prefix index or the
snapshot store knows. A cached block that nobody references is evictable, least recently used first. A slab without
referenced or cached blocks returns to the free slabs, whatever group it served.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from dayzero.cache.layout import Layout
from dayzero.units import ceil_div

SCARCE = 4  # free slabs are scarce when they are no more than this part of the pool


class Shelf:
    """One group's blocks. All mappings keep insertion order; evictable and idle are in order of their last use.

    references: block -> count, referenced blocks only. cached: blocks known under a key, referenced or not.
    evictable: cached blocks without references -> stamp of their last use. free: slab -> its free blocks. idle: slabs
    whose blocks nobody references but some are cached -> stamp of the last use among them. partial: slab -> number of
    its referenced blocks, for slabs that have any.
    """

    __slots__ = ("blocks_per_slab", "cached", "evictable", "free", "idle", "name", "partial", "references")

    def __init__(self, name: str, blocks_per_slab: int) -> None:
        self.name, self.blocks_per_slab = name, blocks_per_slab
        self.references: dict[int, int] = {}
        self.cached: set[int] = set()
        self.evictable: OrderedDict[int, int] = OrderedDict()
        self.free: OrderedDict[int, list[int]] = OrderedDict()
        self.idle: OrderedDict[int, int] = OrderedDict()
        self.partial: dict[int, int] = {}

    @property
    def spare(self) -> int:
        """Blocks that no other group can use: free and evictable ones beside referenced ones in a slab."""
        return len(self.partial) * self.blocks_per_slab - len(self.references)


class Pool:
    """Groups go by their number in ``layout.groups``. on_evict(group, block): called after a cached block was evicted
    to make room; it may drop further blocks."""

    def __init__(self, layout: Layout, num_slabs: int, on_evict: Callable[[int, int], None]) -> None:
        assert num_slabs > 0
        self.num_slabs = num_slabs
        self.shelves = tuple(Shelf(g.name, g.blocks_per_slab) for g in layout.groups)
        self.released = 0  # times that a block lost its last reference: room may have come
        self._on_evict = on_evict
        self._free_slabs = list(range(num_slabs - 1, -1, -1))
        self._owner = [-1] * num_slabs
        self._used = [0] * num_slabs  # referenced or cached blocks of a slab
        self._stamp = 0

    # --- room --------------------------------------------------------------------------------------------------

    def has_room(self, wants: Mapping[int, int]) -> bool:
        """Whether ``take(wants)`` would succeed. Exact, whatever lies in the cache."""
        slabs = self.num_slabs - sum(len(shelf.partial) for shelf in self.shelves)
        for group, count in wants.items():
            shelf = self.shelves[group]
            missing = count - shelf.spare
            if missing > 0:
                slabs -= ceil_div(missing, shelf.blocks_per_slab)
        return slabs >= 0

    def take(self, wants: Mapping[int, int], *, dense: bool = False) -> dict[int, list[int]] | None:
        """group -> ``wants[group]`` blocks with one reference each; None when there is no room, and nothing changed.

        Free blocks go first, then free slabs, then what was used least recently: an evictable block of the group, or a
        whole idle slab of another. dense: once slabs are scarce, take none before every spare block of the group is
        used, so that groups hold as few slabs as their references allow; before, what is cached would go for nothing.
        """
        if not self.has_room(wants):
            return None
        if not dense or len(self._free_slabs) > self.num_slabs // SCARCE:
            taken = {group: self._take_greedily(group, count) for group, count in wants.items()}
            if all(len(taken[group]) == count for group, count in wants.items()):
                return taken
            # A slab that another group needed went to a group with spare blocks. Rare: begin again, the strict way.
            for group, blocks in taken.items():
                self.release(group, blocks)
        return {group: self._take_densely(group, count) for group, count in wants.items()}

    def _take_greedily(self, group: int, count: int) -> list[int]:
        shelf, out = self.shelves[group], list[int]()
        while len(out) < count:
            if shelf.free:
                out.append(self._pop_free(group, next(iter(shelf.free))))
            elif not self._free_slab_for(group) and not self._evict_oldest(group):
                break
        return out

    def _take_densely(self, group: int, count: int) -> list[int]:
        shelf, out = self.shelves[group], list[int]()
        for slab in list(shelf.partial) if shelf.spare else ():
            first = slab * shelf.blocks_per_slab
            for block in range(first, first + shelf.blocks_per_slab):
                if block in shelf.evictable and len(shelf.free.get(slab, ())) + len(out) < count:
                    self.evict(group, block)
            while slab in shelf.free and len(out) < count:
                out.append(self._pop_free(group, slab))
        while len(out) < count:
            if not self._free_slabs:
                _, other, slab = min(self._oldest_idle(range(len(self.shelves))))
                self._clear(other, slab)
            self._free_slab_for(group)
            slab = next(reversed(shelf.free))
            while slab in shelf.free and len(out) < count:
                out.append(self._pop_free(group, slab))
        return out

    def _free_slab_for(self, group: int) -> bool:
        if not self._free_slabs:
            return False
        slab, shelf = self._free_slabs.pop(), self.shelves[group]
        self._owner[slab] = group
        first = slab * shelf.blocks_per_slab
        shelf.free[slab] = list(range(first + shelf.blocks_per_slab - 1, first - 1, -1))
        return True

    def _evict_oldest(self, group: int) -> bool:
        """Evict the group's oldest block, or another group's idle slab if all of it is older. False: there is none."""
        own = next(iter(self.shelves[group].evictable.items()), None)
        oldest = min(self._oldest_idle(g for g in range(len(self.shelves)) if g != group), default=None)
        if own is not None and (oldest is None or own[1] <= oldest[0]):
            self.evict(group, own[0])
        elif oldest is not None:
            self._clear(oldest[1], oldest[2])
        else:
            return False
        return True

    def _oldest_idle(self, groups: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """(stamp, group, slab) of each group's idle slab that was used least recently."""
        for group in groups:
            slab, stamp = next(iter(self.shelves[group].idle.items()), (-1, -1))
            if slab >= 0:
                yield stamp, group, slab

    def _clear(self, group: int, slab: int) -> None:
        shelf = self.shelves[group]
        first = slab * shelf.blocks_per_slab
        for block in range(first, first + shelf.blocks_per_slab):
            if block in shelf.evictable:  # an eviction may take others along
                self.evict(group, block)

    # --- references ---------------------------------------------------------------------------------------------

    def share(self, group: int, blocks: Sequence[int]) -> None:
        """One more reference to each block; all are referenced or cached."""
        shelf = self.shelves[group]
        references = shelf.references
        for block in blocks:
            if block in references:
                references[block] += 1
            else:
                del shelf.evictable[block]
                self._first_reference(shelf, block)

    def release(self, group: int, blocks: Sequence[int]) -> None:
        """One reference less to each block, in order: the first becomes the least recently used. Blocks without
        references become evictable when they are cached and free otherwise."""
        shelf = self.shelves[group]
        references = shelf.references
        for block in blocks:
            count = references[block]
            if count > 1:
                references[block] = count - 1
            else:
                del references[block]
                self._last_reference(group, shelf, block)

    def keep(self, group: int, block: int) -> None:
        """A referenced block is known under a key from now on."""
        shelf = self.shelves[group]
        assert block in shelf.references and block not in shelf.cached, (shelf.name, block)
        shelf.cached.add(block)

    def drop(self, group: int, block: int) -> None:
        """A cached block is known under no key any more; it is free once nobody references it."""
        shelf = self.shelves[group]
        shelf.cached.remove(block)
        if shelf.evictable.pop(block, None) is not None:
            self._give_back(shelf, block)

    def evict(self, group: int, block: int) -> None:
        """Drop an evictable block and tell whoever knows its key."""
        assert block in self.shelves[group].evictable
        self.drop(group, block)
        self._on_evict(group, block)

    def touch(self, group: int, blocks: Sequence[int]) -> None:
        """Cached blocks were of use, in order: the last becomes the most recently used."""
        shelf = self.shelves[group]
        for block in blocks:
            if block in shelf.evictable:
                self._stamp += 1
                shelf.evictable[block] = self._stamp
                shelf.evictable.move_to_end(block)
                slab = block // shelf.blocks_per_slab
                if slab in shelf.idle:
                    shelf.idle[slab] = self._stamp
                    shelf.idle.move_to_end(slab)

    def _first_reference(self, shelf: Shelf, block: int) -> None:
        shelf.references[block] = 1
        slab = block // shelf.blocks_per_slab
        count = shelf.partial.get(slab, 0)
        shelf.partial[slab] = count + 1
        if not count:
            shelf.idle.pop(slab, None)

    def _last_reference(self, group: int, shelf: Shelf, block: int) -> None:
        self._stamp += 1
        self.released += 1
        slab = block // shelf.blocks_per_slab
        shelf.partial[slab] -= 1
        if not shelf.partial[slab]:
            del shelf.partial[slab]
            shelf.idle[slab] = self._stamp
        if block in shelf.cached:
            shelf.evictable[block] = self._stamp
        else:
            self._give_back(shelf, block)

    def _pop_free(self, group: int, slab: int) -> int:
        shelf = self.shelves[group]
        block = shelf.free[slab].pop()
        if not shelf.free[slab]:
            del shelf.free[slab]
        self._used[slab] += 1
        self._first_reference(shelf, block)
        return block

    def _give_back(self, shelf: Shelf, block: int) -> None:
        slab = block // shelf.blocks_per_slab
        self._used[slab] -= 1
        if self._used[slab]:
            shelf.free.setdefault(slab, []).append(block)
            return
        shelf.free.pop(slab, None)
        shelf.idle.pop(slab, None)
        self._owner[slab] = -1
        self._free_slabs.append(slab)

    # --- numbers ------------------------------------------------------------------------------------------------

    def usage(self) -> float:
        """Share of the pool that is referenced, from 0 to 1. Evictable blocks count as free."""
        return sum(len(s.references) / s.blocks_per_slab for s in self.shelves) / self.num_slabs

    def sums(self) -> dict[str, int]:
        """Counts that return to what they were when everything taken was released and dropped."""
        out = {"slabs": self.num_slabs, "slabs.free": len(self._free_slabs)}
        for shelf in self.shelves:
            out[f"{shelf.name}.referenced"] = len(shelf.references)
            out[f"{shelf.name}.cached"] = len(shelf.cached)
            out[f"{shelf.name}.evictable"] = len(shelf.evictable)
            out[f"{shelf.name}.free"] = sum(len(blocks) for blocks in shelf.free.values())
        return out

    def check(self) -> None:
        """Every block is in exactly one place, and every count is what the blocks say. Slow; for debug mode."""
        assert len(set(self._free_slabs)) == len(self._free_slabs), "a slab is free twice"
        assert {s for s in range(self.num_slabs) if self._owner[s] < 0} == set(self._free_slabs), "a slab is lost"
        for group, shelf in enumerate(self.shelves):
            slabs = [s for s in range(self.num_slabs) if self._owner[s] == group]
            per = shelf.blocks_per_slab
            free = [block for blocks in shelf.free.values() for block in blocks]
            placed = [*free, *shelf.references, *shelf.evictable]
            assert sorted(placed) == [s * per + i for s in slabs for i in range(per)], f"{shelf.name}: blocks lost"
            assert shelf.cached - shelf.references.keys() == shelf.evictable.keys(), f"{shelf.name}: cached"
            assert all(b // per == slab for slab, blocks in shelf.free.items() for b in blocks), f"{shelf.name}: free"
            in_slab = Counter(b // per for b in shelf.references)
            assert dict(in_slab) == shelf.partial, f"{shelf.name}: referenced blocks of a slab"
            assert [per - len(shelf.free.get(s, ())) for s in slabs] == [self._used[s] for s in slabs], shelf.name
            assert set(slabs) - in_slab.keys() == set(shelf.idle), f"{shelf.name}: idle slabs"
            for order in (shelf.evictable, shelf.idle):
                assert list(order.values()) == sorted(order.values()), f"{shelf.name}: order of use"
