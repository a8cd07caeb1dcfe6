"""Causal, windowed, sink and sparse attention: what is visible, what it weighs, and that every form agrees."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ops_support import close, poisoned_memory  # noqa: F401
from torch import Tensor

from dayzero.ops import attention
from dayzero.ops import sparse_attention as sparse
from dayzero.ops.cases_mixers import causal_lists
from dayzero.ops.random_inputs import Inputs
from dayzero.view import Paged, Span


def _inputs(queries: int, start: int, heads: int = 4, key_heads: int = 2, width: int = 16) -> dict[str, Any]:
    r = Inputs(queries + start)
    rows = start + queries
    return {
        "q_THD": r.normal(queries, heads, width), "k_LKD": r.normal(rows, key_heads, width),
        "v_LKV": r.normal(rows, key_heads, width), "start": start, "scale": width**-0.5,
    }  # fmt: skip


def _seen(out_THL: Tensor) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in out_THL[:, 0]]


@pytest.mark.parametrize("form", [attention.causal, attention.causal_tiled], ids=["whole", "tiled"])
@pytest.mark.parametrize("window", [None, 1, 4])
def test_one_hot_values_read_back_the_visible_set(form: Any, window: int | None) -> None:
    queries, start = 9, 70
    rows = start + queries
    q, k = torch.zeros(queries, 1, 8), torch.zeros(rows, 1, 8)
    out, lse = form(q, k, torch.eye(rows)[:, None], start=start, scale=1.0, window=window)
    for i, seen in enumerate(_seen(out)):
        first = 0 if window is None else max(0, start + i - window + 1)
        assert seen == list(range(first, start + i + 1))  # a window of W holds the current token and W - 1 before it
        close(out[i, 0, seen], torch.full((len(seen),), 1 / len(seen)), 1e-6)
        assert float(lse[i, 0]) == pytest.approx(torch.tensor(float(len(seen))).log().item(), abs=1e-5)


def test_sinks_take_weight_have_no_value_and_equal_transformers() -> None:
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    inputs = _inputs(33, 30)
    sinks = torch.tensor([3.0, -2.0, 0.0, 9.0])
    got, lse = attention.causal(**inputs, sinks_H=sinks, window=7)
    module = SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False)
    mask = torch.zeros(33, 63).masked_fill(~attention.visible(33, 63, 30, 7, torch.device("cpu")), float("-inf"))
    theirs, weights = oss.eager_attention_forward(
        module, *(inputs[n].transpose(0, 1)[None] for n in ("q_THD", "k_LKD", "v_LKV")), mask, inputs["scale"]
    )
    close(got, theirs[0], 1e-6)
    without, plain = attention.causal(**inputs, window=7)
    close(lse, torch.logaddexp(plain, sinks), 1e-6)
    close(got, without * torch.exp(plain - lse)[..., None], 1e-6)
    close(weights[0].sum(-1).T, torch.exp(plain - lse), 1e-5)


def test_softcap_equals_a_loop_over_everything() -> None:
    inputs = _inputs(3, 4)
    got, _ = attention.causal(**inputs, softcap=0.7)
    for t in range(3):
        for h in range(4):
            keys = inputs["k_LKD"][: 5 + t, h // 2]
            scores = 0.7 * torch.tanh(keys @ inputs["q_THD"][t, h] * inputs["scale"] / 0.7)
            close(got[t, h], scores.softmax(0) @ inputs["v_LKV"][: 5 + t, h // 2], 1e-6)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"window": 65, "sinks_H": torch.ones(4)}, {"softcap": 3.0}])
@pytest.mark.parametrize("queries, start", [(1, 0), (1, 63), (1, 64), (65, 0), (7, 125)])
def test_tiles_merge_to_the_whole(queries: int, start: int, options: dict[str, Any]) -> None:
    inputs = _inputs(queries, start)
    for got, want in zip(attention.causal_tiled(**inputs, **options), attention.causal(**inputs, **options)):
        close(got, want, 1e-6)


def test_keys_held_elsewhere_merge_to_the_whole() -> None:
    inputs = _inputs(20, 30)
    want, want_lse = attention.causal(**inputs)
    parts = []
    for first, last in ((0, 7), (7, 41), (41, 50)):
        rows = slice(first, last)
        parts.append(
            attention.causal(
                inputs["q_THD"], inputs["k_LKD"][rows], inputs["v_LKV"][rows], start=30 - first, scale=inputs["scale"]
            )
        )
    assert (parts[2][1] == float("-inf")).any()
    out, lse = attention.merge(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    close(out, want, 1e-6)
    close(lse, want_lse, 1e-6)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_of_queries_give_the_same_bits(chunk: int) -> None:
    inputs = _inputs(65, 3)
    whole, whole_lse = attention.causal(**inputs, window=9)
    for first in range(0, 65, chunk):
        last = min(first + chunk, 65)
        out, lse = attention.causal(
            inputs["q_THD"][first:last], inputs["k_LKD"][: 3 + last], inputs["v_LKV"][: 3 + last],
            start=3 + first, scale=inputs["scale"], window=9,
        )  # fmt: skip
        assert torch.equal(out, whole[first:last])
        assert torch.equal(lse, whole_lse[first:last])


FORMS = {"reference": sparse.sparse, "gather": sparse.sparse_gather, "masked": sparse.sparse_masked}


def _paged(rows_LKD: Tensor, queries: int) -> Paged:
    """Records of one sequence, the last ``queries`` of which are the step's."""
    start = len(rows_LKD) - queries
    ints = [torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0], [0, queries], [start])]
    return Paged(rows_LKD[None], *ints, (Span(0, 0, queries, start),))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_sparse_reads_the_listed_rows_and_no_others(form: Any) -> None:
    rows = 12
    q, k = torch.zeros(3, 1, 8), torch.zeros(rows, 1, 8)
    lists = torch.tensor([[2, 9, -1], [0, 10, 11], [-1, -1, -1]])
    out, lse = form(q, _paged(k, 3), _paged(torch.eye(rows)[:, None], 3), lists, scale=1.0)
    assert _seen(out) == [[2, 9], [0, 10, 11], []]  # the list alone says what is seen
    assert lse[2, 0] == float("-inf")
    assert not out[2].any()


