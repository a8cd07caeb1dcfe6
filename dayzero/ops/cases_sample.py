"""Hostile inputs for choosing tokens: ties at every cut, flat rows, rows without a token, wild seeds. Part of
``ops/cases``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dayzero.ops.contract import Case
from dayzero.ops.random_inputs import Inputs, strided

BF16 = torch.bfloat16
NEVER, NAN = float("-inf"), float("nan")
# Of each row in turn; the lengths differ, so that rows meet many combinations.
TEMPERATURES, TOP_K = (1.0, 0.6, 0.0, 1.3, 30.0), (0, 7, 0, 1, 0, 50)
TOP_P, MIN_P = (1.0, 0.8, 1.0, 0.95, 0.3, 1.0, 1e-9), (0.0, 0.0, 0.1, 0.0, 0.0, 0.7, 0.02, 1.0)


def _case(name: str, make: Callable[[Inputs], dict[str, Any]]) -> Case:
    return Case(name, lambda seed: make(Inputs(seed)))


def drawn(r: Inputs, logits_SV: Tensor) -> dict[str, Any]:
    """Arguments of ``sample.draw``: options of each row in turn, begun anywhere, and seeds of 64 bits."""
    rows = len(logits_SV)
    first = int(r.integers(0, 1000, 1))
    wide = torch.float64

    def turn(values: tuple[float, ...], dtype: torch.dtype) -> Tensor:
        return torch.tensor([values[(first + i) % len(values)] for i in range(rows)], dtype=dtype)

    return {
        "logits_SV": logits_SV, "temperature_S": turn(TEMPERATURES, wide), "top_k_S": turn(TOP_K, torch.int64),
        "top_p_S": turn(TOP_P, wide), "min_p_S": turn(MIN_P, wide), "seed_S": r.integers(-(2**63), 2**63 - 1, rows),
        "index_S": r.integers(0, 1_000_000, rows),
    }  # fmt: skip


def _without(r: Inputs) -> dict[str, Any]:
    """Rows with a NaN, an infinity of either sign, nothing left, and one token left."""
    logits_SV = r.normal(12, 33) * 4
    logits_SV[0, 30], logits_SV[2, 0], logits_SV[4, 7] = NAN, float("inf"), NEVER
    logits_SV[6:8] = NEVER
    logits_SV[7, 20] = -3.0
    logits_SV[8, 1:32] = NEVER
    return drawn(r, logits_SV)


def _plain(r: Inputs) -> dict[str, Any]:
    rows = 7
    out = drawn(r, r.normal(rows, 5003) * 3)
    ones = torch.ones(rows, dtype=torch.float64)
    none = torch.zeros(rows, dtype=torch.float64)
    return out | {"temperature_S": ones, "top_k_S": none.long(), "top_p_S": ones, "min_p_S": none}


def _shape(rows: int, known: int, masked: bool) -> Callable[[Inputs], dict[str, Any]]:
    def inputs(r: Inputs) -> dict[str, Any]:
        vocab = 70
        ids = r.integers(-3, vocab, rows, known).clamp(min=-1)
        penalties = torch.stack((1 + r.uniform(rows), 2 * r.uniform(rows) - 1, r.uniform(rows)), dim=1)
        penalties[::3, 0], penalties[::4, 1:] = 1.0, 0.0
        bias_ids = torch.stack([r.permutation(vocab)[:4] for _ in range(rows)]) if rows else r.integers(0, 1, 0, 4)
        bias_ids[:, 3] = -1
        banned = r.integers(0, vocab + 9, rows, 3)
        banned[::2, 1] = -1
        words = r.integers(-(2**31), 2**31 - 1, rows, 2).to(torch.int32) if masked else None  # 64 of 70 tokens
        return {
            "logits_SV": strided(r.normal(rows, vocab) * 9), "ids_SL": ids, "prompt_S": r.integers(0, known + 1, rows),
            "penalties_S3": penalties, "bias_ids_SB": bias_ids, "bias_SB": r.normal(rows, 4) * 5, "banned_SC": banned,
            "allowed_SW": words,
        }  # fmt: skip

    return inputs


SAMPLE_CASES: dict[str, tuple[Case, ...]] = {
    "sample.greedy": (
        _case("ties", lambda r: {"logits_TV": r.integers(0, 4, 65, 33).float()}),
        _case("one row", lambda r: {"logits_TV": r.normal(1, 7, dtype=BF16)}),
        _case("no rows", lambda r: {"logits_TV": r.normal(0, 7)}),
        _case("gaps, several parts", lambda r: {"logits_TV": strided(r.integers(0, 9, 3, 9001).float())}),
        _case("no token in some rows", lambda r: {"logits_TV": _without(r)["logits_SV"]}),
    ),
    "sample.draw": (
        _case("every filter", lambda r: drawn(r, r.normal(63, 65) * 2)),
        _case("ties", lambda r: drawn(r, r.integers(0, 4, 65, 63).float())),
        _case("flat", lambda r: drawn(r, r.normal(23, 3001) / 1000)),
        _case("sharp", lambda r: drawn(r, r.normal(23, 1500) * 40)),
        _case("without filters", _plain),
        _case("no token in some rows", _without),
        _case("no rows", lambda r: drawn(r, r.normal(0, 7))),
    ),
    "sample.shape": (
        _case("everything", _shape(13, 40, True)), _case("no mask", _shape(7, 65, False)),
        _case("nothing known", _shape(1, 0, True)), _case("no rows", _shape(0, 5, False)),
    ),
}  # fmt: skip
