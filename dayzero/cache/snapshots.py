"""Snapshots: copies of recurrent state at page boundaries, found by the key of the last page before them. Paper.

A snapshot is one block for each layer of each state group. It is pending (referenced, its copy in flight) until the
step that takes it has retired, then held: evictable by the pool, or by the byte budget, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dayzero.cache.layout import Layout, StateCopy
from dayzero.cache.pool import Pool
from dayzero.cache.prefix import Remembered
from dayzero.units import bytes_text

Blocks = Mapping[int, tuple[int, ...]]  # group number -> one block for each layer


@dataclass(slots=True, eq=False)
class Snapshot:
    """provisional: taken while answering, replaced by the request's next one. key: None while it is pending.
    users: sequences that will restore it in a step that has not retired. live: False once its blocks are gone."""

    blocks: Blocks
    provisional: bool
    key: bytes | None = None
    users: int = 0
    live: bool = True


class Snapshots:
    """All snapshots. budget_bytes bounds the pending and held ones together."""

    def __init__(self, layout: Layout, pool: Pool, budget_bytes: int) -> None:
        self._pool, self.budget = pool, budget_bytes
        self._names = {i: g.name for i, g in enumerate(layout.groups) if g.unit == "state"}
        self.wants = {i: len(layout.groups[i].layers) for i in self._names}
        self.size = layout.state_footprint
        self.held: OrderedDict[bytes, Snapshot] = OrderedDict()  # least recently used first
        self.gone = Remembered()
        self._at: dict[tuple[int, int], Snapshot] = {}
        self.total_bytes = 0
        self.why_none = ""
        if self.size > budget_bytes:
            size, budget = bytes_text(self.size), bytes_text(budget_bytes)
            self.why_none = f"a snapshot takes {size}, and the budget for all is {budget}"

    def take(self, previous: Snapshot | None, *, provisional: bool, spare: Mapping[int, int]) -> Snapshot | None:
        """A pending snapshot, or None when the budget or the pool has no room for it.

        previous: the request's provisional one, first to go when the budget is full. spare: group -> blocks that must
        remain to be had afterwards, so that an optional copy does not make a running sequence wait.
        """
        if self.why_none or not self._pool.has_room({**spare, **self.wants}):
            return None
        if self.total_bytes + self.size > self.budget and previous is not None:
            self.drop_provisional(previous)
        while self.total_bytes + self.size > self.budget:
            oldest = next((s for s in self.held.values() if not s.users), None)
            if oldest is None:
                return None
            self._forget(oldest)
        taken = self._pool.take(self.wants)
        assert taken is not None, "room was checked"
        self.total_bytes += self.size
        return Snapshot({group: tuple(blocks) for group, blocks in taken.items()}, provisional)

    def publish(self, snapshot: Snapshot, key: bytes) -> bool:
        """The step that took it has retired. False: the key has a snapshot already; this one's blocks are free."""
        assert snapshot.key is None and snapshot.live
        if key in self.held:
            self.held.move_to_end(key)
            self.discard(snapshot)
            return False
        snapshot.key, self.held[key] = key, snapshot
        for group, blocks in snapshot.blocks.items():
            for block in blocks:
                self._pool.keep(group, block)
                self._at[group, block] = snapshot
            self._pool.release(group, blocks)
        return True

    def discard(self, snapshot: Snapshot) -> None:
        """A pending snapshot that will never be of use."""
        assert snapshot.key is None and snapshot.live
        snapshot.live = False
        self.total_bytes -= self.size
        for group, blocks in snapshot.blocks.items():
            self._pool.release(group, blocks)

    def use(self, snapshot: Snapshot) -> None:
        """A sequence will restore it: it stays until ``used`` is called."""
        assert snapshot.key is not None
        snapshot.users += 1
        snapshot.provisional = False  # of use to another: no longer this request's to replace
        self.held.move_to_end(snapshot.key)
        for group, blocks in snapshot.blocks.items():
            self._pool.share(group, blocks)

    def used(self, snapshot: Snapshot) -> None:
        snapshot.users -= 1
        for group, blocks in snapshot.blocks.items():
            self._pool.release(group, blocks)

    def settle(self, snapshot: Snapshot, *, touch: bool) -> None:
        """The request that took it has ended: it is kept as any other. touch: as the most recently used."""
        snapshot.provisional = False
        if touch and snapshot.live and snapshot.key is not None:
            self.held.move_to_end(snapshot.key)
            for group, blocks in snapshot.blocks.items():
                self._pool.touch(group, blocks)

    def drop_provisional(self, snapshot: Snapshot) -> None:
        """A newer one has taken its place; nothing happens when others have made use of it."""
        if snapshot.live and snapshot.provisional and not snapshot.users:
            self._forget(snapshot, remember=False)

    def evicted(self, group: int, block: int) -> None:
        """The pool has taken one of its blocks: the others are of no use."""
        snapshot = self._at.pop((group, block))
        self._forget(snapshot)

    def forget(self) -> None:
        """Drop all that nobody is about to restore."""
        for snapshot in [s for s in self.held.values() if not s.users]:
            self._forget(snapshot)
        self.gone.clear()

    def _forget(self, snapshot: Snapshot, *, remember: bool = True) -> None:
        assert snapshot.key is not None and snapshot.live and not snapshot.users
        del self.held[snapshot.key]
        if remember:
            self.gone.add(snapshot.key)
        snapshot.live = False
        self.total_bytes -= self.size
        for group, blocks in snapshot.blocks.items():
            for block in blocks:
                if self._at.pop((group, block), None) is not None:
                    self._pool.drop(group, block)

    def copies(self, source: Blocks, target: Blocks) -> tuple[StateCopy, ...]:
        return tuple(StateCopy(name, source[i], target[i]) for i, name in self._names.items())

    def check(self, pending: Sequence[Snapshot]) -> None:
        """Counts are what the snapshots say. pending: all of them. Raises AssertionError."""
        assert self.total_bytes == self.size * (len(self.held) + len(pending)), "bytes of snapshots"
        at = {(g, b): s for s in self.held.values() for g, blocks in s.blocks.items() for b in blocks}
        assert at == self._at, "blocks of snapshots"
        assert all(s.live and s.key == key for key, s in self.held.items()), "keys of snapshots"
        for group in self.wants:
            assert {b for g, b in at if g == group} == self._pool.shelves[group].cached, "cached blocks of snapshots"
