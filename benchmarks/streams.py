"""One stream against two within recorded decode steps, by turns in one process; weights are made from a seed.

    python benchmarks/streams.py --only kimi_linear_48b,deepseek_v32_4 --batch 1,16

Models and contexts are those of ``benchmarks/models.py``. A step's time is from the end of one to the end of the next,
as served, with the next one begun before the result of the one before. Steps are recorded twice, with the same weights,
pool and operators. ROUNDS times STEPS of each, in turn; medians over all, and the gain of each round: its spread tells
noise.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).parents[1]))

import msgspec

from benchmarks.models import CONTEXT, MODELS, Model, launch_of, models_of, numbers
from dayzero.engine.buckets import table_widths
from dayzero.engine.build import executor_of
from dayzero.engine.graphs import Captured
from dayzero.engine.profiling.measure import Phase
from dayzero.engine.recorded import Recorded
from dayzero.engine.runner import LocalRunner
from dayzero.engine.step_driver import StepDriver

ROUNDS, STEPS, WARM_STEPS = 5, 60, 4
ANSWER_TOKENS = 2 * ROUNDS * (STEPS + WARM_STEPS) + 8
USUAL = "kimi_linear_48b,deepseek_v32_4"


def recorded_again(runner: LocalRunner, streams: int) -> Recorded:
    """The steps of a loaded runner recorded once more, on so many streams."""
    loaded, config = runner._ready, runner._launch.config
    widths = table_widths(loaded.layout, config, loaded.info.max_model_len)
    plan = replace(loaded.recording, streams=streams)
    made = Recorded(runner.stack, runner._views, runner._chooser, config, widths, plan)
    made.record()
    return made


def opened(model: Model, batches: tuple[int, ...], context: int) -> LocalRunner:
    """Ready, with room for the answers of a measurement."""
    launch = launch_of(model, [Phase(True, rows, context) for rows in batches])
    meanwhile = 2 * max(batches) + -(-max(batches) * context // launch.config.max_step_tokens)
    config = replace(launch.config, max_model_len=context + ANSWER_TOKENS + meanwhile)
    runner = cast(LocalRunner, executor_of(msgspec.structs.replace(launch, config=config), lambda done, total: None))
    runner.load()
    assert runner._recorded is not None, dict(runner.info.table)["graphs"]
    return runner


def measure(runner: LocalRunner, ways: Mapping[int, Recorded], rows: int, context: int) -> dict[int, list[list[float]]]:
    """Seconds of steps by number of streams, of each round."""
    driver = StepDriver(runner, runner._launch.config)
    driver.add(driver.random_prompts(rows, context, 23), ANSWER_TOKENS + 2 * rows)
    taken = driver.turn()
    while taken is not None and not (taken.decodes and len(taken.step.rows) == rows):
        taken = driver.turn()
    found: dict[int, list[list[float]]] = {streams: [] for streams in ways}
    driver.turn_ahead()
    for number in range(ROUNDS):
        order = sorted(ways, reverse=bool(number % 2))
        for streams in order:
            runner._recorded = ways[streams]
            for _ in range(WARM_STEPS):
                driver.turn_ahead()
            seconds, before = [], time.perf_counter()
            for _ in range(STEPS):
                step = driver.turn_ahead()
                assert step is not None and len(step.step.rows) == rows, "answers ended while they were measured"
                now = time.perf_counter()
                seconds.append(now - before)
                before = now
            found[streams].append(seconds)
    driver.close()
    return found


def forks(recorded: Recorded) -> int:
    return max(replay.num_forks for replay in recorded._replays.values() if isinstance(replay, Captured))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=models_of, default=models_of(USUAL), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--batch", type=numbers, default=(1, 16))
    parser.add_argument("--context", type=int, default=CONTEXT)
    given = parser.parse_args()
    print("| model | rows | forks | one stream, ms | two, ms | gain | gain by rounds |\n|" + " --- |" * 7, flush=True)
    for model in given.only:
        runner = opened(model, given.batch, given.context)
        assert runner._recorded is not None
        ways = {1: recorded_again(runner, 1), 2: runner._recorded}
        for rows in given.batch:
            found = measure(runner, ways, rows, given.context)
            one, two = (statistics.median(chain(*found[streams])) for streams in (1, 2))
            rounds = [1 - statistics.median(b) / statistics.median(a) for a, b in zip(found[1], found[2], strict=True)]
            spread = ", ".join(f"{gain:.1%}" for gain in rounds)
            cells = (model.name, rows, forks(ways[2]), f"{one * 1e3:.3f}", f"{two * 1e3:.3f}", f"{1 - two / one:.1%}")
            print(f"| {' | '.join(map(str, cells))} | {spread} |", flush=True)
        del runner, ways
    return 0


if __name__ == "__main__":
    sys.exit(main())
