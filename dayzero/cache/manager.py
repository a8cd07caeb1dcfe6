"""CacheManager: what the scheduler asks for blocks, prefixes and snapshots. Paper."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from dayzero.cache.layout import Layout, StateCopy
from dayzero.cache.pool import Pool
from dayzero.cache.prefix import Chain, Found, Media
from dayzero.cache.reuse import Reuse
from dayzero.cache.sequence import OpenSequence, Rows
from dayzero.units import ceil_div, counted


@dataclass(frozen=True, slots=True)
class Opened:
    """hit: tokens restored. why: a sentence when more could have been restored, else empty. before: copies that the
    request's first step makes before its forward pass."""

    hit: int
    why: str
    before: tuple[StateCopy, ...] = ()


@dataclass(slots=True)
class CacheStats:
    """Counters that only go up. prefix_queries: tokens of opened sequences; prefix_hits: those restored. evictions:
    cached blocks that made room for others (of a snapshot, one counts). snapshots_taken: pending ones included."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    evictions: int = 0
    snapshots_taken: int = 0
    snapshots_restored: int = 0


class CacheManager:
    """Owner of a pool of ``num_slabs`` slabs.

    fingerprint: whatever else a cached value depends on (plan, preprocessing, position rule). snapshot_tokens: distance
    of snapshots, rounded up to pages; by default as many tokens as weigh what a state weighs. snapshot_bytes: budget
    of all snapshots, by default a quarter of the pool. prefix: whether anything is kept for reuse. debug: check every
    invariant after each call (slow).

    Order of calls for a request: ``open``; for each step ``extend``, ``rows`` and ``ran`` when it is scheduled (steps
    may be scheduled ahead of results) and ``retire``, in the same order, when its result is there; ``close`` once no
    step that names the request is in flight. Nothing of a step is reusable before ``retire``. Call ``ran`` after the
    ``extend`` of all rows of a step: a snapshot takes only what is left over.

    A sequence that is alone can go on up to what ``why_never`` allows. Blocks may have come to lie scattered, so that
    ``extend`` has no room although no other sequence is open and no step in flight: close it and open it again.
    """

    def __init__(
        self, layout: Layout, num_slabs: int, *, fingerprint: bytes = b"", snapshot_tokens: int | None = None,
        snapshot_bytes: int | None = None, prefix: bool = True, debug: bool = False,
    ) -> None:  # fmt: skip
        self.layout, self.num_slabs, self.stats = layout, num_slabs, CacheStats()
        self._page, self._debug = layout.page_tokens, debug
        self._pool = Pool(layout, num_slabs, self._evicted)
        self._reuse = Reuse(
            layout, self._pool, fingerprint=fingerprint, snapshot_tokens=snapshot_tokens,
            snapshot_bytes=snapshot_bytes, prefix=prefix,
        )  # fmt: skip
        self._working = {i: len(g.layers) for i, g in enumerate(layout.groups) if g.unit == "state"}
        self._open: dict[str, OpenSequence] = {}

    @property
    def snapshot_tokens(self) -> int | None:
        """Distance of snapshots in tokens; None without states."""
        return self._reuse.snapshot_tokens

    @property
    def released(self) -> int:
        """Goes up whenever room may have come: what had no room before need not be asked again until it changes."""
        return self._pool.released

    # --- admission ----------------------------------------------------------------------------------------------

    def why_never(self, num_tokens: int) -> str | None:
        """Why a sequence of ``num_tokens`` tokens cannot fit even when it has the pool to itself; None: it can."""
        needs = self._needs(num_tokens)
        slabs = sum(ceil_div(count, self.layout.groups[i].blocks_per_slab) for i, count in needs.items())
        if slabs <= self.num_slabs:
            return None
        parts = ", ".join(f"{self.layout.groups[i].name}: {counted(n, 'block')}" for i, n in sorted(needs.items()))
        return (
            f"A sequence of {counted(num_tokens, 'token')} needs {counted(slabs, 'slab')} of the cache ({parts}), "
            f"but there are {self.num_slabs:,}; give the cache more memory or ask for fewer tokens."
        )

    def _needs(self, num_tokens: int) -> dict[int, int]:
        """Group number -> blocks that a sequence must hold at once to come to ``num_tokens`` tokens.

        A window group holds what two steps of a page each can see, one in flight and one scheduled ahead.
        """
        pages, needs = ceil_div(num_tokens, self._page), dict(self._working)
        for index in self._reuse.indices:
            window = index.group.window
            needs[index.number] = pages if window is None else min(pages, ceil_div(window - 1, self._page) + 2)
        return needs

    def open(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        salt: str | None = None,
        media: Sequence[Media] = (),
        limit: int | None = None,
    ) -> Opened | None:
        """Begin a sequence whose first ``tokens`` are known: restore what can be restored (whole pages, never the last
        token) and take the blocks of its state. None when there is no room now, and nothing changed.

        The hit is the longest n for which every token group has the pages it needs (a window group those within the
        window before n) and the states have a snapshot at exactly n. media: (content hash, first token, number of
        tokens) of each image. limit: restore at most so many tokens, though more are cached: the others are to be
        computed all the same, and are of use to later sequences. Sequences with different salts share nothing.
        """
        assert request_id not in self._open and len(tokens) > 0, request_id
        if not self._pool.has_room(self._working):
            return None
        chain, found = self._reuse.find(tokens, salt, media, limit)
        sequence = self._begin(request_id, len(tokens), chain, found.pages)
        if sequence is None and found.pages and not self._open:
            found = Found(0, found.matched, "The cached prefix lies too scattered to leave room for the rest.")
            sequence = self._begin(request_id, len(tokens), chain, 0)
        if sequence is None:
            return None
        self._open[request_id] = sequence
        self._reuse.opened(sequence, found)
        self.stats.prefix_queries += len(tokens)
        self.stats.prefix_hits += sequence.retired
        before: tuple[StateCopy, ...] = ()
        if self._reuse.snapshots and sequence.restored:
            before = self._reuse.snapshots.copies(sequence.restored.blocks, sequence.working)
            self.stats.snapshots_restored += 1
        self._checked()
        return Opened(sequence.retired, found.why, before)

    def _begin(self, request_id: str, known: int, chain: Chain, hit: int) -> OpenSequence | None:
        """A sequence restored to ``hit`` pages, or None when there is no room for its state (or, when it would be
        alone, for the rest of its tokens beside the restored pages); then nothing is held."""
        alone = not self._open
        pages, restored = self._reuse.pin(chain, hit)
        tokens = hit * self._page
        sequence = OpenSequence(known, chain, pages, capacity=tokens, retired=tokens, restored=restored)
        rest = self._needs(known + 1)
        for held in pages:
            rest[held.number] = max(0, rest[held.number] - len(held.blocks))
        fits = not (alone and hit) or self._pool.has_room(rest)
        taken = self._pool.take(self._working, dense=alone) if fits else None
        if taken is None:
            self._let_go(sequence)
            return None
        sequence.working = {i: tuple(blocks) for i, blocks in taken.items()}
        sequence.states = {self.layout.groups[i].name: (blocks, 0) for i, blocks in sequence.working.items()}
        return sequence

    # --- a step -------------------------------------------------------------------------------------------------

    def extend(self, request_id: str, end: int) -> bool:
        """Take blocks for positions below ``end`` in every token group. False: no room, and nothing changed."""
        sequence = self._open[request_id]
        if end <= sequence.capacity:
            return True
        last = ceil_div(end, self._page)
        count = last - sequence.capacity // self._page
        taken = self._pool.take({held.number: count for held in sequence.pages}, dense=len(self._open) == 1)
        if taken is None:
            return False
        for held in sequence.pages:
            held.blocks += taken[held.number]
        sequence.capacity = last * self._page
        self._checked()
        return True

    def reach(self, request_id: str, want: int) -> int:
        """Largest end, at most ``want``, for which ``extend`` has room now; what it holds already when there is none.
        With windows a long chunk needs more blocks at once than the same tokens in short ones."""
        sequence = self._open[request_id]
        held = sequence.capacity // self._page
        low, high = 0, max(0, ceil_div(want, self._page) - held)
        while low < high:
            middle = (low + high + 1) // 2
            if self._pool.has_room({pages.number: middle for pages in sequence.pages}):
                low = middle
            else:
                high = middle - 1
        return min(want, (held + low) * self._page)

    def chunk_end(self, request_id: str, start: int, want: int) -> int:
        """Where a chunk that begins at ``start`` and might go to ``want`` should end: start < result <= want.

        At the first place where a snapshot is wanted: the last page boundary of the tokens known at ``open``, every
        ``snapshot_tokens``, and where the prompt was seen to branch off from cached tokens. Otherwise at a page
        boundary, unless it is the last chunk of the known tokens or shorter than that.
        """
        assert start < want, (start, want)
        sequence = self._open[request_id]
        end = self._reuse.next_point(sequence, start, want)
        if end == want < sequence.known:
            boundary = want // self._page * self._page
            end = boundary if boundary > start else want
        return end

    def rows(self, request_id: str, end: int) -> Rows:
        """group name -> (table, first) for a step that computes up to ``end``: blocks of the pages up to ``end``, and
        the position of the first token of the first (for states: working blocks, 0).

        Not to be written to. The same object is returned until the tables change; what was returned never changes, so
        a step in flight may go on using it.
        """
        return self._open[request_id].rows(ceil_div(end, self._page), self._page)

    def ran(self, request_id: str, end: int) -> tuple[StateCopy, ...]:
        """The step that computes up to ``end`` is scheduled. Copies to make after its forward pass, if a snapshot is
        wanted at ``end`` and there is room for it.

        Behind the tokens known at ``open`` every page boundary that a step ends at gets a provisional snapshot, which
        replaces the request's one before: a finished turn, or a request that comes back, finds its newest.
        """
        sequence = self._open[request_id]
        if end % self._page or not self._working:
            return ()
        spare = {held.number: len(self._open) for held in sequence.pages}  # a page for everyone who goes on
        snapshot = self._reuse.take_snapshot(sequence, end, spare)
        if snapshot is None or self._reuse.snapshots is None:
            return ()
        self.stats.snapshots_taken += 1
        self._checked()
        return self._reuse.snapshots.copies(sequence.working, snapshot.blocks)

    def retire(self, request_id: str, end: int, tokens: Sequence[int]) -> None:
        """The step that computed up to ``end`` has retired: its full pages and its snapshot become reusable, and pages
        that fell wholly behind the windows are released. tokens: all ids known so far, at least ``end`` of them; where
        there are fewer, what they do not cover stays private."""
        sequence = self._open[request_id]
        if end // self._page > sequence.retired // self._page or sequence.pending:
            self._reuse.publish(sequence, end, tokens)
        sequence.retired = max(sequence.retired, end)
        self._reuse.unpin_state(sequence)
        for index, held in zip(self._reuse.indices, sequence.pages, strict=True):
            out = index.group.first_page(end) - held.first
            if out > 0:
                self._pool.release(held.number, held.blocks[:out])
                del held.blocks[:out]
                held.first += out
                sequence.changed()
        self._checked()

    def close(self, request_id: str, *, finished: bool = True) -> None:
        """The sequence is over (finished), or given up or preempted (not finished): release all it holds. What it
        published stays as evictable cache, its newest snapshot too."""
        sequence = self._open.pop(request_id)
        self._reuse.ended(sequence, finished=finished)
        self._let_go(sequence)
        self._checked()

    def _let_go(self, sequence: OpenSequence) -> None:
        """The last pages become the least recently used: without the first ones they are of no use."""
        self._reuse.unpin_state(sequence)
        for held in sequence.pages:
            self._pool.release(held.number, held.blocks[::-1])
        for number, blocks in sequence.working.items():
            self._pool.release(number, blocks)

    # --- numbers ------------------------------------------------------------------------------------------------

    def usage(self) -> float:
        """Share of the pool that sequences hold, from 0 to 1; cached blocks that may be evicted count as free."""
        return self._pool.usage()

    def sums(self) -> dict[str, int]:
        """Counts by name that are as at the start once every sequence is closed and ``forget`` was called."""
        snapshots = self._reuse.snapshots
        return {
            **self._pool.sums(),
            "sequences": len(self._open),
            "snapshots": len(snapshots.held) if snapshots else 0,
            "snapshot_bytes": snapshots.total_bytes if snapshots else 0,
        }

    def inventory(self, request_id: str) -> dict[str, tuple[int, ...]]:
        """group name -> all blocks that a sequence holds: pages in order, or its state layer by layer."""
        sequence = self._open[request_id]
        pages = {held.name: tuple(held.blocks) for held in sequence.pages}
        return pages | {name: blocks for name, (blocks, _) in sequence.states.items()}

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) for the start-up table, beside those of the layout."""
        return [("prefix cache", self._reuse.line())]

    def forget(self) -> None:
        """Drop all cached blocks that no sequence holds."""
        self._reuse.forget()
        self._checked()

    def _evicted(self, group: int, block: int) -> None:
        self.stats.evictions += 1
        self._reuse.evicted(group, block)

    def _checked(self) -> None:
        if self._debug:
            self.check()

    def check(self) -> None:
        """Every reference is some sequence's or snapshot's, every cached block has a key, and the pool's own counts
        are right. Raises AssertionError. Slow."""
        self._pool.check()
        held: list[Counter[int]] = [Counter() for _ in self.layout.groups]
        for sequence in self._open.values():
            for pages in sequence.pages:
                held[pages.number].update(pages.blocks)
                assert pages.end * self._page == sequence.capacity >= sequence.retired, "pages and capacity"
            for number, blocks in sequence.working.items():
                held[number].update(blocks)
        pending = [s for sequence in self._open.values() for s in sequence.pending.values()]
        restored = [sequence.restored for sequence in self._open.values() if sequence.restored]
        for snapshot in [*pending, *restored]:
            for number, blocks in snapshot.blocks.items():
                held[number].update(blocks)
        for count, shelf in zip(held, self._pool.shelves, strict=True):
            assert dict(count) == shelf.references, f"{shelf.name}: references that nobody holds"
        self._reuse.check(pending)
