"""Fresh memory holds NaN: what a kernel forgets to write shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(False)
