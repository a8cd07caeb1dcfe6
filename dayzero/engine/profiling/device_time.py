"""Which operator a kernel belongs to, and how long the device was busy, from a trace of a step.

Operators are called within ranges of their own. A kernel names the launch that asked for it, by a number that both
carry; the launch stands on the host's clock, and the innermost range around it has the kernel. So a time is what the
kernels of an operator took, not how long the host took to ask for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RANGE = "dayzero.operator:"  # and a number
DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})  # categories of what a device does
LAUNCHES = frozenset({"cuda_runtime", "cuda_driver"})  # and of how a host asks for it
HOST_RANGE = "user_annotation"

Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """by_range: seconds of kernels and copies that were launched within a range, by its number. outside: seconds of
    those that were launched in none. busy: seconds in which at least one of them ran. launches: how many there were."""

    by_range: Mapping[int, float]
    outside: float
    busy: float
    launches: int

    @property
    def total(self) -> float:
        """Seconds of all kernels and copies; more than ``busy`` where some ran at once."""
        return sum(self.by_range.values()) + self.outside


def device_times(events: Sequence[Event]) -> DeviceTimes | None:
    """Of a Chrome trace's events. None where it has nothing of a device: nobody recorded it."""
    done = [event for event in events if event.get("cat") in DEVICE]
    if not done:
        return None
    asked: dict[int, float] = {}
    for event in events:
        number = _correlation(event)
        if event.get("cat") in LAUNCHES and number is not None:
            asked[number] = min(float(event["ts"]), asked.get(number, float("inf")))
    launched = sorted((asked.get(_correlation(event) or -1, float("-inf")), float(event["dur"])) for event in done)
    by_range: dict[int, float] = {}
    outside = 0.0
    for number, micros in _innermost(_ranges(events), launched):
        if number is None:
            outside += micros / 1e6
        else:
            by_range[number] = by_range.get(number, 0.0) + micros / 1e6
    spans = ((float(event["ts"]), float(event["dur"])) for event in done)
    return DeviceTimes(by_range, outside, _covered(spans) / 1e6, len(done))


def _correlation(event: Event) -> int | None:
    number = event.get("args", {}).get("correlation")
    return None if number is None else int(number)


def _ranges(events: Iterable[Event]) -> list[tuple[float, float, int]]:
    """(begin, end, number) of the operators' ranges, outer ones before those within."""
    found = [
        (float(event["ts"]), float(event["ts"]) + float(event["dur"]), int(event["name"][len(RANGE) :]))
        for event in events
        if event.get("cat") == HOST_RANGE and str(event.get("name", "")).startswith(RANGE)
    ]
    return sorted(found, key=lambda one: (one[0], -one[1]))


def _innermost(
    ranges: Sequence[tuple[float, float, int]], launched: Sequence[tuple[float, float]]
) -> Iterable[tuple[int | None, float]]:
    """(number of the range or None, what came with it) for each launch. Both by time; ranges of one thread, so that
    one lies within another or beside it. A step is asked for by one thread, so threads are not compared."""
    within: list[tuple[float, int]] = []
    at = 0
    for when, what in launched:
        while at < len(ranges) and ranges[at][0] <= when:
            while within and within[-1][0] <= ranges[at][0]:
                within.pop()
            within.append((ranges[at][1], ranges[at][2]))
            at += 1
        while within and within[-1][0] < when:
            within.pop()
        yield (within[-1][1] if within else None), what


def _covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of what (begin, length) pairs cover together."""
    covered, end = 0.0, float("-inf")
    for begin, length in sorted(spans):
        covered += max(0.0, begin + length - max(begin, end))
        end = max(end, begin + length)
    return covered
