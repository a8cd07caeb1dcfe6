"""Packer: collects the rows of one step and turns them into a Step. Paper."""

from __future__ import annotations

from dayzero.cache.layout import StateCopy
from dayzero.cache.manager import CacheManager, Opened
from dayzero.engine.sequence import Sequence
from dayzero.engine.step import GroupRows, NewSlot, Row, Step

Flight = list[tuple[Sequence, Row]]
_Entry = tuple[Sequence, Row, dict[str, tuple[tuple[int, ...], int]]]


class Packer:
    """budget: tokens that may still be added."""

    def __init__(self, manager: CacheManager, budget: int) -> None:
        self.budget = budget
        self._manager = manager
        self._singles: list[_Entry] = []
        self._chunks: list[_Entry] = []
        self._new: list[NewSlot] = []
        self._before: list[StateCopy] = []

    def __bool__(self) -> bool:
        return bool(self._singles or self._chunks)

    def begin(self, seq: Sequence, opened: Opened) -> None:
        """``seq`` starts or comes back with this step."""
        self._new.append(
            NewSlot(seq.slot, seq.id, seq.params, seq.prompt_tokens, tuple(seq.known), tuple(seq.request.media))
        )
        self._before += opened.before

    def add(self, seq: Sequence, end: int) -> None:
        """Compute ``seq`` up to ``end``; its blocks are there."""
        row = seq.row(end)
        entry = (seq, row, self._manager.rows(seq.id, end))
        (self._singles if row.count == 1 else self._chunks).append(entry)
        self.budget -= row.count

    def step(self, number: int, groups: tuple[str, ...]) -> tuple[Step, Flight]:
        """The step, and who is in it, in the order of its rows. Snapshots get what blocks the rows have left."""
        entries = self._singles + self._chunks
        after: list[StateCopy] = []
        for seq, row, _ in entries:
            after += self._manager.ran(seq.id, row.start + row.count)
        where = {}
        for name in groups:
            found = [tables[name] for _, _, tables in entries]
            where[name] = GroupRows(tuple([table for table, _ in found]), tuple([first for _, first in found]))
        rows = tuple([row for _, row, _ in entries])
        step = Step(number, rows, where, tuple(self._new), tuple(self._before), tuple(after))
        return step, [(seq, row) for seq, row, _ in entries]
