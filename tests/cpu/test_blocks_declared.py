"""The operators a spec declares are the ones its blocks bind: no more, no fewer, at the same sites.

A plan binds variants by what is declared; an operator that runs undeclared could not be bound, and a declared one that
never runs would take a binding without effect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from random_models import CHANNELS, MIXERS, RESIDUALS, loader, model, random_params

from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.site import reference
from dayzero.blocks.stack import Stack

CASES = [
    *((mixer, "glu", "plain") for mixer in MIXERS),
    *(("attention", channel, "plain") for channel in CHANNELS),
    *(("attention", "glu", residual) for residual in RESIDUALS),
]


@pytest.mark.parametrize(("mixer", "channel", "residual"), CASES)
def test_declared_operators_are_bound_operators(mixer: str, channel: str, residual: str) -> None:
    spec = model(MIXERS[mixer], (CHANNELS[channel],), RESIDUALS[residual]())
    bound: set[tuple[str, str]] = set()

    def recording(contract: str, site: str) -> Callable[..., Any]:
        bound.add((contract, site))
        return reference(contract, site)

    stack = Stack(spec, loader(random_params(spec)), bind=recording)
    stack.head(stack.forward(LocalCache(spec, torch.float32).view([1, 2, 3])))
    assert bound == {(use.contract, use.site) for use in spec.contracts()}
