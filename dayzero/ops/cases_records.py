"""Hostile inputs for cache records: writes to scattered places of a strided pool full of NaN, rows of zeros, rows below
every scale, NaN and infinities among values; and attention and index selection over packed rows. Part of
``ops/cases``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import LATENT_PARTS, PackedRow, packed_row
from dayzero.ops.cases_mixers import causal_lists
from dayzero.ops.cases_paged import paged_inputs
from dayzero.ops.cases_sparse import index_inputs
from dayzero.ops.contract import Case
from dayzero.ops.heads_write import HeadNorms, Kept
from dayzero.ops.latent_write import LatentNorm, Turn
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.ops.records import RowCodec, packed
from dayzero.view import Paged

BF16, F32 = torch.bfloat16, torch.float32
LATENT, TILED = ("mla_fp8_656", (576,), (512, 64)), ("mla_fp8_tiled", (200,), (137, 63))
SMALL = ("mla_fp8_tiled", (44,), (32, 12))
KEY, MX_KEY = ("idx_fp8_128", (128,), ()), ("idx_mxfp8_32", (128,), ())
ODD_KEY, ODD_MX_KEY = ("idx_fp8_128", (150,), ()), ("idx_mxfp8_32", (40,), ())
HEADS, ODD_HEADS = ("kv_fp8", (2, 128), ()), ("kv_fp8", (3, 24), ())
Named = tuple[str, tuple[int, ...], tuple[int, ...]]


def row_of(named: Named) -> PackedRow:
    row = packed_row(*named)
    assert row is not None
    return row


def rows_of(r: Inputs, tokens: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """[T, *S] with outlier channels, and where there are enough tokens rows of zeros, tiny numbers, NaN and inf."""
    x = r.normal(tokens, *shape)
    x *= 1 + 19 * (r.uniform(*shape) < 0.03)  # outlier channels
    if tokens > 6:
        x[1], x[2] = 0, x[2] * 1e-7
        x[3].flatten()[::5] = torch.nan
        x[4].flatten()[1] = torch.inf
        x[5] *= 1e4
    return x.to(dtype)


def pool_of(shape: tuple[int, ...], dtype: torch.dtype, *, blocks: int = 9, page: int = 16) -> Tensor:
    """[N, P, *shape] of NaN, with gaps between blocks; bytes of all ones where elements are bytes."""
    empty = 0xFF if dtype == torch.uint8 else torch.nan
    return torch.full((blocks, 2, page, *shape), empty, dtype=dtype)[:, 1]


def places(r: Inputs, tokens: int, blocks: int = 9, page: int = 16) -> dict[str, Tensor]:
    """Places of some tokens, each once, in no order."""
    chosen = r.permutation(blocks * page)[:tokens]
    return {"blocks_T": chosen // page, "offsets_T": chosen % page}


def _case(name: str, make: Callable[[Inputs], dict[str, Any]]) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def _writes() -> tuple[Case, ...]:
    def plain(
        tokens: int, shape: tuple[int, ...], dtype: torch.dtype, kept: torch.dtype, loose: bool = False
    ) -> Callable[[Inputs], dict[str, Any]]:
        def inputs(r: Inputs) -> dict[str, Any]:
            x = rows_of(r, tokens, shape, dtype)
            return {"values_TS": strided(x) if loose else x, "rows": pool_of(shape, kept), **places(r, tokens)}

        return inputs

    def narrow(
        tokens: int, named: Named, dtype: torch.dtype, loose: bool = False
    ) -> Callable[[Inputs], dict[str, Any]]:
        def inputs(r: Inputs) -> dict[str, Any]:
            row = row_of(named)
            x = rows_of(r, tokens, row.shape, dtype)
            return {
                "values_TS": strided(x) if loose else x, "rows": pool_of((row.num_bytes,), torch.uint8),
                **places(r, tokens), "codec": RowCodec(row),
            }  # fmt: skip

        return inputs

    return (
        _case("plain bf16", plain(63, (2, 24), BF16, BF16)),
        _case("plain, rounded", plain(65, (33,), F32, BF16, loose=True)),
        _case("plain f32", plain(7, (576,), F32, F32)),
        _case("plain, no tokens", plain(0, (5,), BF16, BF16)),
        *(
            _case(f"{named[0]} {named[1]} {n} tokens {d}", narrow(n, named, d, loose=bool(i % 2)))
            for i, (n, named, d) in enumerate(
                (n, named, d)
                for named in (LATENT, TILED, SMALL, KEY, MX_KEY, ODD_KEY, ODD_MX_KEY, HEADS, ODD_HEADS)
                for n, d in ((1, BF16), (63, BF16), (65, F32))
            )
        ),
        _case("mla_fp8_656, no tokens", narrow(0, LATENT, BF16)),
    )


def _latents() -> tuple[Case, ...]:
    def make(
        tokens: int, dtype: torch.dtype, rank: int, shared: int, *, kept: torch.dtype | None = None, freqs: int = 0,
        **turning: Any,
    ) -> Callable[[Inputs], dict[str, Any]]:  # fmt: skip
        """kept: element of a plain pool; None: packed rows. freqs: of the turn; 0: there is none."""

        def inputs(r: Inputs) -> dict[str, Any]:
            name = "mla_fp8_656" if (rank, shared) == LATENT_PARTS else "mla_fp8_tiled"
            row = row_of((name, (rank + shared,), (rank, shared)))
            rows = pool_of((row.num_bytes,), torch.uint8) if kept is None else pool_of((rank + shared,), kept)
            at = r.integers(0, 1_000_000, *((3, tokens) if "sections" in turning else (tokens,)))
            turn = Turn(at, 10_000.0 ** (-torch.arange(freqs) / max(freqs, 1)), **({"style": "half"} | turning))
            weight_R = 1 + r.normal(rank, dtype=dtype) / 8
            return {
                "kv_TC": strided(rows_of(r, tokens, (rank + shared,), dtype)), "rows": rows, **places(r, tokens),
                "codec": RowCodec(row) if kept is None else None,
                "norm": LatentNorm(weight_R, 1e-6, "f32" if tokens == 65 else "dtype"),
                "turn": turn if freqs else None,
            }  # fmt: skip

        return inputs

    return (
        _case("656 bytes", make(63, BF16, 512, 64, freqs=32, style="interleaved", factor=1.1)),
        _case("656 bytes, one token", make(1, BF16, 512, 64, freqs=32)),
        _case("656 bytes, no turn", make(7, BF16, 512, 64)),
        _case("pads, last dimensions", make(65, F32, 137, 31, freqs=12, part="last")),
        _case("plain bf16", make(65, BF16, 512, 64, kept=BF16, freqs=32, style="interleaved")),
        _case("plain f32, three axes", make(7, F32, 18, 16, kept=F32, freqs=8, sections=(4, 2, 2))),
        _case("no tokens", make(0, BF16, 512, 64, freqs=32)),
    )


def _heads() -> tuple[Case, ...]:
    def make(
        shape: tuple[int, int, int, int], dtype: torch.dtype, *, kept: torch.dtype | None = None, norm: str = "",
        offset: bool = False, joint: bool = True, freqs: int = 0, axes: int = 1, **turning: Any,
    ) -> Callable[[Inputs], dict[str, Any]]:  # fmt: skip
        """shape: tokens, heads of queries, of keys, their width. kept: element of plain pools; None: packed rows. norm:
        in what it multiplies by the weight, if there is one. joint: q, k and v lie side by side in one product; else
        each anyhow. freqs: of the turn; 0: there is none."""

        def inputs(r: Inputs) -> dict[str, Any]:
            (tokens, many, few, width), row = shape, row_of(("kv_fp8", shape[2:], ()))
            keys, values = (
                pool_of((row.num_bytes,), torch.uint8) if kept is None else pool_of((few, width), kept)
                for _ in range(2)
            )
            x = r.normal(tokens, many + 2 * few, width, dtype=dtype) * 30
            if tokens > 1:
                x[0] = 0  # a row whose norm is nothing but eps
            q, k, v = x.split((many, few, few), dim=1)
            if not joint:
                q, k, v = strided(q), strided(k), strided(rows_of(r, tokens, (few, width), dtype))
            at = r.integers(0, 1_000_000, *((tokens,) if axes == 1 else (axes, tokens)))
            turn = Turn(at, 10_000.0 ** (-torch.arange(freqs) / max(freqs, 1)), **({"style": "half"} | turning))
            q_D, k_D = (r.normal(width, dtype=dtype) / 8 + (0 if offset else 1) for _ in range(2))
            return {
                "q_THD": q, "k_TKD": k, "v_TKD": v, "kept": Kept(keys, values, **places(r, tokens)),
                "codec": RowCodec(row) if kept is None else None,
                "norms": HeadNorms(q_D, k_D, 1e-6, offset, norm) if norm else None, "turn": turn if freqs else None,
            }  # fmt: skip

        return inputs

    return (
        _case("norm and turn", make((63, 8, 2, 128), BF16, kept=BF16, norm="dtype", freqs=64)),
        _case("one token, turn by yarn", make((1, 8, 1, 64), BF16, kept=BF16, freqs=32, factor=1.1)),
        _case("turned in part, 1 + w", make((7, 4, 2, 256), BF16, kept=BF16, norm="f32", offset=True, freqs=32)),
        _case(
            "interleaved, last dimensions",
            make((65, 3, 3, 24), F32, kept=F32, joint=False, freqs=8, style="interleaved", part="last"),
        ),
        _case("three axes", make((7, 6, 2, 22), BF16, kept=BF16, norm="f32", freqs=11, sections=(5, 3, 3), axes=3)),
        _case("one axis of three", make((7, 2, 1, 22), F32, kept=F32, norm="dtype", freqs=11, sections=(5, 3, 3))),
        _case("norm alone", make((33, 5, 1, 80), F32, kept=F32, norm="f32", joint=False)),
        _case("nothing but writes, rounded", make((9, 4, 2, 40), F32, kept=BF16, joint=False)),
        _case("packed", make((63, 8, 2, 128), BF16, norm="dtype", freqs=64)),
        _case("packed, turned in part", make((9, 3, 3, 24), BF16, freqs=6, joint=False)),
        _case("no tokens", make((0, 4, 2, 32), BF16, kept=BF16, norm="dtype", freqs=16)),
    )


_RAGGED = ((40, 1), (0, 1), (63, 1), (64, 1), (0, 37), (30, 17))


def _paged() -> tuple[Case, ...]:
    def make(heads: tuple[int, int], width: int, dtype: torch.dtype, **more: Any) -> Callable[[Inputs], dict[str, Any]]:
        def inputs(r: Inputs) -> dict[str, Any]:
            made = paged_inputs(r, _RAGGED, heads, (width, width), dtype, **more)
            row = row_of(("kv_fp8", (heads[1], width), ()))
            return made | {name: packed(made[name], row) for name in ("keys", "values")}

        return inputs

    return (
        _case("packed, grouped bf16", make((8, 2), 64, BF16, page=64)),
        _case("packed, window", make((6, 3), 128, BF16, window=20)),
        _case("packed f32", make((4, 2), 16, F32)),
    )


def _index(named: Named, heads: int, dtype: torch.dtype) -> Callable[[Inputs], dict[str, Any]]:
    def inputs(r: Inputs) -> dict[str, Any]:
        made = index_inputs(r, _RAGGED, heads, named[1][0], dtype)
        return made | {"keys": packed(made["keys"], row_of(named)), "k": 9}

    return inputs


def _sparse(named: Named, heads: int, dtype: torch.dtype, page: int) -> Callable[[Inputs], dict[str, Any]]:
    def inputs(r: Inputs) -> dict[str, Any]:
        width = named[1][0]
        made = paged_inputs(r, _RAGGED, (heads, 1), (width, width), dtype, page=page)
        keys: Paged = made["keys"]
        rows = packed(replace(keys, rows=keys.rows[:, :, 0]), row_of(named)).headed()
        listed_TN = torch.cat([causal_lists(r, count, start, 9) for start, count in _RAGGED])
        return made | {"keys": rows, "values": None, "value_dim": named[2][0], "listed_TN": listed_TN}

    return inputs


RECORD_CASES: dict[str, tuple[Case, ...]] = {
    "cache.write": _writes(),
    "cache.write_latent": _latents(),
    "attention.norm_rope_write": _heads(),
    "attention.paged": _paged(),
    "attention.sparse": (
        _case("packed latent rows", _sparse(LATENT, 16, BF16, 64)),
        _case("packed latent rows, small", _sparse(SMALL, 3, F32, 16)),
    ),
    "sparse_index.tokens": (
        _case("packed keys", _index(KEY, 8, BF16)),
        _case("packed keys, e8m0", _index(MX_KEY, 8, BF16)),
        _case("packed keys f32", _index(KEY, 3, F32)),
    ),
}
