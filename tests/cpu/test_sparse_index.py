"""Generators of index lists: exact and the same in tiles of any size, in chunks, and for one query alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ops_support import poisoned_memory  # noqa: F401
from torch import Tensor

from dayzero.ops import sparse_index, sparse_select, tiles
from dayzero.ops.cases_sparse import gates_of, index_inputs
from dayzero.ops.random_inputs import Inputs
from dayzero.ops.sparse_attention import whole
from dayzero.ops.sparse_index import Pooling
from dayzero.view import Span

INF = float("inf")


def by_tiles(scores_TL: Tensor, k: int, step: int) -> Tensor:
    return sparse_select.running_top_k(scores_TL.shape[0], k, scores_TL.shape[1], step, lambda a, b: scores_TL[:, a:b])


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few hundred rows are many tiles, and candidates are cut again and again."""
    for name, value in (("QUERIES", 5), ("KEYS", 16), ("MERGE_KEYS", 48)):
        monkeypatch.setattr(tiles, name, value)


@pytest.mark.parametrize("step", [1, 7, 16, 1000])
@pytest.mark.parametrize("k", [1, 9, 64, 300])
def test_a_running_top_k_equals_a_sort_by_score_then_row(small_tiles: None, k: int, step: int) -> None:
    r = Inputs(k)
    scores = torch.cat((r.integers(-2, 3, 20, 257).float(), r.normal(20, 257), torch.zeros(3, 257)))
    got = by_tiles(scores, k, step).tolist()
    for row, listed in zip(scores.tolist(), got, strict=True):
        want = sorted(sorted(range(257), key=lambda at: (-row[at], at))[:k])
        assert listed == want + [-1] * (k - len(want))


def test_zeros_have_no_sign_and_what_is_no_score_is_never_chosen(small_tiles: None) -> None:
    nan, tiny = float("nan"), torch.finfo(torch.float32).smallest_normal
    scores = torch.tensor(
        [[-0.0, 0.0, -0.0, -1.0], [nan, -INF, 1.0, nan], [INF, 3.0, INF, nan], [-tiny, -0.0, tiny, 0.0]]
    )
    assert by_tiles(scores, 2, 2).tolist() == [[0, 1], [2, -1], [0, 2], [1, 2]]
    one_shot = sparse_index.top_k.body(scores, 2, start=9)
    assert by_tiles(scores, 2, 3).tolist() == one_shot.tolist()


def test_a_nan_key_is_not_chosen_and_hides_nobody(small_tiles: None) -> None:
    made = index_inputs(Inputs(1), ((0, 90),), 3, 8) | {"k": 9}
    rows = made["keys"].rows.clone()
    block, offset = int(made["keys"].table[0, 2]), 5
    rows[block, offset] = torch.nan
    made["keys"] = replace(made["keys"], rows=rows)
    for generate in (sparse_index.tokens.body, sparse_select.tokens_tiled):
        lists = generate(**made)
        assert not (lists == 2 * 16 + offset).any() and (lists[-1] >= 0).all()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "forced": {"sinks": 3, "window": 4}, "local": {"local": 2, "tail": "scored"},
    "never": {"tail": "never"}, "gated": {},
}  # fmt: skip


def _call(kind: str, seed: int, tokens: int, ties: bool) -> tuple[str, dict[str, Any]]:
    r = Inputs(seed)
    made = index_inputs(r, ((0, tokens),), 3, 4, ties=ties)
    if kind in ("plain", "forced"):
        return "tokens", made | {"k": 11} | OPTIONS[kind]
    gates = gates_of(r, made["keys"], 4) if kind == "gated" else {}
    return "pool", made | {"pools": 3, "pooling": Pooling(4, **gates, **OPTIONS[kind])}


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("kind", OPTIONS)
def test_one_query_alone_lists_what_it_lists_in_a_chunk(small_tiles: None, kind: str, ties: bool) -> None:
    """Prefill = decode: for every query, whole, in chunks of seven and one by one, by reference and in tiles."""
    name, made = _call(kind, 3, 75, ties)
    want = getattr(sparse_index, name).body(**made)
    for generate in (getattr(sparse_index, name).body, getattr(sparse_select, f"{name}_tiled")):
        for count in (75, 7, 1):
            parts = []
            for start in range(0, 75, count):
                some = min(count, 75 - start)
                span = (Span(0, 0, some, start),)
                part = {k: v[start : start + some] for k, v in made.items() if k in ("q_THD", "weights_TH")}
                part["keys"] = replace(made["keys"], spans=span)
                if name == "pool" and made["pooling"].gates is not None:
                    part["pooling"] = replace(made["pooling"], gates=replace(made["pooling"].gates, spans=span))
                parts.append(generate(**{**made, **part}))
            assert torch.equal(torch.cat(parts), want), (generate, count)


