"""Kernels in Triton's interpreter, on a CPU, in an environment of their own (see ``.ci/run``): smallest odd sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # before any test imports triton, which reads it once


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fresh memory holds NaN: what a kernel forgets to write shows."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
