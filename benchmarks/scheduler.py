"""Host time of the scheduler: schedule() + commit() of steps in which every row is one token of a running request.

    python benchmarks/scheduler.py [--rows N] [--context TOKENS] [--turns N]

No model runs: results are made up beforehand. Printed per kind of cache: median and 99th percentile of a turn, and the
first turns, in which prompts are admitted, apart. Goal: at most 1.5 ms a turn of 64 rows.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import load_text
from dayzero.cache.layout import Layout, lay_out
from dayzero.decl import CacheNeed
from dayzero.engine.config import EngineConfig
from dayzero.engine.request import NewRequest, SamplingParams
from dayzero.engine.scheduler import Scheduler
from dayzero.engine.step import RowResult, Step, StepResult

GOAL_MS = 1.5


def layouts() -> dict[str, Layout]:
    """Of the shapes of common models, narrow: only counts matter here."""
    rows = [CacheNeed(f"layers.{i}.mixer.kv", (2, 128), "bf16", "kv_bf16") for i in range(4)]
    window = [CacheNeed(f"layers.{i}.mixer.kv", (2, 128), "bf16", "kv_bf16", window=128) for i in range(4, 8)]
    states = [CacheNeed(f"layers.{i}.mixer.state", (64, 64), "f32", "state_f32", unit="state") for i in range(8, 20)]
    return {
        "rows": lay_out(rows, dtype="bf16"),
        "rows + window": lay_out(rows + window, dtype="bf16"),
        "rows + 12 states": lay_out(rows + states, dtype="bf16"),
    }


def answer(step: Step) -> StepResult:
    return StepResult(step.number, tuple(RowResult(row.request_id, 7 if row.sample else None) for row in step.rows))


def run(layout: Layout, rows: int, context: int, turns: int) -> tuple[list[float], list[float]]:
    """(seconds of each turn with all rows decoding, of each turn before)."""
    config = EngineConfig(max_running=rows, max_step_tokens=max(2048, rows))
    length = context + turns + 8
    slabs = 2 * rows * sum(-(-length // 64) // g.blocks_per_slab + 1 for g in layout.token_groups)
    slabs += 4 * rows * sum(len(g.layers) // g.blocks_per_slab + 1 for g in layout.state_groups)
    scheduler = Scheduler(layout, slabs, config, (), length)
    params = SamplingParams(temperature=0.0, max_tokens=turns + 4)
    for i in range(rows):
        prompt = [(j * 31 + i) % 50_000 for j in range(context)]
        assert scheduler.add(NewRequest(id=f"request-{i}", prompt=prompt, params=params)) is None
    steady: list[float] = []
    first: list[float] = []
    flying: StepResult | None = None
    while scheduler.live_ids():
        began = time.perf_counter()
        step = scheduler.schedule()
        scheduled = time.perf_counter()
        result = answer(step) if step is not None else None
        done, flying = flying, result
        committing = time.perf_counter()
        if done is not None:
            scheduler.commit(done)
        seconds = scheduled - began + time.perf_counter() - committing
        full = step is not None and len(step.rows) == step.num_tokens == rows
        (steady if full else first).append(seconds)
    return steady, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=400)
    given = parser.parse_args()
    print(load_text())
    print(f"{given.rows} rows, contexts of {given.context} tokens and more, {given.turns} turns, ms a turn")
    for name, layout in layouts().items():
        gc.collect()
        steady, first = run(layout, given.rows, given.context, given.turns)
        middle = statistics.median(steady) * 1e3
        late = sorted(steady)[int(len(steady) * 0.99)] * 1e3
        rest = statistics.median(first) * 1e3
        print(f"  {name:18} median {middle:6.3f}   p99 {late:6.3f}   others {rest:6.3f}   goal: ≤ {GOAL_MS} median")


if __name__ == "__main__":
    main()
