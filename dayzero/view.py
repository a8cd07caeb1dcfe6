"""StepView: the inputs of one step as blocks see them. No torch at import; tensors appear only as annotations.

A step holds several requests ("rows") packed one after another in one dimension of T tokens. Single-token rows come
first. Blocks hand whole steps to paged operators, or go through ``view.spans``; they never ask which request a row is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

First = TypeVar("First")
Second = TypeVar("Second")


@dataclass(frozen=True, slots=True)
class Span:
    """One request's run of tokens in a step: packed rows [first, first+count), whose first token has position start.

    row: its number in the step.
    """

    row: int
    first: int
    count: int
    start: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)


@dataclass(frozen=True, slots=True)
class Where:
    """Where one cache group's records of a step's rows lie. R rows, P pages at most, T tokens.

    table: [R, P] int32, number of the block of each page of a row, in order; what lies behind a row's pages is not
    read. For states: the row's working block of each layer of the group. first: [R] int32, position of the first token
    of table[r, 0], a multiple of the page; windows leave out what lies before it. blocks, offsets: [T] int64, where
    each token of the step is written: block number and row in it (empty for states).
    """

    table: Tensor
    first: Tensor
    blocks: Tensor
    offsets: Tensor

    def first_rows(self, rows: int) -> Where:
        """The same of the first so many rows, where each has one token."""
        return Where(self.table[:rows], self.first[:rows], self.blocks[:rows], self.offsets[:rows])


class Codec(Protocol):
    """How records that are not plain elements are read and written: codes and scales (``ops/records``).

    rows: uint8 [N, page, bytes a token], blocks as in ``Paged``.
    """

    @property
    def record(self) -> str:
        """Name of the record."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a token's values."""

    def headed(self) -> Codec:
        """The same, of values [1, *shape]."""

    def write(self, rows: Tensor, blocks: Tensor, offsets: Tensor, values: Tensor) -> None:
        """Encode values [T, *shape] into the places [T] of ``rows``."""

    def read(self, rows: Tensor, blocks: Tensor, offsets: Tensor) -> Tensor:
        """float32 [*places, *shape] at the places that blocks and offsets name together."""

    def pages(self, rows: Tensor, blocks: Tensor) -> Tensor:
        """float32 [n, page, *shape] of whole blocks [n]."""


