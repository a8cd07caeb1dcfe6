"""Hostile inputs for how outputs join the stream: empty and full banks, banks in a larger room, gaps of NaN. Part of
``ops/cases``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided

BF16, F32 = torch.bfloat16, torch.float32
Make = Callable[[Inputs], dict[str, Any]]
WIDTH = 33


def _case(name: str, make: Make) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def _add(rows: int, dtype: torch.dtype) -> Make:
    return lambda r: {
        "stream_TH": r.normal(rows, WIDTH, dtype=dtype) * 50, "out_TH": strided(r.normal(rows, WIDTH, dtype=dtype)),
    }  # fmt: skip


def _add_norm(rows: int, dtype: torch.dtype, **options: Any) -> Make:
    weight = {"eps": 1e-5} | options
    return lambda r: _add(rows, dtype)(r) | {"weight_H": 1 + r.normal(WIDTH, dtype=dtype) / 8} | weight


def _mix(bank: int, dtype: torch.dtype) -> Make:
    return lambda r: {
        "partial_TH": r.normal(7, WIDTH, dtype=dtype), "bank_BTH": r.normal(bank, 7, WIDTH, dtype=dtype) * 9,
        "norm_weight_H": 1 + r.normal(WIDTH, dtype=dtype) / 8, "proj_weight_H": r.normal(1, WIDTH, dtype=dtype),
        "eps": 1e-5,
    }  # fmt: skip


def _mix_norm(bank: int, dtype: torch.dtype, **options: Any) -> Make:
    return lambda r: _mix(bank, dtype)(r) | {"weight_H": 1 + r.normal(WIDTH, dtype=dtype) / 8} | options


def _in_a_room(r: Inputs) -> dict[str, Any]:
    """A bank as a carry holds it: the first rows of a larger room, whose others hold NaN."""
    room = torch.full((8, 65, WIDTH), float("nan"), dtype=BF16)
    room[:5] = r.normal(5, 65, WIDTH, dtype=BF16) * 9
    return _mix(0, BF16)(r) | {"partial_TH": r.normal(65, WIDTH, dtype=BF16), "bank_BTH": room[:5]}


def _tokens_first(r: Inputs) -> dict[str, Any]:
    return _mix(0, F32)(r) | {"bank_BTH": (r.normal(7, 6, WIDTH) * 9).transpose(0, 1)}


def _loose(r: Inputs) -> dict[str, Any]:
    return {k: strided(v) if isinstance(v, torch.Tensor) else v for k, v in _mix(3, F32)(r).items()}


def _enter(r: Inputs) -> dict[str, Any]:
    return {"streams_TNH": r.normal(7, 4, 9) * 3, "fn": r.normal(24, 36), "base": r.normal(24), "norm_eps": 1e-6,
            "scale_3": r.normal(3), "mix_eps": 1e-6, "iterations": 20}  # fmt: skip


def _leave(r: Inputs) -> dict[str, Any]:
    return {"streams_TNH": r.normal(7, 4, 9, dtype=BF16), "out_TH": r.normal(7, 9, dtype=BF16),
            "post_TN": r.uniform(7, 4), "comb_TNN": r.uniform(7, 4, 4)}  # fmt: skip


def _close(r: Inputs) -> dict[str, Any]:
    return {"streams_TNH": r.normal(7, 4, 9), "head": (r.normal(4, 36), r.normal(4), r.normal(1)),
            "norm_eps": 1e-6, "mix_eps": 1e-6}  # fmt: skip


RESIDUAL_CASES: dict[str, tuple[Case, ...]] = {
    "residual.add": tuple(_case(f"{n} rows {d}", _add(n, d)) for n, d in ((0, F32), (7, BF16), (65, F32))),
    "residual.add_norm": (
        _case("no rows", _add_norm(0, F32)), _case("one row", _add_norm(1, F32, offset=True)),
        _case("bf16", _add_norm(63, BF16, scale_in="dtype")), _case("bf16, f32 scale", _add_norm(65, BF16)),
    ),
    "residual.attn_mix": (
        *(_case(f"bank of {n} {d}", _mix(n, d)) for n, d in ((0, F32), (1, BF16), (4, BF16), (7, BF16), (8, F32))),
        _case("in a larger room", _in_a_room), _case("tokens first", _tokens_first), _case("gaps everywhere", _loose),
    ),
    "residual.attn_mix_norm": (
        _case("no bank", _mix_norm(0, F32, scale_in="dtype")), _case("bank of 5", _mix_norm(5, F32, offset=True)),
        _case("bank of 8", _mix_norm(8, BF16, scale_in="dtype")),
        _case("in a larger room", lambda r: _in_a_room(r) | {"weight_H": r.normal(WIDTH, dtype=BF16)}),
    ),
    "residual.streams_enter": (_case("four streams", _enter),),
    "residual.streams_leave": (_case("four streams", _leave),),
    "residual.streams_close": (_case("head", _close), _case("mean", lambda r: {"streams_TNH": r.normal(7, 4, 9)})),
}  # fmt: skip
