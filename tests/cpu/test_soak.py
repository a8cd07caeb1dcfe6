"""Five minutes of mixed load on a real server over a hybrid model: nothing lost, nothing twice, nothing kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from tiny_configs import VOCAB, write_tiny

from benchmarks.soak import Soak, serving, soak

SECONDS = 300.0


@pytest.mark.slow
def test_a_mixed_load_leaves_nothing_behind(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    write_tiny("kimi_linear", model)
    with serving(str(model), tmp_path) as server:
        seen = asyncio.run(soak(server.told["address"], server.rss, SECONDS, VOCAB))
        code = server.stop()
    assert seen.faults() == [] and code == 0
    assert seen.counts["answers"] > 50, "too slow a machine for the load to mean anything"


def test_growth_is_told_from_noise() -> None:
    level = Soak(usage_at_end=0.0, rss=[(float(i), [10**8 + (i * 7919) % 1000, 10**7]) for i in range(600)])
    level.counts.update({"aborted": 1, "bad": 1, "answers": 1})
    assert level.faults() == []
    growing = [(t, [first + int(5000 * t), second]) for t, (first, second) in level.rss]
    leak = Soak(usage_at_end=0.0, rss=growing, counts=level.counts)
    assert "memory grows" in leak.faults()[0]
    assert leak.slope(0)[0] == pytest.approx(5000 * 3600, rel=0.01) and leak.slope(1)[0] == 0
    held = Soak(usage_at_end=0.01, rss=level.rss, counts=level.counts)
    assert "still held" in held.faults()[0]