# (values [T, *shape], rows, blocks [T], offsets [T], codec or None) -> None: the contract ``cache.write``
Write = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Paged:
    """One need's records of all rows of a step, where they lie. R rows, P pages at most, N block numbers.

    rows: [N, page, *need.shape], the pool as this need sees it; the step's own tokens are written already. Within a
    block all is contiguous; ``rows.stride(0)`` is how far block numbers lie apart, which may be less than a block (then
    not every number is one's own). table, first: as in Where. query_start: [R+1] int32, where each row's tokens begin
    in the packed step. start: [R] int32, position of each row's first token in this step. spans: the last two, as the
    host knows them. codec: how rows are read that are not plain elements; rows are then uint8 [N, page, bytes].
    """

    rows: Tensor
    table: Tensor
    first: Tensor
    query_start: Tensor
    start: Tensor
    spans: tuple[Span, ...]
    codec: Codec | None = None

    @property
    def page(self) -> int:
        return self.rows.shape[1]

    @property
    def record(self) -> str:
        """Name of a record with a codec; empty for plain elements."""
        return "" if self.codec is None else self.codec.record

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one token's values."""
        return tuple(self.rows.shape[2:]) if self.codec is None else self.codec.shape

    def headed(self) -> Paged:
        """The same records as those of one head, [1, *shape]."""
        if self.codec is not None:
            return replace(self, codec=self.codec.headed())
        return replace(self, rows=self.rows[:, :, None])

    def history(self, span: Span) -> tuple[Tensor, int]:
        """(records [L, *need.shape] oldest first, position of the first): up to and including the span's last token.
        A copy; float32 where there is a codec."""
        first = int(self.first[span.row])
        length = span.start + span.count - first
        blocks = self.table[span.row, : -(-length // self.page)].long()
        return self._pages(blocks).flatten(0, 1)[:length], first

    def part(self, span: Span, begin: int, end: int) -> Tensor:
        """Records [end - begin, *need.shape] of positions [begin, end) of the span's sequence. A copy, as above."""
        first = int(self.first[span.row])
        assert first <= begin <= end, f"row {span.row} holds positions from {first} on, not {begin}"
        page, skip = (begin - first) // self.page, (begin - first) % self.page
        blocks = self.table[span.row, page : -(-(end - first) // self.page)].long()
        return self._pages(blocks).flatten(0, 1)[skip : skip + end - begin]

    def take(self, span: Span, positions: Tensor) -> Tensor:
        """Records [*positions.shape, *need.shape] at int64 positions of the span's sequence. A copy, as above."""
        places = positions - int(self.first[span.row])
        blocks, offsets = self.table[span.row].long()[places // self.page], places % self.page
        return self.rows[blocks, offsets] if self.codec is None else self.codec.read(self.rows, blocks, offsets)

    def _pages(self, blocks: Tensor) -> Tensor:
        return self.rows[blocks] if self.codec is None else self.codec.pages(self.rows, blocks)


class TokenStore(Protocol):
    """Per-token records of one cache need, e.g. KV rows. What is read and written where is in the view."""

    def append(self, view: StepView, values: Tensor, write: Write | None = None) -> None:
        """Write values [T, *need.shape], one record for each token of the step. write: what does it (the contract
        ``cache.write`` as bound to a site); None: the plain way."""

    def pages(self, view: StepView) -> Paged:
        """All rows' records. Call after ``append``."""

    def history(self, view: StepView, span: Span) -> tuple[Tensor, int]:
        """(records [L, *need.shape] oldest first, position of the first): all of [0, start+count), or for a window at
        least the last window-1 tokens before the span and the span itself. Call after ``append``."""


@dataclass(frozen=True, slots=True)
class States:
    """One need's states of all rows of a step, where they lie. R rows, N block numbers.

    rows: [N, *need.shape], the pool as this need sees it; within a block all is contiguous, ``rows.stride(0)`` as in
    ``Paged``. table: [R] int32, any stride: the block of each row, the same for all needs of a layer.
    """

    rows: Tensor
    table: Tensor


class StateStore(Protocol):
    """Per-sequence state of one cache need, e.g. a recurrent state."""

    def states(self, view: StepView) -> States:
        """All rows' states, for an operator that reads them and writes those behind each row's last token in their
        place: call once a step, and hand them to such an operator. What lies there where start is 0 is not zeros."""

    def read(self, view: StepView, span: Span) -> Tensor:
        """State [*need.shape] before the span's first token; zeros when start is 0. A copy, free to be written to."""

    def write(self, view: StepView, span: Span, value: Tensor) -> None:
        """Replace the state by value [*need.shape], the state after the span's last token."""


@dataclass(frozen=True, slots=True)
class Inserted:
    """Rows [N, D] of an image that stand in the place of the embeddings of the packed tokens from ``first`` on."""

    first: int
    rows: Tensor


# (work that needs the host, a tensor of the same shape and type as what it gives) -> what it gives
OnHost = Callable[[Callable[[], Any], Any], Any]


def at_once(work: Callable[[], Any], like: Any) -> Any:
    """Where a step is computed as it is called: nothing but the work."""
    return work()


class Beside(Protocol):
    """Runs two pieces of work, neither of which needs what the other makes or changes, and returns what both give."""

    def __call__(self, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """first: the longer one; it alone may ask for ``on_host``. What they read that was there before stays as it is,
        and is held by them or by who calls, until both are there."""


def in_turn(first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
    """Where work is done as it is called: one after the other."""
    return first(), second()


@dataclass(frozen=True, slots=True)
class StepView:
    """tokens [T] int64; positions [T] or [3, T] int64; spans in packed order, covering [0, T) exactly once.

    query_start [R+1], start [R] int32: the spans as the device knows them. stores: cache need name -> store. where:
    cache group -> where its records lie. scratch: what one layer leaves for a later one in the same step (shared top-k
    indices), by name; emptied between steps. inserted: rows of images in place of embeddings; none overlap. on_host:
    through which a block does what depends on numbers that only the host can look at, so that a step can be recorded in
    pieces around it. beside: through which a block does two things that need nothing of each other, so that a device
    may do them at the same time. real [T] bool: which tokens are a request's, where others may pad the step and a block
    is to leave them out; None: nothing is left out.
    """

    tokens: Tensor
    positions: Tensor
    spans: tuple[Span, ...]
    query_start: Tensor
    start: Tensor
    stores: Mapping[str, TokenStore | StateStore]
    where: Mapping[str, Where]
    scratch: dict[str, object]
    inserted: tuple[Inserted, ...] = ()
    on_host: OnHost = at_once
    beside: Beside = in_turn
    real: Tensor | None = None

    @property
    def num_single(self) -> int:
        """Rows of one token, which come first."""
        return next((i for i, s in enumerate(self.spans) if s.count != 1), len(self.spans))
