"""Hostile inputs for the contracts of vision towers: one patch, odd grids, one row, grids beyond the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided

BF16, F32 = torch.bfloat16, torch.float32
HALF = (0.5, 0.5, 0.5)


def _case(name: str, make: Callable[[Inputs], dict[str, Any]]) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def _patches(rows: int, columns: int, dtype: torch.dtype, frames: int = 0, bias: bool = False) -> Case:
    def make(r: Inputs) -> dict[str, Any]:
        time = (frames,) if frames else ()
        out: dict[str, Any] = {
            "pixels_YXC": r.integers(0, 256, rows * 3, columns * 3, 3).to(torch.uint8),
            "weight": r.normal(7, 3, *time, 3, 3, dtype=dtype), "mean": HALF, "std": (0.5, 0.25, 1.0),
        }  # fmt: skip
        return out | ({"bias_D": r.normal(7, dtype=dtype)} if bias else {})

    return _case(f"{rows} x {columns}, {frames} frames, {dtype}", make)


def _grid(count: int, columns: int, style: str, first: str, dtype: torch.dtype) -> Case:
    return _case(
        f"{count} in {columns} columns, {style}, {first}, {dtype}",
        lambda r: {
            "x_NHK": strided(r.normal(count, 3, 12, dtype=dtype)), "inv_freq_F": 10000.0 ** -(torch.arange(3.0) / 3),
            "columns": columns, "style": style, "first": first,
        },
    )  # fmt: skip


def _full(queries: int, keys: int, dtype: torch.dtype, loud: bool = False) -> Case:
    def make(r: Inputs) -> dict[str, Any]:
        q, k, v = (strided(r.normal(n, 3, 5, dtype=dtype)) for n in (queries, keys, keys))
        return {"q_NHK": q * 40 if loud else q, "k_MHK": k, "v_MHK": v, "scale": 5**-0.5}

    return _case(f"{queries} over {keys}, {dtype}{', sharp' if loud else ''}", make)


def _stretched(rows: int, columns: int, corners: bool, dtype: torch.dtype = F32) -> Case:
    return _case(
        f"5 x 7 to {rows} x {columns}, corners {corners}, {dtype}",
        lambda r: {"table_ABD": r.normal(5, 7, 6, dtype=dtype), "rows": rows, "columns": columns, "corners": corners},
    )


VISION_CASES: dict[str, tuple[Case, ...]] = {
    "vision.patches": (
        _patches(1, 1, F32), _patches(3, 5, BF16), _patches(2, 7, F32, 2, True), _patches(5, 1, BF16, 1, True),
    ),
    "vision.positions": (
        _stretched(5, 7, False), _stretched(1, 1, True), _stretched(9, 4, False), _stretched(3, 16, True),
        _stretched(1, 63, False, BF16), _stretched(65, 2, True, BF16),
    ),
    "rope.grid": (
        _grid(1, 1, "half", "row", F32), _grid(35, 7, "interleaved", "column", F32),
        _grid(63, 63, "half", "column", BF16), _grid(64, 1, "interleaved", "row", BF16),
    ),
    "activation.gelu": (
        _case("far out", lambda r: {"x": strided(r.normal(7, 33) * 9), "form": "erf"}),
        _case("bf16", lambda r: {"x": r.normal(65, 3, dtype=BF16), "form": "tanh"}),
    ),
    "attention.full": (_full(1, 1, F32), _full(7, 63, F32, True), _full(65, 65, BF16), _full(0, 7, F32)),
}  # fmt: skip
