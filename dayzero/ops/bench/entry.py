"""What is measured: a variant of a contract at one shape, with its check, its floor and its peers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dayzero.ops.bench.timing import Call


@dataclass(frozen=True, slots=True)
class Prepared:
    """calls: the variant on rotated buffers (``timing.num_rotated``); one round runs all of them. check: computes the
    reference for the first buffers and returns {what: (error, bound)}; a time is only told where every error is within
    its bound. num_bytes, flops: of one call, the least it must move and do (element -> FLOPs). peers: other
    implementations of the same work, by name, timed in the same run; a peer need not be checked but should be.
    goal: {word: seconds or share} from an issue, shown beside the figures.
    """

    calls: Sequence[Call]
    check: Callable[[], Mapping[str, tuple[float, float]]]
    num_bytes: int
    flops: Mapping[str, float] = field(default_factory=dict)
    peers: Mapping[str, Sequence[Call]] = field(default_factory=dict)

    def floor(self, ceilings: Mapping[str, float]) -> float:
        """Seconds that no implementation gets below, by ceilings measured in the same run."""
        arithmetic = sum(count / ceilings[element] for element, count in self.flops.items())
        return max(self.num_bytes / ceilings["copy"], arithmetic)


@dataclass(frozen=True, slots=True)
class Entry:
    """contract, variant: a line of the catalog. shape: in words, e.g. ``B=16 H=96``. prepare: makes inputs on the
    current CUDA device; it runs just before the measurement, and what it made is freed after it."""

    contract: str
    variant: str
    shape: str
    prepare: Callable[[], Prepared]

    @property
    def name(self) -> str:
        return f"{self.contract}/{self.variant} {self.shape}"
