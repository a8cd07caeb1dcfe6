"""Where an engine runs, and what it gives back to the system."""

from __future__ import annotations

import time

import pytest

from dayzero.engine.config import EngineConfig
from dayzero.engine.heap import EVERY_SECONDS, Heap
from dayzero.engine.launch import DEVICES, LaunchSpec
from dayzero.errors import UsageError


def test_a_device_is_one_of_those_that_are_known() -> None:
    for device in DEVICES:
        assert LaunchSpec(source="m", config=EngineConfig(), device=device).device == device
    with pytest.raises(UsageError, match="device is 'tpu'; it must be one of auto, cpu, cuda"):
        LaunchSpec(source="m", config=EngineConfig(), device="tpu")


def test_freed_memory_is_given_back_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 1000.0, []
    monkeypatch.setattr(time, "monotonic", lambda: now)
    heap = Heap()
    monkeypatch.setattr(heap, "_trim", calls.append)
    heap.tend()
    assert calls == []
    for _ in range(3):
        now += EVERY_SECONDS
        heap.tend()
        heap.tend()
    assert calls == [0, 0, 0]
