"""When two answers are the same: equal ids; on variants they may part where the two best logits lie closer than the
contracts of the operators allow results to differ, and those places are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from dayzero.arch.spec import ModelSpec
from dayzero.engine.answer import RequestOutput
from dayzero.engine.events import Logprobs
from dayzero.ops.contract import CONTRACTS

REFERENCE_BOUND = 1e-5  # of the logits' spread: sums over other shapes, in float64 and rounded once (design, section 6)
CODE_STEP = 2.0**-4  # of e4m3, relative: what a value moves by whose code turns over
LARGEST = 4.0  # deviations that the largest of some hundred normal errors lies out
MOST_PARTED = {"f32": 0.02, "bf16": 0.1}  # share of the compared places at which answers may part


@dataclass(frozen=True, slots=True)
class Limit:
    """How far log-probabilities of equal contexts may lie apart, in nats, and why. most_parted: share of places."""

    nats: float
    why: str
    most_parted: float


@dataclass(slots=True)
class Tally:
    """places: tokens compared. parted: where near ties turned over, with the margin there. wrong: sentences."""

    places: int = 0
    parted: list[tuple[str, float]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    largest: float = 0.0

    def add(self, other: Tally) -> None:
        self.places += other.places
        self.parted += other.parted
        self.wrong += other.wrong
        self.largest = max(self.largest, other.largest)

    def passed(self, limit: Limit) -> bool:
        return not self.wrong and len(self.parted) <= max(
            1 if limit.most_parted else 0, limit.most_parted * self.places
        )


def limit_of(spec: ModelSpec, path: str, dtype: str, spread: float, deviation: float, narrow: bool) -> Limit:
    """spread, deviation: of the model's logits, largest minus least and standard deviation.

    Variants: each operator may be off by its contract's bound; independent errors add in quadrature over the uses of
    the model, and either of two logits may have moved. Quantised rows: an error e turns over a share e / step of the
    codes, each by a step, so that rows differ by the root of e times step. That is a root mean square, and what is
    compared is the largest of some hundred places: LARGEST deviations of it.
    """
    if path == "reference":
        return Limit(REFERENCE_BOUND * spread, f"{REFERENCE_BOUND:g} of the logits' spread", 0.0)
    bounds = [CONTRACTS[use.contract].bound.get(dtype) for use in spec.contracts() if use.contract in CONTRACTS]
    error = math.sqrt(sum(bound.value**2 for bound in bounds if bound is not None))
    why = f"bounds of {len(bounds)} operators in quadrature, {error:.1e} of the logits' {deviation:.2g}, twice"
    nats = 2 * error * deviation
    if narrow:
        rows = math.sqrt(error * CODE_STEP)
        nats += LARGEST * rows * deviation
        why += f"; and codes that turn over, {rows:.1e}, {LARGEST:g} times"
    return Limit(nats, why, MOST_PARTED[dtype])


def compare_all(got: Sequence[RequestOutput], want: Sequence[RequestOutput], limit: Limit, sampled: bool) -> Tally:
    tally = Tally()
    for number, (one, other) in enumerate(zip(got, want, strict=True)):
        tally.add(compare_one(one, other, limit, sampled, f"answer {number}"))
    return tally


def compare_one(got: RequestOutput, want: RequestOutput, limit: Limit, sampled: bool, name: str) -> Tally:
    tally = Tally()
    if got.error is not None or want.error is not None:
        return Tally(wrong=[f"{name} ended with an error: {(got.error or want.error or ('', ''))[1]}"])
    got_logs, want_logs = got.logprobs or [], want.logprobs or []
    for at, (one, other) in enumerate(zip(got_logs, want_logs)):
        tally.places += 1
        apart = _apart(one, other)
        tally.largest = max(tally.largest, apart)
        if apart > limit.nats:
            tally.wrong.append(f"{name}, token {at}: log-probabilities {apart:.1e} nat apart")
            return tally
        if one.token != other.token:
            margin = _margin(other)
            if not sampled and margin > limit.nats:
                tally.wrong.append(f"{name}, token {at}: {one.token} for {other.token}, margin {margin:.1e} nat")
            else:
                tally.parted.append((f"{name}, token {at}", margin))
            return tally
    if got.token_ids != want.token_ids or got.finish_reason != want.finish_reason:
        tally.wrong.append(f"{name}: {len(got.token_ids)} tokens and {got.finish_reason}, not {len(want.token_ids)}")
    return tally


def _apart(one: Logprobs, other: Logprobs) -> float:
    """Largest distance of the log-probabilities of ids that both sides list. Where they list none together, the ranks
    are by chance close: the margin decides."""
    a = dict(one.top) | {one.token: one.logprob}
    b = dict(other.top) | {other.token: other.logprob}
    return max((abs(a[i] - b[i]) for i in a.keys() & b.keys()), default=0.0)


def _margin(place: Logprobs) -> float:
    """Between the two likeliest ids."""
    return place.top[0][1] - place.top[1][1] if len(place.top) > 1 else math.inf
