"""Sampling: distributions against the softmax, filters against their definition, independence of the batch."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dayzero.engine.request import SamplingParams
from dayzero.engine.sampler import (
    FIRST_CANDIDATES,
    SlotState,
    apply_mask,
    draw,
    logprobs_of,
    shape_logits,
    uniform,
)


def logits_of(vocab: int, seed: int, spread: float = 2.0) -> Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * spread


def slot(params: SamplingParams, prompt: list[int], generated: list[int], stops: tuple[int, ...] = ()) -> SlotState:
    return SlotState("r", params, 1, len(prompt), stops, prompt + generated)


def kept(logits_V: Tensor, params: SamplingParams) -> Tensor:
    """Probabilities [V] that the documented order of filters leaves, written out plainly in float64."""
    p_V = torch.softmax(logits_V.double() / params.temperature, -1)
    order = sorted(range(len(p_V)), key=lambda i: (-float(p_V[i]), i))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(float(p_V[i]) for i in order)
    if params.top_p < 1:
        left, mass = [], 0.0
        for i in order:
            if mass < params.top_p:
                left.append(i)
            mass += float(p_V[i]) / total
        order = left
    order = [i for i in order if float(p_V[i]) >= params.min_p * float(p_V[order[0]])]
    out = torch.zeros_like(p_V)
    out[order] = p_V[order]
    return out / out.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.3, top_k=7),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=0.9, top_k=20, top_p=0.7, min_p=0.05),
    ],
    ids=str,
)
def test_sampled_ids_follow_the_distribution(params: SamplingParams) -> None:
    """Chi squared of 4,000 draws; 0.1 % of right samplers would fail with another seed, and this seed is fixed."""
    logits_V, draws = logits_of(40, 3), 4000
    want_V = kept(logits_V, params) * draws
    got = [draw(logits_V, params, uniform(17, i)) for i in range(draws)]
    counts_V = torch.bincount(torch.tensor(got), minlength=40).double()
    assert not counts_V[want_V == 0].any(), "a token came that the filters forbid"
    common = want_V >= 5
    groups = [(want_V[common], counts_V[common])]
    if (~common & (want_V > 0)).any():
        rare = ~common
        groups.append((want_V[rare].sum()[None], counts_V[rare].sum()[None]))
    chi = sum(float(((c - w) ** 2 / w).sum()) for w, c in groups if float(w.sum()) > 0)
    freedom = sum(len(w) for w, _ in groups) - 1
    assert chi < freedom + 3.1 * math.sqrt(2 * freedom) + 7, (chi, freedom)


@given(
    st.integers(0, 10**6),
    st.integers(0, 60),
    st.floats(0.05, 1.0),
    st.floats(0.0, 0.5),
    st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=80, deadline=None)
def test_filters_are_what_they_say(seed: int, top_k: int, top_p: float, min_p: float, chance: float) -> None:
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    logits_V = (logits_of(50, seed) * 4).round() / 4  # with ties
    assert kept(logits_V, params)[draw(logits_V, params, chance)] > 0


@pytest.mark.parametrize("params", [SamplingParams(top_p=0.95), SamplingParams(min_p=1e-4), SamplingParams(top_k=3000)])
def test_a_flat_distribution_needs_more_candidates_than_the_first(params: SamplingParams) -> None:
    logits_V = logits_of(5000, 1, spread=0.2)
    want_V = kept(logits_V, params)
    assert int((want_V > 0).sum()) > FIRST_CANDIDATES
    order = torch.sort(logits_V, descending=True, stable=True).indices
    total = want_V[order].cumsum(0)
    for chance in (0.0, 0.3, 0.9, 0.999999):
        got = draw(logits_V, params, chance)
        at = int((order == got).nonzero())
        assert total[at] >= chance - 1e-9 and (at == 0 or total[at - 1] <= chance + 1e-9)


def test_the_last_of_the_mass_is_never_a_token_of_probability_zero() -> None:
    logits_V = torch.tensor([0.0, 1.0, float("-inf"), float("-inf")])
    for chance in (0.0, math.nextafter(1.0, 0.0)):
        assert draw(logits_V, SamplingParams(), chance) in (0, 1)


def test_greedy_takes_the_lowest_id_on_ties() -> None:
    assert draw(torch.tensor([1.0, 3.0, 3.0, 2.0]), SamplingParams(temperature=0), 0.5) == 1


def test_uniform_numbers_are_spread_and_repeatable() -> None:
    values = torch.tensor([uniform(seed, index) for seed in range(50) for index in range(200)], dtype=torch.float64)
    assert len(values.unique()) == 10_000 and bool(((values >= 0) & (values < 1)).all())
    counts = torch.histc(values.float(), 20, 0, 1)
    assert float(((counts - 500) ** 2 / 500).sum()) < 43.8  # chi squared, 19 degrees of freedom, 0.1 %
    assert uniform(5, 9) == uniform(5, 9) != uniform(9, 5)


def test_penalties_by_hand() -> None:
    logits_V = torch.tensor([2.0, -2.0, 1.0, 0.5, 0.0])
    params = SamplingParams(repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={4: 3.0})
    shape_logits(logits_V, slot(params, prompt=[0, 1], generated=[2, 2, 1]), 3)
    # repetition: 0 and 2 halved, 1 doubled (prompt included); generated 2 twice: -0.25 - 1.0, 1 once: -0.25 - 0.5
    assert logits_V.tolist() == [1.0, -4.75, -0.75, 0.5, 3.0]


def test_stops_are_banned_until_min_tokens() -> None:
    params = SamplingParams(min_tokens=2, stop_token_ids=(3,))
    for index, banned in ((0, True), (1, True), (2, False)):
        logits_V = torch.zeros(5)
        shape_logits(logits_V, slot(params, [1], [], stops=(0, 9)), index)
        assert (logits_V == float("-inf")).tolist() == [banned, False, False, banned, False]


def test_a_mask_forbids_everything_else_and_what_it_does_not_cover() -> None:
    words = struct.pack("<2I", 1 << 0 | 1 << 31, 1 << 1)
    logits_V = torch.zeros(70)
    apply_mask(logits_V, words)
    assert (logits_V == 0).nonzero()[:, 0].tolist() == [0, 31, 33]


def test_log_probabilities_are_of_the_raw_logits() -> None:
    raw_SV = torch.stack([logits_of(30, 4), logits_of(30, 5)])
    got = logprobs_of(raw_SV, [7, 2], [0, 3])
    want_SV = torch.log_softmax(raw_SV.double(), -1)
    assert got[0].top == [] and got[0].logprob == float(want_SV[0, 7])
    assert [i for i, _ in got[1].top] == want_SV[1].topk(3).indices.tolist()
    assert got[1].rank == int((want_SV[1] > want_SV[1, 2]).sum()) + 1
