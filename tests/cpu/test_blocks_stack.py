"""The stack and its local cache: taps, streaming, what refuses to go on, greedy decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from random_models import (
    CHANNELS,
    DIM,
    MIXERS,
    NORM,
    VOCAB,
    in_chunks,
    loader,
    model,
    random_params,
    stack_of,
    token_ids,
)  # fmt: skip
from torch import Tensor

from dayzero.arch.residuals import Plain
from dayzero.blocks.generate import greedy
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.site import Params, Site, activation_args, binder
from dayzero.blocks.stack import Layer, Stack
from dayzero.errors import UsageError
from dayzero.view import Span

SPEC = model(MIXERS["latent_index"], (CHANNELS["glu"], CHANNELS["moe_softmax"]), Plain(NORM))
HYBRID = model(MIXERS["delta_head"], (CHANNELS["glu"],), Plain(NORM))


def test_taps_come_in_order_and_hold_what_they_say() -> None:
    seen: list[tuple[str, Tensor]] = []
    stack = Stack(SPEC, loader(random_params(SPEC)), tap=lambda site, value: seen.append((site, value.clone())))
    logits = stack.head(stack.forward(LocalCache(SPEC, torch.float32).view(token_ids(11))))
    assert [site for site, _ in seen] == [
        "embed",
        "layers.0.index", "layers.0.mixer", "layers.0.channel", "layers.0",
        "layers.1.index", "layers.1.mixer", "layers.1.experts", "layers.1.channel", "layers.1",
        "final_norm", "logits",
    ]  # fmt: skip
    values = dict(seen)
    assert torch.equal(values["logits"], logits) and logits.shape == (11, VOCAB) and logits.dtype is torch.float32
    torch.testing.assert_close(
        values["embed"] + values["layers.0.mixer"] + values["layers.0.channel"], values["layers.0"]
    )
    assert values["layers.1.experts"].shape == (11, 3) and values["layers.0.index"].shape == (11, 5)


def test_streaming_loads_each_layer_when_it_runs_and_changes_no_bit() -> None:
    params, asked = random_params(SPEC), list[str]()

    def load(prefix: str) -> dict[str, Tensor]:
        asked.append(prefix)
        return loader(params)(prefix)

    cache = LocalCache(SPEC, torch.float32)
    streamed = Stack(SPEC, load, resident=False)
    got = streamed.head(streamed.forward(cache.view(token_ids(9))))
    assert asked == ["embed", "layers.0", "layers.1", "final_norm", "head"]
    kept = stack_of(SPEC)
    assert torch.equal(got, kept.head(kept.forward(LocalCache(SPEC, torch.float32).view(token_ids(9)))))


def test_a_tied_head_is_the_embedding() -> None:
    spec = model(MIXERS["attention"], (CHANNELS["glu"],), Plain(NORM), tied=True)
    params = random_params(spec)
    assert "head" not in params
    hidden = torch.eye(DIM)[:3]
    torch.testing.assert_close(Stack(spec, loader(params)).head(hidden), params["embed"].T[:3])


def test_embeddings_are_scaled() -> None:
    spec = replace(SPEC, embed_scale=3.0)
    params = random_params(spec)
    carry = Stack(spec, loader(params)).open(LocalCache(spec, torch.float32).view([5, 2]))
    assert torch.equal(carry["h"], params["embed"][[5, 2]] * 3.0)


def test_a_parameter_that_no_block_uses_is_refused() -> None:
    layer = SPEC.layers[0]
    params = {n.removeprefix("layers.0."): v for n, v in random_params(SPEC).items() if n.startswith("layers.0.")}
    with pytest.raises(AssertionError, match=r"no block uses mixer\.sinks"):
        Layer(layer, Params({**params, "mixer.sinks": torch.zeros(4)}), Site("layers.0"), 0)


def test_bound_variants_are_used_or_refused() -> None:
    tokens = token_ids(8)
    want = in_chunks(stack_of(HYBRID), tokens, 8)
    fast = Stack(HYBRID, loader(random_params(HYBRID)), bind=binder({"attention.paged": "tiled"}))
    torch.testing.assert_close(in_chunks(fast, tokens, 8), want, rtol=1e-5, atol=1e-5)
    with pytest.raises(UsageError, match="no variant 'fused'"):
        in_chunks(Stack(HYBRID, loader(random_params(HYBRID)), bind=binder({"linear.matmul": "fused"})), tokens, 8)


def test_an_activation_gets_its_own_constants_only() -> None:
    assert activation_args(CHANNELS["glu"].act) == {"kind": "silu"}
    assert activation_args(CHANNELS["moe_latent"].act) == {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}


def test_fresh_cache_memory_is_poisoned_and_grows() -> None:
    cache = LocalCache(SPEC, torch.float32)
    store = cache.stores["layers.0.mixer.latent"]
    first_view = cache.view(token_ids(3))
    store.append(first_view, torch.ones(3, 24))
    rows = store.pages(first_view).rows
    assert rows[0, 3:].isnan().all() and not rows[0, :3].isnan().any()
    view = cache.view(token_ids(200))
    store.append(view, torch.full((200, 24), 2.0))
    rows, first = store.history(view, view.spans[0])
    assert first == 0 and rows.shape == (203, 24) and rows[:3].eq(1).all() and rows[3:].eq(2).all()


def test_sequences_do_not_share_pages_and_give_them_back() -> None:
    cache = LocalCache(SPEC, torch.float32)
    store = cache.stores["layers.0.mixer.latent"]
    view = cache.views([(0, token_ids(70)), (1, token_ids(5))])
    used = view.where["tokens"].table
    assert len({int(b) for b in (used[0, 0], used[0, 1], used[1, 0])}) == 3
    store.append(view, torch.arange(75.0)[:, None].expand(75, 24))
    assert torch.equal(store.history(view, view.spans[1])[0][:, 0], torch.arange(70.0, 75.0))
    cache.drop(0)
    again = cache.view(token_ids(100), row=2)
    assert set(again.where["tokens"].table[0].tolist()) == set(used[0].tolist())


def test_a_gap_in_a_sequence_is_refused() -> None:
    cache = LocalCache(SPEC, torch.float32)
    with pytest.raises(AssertionError, match="row 0 holds 0 tokens, start is 4"):
        cache.view([1, 2], start=4)


def test_going_back_truncates_tokens_but_not_states() -> None:
    tokens = token_ids(12)
    stack, cache = stack_of(SPEC), LocalCache(SPEC, torch.float32)
    first = stack.forward(cache.view(tokens))
    again = stack.forward(cache.view(tokens[7:], start=7))
    torch.testing.assert_close(again, first[7:], rtol=1e-6, atol=1e-6)
    hybrid = LocalCache(HYBRID, torch.float32)
    stack_of(HYBRID).forward(hybrid.view(tokens))
    with pytest.raises(AssertionError, match="recurrent states cannot go back"):
        hybrid.view(tokens[7:], start=7)
    # From the start a state begins at zero again, whatever the row held.
    redone = stack_of(HYBRID).forward(hybrid.view(tokens, start=0))
    assert torch.equal(redone, in_chunks(stack_of(HYBRID), tokens, 12))


def test_a_stale_state_is_refused() -> None:
    cache = LocalCache(HYBRID, torch.float32)
    store = cache.stores["layers.0.mixer.state"]
    view = cache.view(token_ids(4))
    store.write(view, view.spans[0], torch.zeros(4, 8, 6))
    with pytest.raises(AssertionError, match="state before token 4, but token 5 comes"):
        store.read(view, Span(0, 0, 1, 5))


def test_greedy_stops_before_a_stop_id_and_chunks_change_nothing() -> None:
    prompt = token_ids(13).tolist()
    whole = list(greedy(stack_of(HYBRID), LocalCache(HYBRID, torch.float32), prompt, 12))
    assert len(whole) == 12
    parts = greedy(stack_of(HYBRID), LocalCache(HYBRID, torch.float32), prompt, 12, chunk_tokens=5)
    assert list(parts) == whole
    stop = whole[6]
    stopped = list(greedy(stack_of(HYBRID), LocalCache(HYBRID, torch.float32), prompt, 12, {stop}))
    assert stopped == whole[: whole.index(stop)]


def test_records_are_kept_in_the_caches_dtype_and_states_in_float32() -> None:
    cache = LocalCache(HYBRID, torch.bfloat16)
    params = {n: v if n.endswith(("a_log", "dt_bias", "conv", "o_norm")) else v.bfloat16()
              for n, v in random_params(HYBRID).items()}  # fmt: skip
    stack = Stack(HYBRID, loader(params))
    view = cache.view(token_ids(6))
    hidden = stack.forward(view)
    assert hidden.dtype is torch.bfloat16 and stack.head(hidden).dtype is torch.float32
    span = Span(0, 0, 1, 6)
    assert cache.stores["layers.0.mixer.state"].read(view, span).dtype is torch.float32
    assert cache.stores["layers.0.mixer.q_conv"].read(view, span).dtype is torch.bfloat16