@pytest.mark.parametrize("kind", ["local", "never", "gated"])
def test_pools_are_what_their_words_say(kind: str) -> None:
    """By plain loops over one query at a time."""
    name, made = _call(kind, 5, 41, False)
    pooling: Pooling = made["pooling"]
    k_LD = made["keys"].history(made["keys"].spans[0])[0].double()
    if pooling.gates is not None and pooling.bias_SD is not None:
        gate_LD = pooling.gates.history(pooling.gates.spans[0])[0].double()
    for t, listed in enumerate(sparse_index.pool.body(**made).tolist()):

        def score(key_D: Tensor, t: int = t) -> float:
            heads = (made["q_THD"][t].double() @ key_D).clamp(min=0) * made["weights_TH"][t].double()
            return float((heads.sum() * made["scale"]).float())

        pools = []
        for p in range(t // 4 + 1):
            rows = range(4 * p, min(4 * p + 4, t + 1))
            if pooling.gates is not None and pooling.bias_SD is not None:
                if len(rows) == 4:
                    share = torch.softmax(gate_LD[rows.start : rows.stop] + pooling.bias_SD.double(), 0)
                    pools.append((score((share * k_LD[rows.start : rows.stop]).sum(0)), p))
            elif len(rows) == 4 or pooling.tail == "scored":
                pools.append((max(score(k_LD[row]) for row in rows), p))
        newest = {p for _, p in pools[len(pools) - pooling.local :]} if pooling.local else set()
        kept = sorted(pools, key=lambda one: (one[1] not in newest, -one[0], one[1]))[:3]
        want = {row for _, p in kept for row in range(4 * p, min(4 * p + 4, t + 1))}
        if pooling.tail == "always":
            want |= set(range((t + 1) // 4 * 4, t + 1))
        assert [row for row in listed if row >= 0] == sorted(want), t


def test_a_window_lists_the_last_rows_and_the_first() -> None:
    got = sparse_index.window.body(torch.tensor([0, 1, 4, 50]), window=3, sinks=2)
    assert got.tolist() == [[0, -1, -1, -1, -1], [0, 1, -1, -1, -1], [0, 1, 2, 3, 4], [0, 1, 48, 49, 50]]
    with pytest.raises(ValueError, match="window of 0"):
        sparse_index.window.body(torch.arange(3), window=0)


def test_windows_over_a_grid() -> None:
    blocks = sparse_index.grid.body(3, 5, height=2, width=2, reach="block").tolist()
    assert blocks[0] == blocks[1] == blocks[5] == blocks[6] == [0, 1, 5, 6]
    assert blocks[4] == blocks[9] == [4, 9, -1, -1] and blocks[14] == [14, -1, -1, -1]
    near = sparse_index.grid.body(3, 5, height=3, width=3, reach="near").tolist()
    assert near[0] == [0, 1, 5, 6, -1, -1, -1, -1, -1] and near[7] == [1, 2, 3, 6, 7, 8, 11, 12, 13]
    for word, sizes in (("far", (3, 3)), ("near", (2, 3)), ("block", (0, 2))):
        with pytest.raises(ValueError, match=r"windows of|reach is"):
            sparse_index.grid.body(3, 5, height=sizes[0], width=sizes[1], reach=word)


def test_a_part_and_single_records_are_what_history_gives() -> None:
    keys = index_inputs(Inputs(0), ((40, 1), (0, 37), (63, 1)), 1, 4)["keys"]
    for span in keys.spans:
        k_LD, _ = keys.history(span)
        for begin, end in ((0, 1), (0, len(k_LD)), (len(k_LD) // 2, len(k_LD)), (3, 3)):
            assert torch.equal(keys.part(span, begin, end), k_LD[begin:end])
        at = torch.tensor([[0, len(k_LD) - 1], [1 % len(k_LD), 0]])
        assert torch.equal(keys.take(span, at), k_LD[at])
    rows = torch.arange(12.0).view(6, 2)
    assert torch.equal(whole(rows).history(whole(rows).spans[0])[0], rows)
