"""Dense stores that grow: the cache of the reference path, in one process, without pages.

Fresh memory is filled with NaN, so that a row that was never written cannot pass for zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dayzero.arch.spec import ModelSpec
from dayzero.decl import CacheNeed
from dayzero.view import Span, StateStore, StepView, TokenStore

FIRST_TOKENS = 64


class DenseTokens:
    """Records of one need by request row, one buffer each that doubles when it is full."""

    def __init__(self, need: CacheNeed, dtype: torch.dtype) -> None:
        self.need, self.dtype = need, dtype
        self._buffers: dict[int, Tensor] = {}
        self._lengths: dict[int, int] = {}

    def append(self, span: Span, values: Tensor) -> None:
        """Write values [count, *need.shape]; a start before the end drops what lay behind it."""
        length = self._lengths.get(span.row, 0)
        assert span.start <= length, f"{self.need.name}: tokens {length} to {span.start} of row {span.row} are missing"
        assert tuple(values.shape) == (span.count, *self.need.shape), f"{self.need.name}: {tuple(values.shape)}"
        end = span.start + span.count
        buffer = self._grown(span.row, end, values.device)
        buffer[span.start : end] = values.to(self.dtype)
        self._lengths[span.row] = end

    def history(self, span: Span) -> tuple[Tensor, int]:
        """A view of the rows that the span's queries may see, and the position of the first; valid until the next
        append. With a window no older rows are given."""
        end = span.start + span.count
        assert self._lengths.get(span.row) == end, f"{self.need.name}: append comes before history"
        window = self.need.window
        first = 0 if window is None else max(0, span.start - window + 1)
        return self._buffers[span.row][first:end], first

    def drop(self, row: int) -> None:
        self._buffers.pop(row, None)
        self._lengths.pop(row, None)

    def _grown(self, row: int, tokens: int, device: torch.device) -> Tensor:
        held = self._buffers.get(row)
        if held is not None and held.shape[0] >= tokens:
            return held
        size = max(tokens, FIRST_TOKENS if held is None else 2 * held.shape[0])
        grown = torch.full((size, *self.need.shape), torch.nan, dtype=self.dtype, device=device)
        if held is not None:
            grown[: held.shape[0]] = held
        self._buffers[row] = grown
        return grown


class DenseStates:
    """The state of one need by request row, with the position it belongs to."""

    def __init__(self, need: CacheNeed, dtype: torch.dtype) -> None:
        self.need, self.dtype = need, dtype
        self._states: dict[int, tuple[int, Tensor]] = {}

    def read(self, span: Span) -> Tensor:
        """A copy of the state before the span's first token; zeros at the start of a sequence."""
        if span.start == 0:
            return torch.zeros(self.need.shape, dtype=self.dtype)
        position, state = self._states.get(span.row, (0, None))
        assert state is not None and position == span.start, (
            f"{self.need.name}: row {span.row} has the state before token {position}, but token {span.start} comes"
        )
        return state.clone()

    def write(self, span: Span, value: Tensor) -> None:
        assert tuple(value.shape) == self.need.shape, f"{self.need.name}: {tuple(value.shape)}"
        self._states[span.row] = (span.start + span.count, value.to(self.dtype, copy=True))

    def drop(self, row: int) -> None:
        self._states.pop(row, None)


class LocalCache:
    """Everything a model keeps between steps, for any number of sequences ("rows").

    dtype: what records are kept in; recurrent states that are declared float32 stay float32. A row lives until
    ``drop``; starting it again at token 0 replaces it.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._stores: dict[str, DenseTokens | DenseStates] = {}
        self._lengths: dict[int, int] = {}
        needs = spec.cache()
        self._has_states = any(need.unit == "state" for need in needs)
        for need in needs:
            if need.shares is None:
                kept = torch.float32 if need.element == "f32" else dtype
                self._stores[need.name] = (DenseStates if need.unit == "state" else DenseTokens)(need, kept)
        shared = {need.name: self._stores[need.shares] for need in needs if need.shares is not None}
        self.stores: Mapping[str, TokenStore | StateStore] = {**self._stores, **shared}

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
        for (row, _), own, start in zip(parts, tokens, begins, strict=True):
            length = self.length(row)
            assert own.numel() > 0 and 0 <= start <= length, f"row {row} holds {length} tokens, start is {start}"
            assert start in (0, length) or not self._has_states, "recurrent states cannot go back to the middle"
            spans.append(Span(row, first, own.numel(), start))
            self._lengths[row] = start + own.numel()
            first += own.numel()
        positions = torch.cat([torch.arange(s.start, s.start + s.count) for s in spans])
        return StepView(torch.cat(tokens), positions, tuple(spans), self.stores, {})

    def drop(self, row: int) -> None:
        """Forget a sequence."""
        self._lengths.pop(row, None)
        for store in self._stores.values():
            store.drop(row)
