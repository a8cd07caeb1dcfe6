"""The interval of a ratio, against tables and against its own promise."""

from __future__ import annotations

import math
import random

import pytest

from dayzero.acceptance.load.drive import LevelRun
from dayzero.acceptance.load.figures import Figures, figures, medians, percentile, spreads
from dayzero.acceptance.load.noise import ratio_interval, t_quantile
from dayzero.acceptance.load.outcome import Outcome
from dayzero.acceptance.load.workload import LoadRequest

# Student's t as any statistics book prints it: (share below, degrees of freedom) -> t
TABLE = {
    (0.95, 1): 6.314, (0.975, 1): 12.706, (0.995, 1): 63.657, (0.95, 2): 2.920, (0.975, 2): 4.303, (0.975, 4): 2.776,
    (0.995, 4): 4.604, (0.95, 10): 1.812, (0.995, 10): 3.169, (0.975, 30): 2.042, (0.975, 120): 1.980,
}  # fmt: skip


@pytest.mark.parametrize("where", TABLE)
def test_t_is_that_of_the_tables(where: tuple[float, float]) -> None:
    assert t_quantile(*where) == pytest.approx(TABLE[where], abs=6e-4 * TABLE[where])


def test_the_interval_of_two_known_sets() -> None:
    """Logarithms 0, 1, 2 and 3, 4, 5: means 3 apart, variances 1, so the error is sqrt(2/3) with 4 degrees."""
    now, before = [math.exp(v) for v in (3, 4, 5)], [math.exp(v) for v in (0, 1, 2)]
    half = 2.776 * math.sqrt(2 / 3)
    low, high = ratio_interval(now, before, 0.025)
    assert (math.log(low), math.log(high)) == (pytest.approx(3 - half, abs=1e-3), pytest.approx(3 + half, abs=1e-3))


def test_no_spread_is_a_point_and_one_value_has_no_spread() -> None:
    assert ratio_interval([2.0, 2.0], [1.0, 1.0], 0.01) == (pytest.approx(2), pytest.approx(2))
    with pytest.raises(ValueError, match="two repeats"):
        ratio_interval([2.0], [1.0, 1.0], 0.01)


@pytest.mark.parametrize("repeats", [3, 5])
def test_it_errs_as_seldom_as_it_says_and_sees_what_is_there(repeats: int) -> None:
    """12 figures of unchanged software, one chance in twenty for all of them; and one that is 40 % slower at 3 %
    noise. Seeded, so the counts are what they are; the bounds leave three standard errors."""
    rng, doubt, runs = random.Random(7), 0.05 / 12, 300

    def sample(mean: float) -> list[float]:
        return [mean * math.exp(rng.gauss(0, 0.03)) for _ in range(repeats)]

    alarms = sum(any(ratio_interval(sample(1), sample(1), doubt)[0] > 1 for _ in range(12)) for _ in range(runs))
    assert alarms / runs < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)
    assert sum(ratio_interval(sample(1.4), sample(1), doubt)[0] > 1 for _ in range(runs)) / runs > 0.97


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0], 0.99) == 3.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([float(n) for n in range(101)], 0.99) == 99.0


def outcome(sent: float, times: list[float], tokens: int, error: tuple[str, str] | None = None) -> Outcome:
    return Outcome(
        LoadRequest([1], 10, tokens), sent, times, prompt_tokens=10, output_tokens=tokens, cached_tokens=4, error=error
    )


def test_figures_are_those_of_the_answers_that_came() -> None:
    outcomes = [
        outcome(0.0, [0.1, 0.2, 0.4], 3),  # ttft 100 ms, tpot 150 ms, gaps 100 and 200 ms
        outcome(1.0, [1.3, 1.5], 5),  # two chunks of five tokens: tpot 50 ms, one gap of 200 ms
        outcome(1.0, [1.2], 1),  # nothing behind the first token
        outcome(9.0, [9.9], 9, error=("timeout", "no answer")),
    ]
    found = figures(LevelRun(outcomes, seconds=2.0, late_seconds=0.001, client_cpu_seconds=0.5))
    assert (found.requests, found.errors, found.output_tokens, found.prompt_tokens) == (3, 1, 9, 30)
    assert found.ttft_p50_ms == pytest.approx(200)
    assert (found.tpot_mean_ms, found.tpot_p50_ms) == (pytest.approx(100), pytest.approx(100))
    assert (found.itl_p50_ms, found.itl_p99_ms) == (pytest.approx(200), pytest.approx(200))
    assert (found.output_tok_s, found.total_tok_s, found.requests_s) == (4.5, 19.5, 1.5)
    assert (found.cached_tokens, found.late_ms, found.client_cpu) == (12, 1.0, 0.25)


def test_nothing_answered_has_no_times_and_no_division_by_zero() -> None:
    found = figures(LevelRun([outcome(0, [], 1, error=("http 500", "no"))], 1.0, 0.0, 0.0))
    assert (found.requests, found.errors, found.ttft_p50_ms, found.output_tok_s) == (0, 1, None, 0.0)


def test_medians_and_spreads_of_repeats() -> None:
    runs = [figures(LevelRun([outcome(0, [0.1 * n, 1.0], 2)], 1.0 * n, 0, 0)) for n in (1, 2, 4)]
    assert isinstance(runs[0], Figures)
    assert medians(runs)["output_tok_s"] == 1.0
    assert medians(runs)["cached_tokens"] == 4
    assert spreads(runs)["output_tok_s"] == pytest.approx(1.5)  # 2, 1 and 0.5 tokens a second
