"""Seeded inputs for the cases: always made on the CPU, so that a case is the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor


class Inputs:
    """A stream of seeded tensors."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)

    def uniform(self, *shape: int) -> Tensor:
        """In [0, 1), f32."""
        return torch.rand(shape, generator=self._generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """In [low, high), int64."""
        return torch.randint(low, high, shape, generator=self._generator)

    def permutation(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)


def strided(x: Tensor) -> Tensor:
    """The same values with gaps of NaN between them, so that code which assumes packed rows reads a NaN."""
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), float("nan"))
    wide[..., ::2] = x
    return wide[..., ::2]
