"""What this process has held of the machine's memory, and what it may still take."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from pathlib import Path

# Files of a container's limit and of what is used of it, in both versions of the kernel's control groups.
LIMITS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)

_M_MMAP_THRESHOLD = -3  # malloc.h
LARGE_BLOCK_BYTES = 4 * 2**20


def return_large_blocks() -> bool:
    """From now on a block of LARGE_BLOCK_BYTES or more goes back to the system as soon as it is freed. For processes
    that walk through weights: the C library raises its own limit with every large block that is freed (up to 32 MiB),
    and then small things settle in the freed places, so that the next block of the same size takes a new one.

    Sets the process's C library. False where it has no such setting (glibc has).
    """
    setting = getattr(ctypes.CDLL(None), "mallopt", None)
    return setting is not None and setting(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES) == 1


def peak_rss_bytes() -> int:
    """Most memory this process ever held: VmHWM where /proc exists, else getrusage."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes(root: Path = Path("/")) -> int:
    """What the kernel says can be had without swapping, or what a container's limit leaves of it.

    Where the kernel does not say, a quarter of the machine's memory.
    """
    left = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4]
    said = _text(root / "proc/meminfo").splitlines()
    left = [int(line.split()[1]) * 1024 for line in said if line.startswith("MemAvailable:")] or left
    for limit, used in ((_text(root / most), _text(root / now)) for most, now in LIMITS):
        if limit.isdigit() and used.isdigit():  # without a limit it says "max"
            left.append(max(0, int(limit) - int(used)))
    return min(left)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
