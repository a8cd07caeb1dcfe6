"""The walk against our own stack in the oracle's place: any spec passes, and a planted fault is named where it is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from align_support import aligned, self_trace, walk
from random_models import CHANNELS, MIXERS, RESIDUALS, VOCAB, loader, model, random_params

from dayzero.acceptance.findings import first_diverging
from dayzero.acceptance.ladder import hint
from dayzero.acceptance.rounding import Predicted
from dayzero.acceptance.walk import Walk
from dayzero.arch.rope import Rope
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.stack import Stack

TOKENS = torch.randint(0, VOCAB, (23,), generator=torch.Generator().manual_seed(5)).tolist()


KINDS = ["window_sinks", "latent_index", "latent_shared_index", "delta_bounded", "delta_head"]


@pytest.mark.parametrize("mixers", KINDS)
def test_every_kind_aligns_with_itself(mixers: str, tmp_path: Path) -> None:
    spec = model(MIXERS[mixers], (CHANNELS["moe_sigmoid_groups"], CHANNELS["glu"]), RESIDUALS["plain"]())
    params = random_params(spec)
    found = aligned(spec, params, self_trace(spec, params, TOKENS, tmp_path / "t"))
    assert all(s.floor <= s.bound.value for s in found.sites), "chunks of 7 tokens give the same outputs"
    assert {c.site for c in found.choices} >= {"layers.0.experts"} and not found.unseen
    assert found.exact_tokens == len(TOKENS)
    sites = [s.site for s in found.sites]
    assert sites[:4] == ["embed", "layers.0.mixer", "layers.0.channel", "layers.0"]
    assert sites[-2:] == ["final_norm", "head"]


def test_a_carry_of_several_parts_is_forced_whole(tmp_path: Path) -> None:
    spec = model(MIXERS["latent"] * 3, (CHANNELS["glu"],), RESIDUALS["attn_res"]())
    params = random_params(spec)
    aligned(spec, params, self_trace(spec, params, TOKENS, tmp_path / "t"))


def _mixer(spec: ModelSpec, number: int, **over: Any) -> ModelSpec:
    layers = list(spec.layers)
    layers[number] = replace(layers[number], mixer=replace(layers[number].mixer, **over))
    return replace(spec, layers=tuple(layers))


def _router(spec: ModelSpec, number: int, **over: Any) -> ModelSpec:
    layers = list(spec.layers)
    channel: Any = layers[number].channel
    layers[number] = replace(layers[number], channel=replace(channel, router=replace(channel.router, **over)))
    return replace(spec, layers=tuple(layers))


def _index(spec: ModelSpec, **over: Any) -> ModelSpec:
    mixer: Any = spec.layers[1].mixer
    return _mixer(spec, 1, index=replace(mixer.index, **over))


FAULTS: dict[str, tuple[str, str, Any, str, str]] = {
    # name: (mixers, channel, change of the spec, first diverging site, word of the hint)
    "rope style": ("latent", "glu", lambda s: _mixer(s, 1, rope=Rope(6, 10000.0)), "layers.1.mixer", "rope style"),
    "softmax scale": ("latent", "glu", lambda s: _mixer(s, 0, softmax_scale=0.2), "layers.0.mixer", "softmax scale"),
    "window off by one": ("window_sinks", "glu", lambda s: _mixer(s, 0, window=6), "layers.0.mixer", "current token"),
    "no decay bound": ("delta_bounded", "glu", lambda s: _mixer(s, 1, lower=None), "layers.1.mixer", "decay"),
    "index rope style": (
        "latent_index", "glu", lambda s: _index(s, rope=Rope(6, 10000.0, "interleaved")), "layers.1.index", "",
    ),
    "router scale": (
        "latent", "moe_sigmoid_groups", lambda s: _router(s, 1, scale=1.0), "layers.1.channel", "renormalisation",
    ),
    "router groups": (
        "latent", "moe_sigmoid_groups", lambda s: _router(s, 0, groups=1, top_groups=1), "layers.0.experts", "",
    ),
    "final norm eps": (
        "latent", "glu", lambda s: replace(s, final_norm=replace(s.final_norm, eps=1e-2)), "final_norm", "eps",
    ),
    "embedding scale": ("latent", "glu", lambda s: replace(s, embed_scale=1.5), "embed", "scale"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(FAULTS))
def test_a_fault_is_named_where_it_is(name: str, tmp_path: Path) -> None:
    mixers, channel, change, first, word = FAULTS[name]
    right = model(MIXERS[mixers], (CHANNELS[channel],), RESIDUALS["plain"]())
    params = random_params(right)
    found = walk(change(right), params, self_trace(right, params, TOKENS, tmp_path / "t"))
    assert first_diverging(found) == first
    at = next((s for s in found.sites if s.site == first), None)
    if word:
        assert at is not None and word in hint(right, at)


def test_swapped_gate_and_up_are_the_channels_fault_alone(tmp_path: Path) -> None:
    spec = model(MIXERS["latent"], (CHANNELS["glu"],), RESIDUALS["plain"]())
    params = random_params(spec)
    trace = self_trace(spec, params, TOKENS, tmp_path / "t")
    at = "layers.1.channel"
    params[f"{at}.gate"], params[f"{at}.up"] = params[f"{at}.up"], params[f"{at}.gate"]
    found = walk(spec, params, trace)
    assert first_diverging(found) == at
    assert [s.site for s in found.sites if not s.passed] == [at, "layers.1"], "forcing keeps errors from spreading"


def _experts(spec: ModelSpec, params: dict[str, torch.Tensor], name: str, bias: float) -> torch.Tensor:
    """Sorted ids that layer 1 chooses when expert 5's bias is ``bias``."""
    params[name][5] = bias
    seen: dict[str, torch.Tensor] = {}
    stack = Stack(spec, loader(params), tap=seen.__setitem__)
    stack.forward(LocalCache(spec, torch.float32).view(TOKENS))
    return seen["layers.1.experts"].sort(-1).values


