"""Latent attention in both forms, index selection, and both together against transformers' sparse attention layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ops_support import close, poisoned_memory, randomise  # noqa: F401
from torch import Tensor

from dayzero.ops import attention, latent, linear, norm, paged, rope, sparse_attention, sparse_index
from dayzero.ops.cases_mixers import causal_lists
from dayzero.ops.random_inputs import Inputs
from dayzero.view import Span


def _inputs(queries: int, start: int, shared: int = 8, kv_b: Tensor | None = None) -> dict[str, Any]:
    r = Inputs(queries)
    return {
        "q_THD": r.normal(queries, 3, 12 + shared), "cache_LC": r.normal(start + queries, 16 + shared),
        "kv_b": r.normal(3 * 32, 16) if kv_b is None else kv_b, "start": start, "scale": (12 + shared) ** -0.5,
    }  # fmt: skip


def absorbed(
    q_THD: Tensor, cache_LC: Tensor, kv_b: Tensor, *, start: int, scale: float, allowed_TA: Tensor | None = None,
    attend: Any = sparse_attention.sparse, **options: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The projections of the absorbed form around ``attention.paged``, or ``attend`` over listed rows."""
    rank, heads = kv_b.shape[1], q_THD.shape[1]
    nope = q_THD.shape[2] - (cache_LC.shape[1] - rank)
    w_uk, w_uv = latent.absorb(kv_b, heads, nope, kv_b.shape[0] // heads - nope)
    span = Span(0, 0, q_THD.shape[0], start)
    keys = replace(sparse_attention.whole(cache_LC), spans=(span,)).headed()
    listed = () if allowed_TA is None else (allowed_TA,)
    operator = paged.paged if allowed_TA is None else attend
    out, lse = operator(
        latent.queries_into_latent(q_THD, w_uk), keys, None, *listed, scale=scale, value_dim=rank, **options
    )
    return latent.values_out_of_latent(out, w_uv, q_THD.dtype), lse


def _options() -> list[dict[str, Any]]:
    lists = causal_lists(Inputs(3), 33, 31, 5)
    sinks = torch.tensor([2.0, -1.0, 0.5])
    return [{}, {"window": 6}, {"sinks_H": sinks}, {"allowed_TA": lists}, {"allowed_TA": lists, "sinks_H": sinks}]


@pytest.mark.parametrize("options", _options())
@pytest.mark.parametrize("shared", [0, 8])
def test_absorbed_equals_expanded(options: dict[str, Any], shared: int) -> None:
    inputs = _inputs(33, 31, shared)
    for got, want in zip(absorbed(**inputs, **options), latent.attend_expanded(**inputs, **options)):
        close(got, want, 1e-6)
    narrow = {k: v.to(torch.bfloat16) if isinstance(v, Tensor) else v for k, v in inputs.items()}
    a, b = absorbed(**narrow, **options)[0], latent.attend_expanded(**narrow, **options)[0]
    assert (a == b).double().mean() > 0.999  # both keep f64 to the end; only a tie of rounding may differ


def test_both_equal_plain_attention_over_expanded_keys() -> None:
    inputs = _inputs(20, 9)
    k_nope, v = latent.expand(inputs["cache_LC"][:, :16], inputs["kv_b"], 3, 12, 20)
    k = torch.cat([k_nope, inputs["cache_LC"][:, None, 16:].expand(-1, 3, -1)], dim=-1)
    want = attention.causal(inputs["q_THD"], k, v, start=9, scale=inputs["scale"])
    for form in (latent.attend_expanded, absorbed):
        for got, whole in zip(form(**inputs), want):
            close(got, whole, 1e-5)


def test_a_head_that_straddles_scale_blocks_is_absorbed_right() -> None:
    heads, nope, value, rank, block = 3, 192, 256, 160, 128  # heads of 448 rows over blocks of 128: 3.5 blocks each
    r = Inputs(0)
    codes = r.normal(heads * 448, rank).to(torch.float8_e4m3fn)
    scales = torch.exp2(r.integers(-9, 3, -(-heads * 448 // block), -(-rank // block)).float())
    per_element = scales.repeat_interleave(block, 0)[: heads * 448].repeat_interleave(block, 1)[:, :rank]
    kv_b = codes.float() * per_element
    w_uk, w_uv = latent.absorb(kv_b, heads, nope, value)
    for head, row in ((0, 0), (1, 63), (1, 64), (2, 191)):  # rows 511 and 512 lie in different blocks
        assert torch.equal(w_uk[head, row], codes[head * 448 + row].float() * per_element[head * 448 + row])
    assert torch.equal(w_uv[2, 255], kv_b[-1])
    q, cache = r.normal(9, heads, nope + 16), r.normal(40, rank + 16)
    for scale_of in (kv_b, kv_b.to(torch.bfloat16)):
        inputs = {"q_THD": q, "cache_LC": cache, "kv_b": scale_of, "start": 31, "scale": 208**-0.5}
        for got, want in zip(absorbed(**inputs), latent.attend_expanded(**inputs)):
            close(got, want, 1e-5)
    with pytest.raises(ValueError, match="rows"):
        latent.absorb(kv_b[:-1], heads, nope, value)


def test_score_is_the_weighted_sum_of_rectified_products() -> None:
    r = Inputs(1)
    q, k, w = r.normal(5, 8, 16), r.normal(12, 16), r.normal(5, 8)
    got = sparse_index.score(q, k, w, start=7, scale=0.25)
    want = (torch.relu(torch.einsum("thd,ld->thl", q, k) * 0.25) * w[..., None]).sum(1)
    seen = attention.visible(5, 12, 7, None, torch.device("cpu"))
    close(got[seen], want[seen], 1e-6)
    assert (got[~seen] == float("-inf")).all()


def test_top_k_is_exact_and_ties_go_to_the_lower_row() -> None:
    inf = float("-inf")
    scores = torch.tensor([[1.0, 3.0, 3.0, 0.0, 9.0], [2.0, 2.0, 2.0, 2.0, 2.0], [0.0, inf, inf, 1.0, inf]])
    assert sparse_index.top_k(scores, 3, start=2).tolist() == [[0, 1, 2], [0, 1, 2], [0, 3, -1]]
    by_score = sparse_index.top_k(scores, 2, start=2, order="score")
    assert by_score.tolist() == [[1, 2], [0, 1], [3, 0]]
    assert sparse_index.top_k(scores[:1], 7, start=4, order="score").tolist() == [[4, 1, 2, 0, 3, -1, -1]]
    assert sparse_index.top_k(scores[:, :0], 2, start=-1).tolist() == [[-1, -1]] * 3
    with pytest.raises(ValueError, match="order"):
        sparse_index.top_k(scores, 2, start=2, order="id")


def test_top_k_equals_a_sort_by_score_then_row() -> None:
    r = Inputs(2)
    scores = r.integers(0, 4, 40, 50).float()
    got = sparse_index.top_k(scores, 6, start=10)
    for i in range(40):
        rows = sorted(range(min(50, 11 + i)), key=lambda row: (-float(scores[i, row]), row))[:6]
        assert got[i].tolist() == sorted(rows)


def test_forced_rows_come_first_and_count_towards_k() -> None:
    scores = torch.zeros(3, 20)
    scores[:, 7] = 5.0
    got = sparse_index.top_k(scores, 5, start=13, sinks=1, window=2)
    assert got.tolist() == [[0, 1, 7, 12, 13], [0, 1, 7, 13, 14], [0, 1, 7, 14, 15]]
    # Pools of 4: the query at 13 leaves rows 12 and 13 incomplete, the one at 15 none.
    got = sparse_index.top_k(scores, 3, start=13, tail=4)
    assert got.tolist() == [[7, 12, 13], [12, 13, 14], [0, 1, 7]]


def test_a_sparse_latent_layer_equals_transformers() -> None:
    v32 = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    config = v32.DeepseekV32Config(
        hidden_size=48, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=24, kv_lora_rank=16,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=20, index_n_heads=8, index_head_dim=16, index_topk=5,
        max_position_embeddings=512, attn_implementation="eager",
    )  # fmt: skip
    layer = randomise(v32.DeepseekV32Attention(config, 0), 4)
    tokens, device = 37, torch.device("cpu")
    x = Inputs(6).normal(tokens, 48)
    positions, inv_freq = torch.arange(tokens), 1e4 ** (-torch.arange(4) / 4)
    angle = torch.cat([positions[:, None] * inv_freq] * 2, -1)[None]
    mask = torch.zeros(tokens, tokens).masked_fill(~attention.visible(tokens, tokens, 0, None, device), -torch.inf)
    want = layer(x[None], (angle.cos(), angle.sin()), mask[None, None])[0][0]

    weight = layer.state_dict()

    def project(t: Tensor, name: str) -> Tensor:
        return linear.matmul(t, weight[f"{name}.weight"])

    def rotate(t: Tensor, style: str, part: str) -> Tensor:
        return rope.apply(t, positions, inv_freq, style=style, part=part)

    qr = norm.rms(project(x, "q_a_proj"), weight["q_a_layernorm.weight"], eps=1e-6, scale_in="dtype")
    q = rotate(project(qr, "q_b_proj").unflatten(-1, (3, 20)), "interleaved", "last")
    raw = project(x, "kv_a_proj_with_mqa")
    latent_LR = norm.rms(raw[:, :16], weight["kv_a_layernorm.weight"], eps=1e-6, scale_in="dtype")
    cache = torch.cat([latent_LR, rotate(raw[:, None, 16:], "interleaved", "last")[:, 0]], dim=-1)
    iq = rotate(project(qr, "indexer.wq_b").unflatten(-1, (8, 16)), "half", "first")
    k_norm = weight["indexer.k_norm.weight"], weight["indexer.k_norm.bias"]
    ik = rotate(norm.layer(project(x, "indexer.wk"), *k_norm, eps=1e-6)[:, None], "half", "first")[:, 0]
    iw = linear.matmul_f32(x, weight["indexer.weights_proj.weight"]) * 8**-0.5
    chosen = sparse_index.top_k(sparse_index.score(iq, ik, iw, start=0, scale=16**-0.5), 5, start=0)
    theirs = layer.indexer(x[None], qr[None], (angle.cos(), angle.sin()), mask[None], positions)[0]
    for i in range(5, tokens):
        assert set(chosen[i].tolist()) == set(theirs[i].tolist())
    for form in (latent.attend_expanded, absorbed):
        out, _ = form(q, cache, weight["kv_b_proj.weight"], start=0, scale=layer.scaling, allowed_TA=chosen)
        close(project(out.flatten(1), "o_proj"), want, 1e-5)
    dense, _ = absorbed(q, cache, weight["kv_b_proj.weight"], start=0, scale=layer.scaling)
    assert float((project(dense.flatten(1), "o_proj") - want).norm() / want.norm()) > 0.01  # selection bites
