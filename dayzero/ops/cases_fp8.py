"""Hostile inputs for products with weights in blocks of 8 bits: every code that is a number, scales far apart, short
last blocks, parts with any strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dayzero.decl import FP8_SIZE, Fp8Blocks
from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.units import ceil_div

BF16, F32 = torch.bfloat16, torch.float32
Make = Callable[[Inputs], dict[str, Any]]


def _case(name: str, make: Make) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def fp8_blocks(r: Inputs, rows: int, columns: int, *, loose: bool = False) -> Fp8Blocks:
    """A matrix whose codes are any but NaN, with scales over four powers of ten. loose: with gaps of NaN between rows
    and between scales."""
    codes = r.integers(0, 254, rows, columns)
    codes = (codes + (codes > 126)).to(torch.uint8)  # 127 is NaN, and 255
    scales = 10 ** (r.uniform(ceil_div(rows, FP8_SIZE), ceil_div(columns, FP8_SIZE)).float() * 4 - 4)
    if loose:
        wide = codes.new_full((rows, columns + 3), 127)
        wide[:, :columns] = codes
        codes, scales = wide[:, :columns], strided(scales)
    return Fp8Blocks(codes.view(torch.float8_e4m3fn), scales)


def _products() -> tuple[Case, ...]:
    def make(rows: int, outputs: int, width: int, dtype: torch.dtype, bias: bool, loose: bool) -> Make:
        return lambda r: {
            "x_TK": strided(r.normal(rows, width, dtype=dtype)) if loose else r.normal(rows, width, dtype=dtype),
            "w_NK": fp8_blocks(r, outputs, width, loose=loose),
            "bias_N": r.normal(outputs, dtype=dtype) if bias else None,
        }  # fmt: skip

    sizes = (
        (0, 33, 64, BF16, False, False), (1, 33, 272, BF16, True, False), (1, 300, 1040, BF16, False, True),
        (7, 130, 144, BF16, False, False), (9, 257, 656, BF16, True, True), (3, 31, 65, BF16, False, True),
        (33, 200, 400, BF16, True, False), (65, 129, 65, BF16, False, True), (300, 72, 384, BF16, True, False),
        (7, 130, 144, F32, True, True),
    )  # fmt: skip
    return tuple(_case(f"fp8 {n} rows {o} x {k} {d} bias {b}", make(n, o, k, d, b, s)) for n, o, k, d, b, s in sizes)


def _glu() -> tuple[Case, ...]:
    """Of values that gates of some sigma come out of."""

    def make(rows: int, width: int, inner: int, act: dict[str, Any]) -> Make:
        def inputs(r: Inputs) -> dict[str, Any]:
            weight = fp8_blocks(r, 2 * inner, width)
            scales = 0.02 * width**-0.5 * (0.5 + r.uniform(*weight.scales.shape).float())
            x = r.normal(rows, width, dtype=BF16)
            return {"x_TK": x, "w_NK": Fp8Blocks(weight.codes, scales), "activation": act}

        return inputs

    sizes = (
        (1, 64, 128, {"kind": "silu"}), (7, 272, 384, {"kind": "clamped", "limit": 7.0, "alpha": 1.702}),
        (16, 144, 256, {"kind": "silu"}), (33, 130, 128, {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}),
    )  # fmt: skip
    return tuple(_case(f"fp8 {n} rows {a['kind']} {2 * i} x {k}", make(n, k, i, a)) for n, k, i, a in sizes)


def _add() -> tuple[Case, ...]:
    def make(rows: int, outputs: int, width: int) -> Make:
        return lambda r: {
            "x_TK": strided(r.normal(rows, width, dtype=BF16)), "w_NK": fp8_blocks(r, outputs, width),
            "added_TN": r.normal(rows, outputs, dtype=BF16) * 9,
        }  # fmt: skip

    sizes = ((1, 33, 272), (7, 130, 65), (13, 257, 528), (63, 72, 144))
    return tuple(_case(f"fp8 {n} rows {o} x {k}", make(n, o, k)) for n, o, k in sizes)


LINEAR_FP8_CASES: dict[str, tuple[Case, ...]] = {
    "linear.matmul": _products(),
    "linear.matmul_f32": _products(),
    "linear.matmul_glu": _glu(),
    "linear.matmul_add": _add(),
}
