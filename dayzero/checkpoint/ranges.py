"""Byte ranges that are read together, and reads that run ahead of who takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from dayzero.units import MIB

T = TypeVar("T")

MAX_SPAN_BYTES = 64 * MIB  # one merged read: bounds memory when many neighbouring ranges are asked for


def merge_ranges(ranges: Sequence[tuple[int, int]], gap_bytes: int) -> list[tuple[int, int, list[int]]]:
    """(start, end, places in ``ranges``) of the reads that cover all (start, length) ranges, by rising start.

    Neighbours at most gap_bytes apart are merged while the read stays within MAX_SPAN_BYTES. Empty ranges are left out.
    """
    spans: list[tuple[int, int, list[int]]] = []
    for place in sorted(range(len(ranges)), key=lambda i: ranges[i]):
        start, length = ranges[place]
        end = start + length
        if not length:
            continue
        if spans:
            first, last, members = spans[-1]
            if start - last <= gap_bytes and (max(last, end) - first <= MAX_SPAN_BYTES or end <= last):
                members.append(place)
                spans[-1] = (first, max(last, end), members)
                continue
        spans.append((start, end, [place]))
    return spans


def merge_extents(extents: Sequence[tuple[str, int, int]], gap_bytes: int) -> list[tuple[str, int, int, list[int]]]:
    """(file, start, end, places in ``extents``) of the reads that cover all (file, start, length), file by file."""
    by_file: dict[str, list[int]] = {}
    for place, (file, *_) in enumerate(extents):
        by_file.setdefault(file, []).append(place)
    return [
        (file, start, end, [places[member] for member in members])
        for file, places in by_file.items()
        for start, end, members in merge_ranges([extents[place][1:] for place in places], gap_bytes)
    ]


def in_order(calls: Iterable[Callable[[], T]], width: int) -> Iterator[T]:
    """Results of the calls in their order, with at most ``width`` of them running ahead of the reader."""
    if width <= 1:
        for call in calls:
            yield call()
        return
    pool = ThreadPoolExecutor(width)
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            waiting.append(pool.submit(call))
            if len(waiting) >= width:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
