"""A cache that grows as it is needed: for one process without an engine (alignment, tests, a first answer).

Records lie in pages, as in an engine's pool, so that blocks and operators see the same thing; pages are never freed
before their sequence is. Fresh memory is filled with NaN, so that a row that was never written cannot pass for zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dayzero.arch.spec import ModelSpec
from dayzero.decl import CacheNeed
from dayzero.ops.records import codec_of
from dayzero.view import Paged, Span, States, StateStore, StepView, TokenStore, Where, Write

PAGE_TOKENS = 64
NOT_A_NUMBER = 0xFF  # each part of a packed row that was never written is a NaN
TOKENS, STATES = "tokens", "states"  # the two groups


class LocalTokens:
    """Records of one need, [N, page, *need.shape], or uint8 [N, page, bytes] where rows are packed; N doubles when a
    block beyond it is written."""

    def __init__(self, need: CacheNeed, dtype: torch.dtype) -> None:
        self.need, self.codec = need, codec_of(need.packed)
        if need.packed is None:
            self._rows = torch.full((1, PAGE_TOKENS, *need.shape), torch.nan, dtype=dtype)
        else:
            self._rows = torch.full((1, PAGE_TOKENS, need.packed.num_bytes), NOT_A_NUMBER, dtype=torch.uint8)

    def append(self, view: StepView, values: Tensor, write: Write | None = None) -> None:
        """Write values [T, *need.shape]; a start before a sequence's end replaces what lay there."""
        assert tuple(values.shape) == (view.tokens.shape[0], *self.need.shape), f"{self.need.name}: {values.shape}"
        where = view.where[TOKENS]
        self._rows = _grown(self._rows, int(where.blocks.max()) + 1)
        if write is not None:
            write(values, self._rows, where.blocks, where.offsets, self.codec)
        elif self.codec is not None:
            self.codec.write(self._rows, where.blocks, where.offsets, values)
        else:
            self._rows[where.blocks, where.offsets] = values.to(self._rows.dtype)

    def pages(self, view: StepView) -> Paged:
        where = view.where[TOKENS]
        return Paged(self._rows, where.table, where.first, view.query_start, view.start, view.spans, self.codec)

    def history(self, view: StepView, span: Span) -> tuple[Tensor, int]:
        """(records that the span's queries may see, position of the first); with a window no older ones are given."""
        records, _ = self.pages(view).history(span)
        window = self.need.window
        first = 0 if window is None else max(0, span.start - window + 1)
        return records[first:], first


def _grown(rows: Tensor, blocks: int) -> Tensor:
    """The same records with room for so many blocks: NaN behind them."""
    held = rows.shape[0]
    if held >= blocks:
        return rows
    empty = NOT_A_NUMBER if rows.dtype == torch.uint8 else torch.nan
    with torch.inference_mode(False):  # what is made in that mode cannot be written to outside of it
        grown = rows.new_full((max(blocks, 2 * held), *rows.shape[1:]), empty)
        grown[:held] = rows
    return grown


class LocalStates:
    """The state of one need by sequence, [N, *need.shape], with the position it belongs to."""

    def __init__(self, need: CacheNeed, dtype: torch.dtype) -> None:
        self.need, self.dtype = need, dtype
        self._rows = torch.full((1, *need.shape), torch.nan, dtype=dtype)
        self._positions: dict[int, int] = {}

    def states(self, view: StepView) -> States:
        """All rows' states, where they lie; they count as those behind each span from here on."""
        for span in view.spans:
            self._check(view, span)
        for span in view.spans:
            self._advance(view, span)
        return States(self._rows, view.where[STATES].table[:, 0])

    def read(self, view: StepView, span: Span) -> Tensor:
        """A copy of the state before the span's first token; zeros at the start of a sequence."""
        if span.start == 0:
            return torch.zeros(self.need.shape, dtype=self.dtype)
        self._check(view, span)
        return self._rows[_sequence(view, span)].clone()

    def write(self, view: StepView, span: Span, value: Tensor) -> None:
        assert tuple(value.shape) == self.need.shape, f"{self.need.name}: {tuple(value.shape)}"
        self._advance(view, span)
        self._rows[_sequence(view, span)] = value.to(self.dtype)

    def drop(self, sequence: int) -> None:
        if self._positions.pop(sequence, None) is not None:
            self._rows[sequence] = torch.nan

    def _check(self, view: StepView, span: Span) -> None:
        sequence = _sequence(view, span)
        position = self._positions.get(sequence, 0)
        assert span.start in (0, position), (
            f"{self.need.name}: row {sequence} has the state before token {position}, but token {span.start} comes"
        )

    def _advance(self, view: StepView, span: Span) -> None:
        sequence = _sequence(view, span)
        self._rows = _grown(self._rows, sequence + 1)
        self._positions[sequence] = span.start + span.count


