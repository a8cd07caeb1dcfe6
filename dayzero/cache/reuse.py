"""What is kept for reuse: which prefix a sequence can be restored to, what a retired step makes reusable, and where
snapshots are wanted. Paper.

When two requests compute the same page at the same time, the first to retire publishes it; the other's page stays its
own and is freed with it. The same holds for snapshots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dayzero.cache.layout import Layout
from dayzero.cache.pool import Pool
from dayzero.cache.prefix import Chain, Found, Media, PageIndex, PrefixSearch, root_key
from dayzero.cache.sequence import OpenSequence, Pages
from dayzero.cache.snapshots import Snapshot, Snapshots
from dayzero.units import bytes_text, counted, round_up

STATE_ONLY_SNAPSHOT_TOKENS = 1024  # where no rows grow with the context, no number of tokens weighs as much as a state


class Reuse:
    """Published pages and snapshots of one pool. Needs are those of CacheManager, which says what the options mean."""

    def __init__(
        self, layout: Layout, pool: Pool, *, fingerprint: bytes, snapshot_tokens: int | None,
        snapshot_bytes: int | None, prefix: bool,
    ) -> None:  # fmt: skip
        self._pool, self._page, self._fingerprint, self._on = pool, layout.page_tokens, fingerprint, prefix
        self.indices = [PageIndex(g, i) for i, g in enumerate(layout.groups) if g.unit == "token"]
        self._by_number = {index.number: index for index in self.indices}
        self._search = PrefixSearch(self.indices, self._page)
        budget = pool.num_slabs * layout.slab_bytes // 4 if snapshot_bytes is None else snapshot_bytes
        self.snapshots = Snapshots(layout, pool, budget) if layout.state_groups else None
        self.snapshot_tokens: int | None = None
        if self.snapshots:
            weight = layout.sequence_bytes // layout.token_bytes if layout.token_bytes else STATE_ONLY_SNAPSHOT_TOKENS
            self.snapshot_tokens = round_up(max(1, weight if snapshot_tokens is None else snapshot_tokens), self._page)

    # --- before a sequence begins -------------------------------------------------------------------------------

    def find(
        self, tokens: Sequence[int], salt: str | None, media: Sequence[Media], limit: int | None
    ) -> tuple[Chain, Found]:
        """At least one token must be computed, for its logits: the last one is never restored, nor any behind the first
        ``limit``."""
        chain = Chain(root_key(self._fingerprint, salt, self._page), self._page, media)
        best = (len(tokens) - 1) // self._page
        if not self._on:
            return chain, Found(0, 0, "The prefix cache is off." if best else "")
        chain.grow(tokens, best)
        keys = chain.keys if limit is None else chain.keys[: limit // self._page]
        return chain, self._search.find(keys, self.snapshots)

    def pin(self, chain: Chain, hit: int) -> tuple[list[Pages], Snapshot | None]:
        """References to all that a sequence restored to ``hit`` pages needs."""
        pages = []
        for index in self.indices:
            first = index.first_needed(hit)
            blocks = [index.blocks[key] for key in chain.keys[first:hit]]
            self._pool.share(index.number, blocks)
            pages.append(Pages(index.number, index.group.name, blocks, first, hit))
        restored = self.snapshots.held[chain.keys[hit - 1]] if self.snapshots and hit else None
        if self.snapshots and restored:
            self.snapshots.use(restored)
        return pages, restored

    def unpin_state(self, sequence: OpenSequence) -> None:
        """The step that restores the snapshot has retired, or will never run."""
        if self.snapshots and sequence.restored:
            self.snapshots.used(sequence.restored)
            sequence.restored = None

    def opened(self, sequence: OpenSequence, found: Found) -> None:
        """Remember where this sequence should leave snapshots: the last page boundary of its prompt, and where it
        branched off from pages that are cached but could not be restored. Those pages count as used."""
        if self.snapshots and self._on:
            ends = {(sequence.known - 1) // self._page * self._page, found.matched * self._page}
            sequence.points = tuple(sorted(end for end in ends if end > sequence.retired))
        for index in self.indices:
            keys = reversed(sequence.chain.keys[sequence.retired // self._page : found.matched])
            self._pool.touch(index.number, [index.blocks[key] for key in keys if key in index.blocks])

    # --- snapshots ----------------------------------------------------------------------------------------------

    def next_point(self, sequence: OpenSequence, start: int, want: int) -> int:
        """First place between start and want (excluded) where a snapshot is wanted and none is held; else want."""
        if not (self.snapshots and self.snapshot_tokens and self._on) or self.snapshots.why_none:
            return want
        distance = self.snapshot_tokens
        regular = range((start // distance + 1) * distance, want, distance)
        points = [p for p in sequence.points if start < p < want and not self._held(sequence, p)]
        points += next(([p] for p in regular if not self._held(sequence, p)), [])
        return min(points, default=want)

    def take_snapshot(self, sequence: OpenSequence, end: int, spare: Mapping[int, int]) -> Snapshot | None:
        """A pending snapshot at ``end`` if one is wanted there and there is room for it. See CacheManager.ran."""
        if not (self.snapshots and self.snapshot_tokens and self._on) or end % self._page or end <= sequence.retired:
            return None
        wanted = end in sequence.points or end % self.snapshot_tokens == 0
        if not (wanted or end >= sequence.known) or end in sequence.pending or self._held(sequence, end):
            return None
        snapshot = self.snapshots.take(sequence.turn, provisional=not wanted, spare=spare)
        if snapshot:
            sequence.pending[end] = snapshot
        return snapshot

    def _held(self, sequence: OpenSequence, end: int) -> bool:
        """Whether a snapshot of the sequence's first ``end`` tokens is held. False where they are not all known."""
        page, keys = end // self._page, sequence.chain.keys
        return self.snapshots is not None and page <= len(keys) and keys[page - 1] in self.snapshots.held

    # --- when a step retires, when a sequence ends --------------------------------------------------------------

    def publish(self, sequence: OpenSequence, end: int, tokens: Sequence[int]) -> None:
        """Offer full pages below ``end`` and the snapshot taken there, as far as ``tokens`` covers them."""
        if not self._on:
            return
        last, keys = min(end, len(tokens)) // self._page, sequence.chain.keys
        sequence.chain.grow(tokens, last)
        for index, held in zip(self.indices, sequence.pages, strict=True):
            for page in range(max(held.published, held.first), last):
                block = held.blocks[page - held.first]
                if index.put(keys[page], block):
                    self._pool.keep(held.number, block)
            held.published = max(held.published, last)
        self._search.retired(keys[sequence.retired // self._page : last])
        for at in [at for at in sequence.pending if at <= end]:
            self._publish_snapshot(sequence, sequence.pending.pop(at), at // self._page, last)

    def _publish_snapshot(self, sequence: OpenSequence, snapshot: Snapshot, page: int, last: int) -> None:
        assert self.snapshots is not None
        if page > last:
            self.snapshots.discard(snapshot)
            return
        self.snapshots.publish(snapshot, sequence.chain.keys[page - 1])
        if sequence.turn:
            self.snapshots.drop_provisional(sequence.turn)
        sequence.turn = snapshot if snapshot.live and snapshot.provisional else None

    def ended(self, sequence: OpenSequence, *, finished: bool) -> None:
        """Its newest provisional snapshot is kept from now on; those whose step never retired are given up."""
        if self.snapshots:
            for snapshot in sequence.pending.values():
                self.snapshots.discard(snapshot)
            sequence.pending.clear()
            if sequence.turn:
                self.snapshots.settle(sequence.turn, touch=finished)
                sequence.turn = None

    # --- room ---------------------------------------------------------------------------------------------------

    def evicted(self, group: int, block: int) -> None:
        """The pool has taken a cached block."""
        if group in self._by_number:
            self._by_number[group].remove(block)
        else:
            assert self.snapshots is not None
            self.snapshots.evicted(group, block)

    def forget(self) -> None:
        """Drop everything that no sequence holds or is about to restore."""
        for index in self.indices:
            for block in list(self._pool.shelves[index.number].evictable):
                index.remove(block, remember=False)
                self._pool.drop(index.number, block)
            index.gone.clear()
        self._search.seen.clear()
        if self.snapshots:
            self.snapshots.forget()

    def line(self) -> str:
        """For the start-up table."""
        if not self._on:
            return "off"
        if not self.snapshots:
            return f"on, smallest reusable prefix {counted(self._page, 'token')}"
        if self.snapshots.why_none:
            return f"nothing can be reused: {self.snapshots.why_none}"
        return (
            f"on, smallest reusable prefix {counted(self._page, 'token')}; snapshots of "
            f"{bytes_text(self.snapshots.size)} every {counted(self.snapshot_tokens or 0, 'token')} and at the ends of "
            f"prompts and turns, {bytes_text(self.snapshots.budget)} at most"
        )

    def check(self, pending: Sequence[Snapshot]) -> None:
        """Every cached block has a key. pending: all snapshots in flight. Raises AssertionError."""
        for index in self.indices:
            assert index.known() == self._pool.shelves[index.number].cached, f"{index.group.name}: keys"
        if self.snapshots:
            self.snapshots.check(pending)
