"""Drawing a token of each row of logits, one block a row. S rows, V vocabulary."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.cuda.build import check_machine, load
from dayzero.ops.line import MOST_DRAWN

__all__ = ["check_machine", "draw"]

THREADS = 1024


def draw(
    logits_SV: Tensor,
    temperature_S: Tensor,
    top_k_S: Tensor,
    top_p_S: Tensor,
    min_p_S: Tensor,
    seed_S: Tensor,
    index_S: Tensor,
) -> Tensor:
    """``sample.draw`` in one launch. Weights are f64 rounded to 2^-44 of the likeliest one: a token differs from the
    reference's only where ``chance``, or a cut, falls within V * 2^-45 of an edge. V <= 2^18; f32 logits."""
    rows, vocab = logits_SV.shape
    if logits_SV.dtype != torch.float32 or vocab > MOST_DRAWN:
        raise ValueError(f"this variant takes f32 logits of at most {MOST_DRAWN} tokens; bind another one")
    out = torch.empty(rows, dtype=torch.int64, device=logits_SV.device)
    if rows == 0:
        return out
    logits = logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
    options = [x.contiguous() for x in (temperature_S, top_k_S, top_p_S, min_p_S, seed_S, index_S)]
    stride: Any = ctypes.c_int64(logits.stride(0))
    load("sample.cu", "draw", defines={})((rows,), THREADS, (logits, stride, vocab, *options, out))
    return out
