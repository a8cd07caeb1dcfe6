"""Hostile inputs for routed experts: stacks that are plain, in 4 bits and in blocks of 8; tokens without an expert, and
experts that nobody chose. Part of ``ops/cases``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dayzero.decl import FP8_SIZE, Fp8Blocks, Mxfp4
from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.units import ceil_div

BF16, F32 = torch.bfloat16, torch.float32
Make = Callable[[Inputs], dict[str, Any]]
SIZES = ((0, F32, False), (1, F32, True), (1, BF16, False), (7, BF16, True), (63, F32, False), (65, BF16, False))


def _case(name: str, make: Make) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def _plain(tokens: int, dtype: torch.dtype, biases: bool, width: int = 33, inner: int = 17) -> Make:
    def inputs(r: Inputs) -> dict[str, Any]:
        num = 6
        ids = torch.stack([r.permutation(num)[:3] for _ in range(tokens)]) if tokens else r.integers(0, 1, 0, 3)
        if tokens > 1:
            ids[0] = -1  # a token that has no expert on this rank
            ids[ids == 4] = -1  # an expert that nobody hits
        elif dtype == BF16:
            ids[:, 1] = -1
        many = tuple(r.normal(num, n, dtype=dtype) for n in (inner, inner, width)) if biases else None
        kind = {"kind": "clamped", "limit": 7.0, "alpha": 1.702} if biases else {"kind": "silu"}
        return {
            "x_TD": strided(r.normal(tokens, width, dtype=dtype)), "ids_TN": ids,
            "weights_TN": r.uniform(tokens, 3),
            "gate_EID": r.normal(num, inner, width, dtype=dtype) / 4,
            "up_EID": r.normal(num, inner, width, dtype=dtype) / 4,
            "down_EDI": r.normal(num, width, inner, dtype=dtype) / 4, "activation": kind, "biases": many,
        }  # fmt: skip

    return inputs


def _in_4_bits(r: Inputs, rows: int, columns: int) -> Mxfp4:
    """As a checkpoint stores them, some groups further apart than e4m3 reaches, some all zero."""
    codes = r.integers(0, 256, 5, rows, columns // 2).to(torch.uint8)
    scales = r.integers(119, 124, 5, rows, columns // 32).to(torch.uint8)
    scales[3, 1, 0] = 104  # too small for e4m3 beside its neighbours
    codes[2, 0, :16] = 0
    scales[2, 0, 0] = 200
    return Mxfp4(codes, scales)


def _in_8_bits(r: Inputs, rows: int, columns: int) -> Fp8Blocks:
    """As a checkpoint stores them, in part of a larger room: every code there is but NaN, around which lie NaN; blocks
    up to 2^9 apart, one of zeros below the largest scale, one with a scale of zero."""
    codes = r.integers(0, 255, 5, rows, columns + 3).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x80
    codes[..., columns:] = 0x7F
    codes[2, :FP8_SIZE, :FP8_SIZE] &= 0x80
    blocks = ceil_div(rows, FP8_SIZE), ceil_div(columns, FP8_SIZE)
    scales = torch.exp2(r.integers(-6, 4, 5, *blocks).float()) * (1 + r.uniform(5, *blocks)) / 2048
    scales[2, 0, 0] = 1e30
    scales[3, -1, 0] = 0
    room = r.normal(5, *blocks, 2)
    room[..., 1] = scales
    return Fp8Blocks(codes.view(torch.float8_e4m3fn)[..., :columns], room[..., 1])


def _packed(stack: Callable[[Inputs, int, int], Any], width: int, inner: int) -> Callable[..., Make]:
    """stack: makes five matrices of so many rows and columns."""

    def make(tokens: int, dtype: torch.dtype, biases: bool) -> Make:
        def inputs(r: Inputs) -> dict[str, Any]:
            ids = torch.stack([r.permutation(5)[:3] for _ in range(tokens)]) if tokens else r.integers(0, 1, 0, 3)
            if tokens > 1:
                ids[0] = -1
                ids[ids == 4] = -1
            many = tuple(r.normal(5, n, dtype=dtype) for n in (inner, inner, width)) if biases else None
            kind: dict[str, Any] = {"kind": "silu"}
            if biases or tokens == 1:
                limits, betas = {"limit": 7.0, "alpha": 1.702}, {"beta": 4.0, "linear_beta": 25.0}
                kind = {"kind": "clamped", **limits} if biases else {"kind": "situ", **betas}
            return {
                "x_TD": strided(r.normal(tokens, width, dtype=dtype)), "ids_TN": ids,
                "weights_TN": r.uniform(tokens, 3), "gate_EID": stack(r, inner, width),
                "up_EID": stack(r, inner, width), "down_EDI": stack(r, width, inner), "activation": kind,
                "biases": many,
            }  # fmt: skip

        return inputs

    return make


def _named(words: str, make: Callable[..., Make]) -> tuple[Case, ...]:
    return tuple(_case(f"{words}{n} tokens {d} biases {b}", make(n, d, b)) for n, d, b in SIZES)


# More than a block of 128 columns, and not a whole number of them.
_WIDE = _case("wide", _plain(7, BF16, True, 320, 192))
_FOUR = _named("4 bits, ", _packed(_in_4_bits, 160, 96))
_EIGHT = _named("8 bits, ", _packed(_in_8_bits, 200, 140))
_EIGHT_MORE = _case("8 bits, more blocks", _packed(_in_8_bits, 330, 260)(7, BF16, True))

EXPERT_CASES: dict[str, tuple[Case, ...]] = {
    "moe.experts": (*_named("", _plain), _WIDE, *_EIGHT, _EIGHT_MORE, *_FOUR),
    "moe.experts_fp8_128": (*_EIGHT, _EIGHT_MORE, *_FOUR),
}
