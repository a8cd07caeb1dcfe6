"""StepView: the inputs of one step as blocks see them. No torch at import; tensors appear only as annotations.

A step holds several requests ("rows") packed one after another in one dimension of T tokens. Single-token rows come
first. Blocks never ask which request a row is; they go through ``view.spans``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """One request's run of tokens in a step: packed rows [first, first+count), whose first token has position start."""

    row: int
    first: int
    count: int
    start: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)


class TokenStore(Protocol):
    """Per-token records of one cache need, e.g. KV rows."""

    def append(self, span: Span, values: Tensor) -> None:
        """Write values [count, *need.shape] for the span's tokens. Must be called before ``history`` of that span."""

    def history(self, span: Span) -> tuple[Tensor, int]:
        """(records [L, *need.shape] oldest first, position of the first): all of [0, start+count), or for a window at
        least the last window-1 tokens before the span and the span itself. Valid until the next append."""


class StateStore(Protocol):
    """Per-sequence state of one cache need, e.g. a recurrent state."""

    def read(self, span: Span) -> Tensor:
        """State [*need.shape] before the span's first token; zeros when start is 0. A copy, free to be written to."""

    def write(self, span: Span, value: Tensor) -> None:
        """Replace the state by value [*need.shape], the state after the span's last token."""


@dataclass(frozen=True, slots=True)
class StepView:
    """tokens [T] int64; positions [T] or [3, T] int64; spans in packed order, covering [0, T) exactly once.

    stores: cache need name -> store. scratch: what one layer leaves for a later one in the same step (shared top-k
    indices), by name; emptied between steps.
    """

    tokens: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    stores: Mapping[str, TokenStore | StateStore]
    scratch: dict[str, object]
