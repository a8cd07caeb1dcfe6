"""Hostile inputs for paged attention: pages out of order in a pool full of NaN, ragged rows, windows. Part of
``ops/cases``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dayzero.decl import packed_row
from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.ops.records import packed
from dayzero.view import Paged, Span

BF16, F32 = torch.bfloat16, torch.float32
Rows = tuple[tuple[int, int], ...]  # (start, count) of each
Widths = tuple[int, int, int, int]  # key width from the latent, shared key width, latent width, value width


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
_CHUNKS = ((0, 130), (63, 1), (127, 129), (300, 5))
_EDGES = ((126, 1), (127, 1), (128, 1), (191, 1), (255, 1), (120, 20))  # a window of 128 just below, at, just above


def _case(name: str, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, **more: Any) -> Case:
    rows = more.pop("rows", _RAGGED)
    extra = {key: more.pop(key) for key in ("softcap",) if key in more}
    sinks = more.pop("sinks", False)
    latent, record = more.pop("latent", False), more.pop("record", "")

    def make(seed: int) -> dict[str, Any]:
        r = Inputs(seed)
        made = paged_inputs(r, rows, heads, widths, dtype, **more) | extra
        if latent:  # the values are the beginning of the keys
            made |= {"values": None, "value_dim": widths[1]}
        if record:
            row = packed_row(record, widths[:1], (widths[1], widths[0] - widths[1]))
            assert row is not None
            keys = made["keys"]
            made["keys"] = packed(replace(keys, rows=keys.rows[:, :, 0]), row).headed()
        return made | ({"sinks_H": r.normal(heads[0]) * 3} if sinks else {})

    return Case(name, make)


def _latent(name: str, heads: int, widths: Widths, dtype: torch.dtype, rows: Rows, page: int = 16, **more: Any) -> Case:
    """Of ``latent.attend``. Short sequences, so that a chunk of ``LEAST_QUERIES`` is computed in the expanded form."""

    def make(seed: int) -> dict[str, Any]:
        r, (nope, shared, rank, value) = Inputs(seed), widths
        made = paged_inputs(r, rows, (heads, 1), (rank + shared, rank), dtype, page=page)
        kept = replace(made["keys"], rows=made["keys"].rows[:, :, 0])
        if "record" in more:
            row = packed_row(more["record"], (rank + shared,), (rank, shared))
            assert row is not None
            kept = packed(kept, row)
        tokens = made["q_THD"].shape[0]
        return {
            "q_THD": strided(r.normal(tokens, heads, nope + shared, dtype=dtype)), "rows": kept,
            "kv_b": r.normal(heads * (nope + value), rank, dtype=dtype) / rank**0.5, "scale": (nope + shared) ** -0.5,
        }  # fmt: skip

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
        _case("window, edges on tiles", (8, 1), (64, 64), BF16, rows=_EDGES, window=128, page=64, sinks=True),
        _case("one head for each", (3, 3), (128, 128), BF16, rows=((70, 1), (0, 65)), page=32),
        _case("many heads on one", (40, 1), (32, 32), BF16, rows=((9, 1), (3, 7))),
        _case("expanded latent", (2, 2), (48, 32), BF16, page=64),
        _case("latent f32", (5, 1), (24, 16), F32, latent=True),
        _case("latent bf16", (20, 1), (48, 32), BF16, latent=True),
        _case("latent, window and sinks", (3, 1), (32, 16), BF16, latent=True, window=20, sinks=True, page=64),
        _case("latent, no power of two", (5, 1), (56, 48), BF16, latent=True, page=64),
        _case("latent, nothing shared", (70, 1), (32, 32), BF16, latent=True, rows=((130, 1), (2, 5)), page=64),
        _case("latent, 512 + 64", (70, 1), (576, 512), BF16, latent=True, rows=((64, 1), (63, 1), (100, 3))),
        _case("latent, 512 + 64, sinks", (9, 1), (576, 512), BF16, latent=True, page=64, sinks=True, rows=((200, 1),)),
        _case(
            "latent, 656 bytes",
            (70, 1),
            (576, 512),
            BF16,
            latent=True,
            rows=((64, 1), (130, 1), (100, 3)),
            page=64,
            record="mla_fp8_656",
        ),
        _case(
            "latent, 656 bytes, pages of 16",
            (9, 1),
            (576, 512),
            BF16,
            latent=True,
            rows=((200, 1), (0, 1)),
            record="mla_fp8_656",
        ),
        _case("chunks, 128 wide", (8, 2), (128, 128), BF16, page=64, sinks=True, rows=_CHUNKS),
        _case("chunks, 64 wide", (16, 2), (64, 64), BF16, page=32, window=128, rows=((0, 257), (130, 100), (5, 2))),
        _case("chunks, three heads on one", (6, 2), (128, 128), BF16, page=128, rows=((200, 50), (0, 90))),
        _case("no rows", (2, 1), (8, 8), F32, rows=()),
    ),
    "latent.attend": (
        _latent("ragged f32", 3, (12, 8, 16, 20), F32, _RAGGED),
        _latent("ragged bf16", 5, (16, 16, 32, 16), BF16, _RAGGED),
        _latent("single tokens", 3, (32, 16, 64, 32), BF16, ((5, 1), (130, 1), (0, 1)), 64),
        _latent("chunks", 2, (32, 16, 128, 32), BF16, ((63, 1), (0, 130), (7, 2), (31, 129), (300, 5)), 64),
        _latent("chunks, odd widths", 3, (12, 8, 64, 20), BF16, ((0, 200), (5, 150))),
        _latent("chunks, nothing shared", 3, (32, 0, 128, 16), BF16, ((2, 3), (0, 131))),
        _latent("128 + 64 of 512", 2, (128, 64, 512, 128), BF16, ((9, 1), (40, 160), (3, 2)), 64),
        _latent(
            "128 + 64 of 512, 656 bytes",
            2,
            (128, 64, 512, 128),
            BF16,
            ((70, 1), (0, 140), (9, 5)),
            64,
            record="mla_fp8_656",
        ),
        _latent("no rows", 2, (8, 8, 16, 8), F32, ()),
    ),
}