def test_a_tie_at_the_cut_is_no_fault_and_a_moved_bias_is(tmp_path: Path) -> None:
    spec = model(MIXERS["latent"], (CHANNELS["moe_sigmoid_groups"],), RESIDUALS["plain"]())
    spec = _router(_router(spec, 0, groups=1, top_groups=1), 1, groups=1, top_groups=1)
    params, name = random_params(spec), "layers.1.channel.router_bias"
    low, high = -1.0, 1.0
    while high - low > 2e-7:  # the two float32 biases of expert 5 between which a token's set turns over
        middle = (low + high) / 2
        same = torch.equal(_experts(spec, params, name, low), _experts(spec, params, name, middle))
        low, high = (middle, high) if same else (low, middle)
    params[name][5] = low
    trace = self_trace(spec, params, TOKENS, tmp_path / "t")
    nudged = params | {name: params[name].clone()}
    nudged[name][5] = high
    found = walk(spec, nudged, trace)
    tied = next(c for c in found.choices if c.site == "layers.1.experts")
    assert tied.choice.differing and tied.passed and first_diverging(found) is None
    assert found.exact_tokens == min(tied.choice.differing)
    nudged[name][5] += 0.2
    assert first_diverging(walk(spec, nudged, trace)) == "layers.1.experts"


def test_an_oracle_without_a_site_is_told(tmp_path: Path) -> None:
    spec = model(MIXERS["latent"], (CHANNELS["moe_softmax"],), RESIDUALS["plain"]())
    params = random_params(spec)
    trace = self_trace(spec, params, TOKENS, tmp_path / "t")
    del trace._table["layers.0.experts"], trace._table["layers.1.mixer"]
    found = walk(spec, params, trace)
    assert found.unseen == ["layers.0.experts", "layers.1.mixer"] and first_diverging(found) is None


def test_how_many_ids_rounding_of_records_may_turn_over() -> None:
    walk = object.__new__(Walk)  # what it predicted of one layer, and nothing else
    walk._predicted = Predicted({"layers.0.mixer": 0.0}, {"layers.0.index": 0.0})
    assert walk._may_differ("layers.0.index") == 0, "where no rounding reaches, there is none to blame"
    walk._predicted = Predicted({"layers.0.mixer": 1e-2}, {"layers.0.index": 0.0, "layers.0.experts": 12.0})
    assert walk._may_differ("layers.0.index") == 5, "two pairs: none in three draws is no proof that there is none"
    assert walk._may_differ("layers.0.experts") == 41, "twice 12 2/3, and three deviations of that"
