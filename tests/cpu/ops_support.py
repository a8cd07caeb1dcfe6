"""What the operator tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.ops.contract import relative_l2


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN: what an operator forgets to write shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)


def close(got: Tensor, want: Tensor, bound: float) -> None:
    """Relative L2 distance within ``bound``; infinities must stand in the same places."""
    infinite = ~torch.isfinite(want)
    assert got.shape == want.shape
    assert torch.equal(got[infinite].double(), want[infinite].double())
    error = relative_l2(got.masked_fill(infinite, 0), want.masked_fill(infinite, 0))
    assert error <= bound, f"relative L2 error {error:.3g}, allowed {bound:.3g}"


def tensors(result: Any) -> list[Tensor]:
    """The tensors of a result, nested tuples flattened."""
    if isinstance(result, Tensor):
        return [result]
    return [tensor for part in result for tensor in tensors(part)]


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