@pytest.mark.parametrize("options", [{}, {"sinks_H": torch.tensor([1.0, -1.0, 0.0, 4.0])}, {"softcap": 2.0}], ids=str)
def test_every_form_agrees_and_is_dense_attention_when_everything_is_listed(options: dict[str, Any]) -> None:
    inputs = _inputs(17, 40)
    q, scale = inputs["q_THD"], inputs["scale"]
    keys, values = _paged(inputs["k_LKD"], 17), _paged(inputs["v_LKV"], 17)
    few, everything = (causal_lists(Inputs(5), 17, 40, num) for num in (6, 57))
    for form in FORMS.values():
        for got, want in zip(
            form(q, keys, values, few, scale=scale, **options),
            sparse.sparse(q, keys, values, few, scale=scale, **options),
        ):
            close(got, want, 1e-6)
        for got, want in zip(
            form(q, keys, values, everything, scale=scale, **options), attention.causal(**inputs, **options)
        ):
            close(got, want, 1e-6)


def test_gate_shapes() -> None:
    r = Inputs(0)
    out, gate = r.normal(7, 3, 4), r.normal(7, 12)
    close(attention.gate(out, gate), out * torch.sigmoid(gate).reshape(7, 3, 4), 1e-6)
    close(attention.gate(out, gate[:, :3]), out * torch.sigmoid(gate[:, :3])[..., None], 1e-6)
    with pytest.raises(ValueError, match="neither"):
        attention.gate(out, gate[:, :4])


def test_heads_that_do_not_share_evenly_are_refused() -> None:
    with pytest.raises(ValueError, match="evenly"):
        attention.causal(**_inputs(2, 0, heads=4, key_heads=3))
