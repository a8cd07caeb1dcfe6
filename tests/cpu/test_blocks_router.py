"""How experts are chosen: by one operator where one is bound that multiplies and chooses, else by the two in turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.arch.residuals import Plain
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import MoEBlock
from dayzero.blocks.site import Params, Site, reference
from dayzero.engine.expert_choice import Choices
from tests.cpu.random_models import CHANNELS, DIM, NORM, attention, model, random_params

FUSED, IN_TURN = "moe.matmul_route", ["linear.matmul_f32", "moe.route"]
WITH_EXPERTS = [name for name in CHANNELS if name.startswith("moe")]


@pytest.mark.parametrize("channel", WITH_EXPERTS)
def test_one_call_chooses_as_the_two_in_turn(channel: str) -> None:
    whole = model((attention(),), (CHANNELS[channel],), Plain(NORM))
    x_TD = torch.randn(9, DIM, generator=torch.Generator().manual_seed(0))
    given: list[tuple[Tensor, Tensor]] = []
    for fused in (True, False):
        called: list[str] = []
        choices = Choices(whole)
        choices.listening = True

        def bound(contract: str, site: str, fused: bool = fused, called: list[str] = called) -> Callable[..., Any]:
            body = reference(contract, site)

            def call(*args: Any, **options: Any) -> Any:
                called.append(contract)
                return body(*args, **options)

            return body if contract == FUSED and not fused else call

        shown: list[Tensor] = []
        site = Site("layers.0.channel", choices.bind(bound), lambda name, value, shown=shown: shown.append(value))
        block = MoEBlock(whole.layers[0].channel, Params(random_params(whole), "layers.0.channel."), site)
        out_TD = block.forward(x_TD, LocalCache(whole, torch.float32).view([1] * 9))
        given.append((out_TD, shown[0]))
        chosen = [name for name in called if name in (FUSED, *IN_TURN)]
        assert chosen == ([FUSED] if fused else IN_TURN)
        heard = choices.take()
        assert heard is not None and heard.tokens == 9, "who listens to choices hears them either way"
    assert all(torch.equal(one, other) for one, other in zip(*given, strict=True))
