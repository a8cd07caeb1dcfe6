"""Residual topologies: attention over depth by hand, hyper-connections against transformers."""

from __future__ import annotations

import pytest
import torch
from ops_support import close, poisoned_memory, randomise  # noqa: F401

from dayzero.ops import residual
from dayzero.ops.random_inputs import Inputs

EPS = 1e-5


def test_mix_by_hand() -> None:
    r = Inputs(0)
    partial, bank, norm_w, proj_w = r.normal(5, 12), r.normal(3, 5, 12) * 4, r.normal(12), r.normal(1, 12)
    got = residual.attn_mix(partial, bank, norm_w, proj_w, eps=EPS)
    for t in range(5):
        sources = [*(row[t] for row in bank), partial[t]]
        scores = []
        for source in sources:
            key = source / torch.sqrt((source * source).mean() + EPS) * norm_w  # gamma on the key = gamma in the query
            scores.append(float(key @ proj_w[0]))
        share = torch.tensor(scores).softmax(0)
        close(got[t], sum(s * v for s, v in zip(share, sources)), 1e-5)


def test_mix_of_an_empty_bank_is_the_identity() -> None:
    r = Inputs(1)
    for dtype in (torch.float32, torch.bfloat16):
        partial = r.normal(7, 9, dtype=dtype)
        assert torch.equal(residual.attn_mix(partial, partial[None][:0], r.normal(9), r.normal(9), eps=EPS), partial)


def test_mix_weighs_raw_sources_and_multiplies_the_query_in_f32() -> None:
    r = Inputs(2)
    partial, bank = r.normal(4, 64), r.normal(1, 4, 64)
    zero = torch.zeros(64)
    close(residual.attn_mix(partial, bank * 100, zero, zero, eps=EPS), (partial + bank[0] * 100) / 2, 1e-6)
    norm_w, proj_w = 1 + r.normal(64, dtype=torch.bfloat16) / 8, r.normal(1, 64, dtype=torch.bfloat16)
    kept = residual.attn_mix(partial, bank, norm_w, proj_w, eps=EPS)
    rounded = residual.attn_mix(partial, bank, torch.ones(64), norm_w * proj_w[0], eps=EPS)
    assert float((kept - rounded).norm() / kept.norm()) > 1e-4


def test_streams_equal_transformers() -> None:
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    config = v4.DeepseekV4Config(hidden_size=12, hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6)
    theirs = randomise(v4.DeepseekV4HyperConnection(config), 3, 0.7)
    streams, out = Inputs(4).normal(7, 4, 12) * 3, Inputs(5).normal(7, 12)
    options = {"norm_eps": 1e-6, "mix_eps": 1e-6}
    post, comb, x = theirs(streams[None])
    got_x, got_post, got_comb = residual.streams_enter(
        streams, theirs.fn, theirs.base, theirs.scale, **options, iterations=20
    )
    close(got_x, x[0], 1e-5)
    close(got_post, post[0], 1e-5)
    close(got_comb, comb[0], 1e-5)
    want = post.unsqueeze(-1) * out[None].unsqueeze(-2) + torch.matmul(comb.transpose(-1, -2), streams[None])
    close(residual.streams_leave(streams, out, got_post, got_comb), want[0], 1e-5)
    head = randomise(v4.DeepseekV4HyperHead(config), 6, 0.7)
    got = residual.streams_close(streams, (head.hc_fn, head.hc_base, head.hc_scale), **options)
    close(got, head(streams[None])[0], 1e-5)
    close(residual.streams_close(streams), streams.mean(1), 1e-6)


def test_comb_is_doubly_stochastic_and_its_direction_matters() -> None:
    r = Inputs(7)
    streams = r.normal(5, 4, 12)
    enter = residual.streams_enter(
        streams, r.normal(24, 48) / 8, r.normal(24), torch.ones(3), norm_eps=1e-6, mix_eps=1e-6, iterations=50
    )
    post, comb = enter[1:]
    for dim in (-1, -2):
        close(comb.sum(dim), torch.ones(5, 4), 1e-3)
    one = residual.streams_leave(streams, streams[:, 0], post, comb)
    other = residual.streams_leave(streams, streams[:, 0], post, comb.transpose(1, 2))
    assert float((one - other).norm() / one.norm()) > 0.01


def test_add_is_one_rounding() -> None:
    stream, out = torch.tensor([256.0]).bfloat16(), torch.tensor([1.5]).bfloat16()
    assert float(residual.add(stream, out)) == 258.0  # 257.5 rounds to 258 in steps of 2
