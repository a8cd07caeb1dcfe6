"""A prompt of several thousand tokens through a twin with a sparse index of 2,048: sets and needle against the plain
oracle, memory against the plan. ``benchmarks/long_prompt.py`` does the same with 65,536 tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import long_prompt as long

TOKENS, TOP_K = 6_500, 2048
POSITIONS = (0, 700, 2047, 2048, 3001, 4095, 4096, 5555, TOKENS - 1)
# Our forward and the oracle's agree to float32 roundings in front of the index, so that their scores may differ by so
# much of the spread of all scores; only rows twice as close to the cut as they do may fall to either side of it.
ROUNDED = 1e-4


@pytest.mark.slow
def test_a_long_prompt_selects_as_the_oracle_does_and_takes_what_is_planned(tmp_path: Path) -> None:
    twin = tmp_path / "twin"
    long.long_twin(twin, TOKENS, TOP_K)
    engine = long.long_engine(twin, TOKENS)
    prompt, needle = long.long_prompt(engine, TOKENS)
    ran = long.run(engine, prompt, POSITIONS)
    want, scored = long.oracle_lists(twin, prompt, POSITIONS), long.oracle_scores(twin, prompt, POSITIONS)
    assert needle in want[TOKENS - 1] and needle in ran.seen.lists[TOKENS - 1]
    for position in POSITIONS:
        got, (rows, exact_L) = ran.seen.lists[position], scored[position]
        assert rows == want[position], "what the benchmark asks of the oracle is what its whole forward selects"
        assert got == ran.seen.reference(position, TOP_K)
        assert len(got) == len(rows) == min(TOP_K, position + 1)
        if position < TOP_K:  # all rows are listed; one row alone has no spread
            continue
        count, margin, error = long.apart(rows, got, exact_L, ran.seen.scores(position))
        assert error < ROUNDED and count <= 4 and margin <= 2 * error, (position, count, margin, error)
    layout = engine.runner.layout
    cache = TOKENS * layout.token_bytes + layout.sequence_bytes
    planned = cache + long.planned_bytes(engine, TOKENS)
    assert abs(cache + ran.memory.peak_bytes - planned) <= 0.02 * planned
    assert ran.memory.most_numbers <= long.CHUNK * TOP_K  # the lists; nothing is chunk x length
