"""A step as a value: which tokens of which requests are computed, where their cache lies, which rows are sampled.

Paper. The scheduler makes a Step, an executor computes it, ``scheduler.commit`` takes the StepResult.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dayzero.cache.layout import StateCopy
from dayzero.engine.events import Logprobs
from dayzero.engine.request import Image, SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """One request's part of a step: ``count`` tokens from position ``start`` on.

    slot: the request's place in the executor's per-request buffers, fixed while it runs. tokens: the ids known to the
    host; one fewer than ``count`` when the last input is what the step before sampled for this slot. sample: whether
    the row's last token is followed by a sampled one. index: how many tokens have been sampled for the request before
    this one, in-flight ones included (drives the seed and min_tokens). prompt_logprobs: report log-probabilities of
    the prompt tokens that follow the row's own tokens.
    """

    request_id: str
    slot: int
    start: int
    count: int
    tokens: tuple[int, ...]
    sample: bool
    index: int = 0
    prompt_logprobs: bool = False

    @property
    def late(self) -> bool:
        """Whether the last input token is the slot's previous sample."""
        return len(self.tokens) < self.count


@dataclass(frozen=True, slots=True)
class GroupRows:
    """Where one cache group's records of a step's rows lie, row by row.

    tables: token groups: block numbers of the row's pages from ``first`` on, up to the row's last token; state
    groups: the row's working blocks, one for each layer of the group. first: position of the first token of the first
    page (0 for states).
    """

    tables: tuple[tuple[int, ...], ...]
    first: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NewSlot:
    """A request that starts or comes back: ``slot`` belongs to it from this step on. known: all its ids so far.
    media: the images of its prompt."""

    slot: int
    request_id: str
    params: SamplingParams
    prompt_tokens: int
    known: tuple[int, ...]
    media: tuple[Image, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """number: counts up by one. rows: single-token rows first. groups: cache group name -> where rows lie.

    new: slots (re)assigned before this step. before, after: state copies around the forward pass (restored snapshots,
    taken snapshots).
    """

    number: int
    rows: tuple[Row, ...]
    groups: Mapping[str, GroupRows]
    new: tuple[NewSlot, ...] = ()
    before: tuple[StateCopy, ...] = ()
    after: tuple[StateCopy, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.count for row in self.rows)


@dataclass(frozen=True, slots=True)
class RowResult:
    """What one row gave. token: sampled id, None when the row was not sampled or is bad.

    bad: why no token could be sampled (``nan`` logits, a grammar that refuses every token), else None.
    prompt: log-probabilities of the prompt tokens behind the row's own, when asked for.
    """

    request_id: str
    token: int | None = None
    bad: str | None = None
    logprobs: Logprobs | None = None
    prompt: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """seconds: time from submit to result; host_seconds: the part of it that was not spent in operators, if known.
    facts: what it adds to the engine's counters, by their names."""

    number: int
    rows: tuple[RowResult, ...]
    seconds: float = 0.0
    host_seconds: float = 0.0
    facts: Mapping[str, float] = field(default_factory=dict)
