"""Executor: who computes steps. The local runner is the first one; ranks behind a collective are others. Paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from dayzero.cache.layout import Layout
from dayzero.engine.step import Step, StepResult


@dataclass(frozen=True, slots=True)
class Late:
    """What sampling of a step needs from the results of the step before it: the late buffer.

    masks: request id -> allowed tokens as a bitmask (32-bit words, token i is bit i % 32 of word i // 32).
    dropped: requests that ended meanwhile; their rows are not sampled.
    """

    masks: Mapping[str, bytes] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # request id -> why its grammar allows nothing
    dropped: frozenset[str] = frozenset()


class Executor(Protocol):
    """Steps are submitted in order, one ahead of results at most; ``sample`` is called once for each, in order."""

    overlaps: bool
    """Whether a submitted step is computed while the host goes on; else it is computed inside ``result``."""

    def load(self) -> None:
        """Read weights, allocate the cache pool, warm up. Errors: those of opening a model; MachineError."""

    @property
    def layout(self) -> Layout:
        """The cache layout that steps refer to; known after ``load``."""

    @property
    def num_slabs(self) -> int:
        """Slabs of the pool; known after ``load``."""

    def submit(self, step: Step) -> int:
        """Begin a step's forward pass; returns its handle. On an asynchronous device this returns at once; the local
        CPU runner computes when ``result`` is asked for."""

    def sample(self, handle: int, late: Late) -> None:
        """Sample the step's rows, with what the results of the step before made known."""

    def result(self, handle: int) -> StepResult:
        """Wait for a step that ``sample`` has been called for."""

    def release(self, slot: int) -> None:
        """The slot's request has gone; per-request state may be dropped."""

    def health(self) -> str | None:
        """None when all is well, else why not."""
