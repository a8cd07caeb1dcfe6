"""Hostile inputs for index selection and attention over listed rows: pages out of order in a pool full of NaN, ties,
lists shorter than the history and longer, tiles that end in the middle of a page. Part of ``ops/cases``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import LATENT_PARTS, packed_row
from dayzero.ops import tiles
from dayzero.ops.cases_mixers import causal_lists
from dayzero.ops.cases_paged import paged_inputs
from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.ops.records import packed
from dayzero.ops.sparse_attention import whole
from dayzero.ops.sparse_index import Pooling
from dayzero.view import Paged

BF16, F32 = torch.bfloat16, torch.float32
WIDE = sum(LATENT_PARTS)
Make = Callable[[Inputs], dict[str, Any]]
Rows = tuple[tuple[int, int], ...]
_RAGGED: Rows = ((40, 1), (0, 1), (63, 1), (0, 37), (30, 17))
_SINGLE: Rows = ((5, 1), (255, 1), (0, 1), (700, 1), (64, 1))
_LONG: Rows = ((tiles.MERGE_KEYS + 37, 3), (tiles.KEYS - 1, 1))  # candidates are cut twice; a tile is just full


def _case(name: str, make: Make) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def index_inputs(
    r: Inputs, rows: Rows, heads: int, width: int, dtype: torch.dtype = F32, *, page: int = 16, ties: bool = False
) -> dict[str, Any]:
    """q_THD, weights_TH, keys and scale of a generator. ties: small whole numbers, so that many scores are equal."""
    made = paged_inputs(r, rows, (heads, 1), (width, width), dtype, page=page)
    q_THD, keys = made["q_THD"], made["keys"]
    keys = replace(keys, rows=keys.rows[:, :, 0])
    weights_TH = r.normal(q_THD.shape[0], heads)
    if ties:
        q_THD, weights_TH = q_THD.round(), weights_TH.round()
        keys = replace(keys, rows=keys.rows.round())
    return {"q_THD": q_THD, "weights_TH": weights_TH, "keys": keys, "scale": width**-0.5}


def gates_of(r: Inputs, keys: Paged, size: int) -> dict[str, Any]:
    """Gates beside index keys, NaN where those are, and a bias for each place in a pool of ``size``."""
    gates = keys.rows * 0 + r.normal(*keys.rows.shape)
    return {"gates": replace(keys, rows=gates), "bias_SD": r.normal(size, keys.rows.shape[-1])}


def _scored() -> dict[str, tuple[Case, ...]]:
    def score(queries: int, start: int, dtype: torch.dtype) -> Make:
        return lambda r: {
            "q_THD": strided(r.normal(queries, 8, 16, dtype=dtype)), "k_LD": r.normal(start + queries, 16, dtype=dtype),
            "weights_TH": r.normal(queries, 8), "start": start, "scale": 16**-0.5,
        }  # fmt: skip

    def chosen(r: Inputs) -> dict[str, Any]:
        return {"scores_TL": strided(r.normal(63, 70)), "k": 9, "start": 7}

    def ties(r: Inputs) -> dict[str, Any]:
        # ReLU scores are often exactly 0 in many rows at once.
        return {"scores_TL": r.integers(0, 3, 63, 70).float(), "k": 9, "start": 7}

    return {
        "sparse_index.score": tuple(
            _case(f"{n} queries after {s} {d}", score(n, s, d))
            for n, s, d in ((1, 0, F32), (7, 64, BF16), (63, 0, F32))
        ),
        "sparse_index.top_k": (
            _case("below the length", chosen),
            _case("best first", lambda r: chosen(r) | {"order": "score"}),
            _case("ties", ties),
            _case("forced", lambda r: ties(r) | {"sinks": 2, "window": 3, "tail": 4}),
            _case("above the length", lambda r: chosen(r) | {"k": 99}),
            _case("no queries", lambda r: {"scores_TL": r.normal(0, 7), "k": 3, "start": 7}),
        ),
    }


def _tokens() -> tuple[Case, ...]:
    def ragged(r: Inputs) -> dict[str, Any]:
        return index_inputs(r, _RAGGED, 5, 16) | {"k": 9}

    def tied(r: Inputs) -> dict[str, Any]:
        return index_inputs(r, _RAGGED, 2, 3, ties=True) | {"k": 9}

    def kept(record: str, heads: int, page: int) -> Make:
        """Packed keys. Each channel has a magnitude of its own, as trained keys have."""

        def inputs(r: Inputs) -> dict[str, Any]:
            made = index_inputs(r, _SINGLE, heads, 128, BF16, page=page)
            keys = replace(made["keys"], rows=made["keys"].rows * (2.0 ** r.integers(-6, 6, 128)).bfloat16())
            row = packed_row(record, (128,))
            assert row is not None
            return made | {"keys": packed(keys, row), "k": 64}

        return inputs

    return (
        _case("one row, one token", lambda r: index_inputs(r, ((0, 1),), 2, 8) | {"k": 3}),
        _case("ragged", ragged),
        _case("ragged bf16", lambda r: index_inputs(r, _RAGGED, 3, 32, BF16, page=64) | {"k": 8}),
        _case("ties", tied),
        _case("forced", lambda r: tied(r) | {"sinks": 2, "window": 3}),
        _case("above the length", lambda r: ragged(r) | {"k": 99}),
        _case("over tiles", lambda r: index_inputs(r, _LONG, 3, 8, page=64) | {"k": 100}),
        _case("over tiles, ties", lambda r: index_inputs(r, _LONG, 1, 2, page=64, ties=True) | {"k": 100}),
        _case("over tiles, forced", lambda r: index_inputs(r, _LONG, 1, 2, page=64, ties=True) | {
            "k": 2000, "sinks": 4, "window": 1030,
        }),
        _case("no rows", lambda r: index_inputs(r, (), 2, 8) | {"k": 3}),
        _case("single rows", lambda r: index_inputs(r, _SINGLE, 16, 64, BF16, page=16) | {"k": 65}),
        _case("single rows, packed", kept("idx_fp8_128", 64, 16)),
        _case("single rows, e8m0", kept("idx_mxfp8_32", 72, 64)),
        _case("single rows, forced", lambda r: kept("idx_fp8_128", 8, 64)(r) | {"sinks": 4, "window": 33}),
        _case("single rows, ties", lambda r: index_inputs(r, _SINGLE, 8, 64, BF16, ties=True) | {"k": 31}),
    )  # fmt: skip


def _pools() -> tuple[Case, ...]:
    def best(rows: Rows, size: int, pools: int, ties: bool, **more: Any) -> Make:
        return lambda r: index_inputs(r, rows, 2, 5, ties=ties, page=32) | {
            "pools": pools, "pooling": Pooling(size, **more),
        }  # fmt: skip

    def gated(rows: Rows, size: int, pools: int, **more: Any) -> Make:
        def inputs(r: Inputs) -> dict[str, Any]:
            made = index_inputs(r, rows, 3, 6, page=16)
            return made | {"pools": pools, "pooling": Pooling(size, **gates_of(r, made["keys"], size), **more)}

        return inputs

    return (
        _case("by the best row", best(_RAGGED, 4, 3, False)),
        _case("by the best row, ties", best(_RAGGED, 4, 3, True)),
        _case("local, scored tail", best(_RAGGED, 8, 3, True, local=2, tail="scored")),
        _case("no tail", best(_RAGGED, 4, 3, True, tail="never")),
        _case("pools of one", best(_RAGGED, 1, 7, True)),
        _case("more than there are", best(_RAGGED, 5, 40, True)),
        _case("by the best row over tiles", best(_LONG, 48, 9, True, local=1, tail="scored")),
        _case("gated", gated(_RAGGED, 4, 3)),
        _case("gated, no tail", gated(_RAGGED, 3, 4, tail="never")),
        _case("gated over tiles", gated(_LONG, 7, 50)),
        _case("no rows", gated((), 4, 3)),
    )


def _lists(
    rows: Rows, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype, width: int, **more: Any
) -> Make:
    def inputs(r: Inputs) -> dict[str, Any]:
        page, extra = more.get("page", 16), {k: v for k, v in more.items() if k == "softcap"}
        made = paged_inputs(r, rows, heads, widths, dtype, page=page)
        lists = [causal_lists(r, count, start, width) for start, count in rows]
        made["listed_TN"] = torch.cat(lists) if lists else torch.zeros(0, width, dtype=torch.int64)
        if more.get("sinks"):
            extra["sinks_H"] = r.normal(heads[0]) * 3
        return made | extra

    return inputs


def _latent() -> tuple[Case, ...]:
    """Rows of the usual width, plain and coded, under lists that end anywhere in a tile of 64."""

    def wide(rows: Rows, heads: int, width: int, dtype: torch.dtype = BF16) -> Make:
        """Latent rows of the usual width."""
        return lambda r: _lists(rows, (heads, 1), (WIDE, 512), dtype, width, page=64)(r) | {
            "values": None, "value_dim": 512, "scale": 192**-0.5,
        }  # fmt: skip

    def coded(rows: Rows, heads: int, width: int, **more: Any) -> Make:
        """The same in FP8 records; pages nobody has are NaN."""

        def inputs(r: Inputs) -> dict[str, Any]:
            found = wide(rows, heads, width)(r)
            spread = (2.0 ** r.integers(-9, 9, WIDE)).bfloat16()
            plain = replace(found["keys"], rows=found["keys"].rows[:, :, 0] * spread)
            row = packed_row("mla_fp8_656", (WIDE,), LATENT_PARTS)
            assert row is not None
            sinks = {"sinks_H": r.normal(heads) * 3} if more.get("sinks") else {}
            return found | {"keys": packed(plain, row).headed(), "scale": 1e-3} | sinks

        return inputs

    def in_one(r: Inputs) -> dict[str, Any]:
        """A sequence that is no pages of a pool; some of its queries list nothing."""
        listed_TN = causal_lists(r, 70, 0, 66)
        listed_TN[::9] = -1
        return {"q_THD": r.normal(70, 16, 576, dtype=BF16), "keys": whole(r.normal(70, 1, 576, dtype=BF16)),
                "values": None, "value_dim": 512, "scale": 192**-0.5, "listed_TN": listed_TN}  # fmt: skip

    return (
        _case("latent, wide", wide(((130, 1), (0, 1), (62, 1), (63, 1), (64, 1), (0, 3), (126, 4)), 128, 129)),
        _case("latent, wide, odd heads", wide(((300, 2), (70, 1)), 7, 257)),
        _case("latent, wide f32", wide(((70, 1), (3, 2)), 5, 65, F32)),
        _case("latent, in one", in_one),
        _case("latent, coded", coded(((130, 1), (0, 1), (62, 1), (63, 1), (64, 1), (0, 3), (126, 4)), 64, 129)),
        _case("latent, coded, sinks", coded(((300, 2), (0, 1), (70, 1)), 96, 257, sinks=True)),
    )


def _sparse() -> tuple[Case, ...]:
    make = _lists

    def latent(width: int) -> Make:
        return lambda r: make(_RAGGED, (5, 1), (width + 8, width), BF16, 9)(r) | {"values": None, "value_dim": width}

    def around(r: Inputs) -> dict[str, Any]:
        """A window over a sequence of which every query sees rows on both sides."""
        made = make(((0, 37),), (2, 2), (8, 8), F32, 9)(r)
        near = torch.arange(37)[:, None] + torch.arange(-4, 5)
        gone: Tensor = (near < 0) | (near > 36)
        return made | {"listed_TN": torch.where(gone, 99, near).sort(-1).values.where(~gone.sort(-1).values, -1)}

    return (
        _case("one row, one token", make(((0, 1),), (1, 1), (8, 8), F32, 3)),
        _case("ragged, grouped", make(_RAGGED, (4, 2), (16, 16), F32, 5)),
        _case("ragged bf16", make(_RAGGED, (6, 2), (32, 32), BF16, 9, page=64)),
        _case("wider values than keys", make(_RAGGED, (3, 3), (8, 24), F32, 5)),
        _case("lists above the length", make(_RAGGED, (4, 2), (16, 16), F32, 99)),
        _case("latent", latent(16)),
        _case("latent, no power of two", latent(48)),
        *_latent(),
        _case("sinks", make(_RAGGED, (4, 2), (16, 16), F32, 5, sinks=True)),
        _case("softcap", make(_RAGGED, (4, 2), (16, 16), F32, 5, softcap=2.0)),
        _case("sinks and nothing else", lambda r: (made := make(_RAGGED, (4, 2), (16, 16), F32, 5, sinks=True)(r)) | {
            "listed_TN": torch.full_like(made["listed_TN"], -1),
        }),
        _case("over tiles", make(((2 * tiles.KEYS + 7, 5), (30, 1)), (2, 1), (8, 8), F32, 300, page=64)),
        _case("rows after the query", around),
        _case("no rows", make((), (2, 1), (8, 8), F32, 4)),
    )  # fmt: skip


SPARSE_CASES: dict[str, tuple[Case, ...]] = {
    **_scored(),
    "sparse_index.tokens": _tokens(),
    "sparse_index.pool": _pools(),
    "attention.sparse": _sparse(),
    "sparse_index.window": (
        _case("from the beginning", lambda r: {"own_T": torch.arange(65), "window": 7}),
        _case("first rows", lambda r: {"own_T": torch.cat((torch.arange(63), torch.tensor([9, 10**6]))), "window": 7,
                                       "sinks": 3}),
        _case("window of one", lambda r: {"own_T": r.integers(0, 99, 7), "window": 1}),
        _case("no queries", lambda r: {"own_T": r.integers(0, 9, 0), "window": 2, "sinks": 1}),
    ),
    "sparse_index.grid": (
        _case("blocks", lambda r: {"rows": 7, "columns": 9, "height": 4, "width": 4, "reach": "block"}),
        _case("near", lambda r: {"rows": 5, "columns": 8, "height": 3, "width": 5, "reach": "near"}),
        _case("larger than the grid", lambda r: {"rows": 1, "columns": 3, "height": 5, "width": 7, "reach": "near"}),
    ),
}  # fmt: skip
