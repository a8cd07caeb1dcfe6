"""Hostile inputs for the delta rule over states in a pool: blocks out of order among NaN, ragged rows, padding rows,
blocks that overlap. Part of ``ops/cases``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dayzero.ops.contract import Case
from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.view import Span

BF16, F32 = torch.bfloat16, torch.float32
Rows = tuple[tuple[int, int], ...]  # (start, count) of each row


def delta_inputs(
    r: Inputs,
    rows: Rows,
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    *,
    taps: int = 4,
    decay: str = "channel",
    padding: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Inputs of ``recurrence.paged``. heads: of values and of keys; widths: of keys and of values; padding: rows whose
    block number is negative. Exponents are those of trained models: rates e^A in [1, 16], softplus or sigmoid in
    mid range."""
    spans, packed = [], 0
    for number, (start, count) in enumerate(rows):
        spans.append(Span(number, packed, count, start))
        packed += count
    channels = {"q": heads[1] * widths[0], "k": heads[1] * widths[0], "v": heads[0] * widths[1]}
    raw = {f"{part}_TC": strided(r.normal(packed, size, dtype=dtype)) for part, size in channels.items()}
    bias_shape = (heads[0], widths[0]) if decay == "channel" else (heads[0],)
    weights = {f"{part}_taps_CW": r.normal(size, taps) / 2 for part, size in channels.items()}
    order = r.permutation(len(rows) + 3)[: len(rows)].int()
    for row in padding:
        order[row] = -1
    windows = [
        _pool(r, rows, order, (size, taps - 1), dtype, 1 + number) for number, size in enumerate(channels.values())
    ]
    table = torch.full((len(rows), 3), -77, dtype=torch.int32)  # of three layers: a column of it is strided
    table[:, 1] = order
    return {
        "raw": Raw(
            **raw, z=r.normal(packed, *bias_shape, dtype=dtype),
            beta_TH=strided(r.normal(packed, heads[0], dtype=dtype) * 2),
            gate_TC=r.normal(packed, channels["v"], dtype=dtype) * 3,
        ),
        "weights": Weights(
            **weights, a_log_H=torch.log(1 + 15 * r.uniform(heads[0])), dt_bias=r.normal(*bias_shape) - 3,
            norm_V=1 + r.normal(widths[1]) / 8,
        ),
        "kept": Kept(
            _pool(r, rows, order, (heads[0], *widths), F32, 0), windows[0], windows[1], windows[2], table[:, 1],
            query_start=torch.tensor([*(s.first for s in spans), packed], dtype=torch.int32),
            start=torch.tensor([s.start for s in spans], dtype=torch.int32), spans=tuple(spans),
        ),
        "eps": 1e-5, "act": "sigmoid" if decay == "channel" else "silu",
    }  # fmt: skip


def _pool(r: Inputs, rows: Rows, order: Tensor, shape: tuple[int, ...], dtype: torch.dtype, shift: int) -> Tensor:
    """[N, *shape] with gaps between blocks; NaN where no row has a state, and where a row begins."""
    size, num = torch.Size(shape).numel(), int(order.max()) + 3 if order.numel() else 3
    apart = -(-(size + 64 * shift) // 128) * 128
    pool = torch.full((num * apart + size,), torch.nan, dtype=dtype).as_strided(
        (num, *shape), (apart, *torch.empty(shape, device="meta").stride())
    )
    for block, (start, _) in zip(order.tolist(), rows, strict=True):
        if block >= 0 and start > 0:
            pool[block] = r.normal(*shape, dtype=dtype)
    return pool


def _case(name: str, *sizes: Any, lower: float | None = None, **more: Any) -> Case:
    extra: dict[str, Any] = {} if lower is None else {"lower": lower}
    return Case(name, lambda seed: delta_inputs(Inputs(seed), *sizes, **more) | extra)


SINGLE: Rows = ((5, 1), (0, 1), (1, 1), (2, 1), (901, 1))
RAGGED: Rows = ((5, 1), (0, 1), (0, 7), (64, 65), (3, 2), (0, 63))

DELTA_CASES: dict[str, tuple[Case, ...]] = {
    "recurrence.paged": (
        _case("single tokens, bounded, bf16", SINGLE, (3, 3), (16, 16), BF16, lower=-5.0),
        _case("single tokens, softplus, per head, grouped, bf16", SINGLE, (4, 2), (16, 16), BF16, decay="head"),
        _case("single tokens, f32, odd widths", SINGLE, (3, 3), (12, 20), F32),
        _case("one token, grouped in fours, f32", ((7, 1),), (8, 2), (8, 12), F32, decay="head", lower=-5.0),
        _case("two taps", SINGLE, (2, 1), (16, 16), F32, taps=2),
        _case("rows that pad the step", SINGLE, (2, 2), (16, 16), F32, lower=-5.0, padding=(1, 4)),
        _case("ragged, bounded, bf16", RAGGED, (2, 2), (16, 16), BF16, lower=-5.0),
        _case("ragged, per head, grouped, f32", RAGGED, (4, 2), (16, 8), F32, decay="head"),
        _case("one long row, f32", ((0, 65),), (2, 2), (16, 16), F32, lower=-5.0),
        _case("wide, single tokens, bf16", ((5, 1), (0, 1), (70, 1)), (3, 3), (128, 128), BF16, lower=-5.0),
        _case("wide, single tokens, per head, grouped", ((5, 1), (0, 1)), (4, 2), (128, 128), BF16, decay="head"),
        _case("wide, ragged, bf16", ((5, 1), (0, 1), (0, 70), (9, 3)), (2, 2), (128, 128), BF16, lower=-5.0),
        _case("wide, ragged, per head, grouped", ((9, 1), (64, 66)), (4, 2), (128, 128), BF16, decay="head"),
        _case("no rows", (), (2, 2), (16, 16), F32),
    ),
}
