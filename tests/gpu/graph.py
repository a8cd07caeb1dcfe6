"""Calls as a CUDA graph has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def replayed(call: Callable[[], Tensor]) -> Tensor:
    """What a replay of the captured call gives; it is run once before."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()
    out.fill_(0)
    graph.replay()
    return out
