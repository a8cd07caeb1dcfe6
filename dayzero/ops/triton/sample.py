"""Choosing a token: the largest logit of a row, found in parts and then among the parts.

T rows of logits, V vocabulary, C parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.rows import FOLLOWS, follow

__all__ = ["check_machine", "greedy"]

BLOCK = 4096
MOST_PARTS = 64


@triton.jit
def _parts_kernel(logits, best, first, logits_t, logits_v, vocab, part, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Of columns [part * c, part * (c + 1)) of a row: the largest and its first id; NaN and V where one is a NaN."""
    follow()
    row, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    at = tl.full((BLOCK,), 0, tl.int32) + vocab
    bad = tl.zeros((BLOCK,), tl.int32)
    for step in range(STEPS):
        col = number * part + step * BLOCK + tl.arange(0, BLOCK)
        inside = (col < (number + 1) * part) & (col < vocab)
        value = tl.load(logits + row * logits_t + col.to(tl.int64) * logits_v, mask=inside, other=float("-inf"))
        value = value.to(tl.float32)
        bad |= (value != value).to(tl.int32)
        # A lane meets its columns in order: only a larger one, or the first of all, replaces what it has.
        better = inside & ((value > top) | (at == vocab))
        top, at = tl.where(better, value, top), tl.where(better, col, at)
    most = tl.max(top, axis=0)
    lowest = tl.min(tl.where(top == most, at, vocab), axis=0)
    spoiled = tl.max(bad, axis=0) > 0
    place = row * tl.num_programs(1) + number
    tl.store(best + place, tl.where(spoiled, float("nan"), most))
    tl.store(first + place, tl.where(spoiled, vocab, lowest))


@triton.jit
def _among_kernel(best, first, out, parts, vocab, PARTS: tl.constexpr):
    follow()
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, PARTS)
    value = tl.load(best + row * parts + number, mask=number < parts, other=float("-inf"))
    place = tl.load(first + row * parts + number, mask=number < parts, other=vocab)
    spoiled = tl.max((value != value).to(tl.int32), axis=0) > 0
    most = tl.max(tl.where(value != value, float("-inf"), value), axis=0)
    lowest = tl.min(tl.where(value == most, place, vocab), axis=0)
    tl.store(out + row, tl.where(spoiled, vocab, lowest).to(tl.int64))


def greedy(logits_TV: Tensor) -> Tensor:
    """``sample.greedy``: two launches, nothing is read back. V < 2^31."""
    rows, vocab = logits_TV.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits_TV.device)
    if rows == 0:
        return out
    block = min(BLOCK, triton.next_power_of_2(vocab))
    steps = triton.cdiv(triton.cdiv(vocab, block), MOST_PARTS)
    parts = triton.cdiv(vocab, steps * block)
    best = torch.empty(rows, parts, dtype=torch.float32, device=logits_TV.device)
    first = torch.empty(rows, parts, dtype=torch.int32, device=logits_TV.device)
    _parts_kernel[(rows, parts)](
        logits_TV,
        best,
        first,
        *logits_TV.stride(),
        vocab,
        steps * block,
        BLOCK=block,
        STEPS=steps,
        num_warps=8,
        **FOLLOWS,
    )
    _among_kernel[(rows,)](best, first, out, parts, vocab, PARTS=triton.next_power_of_2(parts), num_warps=1, **FOLLOWS)
    return out
