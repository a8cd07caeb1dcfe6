"""Work that is done side by side on two streams: its order, its memory, and that its numbers are those of one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.arch.channels import GLU
from dayzero.arch.residuals import Plain
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import MoEBlock
from dayzero.engine.graphs import Fork, Memory
from dayzero.view import in_turn
from tests.cpu.random_models import (
    CHANNELS,
    DIM,
    MIXERS,
    NORM,
    RESIDUALS,
    attention,
    index,
    latent,
    model,
    moe,
    stack_of,
)
from tests.cpu.two_streams import Device, forks


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device().placed(monkeypatch)


def fork_of(device: Device) -> Fork:
    return Fork(Memory(pool=None, stream=device.main, side=device.side))


def pieces(x: Tensor) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    return lambda: (x + 1).relu() * 2, lambda: (x - 1).abs() * 3


def test_both_are_done_and_given() -> None:
    first, second = pieces(torch.randn(5))
    assert all(torch.equal(a, b) for a, b in zip(in_turn(first, second), (first(), second()), strict=True))


def test_a_fork_and_a_join_order_both_sides(device: Device) -> None:
    x = torch.randn(5)
    fork = fork_of(device)
    with device:
        for _ in range(3):
            x = x * 2
            mine, aside = fork.beside(*pieces(x))
            x = mine + aside
    assert device.races == [] and fork.uses == 3
    assert device.asked == {"main": 3 * 5, "side": 3 * 3}


def test_within_one_of_two_pieces_there_is_no_third_stream(device: Device) -> None:
    x, fork = torch.randn(5), fork_of(device)

    def both() -> Tensor:
        return torch.stack(fork.beside(*pieces(x))).sum(0)

    with device:
        a, b = fork.beside(both, both)
        assert torch.equal(a, b) and torch.equal(a, sum(in_turn(*pieces(x))))
    assert device.races == [] and fork.uses == 1 and device.asked["side"] >= 6


@pytest.mark.parametrize("broken", ["fork", "join"])
def test_a_missing_event_is_seen(device: Device, broken: str) -> None:
    """Else the tests above and below would prove nothing."""
    stream = device.side if broken == "fork" else device.main
    stream.wait_stream = lambda other: None  # type: ignore[method-assign]
    with device:
        x = torch.randn(5) * 2
        mine, aside = fork_of(device).beside(*pieces(x))
        mine + aside
    assert device.races and ("mul" in device.races[0] or "randn" in device.races[0])


def test_memory_that_the_other_side_reads_is_held(device: Device) -> None:
    """What is let go of too early is taken again, and that is seen; held by a piece it is not."""
    for keep in (False, True):
        device.races.clear()
        with device:
            box = [torch.randn(5) * 2]
            held = list(box) if keep else []
            fork_of(device).beside(lambda: [torch.randn(5) + n for n in range(4)], lambda box=box: box.pop() * 2)
            held.clear()
        assert bool(device.races) == (not keep), device.races


def test_what_the_side_made_is_read_behind_the_join_and_then_taken_again(device: Device) -> None:
    fork, x = fork_of(device), torch.randn(5)
    with device:
        for _ in range(4):
            mine, aside = fork.beside(*pieces(x))
            x = mine + aside
            del mine, aside
    assert device.races == []


# --- blocks -----------------------------------------------------------------------------------------------------------

SHARED = moe(shared=GLU(DIM, 24))
MODELS = {
    **{name: model(mixers, (SHARED,), Plain(NORM)) for name, mixers in MIXERS.items()},
    **{name: model((attention(), latent(index=index())), (one,), Plain(NORM)) for name, one in CHANNELS.items()},
    **{name: model(MIXERS["latent"], (SHARED,), make()) for name, make in RESIDUALS.items()},
}


@torch.inference_mode()
def steps(spec: ModelSpec, beside: Any) -> list[Tensor]:
    """Logits of a chunk of three sequences and of two steps of a token each."""
    stack, cache, out = stack_of(spec), LocalCache(spec, torch.float32), []
    draw = torch.Generator().manual_seed(4)
    for lengths in ([9, 1, 14], *[[1, 1, 1]] * 2):
        tokens = [(row, torch.randint(spec.vocab, (length,), generator=draw)) for row, length in enumerate(lengths)]
        out.append(stack.head(stack.forward(replace(cache.views(tokens), beside=beside))))
    return out


@pytest.mark.parametrize("name", MODELS)
def test_two_streams_give_what_one_gives_and_race_for_nothing(device: Device, name: str) -> None:
    spec, fork = MODELS[name], fork_of(device)
    want = steps(spec, in_turn)
    with device:
        got = steps(spec, fork.beside)
    assert device.races == []
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert fork.uses == 3 * forks(spec) and (device.asked["side"] > 0) == (fork.uses > 0)


def test_a_missing_join_is_seen_in_a_model(device: Device) -> None:
    fork = fork_of(device)
    fork.join = lambda: None  # type: ignore[method-assign]
    with device:
        steps(MODELS["attention"], fork.beside)
    assert any("reads what" in line for line in device.races)


@torch.inference_mode()
def test_experts_that_are_fetched_are_asked_for_on_the_main_stream(device: Device) -> None:
    """Where a graph is cut for them, what runs beside has to have joined: they are the first of the two pieces."""
    spec, fork, asked = MODELS["moe_latent"], fork_of(device), []
    stack, cache = stack_of(spec), LocalCache(spec, torch.float32)

    def on_host(work: Callable[[], Any], like: Any) -> Any:
        fork.join()
        asked.append(device.current)
        return work()

    list(stack.load_all())
    blocks = [layer.channel for layer in stack._layers.values() if isinstance(layer.channel, MoEBlock)]
    for block in blocks:
        block.fetched = SimpleNamespace(expect=lambda experts: None)
    view = cache.views([(0, torch.arange(5))])
    with device:
        stack.forward(replace(view, beside=fork.beside, on_host=on_host))
    assert asked == [device.main] * len(blocks) != [] and device.races == []
