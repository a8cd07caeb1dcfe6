"""Sizes at the edge of what a spec may say: one head, one token, windows and convolutions of one, top-k beyond all.

The equalities of test_blocks_equalities at sizes that no published model has and that a shape slip would show at.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_models import (
    CHANNELS,
    DIM,
    NORM,
    attention,
    delta,
    in_chunks,
    index,
    latent,
    loader,
    model,
    random_params,
    stack_of,
    token_ids,
)
from torch import Tensor

from dayzero.arch.channels import MoE, Router
from dayzero.arch.mixers import MLA, Attention, Mixer
from dayzero.arch.residuals import Plain
from dayzero.arch.rope import Rope
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.stack import Forms, Stack

NUM_TOKENS = 19
LAST_PLACES = 1e-6  # float64 sums rounded once, see test_blocks_equalities


def one_head() -> Attention:
    return Attention(DIM, 1, 1, 2, Rope(2, 10000.0), 2**-0.5)


def all_heads(**over: object) -> Attention:
    return Attention(DIM, 5, 5, 6, Rope(2, 10000.0), 6**-0.5, **over)  # type: ignore[arg-type]


def thin_latent(**over: object) -> MLA:
    values: dict[str, object] = {"q_rank": 1, "rope": Rope(2, 10000.0, "interleaved"), **over}
    return MLA(DIM, 1, kv_rank=1, nope=1, shared=2, v_dim=1, softmax_scale=3**-0.5, norm_eps=1e-6, **values)  # type: ignore[arg-type]


MIXERS: dict[str, Mixer] = {
    "one head": one_head(),
    "KV heads are heads": all_heads(),
    "window of one": all_heads(window=1),
    "window of one with sinks": all_heads(window=1, sinks=True),
    "window past the length": attention(window=10_000),
    "one KV head, gate": attention(gate=True),
    "thin latent": thin_latent(),
    "index of everything": latent(index=index(top_k=10_000)),
    "index of one": latent(index=index(top_k=1)),
    **{f"convolution of {taps}": replace(delta(), conv=taps) for taps in (1, 2, 3)},
    "one key head": replace(delta(key_heads=1, decay="head", decay_rank=None, gate_rank=None, out_gate="silu"), conv=1),
}


def stack(mixer: Mixer, forms: Forms | None = None) -> Stack:
    return stack_of(model((mixer, mixer), (CHANNELS["glu"],), Plain(NORM)), forms=forms or Forms())


def close(got: Tensor, want: Tensor, relative: float = LAST_PLACES) -> None:
    assert torch.isfinite(got).all()
    worst = float((got - want).abs().max() / want.std())
    assert worst < relative, f"differs by {worst:.2e} of the spread"


@pytest.mark.parametrize("name", MIXERS)
def test_any_chunking_at_odd_sizes(name: str) -> None:
    made, tokens = stack(MIXERS[name]), token_ids(NUM_TOKENS)
    whole = in_chunks(made, tokens, NUM_TOKENS)
    for chunk_tokens in (1, 2, 5):
        close(in_chunks(made, tokens, chunk_tokens), whole)
    close(in_chunks(made, tokens[:1], 1), whole[:1])


@pytest.mark.parametrize("name", MIXERS)
def test_five_sequences_in_interleaved_chunks(name: str) -> None:
    """Rows of different lengths enter, pause, end and start again while others go on."""
    made = stack(MIXERS[name])
    sequences = {row: token_ids(length, row) for row, length in ((0, 1), (3, 19), (1, 8), (9, 13), (4, 2))}
    lone = {row: in_chunks(made, tokens, 64) for row, tokens in sequences.items()}
    cache = LocalCache(made.spec, torch.float32)
    done = dict.fromkeys(sequences, 0)
    turn = 0
    while any(done[row] < len(tokens) for row, tokens in sequences.items()):
        turn += 1
        sizes = {row: 1 + (turn * 7 + row * 3) % 5 for row in sequences}
        parts = [
            (row, tokens[done[row] : done[row] + sizes[row]])
            for row, tokens in reversed(sequences.items())
            if done[row] < len(tokens) and (turn + row) % 3
        ]
        if not parts:
            continue
        view = cache.views(parts)
        got = made.forward(view)
        for span, (row, _) in zip(view.spans, parts, strict=True):
            close(got[span.rows], lone[row][done[row] : done[row] + span.count])
            done[row] += span.count
    cache.drop(3)  # another sequence in the place of an ended one sees nothing of it
    close(made.forward(cache.view(sequences[9], row=3)), lone[9])


def test_a_window_of_one_sees_the_token_itself_alone() -> None:
    made, tokens = stack(MIXERS["window of one"]), token_ids(NUM_TOKENS)
    alone = torch.cat([in_chunks(made, token[None], 1) for token in tokens])
    close(in_chunks(made, tokens, NUM_TOKENS), alone)


def test_an_index_past_the_length_is_dense_attention() -> None:
    tokens = token_ids(NUM_TOKENS)
    with_index = stack(MIXERS["index of everything"])
    params = {name: value for name, value in random_params(with_index.spec).items() if ".index." not in name}
    dense = Stack(model((latent(), latent()), (CHANNELS["glu"],), Plain(NORM)), loader(params))
    close(in_chunks(with_index, tokens, 7), in_chunks(dense, tokens, NUM_TOKENS))


@pytest.mark.parametrize("top_k", [1, 8])
def test_one_expert_of_eight_and_all_of_them(top_k: int) -> None:
    channel = MoE(DIM, 1, Router(8, top_k, "softmax"))
    made = stack_of(model((attention(),), (channel,), Plain(NORM)))
    tokens = token_ids(NUM_TOKENS)
    close(in_chunks(made, tokens, 1), in_chunks(made, tokens, NUM_TOKENS))
