"""What the cache manager knows of one open sequence. Paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dayzero.cache.prefix import Chain
from dayzero.cache.snapshots import Snapshot

Rows = dict[str, tuple[tuple[int, ...], int]]  # group name -> (table, position of the first token of table[0])


@dataclass(slots=True)
class Pages:
    """Pages of one token group that a sequence holds, in order; ``first``: number of the first. published: pages below
    this number have been offered to the index."""

    number: int  # of the group in the pool
    name: str
    blocks: list[int] = field(default_factory=list)
    first: int = 0
    published: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)


@dataclass(slots=True)
class OpenSequence:
    """known: tokens known when it was opened. pages: of each token group. capacity: tokens that they can hold.
    retired: tokens whose step has retired, or that were restored. restored: the snapshot that its first step copies
    from. working: group number -> the blocks of its state, one for each layer; states: the same as rows.
    points: page boundaries at which snapshots are wanted. pending: end of a step in flight -> the snapshot it takes.
    turn: the newest provisional snapshot.
    """

    known: int
    chain: Chain
    pages: list[Pages]
    capacity: int = 0
    retired: int = 0
    restored: Snapshot | None = None
    working: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    states: Rows = field(default_factory=dict)
    points: tuple[int, ...] = ()
    pending: dict[int, Snapshot] = field(default_factory=dict)
    turn: Snapshot | None = None
    _rows: Rows = field(default_factory=dict)
    _rows_pages: int = -1

    def rows(self, num_pages: int, page_tokens: int) -> Rows:
        """Tables up to page ``num_pages`` (excluded). The same object until something changes; never written to."""
        if num_pages != self._rows_pages:
            rows = {
                held.name: (tuple(held.blocks[: num_pages - held.first]), held.first * page_tokens)
                for held in self.pages
            }
            self._rows, self._rows_pages = {**rows, **self.states}, num_pages
        return self._rows

    def changed(self) -> None:
        """Pages were freed: tables begin elsewhere."""
        self._rows_pages = -1
