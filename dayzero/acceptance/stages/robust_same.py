"""Whether two answers to one prompt are the same, where arithmetic may differ in its last bits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dayzero.acceptance.stages.robust_ask import Completion


@dataclass(frozen=True, slots=True)
class Difference:
    """Of one answer from another. worst: largest difference of two log-probabilities of the same token. parted: first
    place with another token, where the first answer's two best were ``margin`` apart; None: nowhere."""

    same: bool
    worst: float = 0.0
    parted: int | None = None
    margin: float | None = None
    why: str = ""

    @property
    def tie(self) -> bool:
        """Another token, at a place where rounding decides."""
        return self.same and self.parted is not None


def difference(alone: Completion, other: Completion, bound: float) -> Difference:
    """``other`` against ``alone``. bound: of ``ties.bound_of``, or 0 where nothing may differ. Answers without ids or
    log-probabilities must have the same text."""
    if not alone.good or not other.good:
        return Difference(False, why=alone.error or other.error)
    if not alone.tokens or not other.tokens:
        same = alone.text == other.text
        return Difference(same, why="" if same else f"{other.text[:60]!r} instead of {alone.text[:60]!r}")
    parted = first_other(alone.tokens, other.tokens)
    shared = len(alone.tokens) if parted is None else parted
    gaps = [abs(a - b) for a, b in zip(alone.logprobs[:shared], other.logprobs[:shared], strict=False)]
    worst = max(gaps, default=0.0)
    if worst > bound:
        place = gaps.index(worst)
        return Difference(False, worst, parted, why=f"log-probability of token {place} differs by {worst:.3g}")
    if parted is None:
        return Difference(True, worst)
    margin = alone.margins[parted] if parted < len(alone.margins) else None
    close = margin is not None and margin <= bound
    apart = "" if margin is None else f", where the two best are {margin:.3g} apart"
    return Difference(close, worst, parted, margin, "" if close else f"another token at place {parted}{apart}")


def first_other(a: Sequence[int], b: Sequence[int]) -> int | None:
    """First place at which two runs of ids differ, a missing id included."""
    found = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    return min(len(a), len(b)) if found is None and len(a) != len(b) else found


def extended(alone: Completion, longer: Completion, prompt_tokens: int, bound: float) -> Difference:
    """An answer's log-probabilities, decoded one by one, against those of the same tokens read as a prompt. longer: the
    answer to prompt and answer together, with log-probabilities of its prompt."""
    if not alone.good or not longer.good:
        return Difference(False, why=alone.error or longer.error)
    read = longer.prompt_logprobs[prompt_tokens : prompt_tokens + len(alone.logprobs)]
    if len(read) != len(alone.logprobs) or any(value is None for value in read):
        return Difference(False, why=f"{len(read)} log-probabilities for {len(alone.logprobs)} tokens of the prompt")
    gaps = [abs(a - b) for a, b in zip(alone.logprobs, read, strict=True) if b is not None]
    worst = max(gaps, default=0.0)
    if worst <= bound:
        return Difference(True, worst)
    return Difference(False, worst, why=f"log-probability of answer token {gaps.index(worst)} differs by {worst:.3g}")
