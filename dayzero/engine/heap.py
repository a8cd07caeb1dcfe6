"""Freed memory back to the system. Paper.

The C library keeps what was freed for later allocations. A step's tensors differ in size from those of the step before,
so that what it keeps creeps up for hours, though nothing is held.
"""

from __future__ import annotations

import ctypes
import time

EVERY_SECONDS = 30.0  # a call takes below a millisecond


class Heap:
    """Gives freed memory back now and then. Does nothing where the C library has no ``malloc_trim`` (glibc has)."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        self._next = time.monotonic() + EVERY_SECONDS

    def tend(self) -> None:
        """Call often; acts when the time has come."""
        if self._trim is not None and time.monotonic() >= self._next:
            self._trim(0)
            self._next = time.monotonic() + EVERY_SECONDS
