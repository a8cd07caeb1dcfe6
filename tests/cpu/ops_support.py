"""What the operator tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.parity import close, tensors

__all__ = ["close", "poisoned_memory", "randomise", "tensors", "unwrapped"]


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN: what an operator forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def unwrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """The plain-torch body of a transformers function that may be replaced by a kernel package."""
    return getattr(function, "__wrapped__", function)


def randomise(module: torch.nn.Module, seed: int, scale: float = 0.2) -> torch.nn.Module:
    """Seeded values in every parameter and buffer, so that no constant initial value hides a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale)
    return module.eval().requires_grad_(False)
