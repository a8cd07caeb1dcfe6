"""Which operator a kernel belongs to, and how long the device was busy, from a trace of a step.

Operators are called within ranges of their own. A kernel names the launch that asked for it, by a number that both
carry; the launch stands on the host's clock, and the innermost range of its thread around it has the kernel. So a time
is what the kernels of an operator took, not how long the host took to ask for them.
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
Thread = tuple[Any, Any]  # process, thread; as the trace names them


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """by_range: seconds of kernels and copies that were launched within a range, by its number. outside: seconds of
    those that were launched in none, or by another thread than the range's, as experts are read. busy: seconds in which
    at least one of them ran. launches: how many there were."""

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
    asked: dict[int, tuple[float, Thread]] = {}
    for event in events:
        number = _correlation(event)
        if event.get("cat") in LAUNCHES and number is not None:
            when = float(event["ts"])
            if number not in asked or when < asked[number][0]:
                asked[number] = when, _thread(event)
    launched: dict[Thread, list[tuple[float, float]]] = {}
    outside = 0.0
    for event in done:
        launch = asked.get(_correlation(event) or -1)
        if launch is None:
            outside += float(event["dur"]) / 1e6
        else:
            launched.setdefault(launch[1], []).append((launch[0], float(event["dur"])))
    by_range: dict[int, float] = {}
    ranges = _ranges(events)
    for thread, of_thread in launched.items():
        for number, micros in _innermost(ranges.get(thread, []), sorted(of_thread)):
            if number is None:
                outside += micros / 1e6
            else:
                by_range[number] = by_range.get(number, 0.0) + micros / 1e6
    spans = ((float(event["ts"]), float(event["dur"])) for event in done)
    return DeviceTimes(by_range, outside, _covered(spans) / 1e6, len(done))


def _correlation(event: Event) -> int | None:
    number = event.get("args", {}).get("correlation")
    return None if number is None else int(number)


def _thread(event: Event) -> Thread:
    return event.get("pid"), event.get("tid")


def _ranges(events: Iterable[Event]) -> dict[Thread, list[tuple[float, float, int]]]:
    """(begin, end, number) of the operators' ranges by the thread that they are of, outer ones before those within."""
    found: dict[Thread, list[tuple[float, float, int]]] = {}
    for event in events:
        if event.get("cat") == HOST_RANGE and str(event.get("name", "")).startswith(RANGE):
            begin, number = float(event["ts"]), int(event["name"][len(RANGE) :])
            found.setdefault(_thread(event), []).append((begin, begin + float(event["dur"]), number))
    return {thread: sorted(ranges, key=lambda one: (one[0], -one[1])) for thread, ranges in found.items()}


def _innermost(
    ranges: Sequence[tuple[float, float, int]], launched: Sequence[tuple[float, float]]
) -> Iterable[tuple[int | None, float]]:
    """(number of the range or None, what came with it) for each launch. Both by time and of one thread, so that
    one range lies within another or beside it."""
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
