"""Equalities of the blocks that need no judge: any chunking, packed or alone, decoded or whole, any equal form.

The reference operators sum in float64 and round to float32 once, so that results of other batch shapes agree but for
the rare value whose float64 sum lies on a rounding boundary: 1e-6 of the spread is a few units in the last place.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_models import (
    CHANNELS,
    MIXERS,
    RESIDUALS,
    USUAL,
    in_chunks,
    loader,
    model,
    random_params,
    stack_of,
    token_ids,
)
from torch import Tensor

from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.site import binder
from dayzero.blocks.stack import Forms, Stack

NUM_TOKENS = 33
LAST_PLACES = 1e-6


def close(got: Tensor, want: Tensor, relative: float = LAST_PLACES) -> None:
    assert torch.isfinite(got).all()
    worst = float((got - want).abs().max() / want.std())
    assert worst < relative, f"differs by {worst:.2e} of the spread"


def stack_for(mixer: str, channel: str = "glu", residual: str = "plain", forms: Forms = USUAL) -> Stack:
    return stack_of(model(MIXERS[mixer], (CHANNELS[channel],), RESIDUALS[residual]()), forms=forms)


CASES = [
    *((mixer, "glu", "plain") for mixer in MIXERS),
    *(("attention", channel, "plain") for channel in CHANNELS),
    *(("delta_softplus", "moe_latent", residual) for residual in RESIDUALS),
]


@pytest.mark.parametrize(("mixer", "channel", "residual"), CASES)
def test_any_chunking_gives_the_same(mixer: str, channel: str, residual: str) -> None:
    stack, tokens = stack_for(mixer, channel, residual), token_ids(NUM_TOKENS)
    whole = in_chunks(stack, tokens, NUM_TOKENS)
    for chunk_tokens in (1, 7, 16):
        close(in_chunks(stack, tokens, chunk_tokens), whole)


@pytest.mark.parametrize(("mixer", "channel", "residual"), CASES)
def test_packed_sequences_equal_lone_ones(mixer: str, channel: str, residual: str) -> None:
    """Three sequences with different histories, one of them a single new token, in one step."""
    stack = stack_for(mixer, channel, residual)
    sequences = {4: token_ids(23, 1), 0: token_ids(17, 2), 7: token_ids(9, 5)}
    split = {4: 22, 0: 6, 7: 0}
    lone = {row: in_chunks(stack, tokens, 64) for row, tokens in sequences.items()}
    cache = LocalCache(stack.spec, torch.float32)
    for row, tokens in sequences.items():
        if split[row]:
            stack.forward(cache.view(tokens[: split[row]], row=row))
    view = cache.views([(row, tokens[split[row] :]) for row, tokens in sequences.items()])
    got = stack.forward(view)
    for span, row in zip(view.spans, sequences, strict=True):
        close(got[span.rows], lone[row][split[row] :])


def test_a_window_forgets_and_a_full_layer_does_not() -> None:
    """Changing the oldest token must change the newest output through a full layer, and not through windows alone."""
    tokens = token_ids(20)
    other = tokens.clone()
    other[0] = (other[0] + 1) % 50
    window, full = MIXERS["window_sinks"]
    for mixers, same in (((window, window), True), ((window, full), False)):
        stack = stack_of(model(mixers, (CHANNELS["glu"],), RESIDUALS["plain"]()))
        one, two = (in_chunks(stack, t, 20)[-1] for t in (tokens, other))
        assert torch.equal(one, two) == same


@pytest.mark.parametrize("mixer", ["latent", "latent_raw_gate", "latent_index", "latent_shared_index"])
def test_latent_forms_agree(mixer: str) -> None:
    """Absorbed = expanded, at lengths where the selection is much shorter than the history."""
    tokens = token_ids(NUM_TOKENS)
    want = in_chunks(stack_for(mixer), tokens, 16)
    close(in_chunks(stack_for(mixer, forms=Forms(latent="expanded")), tokens, 16), want)


@pytest.mark.parametrize(
    "mixer", ["latent_index", "latent_shared_index", "latent_pools", "latent_gated", "latent_near"]
)
def test_gather_and_masked_agree(mixer: str) -> None:
    """Both compute in float32 what the reference sums in float64, over two layers: some 1e-6 of the spread each."""
    tokens, spec = token_ids(NUM_TOKENS), model(MIXERS[mixer], (CHANNELS["glu"],), RESIDUALS["plain"]())
    want = in_chunks(stack_of(spec), tokens, 16)
    for variant in ("gather", "masked", "by_length"):
        bound = {"attention.sparse": variant, **{f"sparse_index.{n}": "tiled" for n in ("tokens", "pool")}}
        stack = Stack(spec, loader(random_params(spec)), bind=binder(bound))
        close(in_chunks(stack, tokens, 16), want, 1e-5)


@pytest.mark.parametrize("mixer", ["delta_softplus", "delta_bounded", "delta_head"])
def test_recurrent_and_chunked_forms_agree(mixer: str) -> None:
    """The recurrent form rounds the state to float32 after every token, the chunked one after 64: 1e-7 a token."""
    tokens = token_ids(150)
    want = in_chunks(stack_for(mixer), tokens, 150)
    close(in_chunks(stack_for(mixer, forms=Forms(recurrence="chunked")), tokens, 150), want, 1e-5)


def test_a_shared_index_reuses_the_selection_of_the_layer_before() -> None:
    seen: dict[str, Tensor] = {}
    spec = model(MIXERS["latent_shared_index"], (CHANNELS["glu"],), RESIDUALS["plain"]())
    stack = stack_of(spec)
    stack = Stack(spec, stack.load, tap=seen.__setitem__)
    in_chunks(stack, token_ids(NUM_TOKENS), NUM_TOKENS)
    assert torch.equal(seen["layers.0.index"], seen["layers.1.index"])
    chosen = seen["layers.0.index"]
    assert chosen.shape == (NUM_TOKENS, 5)
    for position, row in enumerate(chosen.tolist()):
        kept = [p for p in row if p >= 0]
        assert len(kept) == min(5, position + 1) and kept == sorted(set(kept)) and max(kept) <= position


def test_an_index_that_sees_little_differs_from_dense_attention() -> None:
    """The selection must bite: with top-k above the length the same weights give another answer."""
    narrow = MIXERS["latent_index"][0]
    wide = replace(narrow, index=replace(narrow.index, top_k=64))  # type: ignore[type-var]
    outs = [
        in_chunks(stack_of(model((mixer,), (CHANNELS["glu"],), RESIDUALS["plain"]())), token_ids(NUM_TOKENS), 64)
        for mixer in (narrow, wide)
    ]
    assert torch.equal(outs[0][:5], outs[1][:5])
    assert (outs[0][20:] - outs[1][20:]).abs().max() > 1e-2
