"""From a Step to the numbers that blocks read: one packed copy of ids, positions and tables a step.

T tokens, R rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
from torch import Tensor

from dayzero.cache.layout import Group
from dayzero.cache.views import PoolViews, device_numbers
from dayzero.engine.packed import Packed, Part
from dayzero.engine.step import GroupRows, Row, Step
from dayzero.units import round_up
from dayzero.view import Span, StepView, Where

Arrays = Mapping[str, np.ndarray]
WIDTHS = 16  # pages of a table are a multiple: compilers of kernels tell strides apart by whether they are that


class Slots:
    """newest [max_running] int64: the last sampled token of each slot, written by the executor's chooser."""

    def __init__(self, views: PoolViews, newest: Tensor) -> None:
        self.views, self.newest = views, newest

    def view(self, step: Step) -> StepView:
        """The inputs of ``step``. Late tokens are read from ``newest`` by what the device does next, so the step before
        must be sampled, or asked to be."""
        return self.view_with(step)[0]

    def view_with(self, step: Step, more: Arrays | None = None) -> tuple[StepView, Mapping[str, Tensor]]:
        """(the inputs of ``step``, what was copied with them). more: arrays that the caller wants on the device too."""
        rows, spans, more = step.rows, spans_of(step.rows), more or {}
        late = [i for i, row in enumerate(rows) if row.late]
        packed = Packed([*self._parts(step, len(late)), *(Part(n, a.dtype.str[1:], a.shape) for n, a in more.items())])
        host = packed.host(self.newest.device)
        arrays = packed.arrays(host)
        for name, array in more.items():
            arrays[name][...] = array
        fill(self.views, arrays, step)
        for name, rows_of in step.groups.items():  # nobody may read what lay behind a row's pages
            arrays[f"{name}.table"][:, _width(rows_of) :] = 0
        ids = arrays["ids"]
        ids[...] = 0
        for row, span in zip(rows, spans, strict=True):
            ids[span.first : span.first + len(row.tokens)] = row.tokens
        arrays["query_start"][...] = [*(span.first for span in spans), step.num_tokens]
        arrays["late"][...] = [spans[i].first + spans[i].count - 1 for i in late]
        arrays["late_slots"][...] = [rows[i].slot for i in late]
        placed = packed.put(host, self.newest.device)
        tokens = placed["ids"]
        if late:
            tokens[placed["late"]] = self.newest[placed["late_slots"]]
        view = StepView(
            tokens, placed["positions"], spans, query_start=placed["query_start"], start=placed["start"],
            stores=self.views.stores, where=where_of(self.views, placed), scratch={},
        )  # fmt: skip
        return view, placed

    def _parts(self, step: Step, num_late: int) -> list[Part]:
        tokens, rows = step.num_tokens, len(step.rows)
        whole = 1 if self.newest.device.type == "cpu" else WIDTHS
        widths = {name: round_up(_width(placed), whole) for name, placed in step.groups.items()}
        return [
            Part("ids", "i8", (tokens,)), Part("positions", "i8", (tokens,)), Part("query_start", "i4", (rows + 1,)),
            Part("late", "i8", (num_late,)), Part("late_slots", "i8", (num_late,)),
            *group_parts(self.views, rows, tokens, widths),
        ]  # fmt: skip


def spans_of(rows: Sequence[Row]) -> tuple[Span, ...]:
    """The spans of packed rows."""
    out, first = [], 0
    for number, row in enumerate(rows):
        out.append(Span(number, first, row.count, row.start))
        first += row.count
    return tuple(out)


def group_parts(views: PoolViews, rows: int, tokens: int, widths: Mapping[str, int]) -> list[Part]:
    """Where rows stand and where their records lie, by groups. The widest table comes last."""
    parts, tables = [Part("start", "i4", (rows,))], []
    for name, group in views.groups.items():
        parts.append(Part(f"{name}.first", "i4", (rows,)))
        if group.unit == "token":
            parts += [Part(f"{name}.{word}", "i8", (tokens,)) for word in ("blocks", "offsets")]
        tables.append(Part(f"{name}.table", "i4", (rows, widths[name])))
    return parts + sorted(tables, key=lambda part: part.shape[1])


def fill(views: PoolViews, arrays: Arrays, step: Step) -> None:
    """Write what ``group_parts`` names, and ``positions``, for the step's rows; what lies behind them is left alone."""
    num_rows, num_tokens = len(step.rows), step.num_tokens
    counts = np.array([row.count for row in step.rows], np.int64)
    starts = np.array([row.start for row in step.rows], np.int64)
    row_of = np.repeat(np.arange(num_rows), counts)
    positions = np.arange(num_tokens) + (starts - (np.cumsum(counts) - counts))[row_of]
    arrays["positions"][..., :num_tokens] = positions
    arrays["start"][:num_rows] = starts
    for name, placed in step.groups.items():
        group = views.groups[name]
        table = _table(views, group, placed)
        arrays[f"{name}.table"][:num_rows, : table.shape[1]] = table
        first = np.asarray(placed.first, np.int64)
        arrays[f"{name}.first"][:num_rows] = first
        if group.unit == "token":
            pages, offsets = np.divmod(positions - first[row_of], group.page_tokens)
            arrays[f"{name}.blocks"][:num_tokens] = table[row_of, pages]
            arrays[f"{name}.offsets"][:num_tokens] = offsets


def _width(placed: GroupRows) -> int:
    """Pages of the longest row, at least one."""
    return max((1, *map(len, placed.tables)))


def _table(views: PoolViews, group: Group, placed: GroupRows) -> np.ndarray:
    """[R, P] int32 device numbers of the rows' blocks; block 0 behind a row's pages."""
    lengths = np.fromiter(map(len, placed.tables), np.int64, len(placed.tables))
    width = _width(placed)
    ids = np.zeros((len(placed.tables), width), np.int64)
    ids[np.arange(width) < lengths[:, None]] = np.fromiter(
        chain.from_iterable(placed.tables), np.int64, int(lengths.sum())
    )
    return device_numbers(views.layout, group, ids)


def where_of(views: PoolViews, placed: Mapping[str, Tensor]) -> dict[str, Where]:
    """Where each group's records lie, of parts on the device."""
    nothing = placed["positions"].new_zeros(0)
    return {
        name: Where(
            placed[f"{name}.table"], placed[f"{name}.first"], placed.get(f"{name}.blocks", nothing),
            placed.get(f"{name}.offsets", nothing),
        )
        for name in views.groups
    }  # fmt: skip
