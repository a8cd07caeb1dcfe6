"""What this device reaches now, so that shares are of it and not of a data sheet."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dayzero.engine.launch import kind_of
from dayzero.planner.detect import detect

COPIED_BYTES = 1 << 28  # beyond every cache
SIDE = 1024  # of the matrices of a product
LEAST_SECONDS = 0.2


def measure(device: str, threads: int | None = None) -> dict[str, float]:
    """``copy``: bytes/s, read and written counted; ``f32``, ``bf16``, on accelerators ``e4m3``: FLOP/s that operands of
    that type can be multiplied with, seen in a product of square matrices. Needs memory, so before a model is loaded.

    device, threads: as in a LaunchSpec.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if detect(kind_of(device))[0].target == "cuda":
        from dayzero.ops.bench import timing

        found = timing.ceilings()
        return found | {"f32": found["bf16"]}  # an upper bound: no tensor core multiplies float32
    source = torch.randint(0, 255, (COPIED_BYTES,), dtype=torch.uint8)
    target = torch.empty_like(source)
    found = {"copy": 2 * COPIED_BYTES / _best(lambda: target.copy_(source))}
    for element, dtype in (("f32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(SIDE, SIDE).to(dtype) for _ in range(2))
        found[element] = 2 * SIDE**3 / _best(lambda a=a, b=b: a @ b.T)  # type: ignore[misc]
    # What is stored narrow may be multiplied wide, where that is faster.
    return found | {"bf16": max(found["bf16"], found["f32"])}


def _best(call: Callable[[], object]) -> float:
    """Seconds of the fastest of some calls."""
    call()
    seconds: list[float] = []
    while not seconds or (sum(seconds) < LEAST_SECONDS and len(seconds) < 9):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
