"""From a Step to the StepView that blocks read: one packed copy of ids, positions and tables a step.

T tokens, R rows.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dayzero.cache.layout import Group
from dayzero.cache.views import PoolViews, device_numbers
from dayzero.engine.step import GroupRows, Row, Step
from dayzero.view import Span, StepView, Where


class Slots:
    """newest [max_running] int64: the last sampled token of each slot, written by the executor's chooser."""

    def __init__(self, views: PoolViews, newest: Tensor) -> None:
        self.views, self.newest = views, newest

    def view(self, step: Step) -> StepView:
        """The inputs of ``step``. Late tokens are read from ``newest`` now, so the step before must be sampled."""
        rows = step.rows
        counts = np.fromiter((row.count for row in rows), np.int64, len(rows))
        starts = np.fromiter((row.start for row in rows), np.int64, len(rows))
        begins = np.concatenate(([0], np.cumsum(counts)))
        row_of = np.repeat(np.arange(len(rows)), counts)
        positions = np.arange(begins[-1]) - begins[row_of] + starts[row_of]
        spans = tuple(
            Span(i, int(begin), row.count, row.start) for i, (row, begin) in enumerate(zip(rows, begins, strict=False))
        )
        where = {
            name: self._where(self.views.groups[name], placed, row_of, positions)
            for name, placed in step.groups.items()
        }
        return StepView(
            self._tokens(rows, begins), self._put(positions), spans,
            query_start=self._put(begins.astype(np.int32)), start=self._put(starts.astype(np.int32)),
            stores=self.views.stores, where=where, scratch={},
        )  # fmt: skip

    def _put(self, numbers: np.ndarray) -> Tensor:
        return torch.from_numpy(numbers).to(self.newest.device)

    def _tokens(self, rows: tuple[Row, ...], begins: np.ndarray) -> Tensor:
        ids = np.zeros(int(begins[-1]), np.int64)
        late = [(i, row.slot) for i, row in enumerate(rows) if row.late]
        for row, begin in zip(rows, begins, strict=False):
            ids[begin : begin + len(row.tokens)] = row.tokens
        tokens = self._put(ids)
        if late:
            ends = self._put(np.array([int(begins[i + 1]) - 1 for i, _ in late]))
            tokens[ends] = self.newest[self._put(np.array([slot for _, slot in late]))]
        return tokens

    def _where(self, group: Group, placed: GroupRows, row_of: np.ndarray, positions: np.ndarray) -> Where:
        width = max((len(blocks) for blocks in placed.tables), default=0)
        ids = np.zeros((len(placed.tables), max(width, 1)), np.int64)
        for number, blocks in enumerate(placed.tables):
            ids[number, : len(blocks)] = blocks
        table = device_numbers(self.views.layout, group, ids)
        first = np.asarray(placed.first, np.int32)
        if group.unit == "state":
            nothing = self._put(np.zeros(0, np.int64))
            return Where(self._put(table), self._put(first), nothing, nothing)
        pages, offsets = np.divmod(positions - first[row_of], group.page_tokens)
        blocks = table[row_of, pages].astype(np.int64)
        parts = (self._put(part) for part in (table, first, blocks, offsets))
        return Where(*parts)
