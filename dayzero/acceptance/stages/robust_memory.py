"""Memory of processes over time: what they hold, and whether it grows. Paper; plain arithmetic."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

WARM_SHARE, NUM_BLOCKS = 0.3, 10
LEAST_SAMPLES = int(2 * NUM_BLOCKS / (1 - WARM_SHARE)) + 2
T_995_8 = 3.355  # Student's t, NUM_BLOCKS - 2 degrees of freedom, both tails 1 %
GOES_ON = 1 / 3  # share of the growth from first to last third that the second half must have; of a line it has half
ARENA_SHARE, ARENA_BYTES = 0.01, 8 << 20  # of what is held, and at least: what an allocator's arenas move by


def resident(process_ids: Sequence[int]) -> list[int]:
    """Resident bytes of each process, 0 for one that is gone."""
    return [_pages(pid) * os.sysconf("SC_PAGE_SIZE") for pid in process_ids]


def _pages(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except OSError:
        return 0


def peak(pid: int) -> int | None:
    """Most bytes that the process ever held, or has since ``forget_peak``; None where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def forget_peak(pid: int) -> bool:
    """From now on ``peak`` counts anew. False where the system does not allow it."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): resets the peak of the resident set
        return True
    return False


def slope(series: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(bytes an hour, t) behind the warm-up, from block means: neighbouring samples are not independent, blocks nearly
    are. series: (seconds, bytes), at least 2 * NUM_BLOCKS of them behind the warm-up (else ValueError)."""
    kept = series[int(WARM_SHARE * len(series)) :]
    size = len(kept) // NUM_BLOCKS
    if size < 2:
        raise ValueError(f"{len(series)} samples are too few to tell growth from noise")
    blocks = [kept[i * size : (i + 1) * size] for i in range(NUM_BLOCKS)]
    xs = [statistics.fmean(t for t, _ in block) for block in blocks]
    ys = [statistics.fmean(b for _, b in block) for block in blocks]
    mean_x, mean_y = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    found = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    rest = sum((y - mean_y - found * (x - mean_x)) ** 2 for x, y in zip(xs, ys, strict=True))
    error = (rest / (NUM_BLOCKS - 2) / spread) ** 0.5
    return found * 3600, found / error if error else (0.0 if found == 0 else float("inf") * found)


def _thirds(values: Sequence[float]) -> list[Sequence[float]]:
    size = len(values) // 3
    return [values[:size], values[size : 2 * size], values[-size:]]


def grows(series: Sequence[tuple[float, float]]) -> bool:
    """Growth that shows against the spread of the blocks, is more than an allocator's arenas move by, and goes on: a
    warm-up that is longer than thought slows down, a leak does not."""
    rate, t = slope(series)
    grown = rate / 3600 * (series[-1][0] - series[0][0])
    kept = [held for _, held in series[int(WARM_SHARE * len(series)) :]]
    first, middle, last = (statistics.fmean(part) for part in _thirds(kept))
    goes_on = last - middle > GOES_ON * (last - first)
    return goes_on and t > T_995_8 and grown > max(ARENA_BYTES, ARENA_SHARE * series[-1][1])
