"""Choosing a token. T rows of logits, V vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.bounds import EXACT
from dayzero.ops.contract import contract


@contract("sample.greedy", bound=EXACT)
def greedy(logits_TV: Tensor) -> Tensor:
    """Id of the largest logit of each row [T] int64; the lowest id on ties. A NaN in a row gives V, no token."""
    best_T1 = logits_TV.amax(-1, keepdim=True)
    ids_V = torch.arange(logits_TV.shape[-1], device=logits_TV.device)
    return torch.where(logits_TV == best_T1, ids_V, logits_TV.shape[-1]).amin(-1)
