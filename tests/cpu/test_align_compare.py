"""Distances, bounds, sets and logits: what passes, what fails, and that nothing passes for not being a number."""

from __future__ import annotations

import math

import pytest
import torch
from random_models import CHANNELS, MIXERS, RESIDUALS, model

from dayzero.acceptance.compare import UNIT, Bound, bound_at, compare_choices, compare_logits, distance, free_bound

BOUND = Bound(1e-4, "test")


def test_distance_measures_what_it_says() -> None:
    oracle = torch.tensor([[3.0, 4.0], [6.0, 8.0], [0.0, 1.0]])
    ours = oracle.clone()
    ours[1] += torch.tensor([0.6, 0.8])
    d = distance(ours, oracle, None, bound=1e-3)
    assert d.rel_l2 == pytest.approx(1 / math.sqrt(126)) and d.worst_token == pytest.approx(0.1)
    assert (d.worst_at, d.first_wrong, d.num_tokens) == (1, 1, 3)
    assert d.max_over_spread == pytest.approx(0.1) and not d.within(1e-3)
    kept = distance(ours, oracle, torch.tensor([True, False, True]), bound=1e-3)
    assert kept.rel_l2 == 0 and kept.num_tokens == 2 and kept.within(1e-9)


def test_one_bad_token_among_loud_ones_is_seen() -> None:
    """A first token of norm 1e4 must not hide that another token is wrong altogether."""
    oracle = torch.ones(50, 8)
    oracle[0] = 1e4
    ours = oracle.clone()
    ours[30] = 1.001
    d = distance(ours, oracle, None, bound=1e-5)
    assert d.rel_l2 < 1e-5 and d.first_wrong == 30 and not d.within(1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_never_pass(bad: float) -> None:
    oracle = torch.ones(4, 3)
    ours = oracle.clone()
    ours[2, 1] = bad
    d = distance(ours, oracle, None, bound=1e9)
    assert not d.within(1e9) and d.worst_at == 2 and d.first_wrong == 2
    logits = compare_logits(ours, oracle.clone().add_(torch.arange(3.0)), [0, 1, 2, 0], BOUND, 4)
    assert not logits.passed


def test_zeros_against_zeros_agree_and_against_values_do_not() -> None:
    zeros, ones = torch.zeros(2, 3), torch.ones(2, 3)
    assert distance(zeros, zeros, None, 1e-6).within(1e-6)
    assert not distance(ones, zeros, None, 1e-6).within(1e-6)
    assert not distance(zeros, ones, None, 1e-6).within(1e-6)


def test_bounds_are_float32_sized_and_grow_along_a_layer() -> None:
    spec = model(MIXERS["latent"], (CHANNELS["moe_latent"],), RESIDUALS["plain"]())
    mixer, channel = bound_at(spec, "layers.0.mixer", 48), bound_at(spec, "layers.0.channel", 48)
    assert 10 * UNIT < mixer.value < channel.value < 1e-4
    assert "2^-24" in mixer.why and "sqrt" in mixer.why
    assert bound_at(spec, "embed", 48).value == 2 * UNIT
    assert 1e-4 <= free_bound(spec, 48).value < 1e-3
    recurrent = model(MIXERS["delta_softplus"], (CHANNELS["glu"],), RESIDUALS["plain"]())
    assert bound_at(recurrent, "layers.0.mixer", 400).value > bound_at(recurrent, "layers.0.mixer", 4).value


def test_choices_are_sets_without_pads_and_future() -> None:
    ours = torch.tensor([[0, -1, -1], [1, 0, -1], [2, 0, 1], [3, 1, 0]])
    oracle = torch.tensor([[0, 2, 1], [0, 1, 2], [0, 1, 2], [3, 1, 2]])
    found = compare_choices(ours, oracle, causal=True)
    assert found.differing == (3,) and found.missed == 2 and found.agreement == 0.75
    assert compare_choices(ours, oracle, causal=False).differing == (0, 1, 3)


def test_logits_are_split_by_margin_and_judged_by_noise() -> None:
    oracle = torch.zeros(4, 5)
    for token, margin in enumerate((0.01, 0.5, 3.0, 3.0)):
        oracle[token, token] = 2.0 + margin
        oracle[token, 4] = 2.0
    ours = oracle + 1e-6
    ours[0, 4] += 0.02  # turns the thin margin over; still far more than float32 noise
    found = compare_logits(ours, oracle, [0, 1, 2, 3], BOUND, exact_tokens=4)
    assert found.top1 == {"<0.05": (1, 0), "0.05-1": (1, 1), ">1": (2, 2)}
    assert found.flips_beyond_noise == (0,) and not found.passed
    assert 0 < found.kl_mean < 1e-3 and found.kl_max >= found.kl_p99 >= found.kl_mean
    same = compare_logits(oracle + 1e-6, oracle, [0, 1, 2, 3], BOUND, 4)
    assert same.passed and same.kl_max < 1e-10
    assert same.perplexity_ours == pytest.approx(same.perplexity_oracle, rel=1e-6)
    assert compare_logits(ours, oracle, [0, 1, 2, 3], BOUND, exact_tokens=0).passed, "after a tie only sets decide"
