"""Hostile inputs for attention, recurrences and convolutions. Part of ``ops/cases``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided

BF16, F32 = torch.bfloat16, torch.float32
Make = Callable[[Inputs], dict[str, Any]]


def _case(name: str, make: Make) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def causal_lists(r: Inputs, num_queries: int, start: int, width: int) -> Tensor:
    """[T, width] index lists, ascending, padded with -1: fewer rows than a query could see, where it sees more."""
    lists = torch.full((num_queries, width), -1)
    for i in range(num_queries):
        rows = r.permutation(start + i + 1)[:width].sort().values
        lists[i, : rows.shape[0]] = rows
    return lists


def _attention() -> tuple[Case, ...]:
    def make(queries: int, start: int, heads: tuple[int, int], widths: tuple[int, int], dtype: torch.dtype) -> Make:
        def inputs(r: Inputs) -> dict[str, Any]:
            rows = start + queries
            return {
                "q_THD": strided(r.normal(queries, heads[0], widths[0], dtype=dtype)),
                "k_LKD": strided(r.normal(rows, heads[1], widths[0], dtype=dtype)),
                "v_LKV": r.normal(rows, heads[1], widths[1], dtype=dtype),
                "start": start, "scale": widths[0] ** -0.5,
            }  # fmt: skip

        return inputs

    base = make(7, 30, (4, 2), (16, 16), F32)
    return (
        _case("one query, one key", make(1, 0, (1, 1), (8, 8), F32)),
        _case("from the beginning", make(65, 0, (4, 4), (16, 16), F32)),
        _case("continued, grouped", base),
        _case("grouped bf16", make(63, 2, (6, 2), (16, 16), BF16)),
        _case("wider keys than values", make(7, 64, (2, 1), (24, 16), F32)),
        _case("wider values than keys", make(7, 1, (2, 2), (8, 24), F32)),
        _case("sinks", lambda r: base(r) | {"sinks_H": r.normal(4) * 3}),
        _case("softcap", lambda r: base(r) | {"softcap": 2.0}),
        _case("no queries", make(0, 5, (2, 1), (8, 8), F32)),
        _case("window below the length", lambda r: base(r) | {"window": 4}),
        _case("window of one", lambda r: make(65, 0, (2, 1), (8, 8), BF16)(r) | {"window": 1}),
        _case("window with sinks", lambda r: base(r) | {"window": 9, "sinks_H": r.normal(4)}),
        _case("keys after some queries", lambda r: base(r) | {"start": -3}),
        _case("keys of an earlier part", lambda r: base(r) | {"start": 100}),
    )


def _latent() -> tuple[Case, ...]:
    def make(queries: int, start: int, shared: int, dtype: torch.dtype) -> Make:
        return lambda r: {
            "q_THD": strided(r.normal(queries, 3, 12 + shared, dtype=dtype)),
            "cache_LC": strided(r.normal(start + queries, 16 + shared, dtype=dtype)),
            "kv_b": r.normal(3 * (12 + 20), 16, dtype=dtype) / 4, "start": start, "scale": (12 + shared) ** -0.5,
        }  # fmt: skip

    base = make(7, 30, 8, F32)
    lists = (
        _case("index lists", lambda r: base(r) | {"allowed_TA": causal_lists(r, 7, 30, 5)}),
        _case("index lists, first rows", lambda r: make(33, 0, 8, F32)(r) | {"allowed_TA": causal_lists(r, 33, 0, 5)}),
        _case(
            "index lists over tiles", lambda r: make(65, 290, 8, F32)(r) | {"allowed_TA": causal_lists(r, 65, 290, 99)}
        ),
    )
    return (
        _case("one query, one key", make(1, 0, 8, F32)),
        _case("from the beginning", make(65, 0, 8, F32)),
        _case("no shared key bf16", make(63, 1, 0, BF16)),
        _case("window and sinks", lambda r: base(r) | {"window": 6, "sinks_H": r.normal(3)}),
        _case("no queries", make(0, 5, 8, F32)),
        *lists,
    )


def _into_latent() -> tuple[Case, ...]:
    def make(tokens: int, heads: int, widths: tuple[int, int, int], dtype: torch.dtype) -> Make:
        nope, shared, rank = widths  # W_UK is a part of each head's rows of kv_b
        return lambda r: {
            "q_THD": strided(r.normal(tokens, heads, nope + shared, dtype=dtype)),
            "w_uk_HNR": (r.normal(heads, nope + 5, rank, dtype=dtype) / 4)[:, :nope],
        }  # fmt: skip

    return tuple(_case(f"{n} tokens, {h} heads of {w} {d}", make(n, h, w, d)) for n, h, w, d in (
        (1, 3, (12, 8, 16), F32), (63, 3, (12, 0, 16), F32), (1, 7, (32, 16, 64), BF16), (65, 2, (128, 64, 512), BF16),
        (17, 3, (48, 8, 40), BF16), (0, 2, (8, 8, 16), F32),
    ))  # fmt: skip


def _out_of_latent() -> tuple[Case, ...]:
    def make(tokens: int, heads: int, widths: tuple[int, int], dtype: torch.dtype, wide: torch.dtype) -> Make:
        rank, value = widths
        return lambda r: {
            "out_THR": r.normal(tokens, heads, rank, dtype=wide),
            "w_uv_HVR": (r.normal(heads, value + 5, rank, dtype=dtype) / 4)[:, 5:], "dtype": dtype,
        }  # fmt: skip

    return tuple(_case(f"{n} tokens, {h} heads of {w} {d}", make(n, h, w, d, wide)) for n, h, w, d, wide in (
        (1, 3, (16, 20), F32, torch.float64), (63, 3, (16, 12), F32, torch.float64), (1, 7, (64, 32), BF16, F32),
        (65, 2, (512, 128), BF16, F32), (17, 3, (40, 24), BF16, F32), (0, 2, (16, 8), BF16, F32),
    ))  # fmt: skip


def decay(r: Inputs, kind: str, *shape: int) -> Tensor:
    """Log-decay as trained models have it. ``bounded``: (-5, 0) (Kimi K3); ``softplus``: A in [1, 16], small dt."""
    z = r.normal(*shape)
    if kind == "bounded":
        return -5 * torch.sigmoid(torch.exp(r.uniform(shape[1])).reshape(-1, *[1] * (len(shape) - 2)) * (z * 2 - 1))
    rate = (1 + 15 * r.uniform(shape[1])).reshape(-1, *[1] * (len(shape) - 2))
    return -rate * torch.nn.functional.softplus(z - 4)


def _delta(chunked: bool) -> tuple[Case, ...]:
    def make(tokens: int, kind: str, per: str, heads: tuple[int, int], dtype: torch.dtype, state: bool) -> Make:
        def inputs(r: Inputs) -> dict[str, Any]:
            shape = (tokens, heads[0], 8) if per == "channel" else (tokens, heads[0])
            out = {
                "q_TGK": strided(r.normal(tokens, heads[1], 8, dtype=dtype)),
                "k_TGK": r.normal(tokens, heads[1], 8, dtype=dtype),
                "v_THV": strided(r.normal(tokens, heads[0], 12, dtype=dtype)),
                "g": decay(r, kind, *shape), "beta_TH": torch.sigmoid(r.normal(tokens, heads[0]) * 2),
                "state_HKV": r.normal(heads[0], 8, 12) if state else None,
            }  # fmt: skip
            return out | ({"chunk": 16} if chunked else {})

        return inputs

    return (
        _case("bounded, channel", make(65, "bounded", "channel", (3, 3), F32, True)),
        _case("softplus, channel, bf16", make(63, "softplus", "channel", (2, 2), BF16, False)),
        _case("softplus, head, grouped", make(65, "softplus", "head", (4, 2), F32, True)),
        _case("one token", make(1, "bounded", "channel", (2, 2), F32, True)),
        _case("no tokens", make(0, "bounded", "channel", (2, 2), F32, True)),
        _case("fastest decay", lambda r: make(63, "bounded", "channel", (2, 2), F32, True)(r) | {
            "g": torch.full((63, 2, 8), -80.0),  # e^(80 * 16) overflows even f64 unless exponents stay below 0
        }),
        _case("zero rows", lambda r: make(7, "bounded", "head", (2, 1), F32, True)(r) | {
            "q_TGK": torch.zeros(7, 1, 8), "k_TGK": torch.zeros(7, 1, 8),
        }),
    )  # fmt: skip


def _delta_wide() -> tuple[Case, ...]:
    """As wide as models, chunks of 64 and others; channels from e^-5 a token to 0.9999, and some far below."""

    def make(tokens: int, heads: tuple[int, int], per_head: bool, wild: bool, **more: Any) -> Make:
        def inputs(r: Inputs) -> dict[str, Any]:
            shape = (tokens, heads[0]) if per_head else (tokens, heads[0], 128)
            g = -(torch.logspace(-4, 0.7, shape[-1]) * (0.5 + r.uniform(*shape))).clamp(max=5.0)
            return {
                "q_TGK": r.normal(tokens, heads[1], 128, dtype=BF16),
                "k_TGK": r.normal(tokens, heads[1], 128, dtype=BF16),
                "v_THV": r.normal(tokens, heads[0], 128, dtype=BF16),
                "g": torch.where(r.uniform(*shape) < 0.02, -90.0, g) if wild else g,
                "beta_TH": torch.sigmoid(r.normal(tokens, heads[0]) * 5), "state_HKV": r.normal(heads[0], 128, 128),
            } | more  # fmt: skip

        return inputs

    return (
        _case("wide, mixed decay", make(70, (2, 2), False, False)),
        _case("wide, sudden decay", make(64, (1, 1), False, True)),
        _case("wide, per head, grouped, transition", make(65, (4, 2), True, False, return_transition=True)),
        _case("wide, odd span", make(50, (1, 1), False, False, chunk=20)),
    )


def _gates(bounded: bool) -> tuple[Case, ...]:
    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Make:
        return lambda r: {
            "z": r.normal(*shape, dtype=dtype) * 9, "a_log_H": (1 + 15 * r.uniform(shape[1])).log(),
            "dt_bias": r.normal(*shape[1:]) / 10,
        } | ({"lower": -5.0} if bounded else {})  # fmt: skip

    return tuple(_case(f"{s} {d}", make(s, d)) for s, d in (((7, 3, 5), BF16), ((63, 4), F32), ((0, 2, 3), F32)))


def _conv() -> tuple[Case, ...]:
    def make(tokens: int, dtype: torch.dtype, state: bool, act: str | None) -> Make:
        return lambda r: {
            "x_TC": strided(r.normal(tokens, 5, dtype=dtype)), "weight_CW": r.normal(5, 4), "act": act,
            "state_SC": r.normal(3, 5, dtype=dtype) if state else None, "bias_C": r.normal(5) if state else None,
        }  # fmt: skip

    return tuple(_case(f"{n} tokens {d} state {s}", make(n, d, s, a)) for n, d, s, a in (
        (0, F32, True, "silu"), (1, BF16, True, "silu"), (2, F32, False, None), (65, F32, True, "silu"),
    ))  # fmt: skip


def _merge(r: Inputs) -> dict[str, Any]:
    lse = r.normal(3, 7, 2) * 20
    lse[0, :4] = float("-inf")
    lse[:, 6] = float("-inf")
    return {"out_PTHV": r.normal(3, 7, 2, 5), "lse_PTH": lse}


MIXER_CASES: dict[str, tuple[Case, ...]] = {
    "attention.causal": _attention(),
    "attention.merge": (_case("parts that saw nothing", _merge),),
    "attention.gate": (
        _case("per channel", lambda r: {"out_THV": r.normal(7, 2, 5, dtype=BF16), "gate_T": r.normal(7, 10) * 5}),
        _case("per head", lambda r: {"out_THV": r.normal(7, 2, 5), "gate_T": r.normal(7, 2, dtype=BF16) * 5}),
    ),
    "latent.absorb": (
        _case("odd heads", lambda r: {"kv_b": r.normal(3 * 21, 16), "heads": 3, "nope": 8, "value": 13}),
    ),
    "latent.expand": (
        _case("bf16", lambda r: {"latent_LR": strided(r.normal(63, 16, dtype=BF16)), "heads": 3, "nope": 8, "value": 13,
                                 "kv_b": r.normal(3 * 21, 16, dtype=BF16)}),
    ),
    "latent.attend_expanded": _latent(),
    "latent.queries": _into_latent(),
    "latent.values": _out_of_latent(),
    "recurrence.gate_softplus": _gates(bounded=False),
    "recurrence.gate_bounded": _gates(bounded=True),
    "recurrence.delta": _delta(chunked=False),
    "recurrence.delta_chunked": (*_delta(chunked=True), *_delta_wide()),
    "conv.causal": _conv(),
}  # fmt: skip
