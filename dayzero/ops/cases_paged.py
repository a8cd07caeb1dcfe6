"""Hostile inputs for paged attention: pages out of order in a pool full of NaN, ragged rows, windows. Part of
``ops/cases``."""

from __future__ import annotations

from typing import Any

import torch

from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.view import Paged, Span

BF16, F32 = torch.bfloat16, torch.float32


def paged_inputs(
    r: Inputs,
    rows: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    widths: tuple[int, int],
    dtype: torch.dtype,
    *,
    page: int = 16,
    window: int | None = None,
) -> dict[str, Any]:
    """Inputs of ``attention.paged``. rows: (start, count) of each row. widths: of keys and of values.

    With a window, pages that lie wholly behind it are not in the table.
    """
    spans, firsts, pages, packed = [], [], [], 0
    for number, (start, count) in enumerate(rows):
        first = 0 if window is None else max(0, start - window + 1) // page * page
        spans.append(Span(number, packed, count, start))
        firsts.append(first)
        pages.append(-(-(start + count - first) // page))
        packed += count
    order = r.permutation(sum(pages) + 3) + 1
    table = torch.zeros(len(rows), max(pages, default=0) + 1, dtype=torch.int32)  # block 0 is nobody's
    taken = 0
    for number, num in enumerate(pages):
        table[number, :num] = order[taken : taken + num].int()
        taken += num
    shared = (
        table, torch.tensor(firsts, dtype=torch.int32),
        torch.tensor([*(s.first for s in spans), packed], dtype=torch.int32),
        torch.tensor([s.start for s in spans], dtype=torch.int32), tuple(spans),
    )  # fmt: skip
    out = {"q_THD": strided(r.normal(packed, heads[0], widths[0], dtype=dtype)), "scale": widths[0] ** -0.5}
    for name, width in zip(("keys", "values"), widths, strict=True):
        out[name] = Paged(_pool(r, spans, table, firsts, (page, heads[1], width), dtype), *shared)
    return out if window is None else out | {"window": window}


def _pool(
    r: Inputs, spans: list[Span], table: torch.Tensor, firsts: list[int], block: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """[N, *block], NaN where no row has a token, with gaps of NaN between blocks."""
    num_blocks = int(table.max()) + 4 if table.numel() else 4
    pool = torch.full((num_blocks, 2, *block), torch.nan, dtype=dtype)[:, 0]
    for span, first in zip(spans, firsts, strict=True):
        for position in range(first, span.start + span.count):
            at = int(table[span.row, (position - first) // block[0]]), position % block[0]
            pool[at] = r.normal(*block[1:], dtype=dtype)
    return pool


_RAGGED = ((40, 1), (0, 1), (63, 1), (64, 1), (0, 37), (30, 17))


def _case(name: str, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, **more: Any) -> Case:
    rows = more.pop("rows", _RAGGED)
    extra = {key: more.pop(key) for key in ("softcap",) if key in more}
    sinks = more.pop("sinks", False)

    def make(seed: int) -> dict[str, Any]:
        r = Inputs(seed)
        made = paged_inputs(r, rows, heads, widths, dtype, **more) | extra
        return made | ({"sinks_H": r.normal(heads[0]) * 3} if sinks else {})

    return Case(name, make)


PAGED_CASES: dict[str, tuple[Case, ...]] = {
    "attention.paged": (
        _case("one row, one token", (1, 1), (8, 8), F32, rows=((0, 1),)),
        _case("single tokens, grouped bf16", (8, 2), (64, 64), BF16, rows=((5, 1), (130, 1), (0, 1)), page=64),
        _case("ragged f32", (4, 2), (16, 16), F32),
        _case("ragged bf16", (6, 2), (32, 32), BF16),
        _case("ragged bf16, odd width", (3, 3), (80, 80), BF16, page=64),
        _case("wider keys than values", (4, 1), (24, 16), BF16),
        _case("window", (4, 2), (16, 16), BF16, window=7),
        _case("window of one", (2, 1), (16, 16), F32, window=1),
        _case("window beyond the pages", (4, 2), (16, 16), F32, window=33, page=8),
        _case("sinks", (4, 2), (16, 16), BF16, sinks=True),
        _case("window and sinks", (4, 2), (64, 64), BF16, sinks=True, window=20),
        _case("softcap", (4, 2), (16, 16), F32, softcap=2.0),
        _case("no rows", (2, 1), (8, 8), F32, rows=()),
    ),
}