def _sequence(view: StepView, span: Span) -> int:
    return int(view.where[STATES].table[span.row, 0])


class LocalCache:
    """Everything a model keeps between steps, for any number of sequences ("rows").

    dtype: what records are kept in; recurrent states that are declared float32 stay float32. A row lives until
    ``drop``; starting it again at token 0 replaces it.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        needs = spec.cache()
        self._has_states = any(need.unit == "state" for need in needs)
        self._lengths: dict[int, int] = {}
        self._blocks: dict[int, list[int]] = {}
        self._free: list[int] = []
        self._num_blocks = 0
        own: dict[str, LocalTokens | LocalStates] = {}
        for need in needs:
            if need.shares is None:
                kept = torch.float32 if need.element == "f32" else dtype
                own[need.name] = (LocalStates if need.unit == "state" else LocalTokens)(need, kept)
        self._states = [store for store in own.values() if isinstance(store, LocalStates)]
        shared = {need.name: own[need.shares] for need in needs if need.shares is not None}
        self.stores: Mapping[str, TokenStore | StateStore] = {**own, **shared}

    def length(self, row: int = 0) -> int:
        """Tokens of ``row`` that steps have been made for."""
        return self._lengths.get(row, 0)

    def view(self, tokens: Sequence[int] | Tensor, start: int | None = None, *, row: int = 0) -> StepView:
        """A step of one sequence: its tokens from position ``start`` on (default: where it ended)."""
        return self.views([(row, tokens)], None if start is None else [start])

    def views(
        self, parts: Sequence[tuple[int, Sequence[int] | Tensor]], starts: Sequence[int] | None = None
    ) -> StepView:
        """A step of several sequences, packed in this order: (row, tokens) each, rows all different.

        A start before a row's end goes back to that token; with recurrent states only 0 can be gone back to.
        """
        assert len({row for row, _ in parts}) == len(parts), "a row comes twice in one step"
        tokens = [torch.as_tensor(t, dtype=torch.int64).reshape(-1) for _, t in parts]
        begins = [self.length(row) for row, _ in parts] if starts is None else list(starts)
        spans, first = [], 0
        for number, ((row, _), own, start) in enumerate(zip(parts, tokens, begins, strict=True)):
            length = self.length(row)
            assert own.numel() > 0 and 0 <= start <= length, f"row {row} holds {length} tokens, start is {start}"
            assert start in (0, length) or not self._has_states, "recurrent states cannot go back to the middle"
            spans.append(Span(number, first, own.numel(), start))
            self._lengths[row] = start + own.numel()
            self._extend(row, start + own.numel())
            first += own.numel()
        return self._view(torch.cat(tokens), tuple(spans), [row for row, _ in parts])

    def _extend(self, row: int, tokens: int) -> None:
        held = self._blocks.setdefault(row, [])
        while len(held) * PAGE_TOKENS < tokens:
            if not self._free:
                self._free.append(self._num_blocks)
                self._num_blocks += 1
            held.append(self._free.pop())

    def _view(self, tokens: Tensor, spans: tuple[Span, ...], rows: list[int]) -> StepView:
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in spans])
        width = max(len(self._blocks[row]) for row in rows)
        table = torch.zeros(len(rows), width, dtype=torch.int32)
        for number, row in enumerate(rows):
            table[number, : len(self._blocks[row])] = torch.tensor(self._blocks[row], dtype=torch.int32)
        row_of_token = torch.repeat_interleave(torch.tensor([s.count for s in spans]))
        blocks = table[row_of_token, positions // PAGE_TOKENS].long()
        zeros, nothing = torch.zeros(len(rows), dtype=torch.int32), torch.zeros(0, dtype=torch.int64)
        states = torch.tensor(rows, dtype=torch.int32)[:, None]
        return StepView(
            tokens, positions, spans,
            query_start=torch.tensor([*(s.first for s in spans), tokens.shape[0]], dtype=torch.int32),
            start=torch.tensor([s.start for s in spans], dtype=torch.int32),
            stores=self.stores,
            where={
                TOKENS: Where(table, zeros, blocks, positions % PAGE_TOKENS),
                STATES: Where(states, zeros, nothing, nothing),
            },
            scratch={},
        )  # fmt: skip

    def drop(self, row: int) -> None:
        """Forget a sequence."""
        self._lengths.pop(row, None)
        self._free += self._blocks.pop(row, [])
        for store in self._states:
            store.drop(row)
