"""Norms, rotary embedding and matrix products against transformers and against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from ops_support import close, poisoned_memory  # noqa: F401
from torch.nn import functional as F

from dayzero.ops import activation, linear, norm, rope, sample
from dayzero.ops.contract import relative_l2

BF16 = torch.bfloat16


def _normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_rms_orders_equal_those_of_transformers() -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    x, weight = _normal(63, 40).to(BF16) * 5, _normal(40, seed=1)
    cast_first = kimi.KimiLinearRMSNorm(40, 1e-5)
    cast_first.weight.data = weight.to(BF16)
    # An f32 sum in another order moves a few of 2,520 elements by a bf16 step (2^-8 / sqrt(2520) = 8e-5 each); the
    # other order of rounding moves about half of them.
    ours = norm.rms(x, weight.to(BF16), eps=1e-5, scale_in="dtype")
    close(ours, cast_first(x).detach(), 3e-4)
    in_f32 = v4.DeepseekV4RMSNorm(40, 1e-6)
    in_f32.weight.data = weight
    close(norm.rms(x, weight, eps=1e-6), in_f32(x).detach(), 3e-4)
    offset = qwen.Qwen3_5RMSNorm(40, 1e-6)
    offset.weight.data = weight
    close(norm.rms(x, weight, eps=1e-6, offset=True), offset(x).detach(), 3e-4)
    assert relative_l2(norm.rms(x, weight.to(BF16), eps=1e-5), ours) > 1e-3


def test_gated_layer_and_l2_norms_equal_transformers_and_torch() -> None:
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    x, gate, weight = _normal(7, 3, 24), _normal(7, 3, 24, seed=1) * 4, _normal(24, seed=2)
    for theirs, act in (
        (kimi.KimiLinearRMSNormGated(24, 1e-5), "sigmoid"),
        (qwen.Qwen3_5RMSNormGated(24, 1e-5), "silu"),
    ):
        theirs.weight.data = weight
        close(norm.rms_gated(x, gate, weight, eps=1e-5, act=act), theirs(x, gate).detach(), 1e-6)
    close(norm.layer(x, weight, gate[0, 0], eps=1e-6), F.layer_norm(x, (24,), weight, gate[0, 0], 1e-6), 1e-6)
    close(norm.l2(x), kimi.l2norm(x), 1e-6)


def test_l2_eps_stands_inside_the_root_of_a_sum() -> None:
    tiny = torch.full((1, 4), 1e-4)
    assert float(norm.l2(tiny)[0, 0]) == pytest.approx(1e-4 / math.sqrt(4e-8 + 1e-6), rel=1e-6)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_rope_turns_the_pairs_it_says(style: str) -> None:
    inv_freq, position = torch.tensor([1.0, 0.25]), 3
    x = torch.arange(1.0, 7.0).reshape(1, 1, 6)
    got = rope.apply(x, torch.tensor([position]), inv_freq, style=style, part="last", factor=2.0)[0, 0]
    pairs = {"half": [(2, 4), (3, 5)], "interleaved": [(2, 3), (4, 5)]}[style]
    want = x[0, 0].clone()
    for (a, b), freq in zip(pairs, inv_freq.tolist()):
        cos, sin = 2 * math.cos(position * freq), 2 * math.sin(position * freq)
        want[a], want[b] = x[0, 0, a] * cos - x[0, 0, b] * sin, x[0, 0, b] * cos + x[0, 0, a] * sin
    close(got, want, 1e-6)
    assert torch.equal(got[:2], x[0, 0, :2])


def test_rope_equals_transformers_half_interleaved_and_three_axes() -> None:
    v32 = pytest.importorskip("transformers.models.deepseek_v32.modeling_deepseek_v32")
    oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    x, inv_freq = _normal(65, 3, 16), 1e4 ** (-torch.arange(8) / 8)
    positions = torch.arange(65) * 1543  # up to 98,752: the product of position and frequency must be the f32 one
    angle = positions.float()[:, None] * inv_freq
    cos, sin = angle.cos()[None], angle.sin()[None]
    theirs = oss.apply_rotary_pos_emb(x[None].transpose(1, 2), x[None].transpose(1, 2), cos, sin)[0][0].transpose(0, 1)
    close(rope.apply(x, positions, inv_freq, style="half"), theirs, 1e-6)
    both = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
    theirs = v32.apply_rotary_pos_emb_interleave(x[None], x[None], *both, unsqueeze_dim=2)[0][0]
    # Theirs comes back with even members first; ours keeps the pairs in place.
    ours = rope.apply(x, positions, inv_freq, style="interleaved")
    close(torch.cat([ours[..., ::2], ours[..., 1::2]], -1), theirs, 1e-6)

    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    config = qwen.Qwen3_5TextConfig(
        hidden_size=64, num_attention_heads=2, head_dim=88, max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_section": [5, 3, 3],
        },
    )  # fmt: skip
    rotary = qwen.Qwen3_5TextRotaryEmbedding(config)
    grid = torch.randint(0, 999, (3, 65), generator=torch.Generator().manual_seed(3))
    heads = _normal(65, 2, 88, seed=4)
    cos, sin = rotary(heads, grid[:, None])
    theirs = qwen.apply_rotary_pos_emb(heads[None].transpose(1, 2), heads[None].transpose(1, 2), cos, sin)[0]
    ours = rope.apply(heads, grid, rotary.inv_freq, style="half", sections=(5, 3, 3))
    close(ours, theirs[0].transpose(0, 1), 1e-6)


def test_rope_inverse_turns_back_and_wrong_calls_are_refused() -> None:
    x, inv_freq, positions = _normal(7, 2, 12), torch.tensor([1.0, 0.1]), torch.arange(7) * 99
    for style in ("half", "interleaved"):
        there = rope.apply(x, positions, inv_freq, style=style)
        close(rope.apply(there, positions, inv_freq, style=style, inverse=True), x, 1e-6)
    with pytest.raises(ValueError, match="sections"):
        rope.apply(x, positions.expand(3, -1), inv_freq, style="half")
    with pytest.raises(ValueError, match="cannot be rotated"):
        rope.apply(x[..., :3], positions, inv_freq, style="half")


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    x, w = _normal(65, 257).to(BF16), _normal(33, 257, seed=1).to(BF16)
    whole = linear.matmul(x, w)
    normed = norm.rms(x, w[0], eps=1e-6)
    for row in (0, 13, 64):
        assert torch.equal(linear.matmul(x[row : row + 1], w)[0], whole[row])
        assert torch.equal(norm.rms(x[row : row + 1], w[0], eps=1e-6)[0], normed[row])
    assert torch.equal(whole, (x.double() @ w.double().T).to(BF16))


def test_linear_keeps_f32_where_it_says_so_and_groups_are_apart() -> None:
    x, w, bias = _normal(7, 33).to(BF16), _normal(5, 33, seed=1), _normal(5, seed=2)
    assert linear.matmul_f32(x, w, bias).dtype == torch.float32
    close(linear.matmul_f32(x, w, bias), F.linear(x.float(), w, bias), 1e-6)
    grouped_x, grouped_w = _normal(7, 3, 16), _normal(3, 9, 16, seed=3)
    block = torch.block_diag(*grouped_w)
    close(linear.grouped(grouped_x, grouped_w).flatten(1), grouped_x.flatten(1) @ block.T, 1e-6)


def test_vocabulary_sized_products_are_cut_without_a_seam() -> None:
    w = _normal(2 * 8192 + 3, 4)
    close(linear.matmul(_normal(2, 4, seed=1), w), _normal(2, 4, seed=1) @ w.T, 1e-6)


def test_glu_kinds_by_hand() -> None:
    g, u = torch.tensor([9.0, -2.0, 30.0]), torch.tensor([3.0, -50.0, 11.0])
    sigmoid = torch.sigmoid
    close(activation.glu(g, u), g * sigmoid(g) * u, 1e-6)
    clamped = activation.glu(g, u, kind="clamped", limit=7.0, alpha=1.702)
    gate, up = torch.tensor([7.0, -2.0, 7.0]), torch.tensor([3.0, -7.0, 7.0])
    close(clamped, gate * sigmoid(1.702 * gate) * (up + 1), 1e-6)
    gate, up = torch.tensor([9.0, -2.0, 10.0]), torch.tensor([3.0, -10.0, 10.0])
    close(activation.glu(g, u, kind="silu_clamped", limit=10.0), gate * sigmoid(gate) * up, 1e-6)
    situ = activation.glu(g, u, kind="situ", beta=4.0, linear_beta=25.0)
    close(situ, 4 * torch.tanh(g / 4) * sigmoid(g) * 25 * torch.tanh(u / 25), 1e-6)
    assert float(activation.glu(g * 99, u * 99, kind="situ", beta=4.0, linear_beta=25.0).abs().max()) <= 100
    for wrong in ({"kind": "silu", "limit": 7.0}, {"kind": "clamped", "limit": 7.0}, {"kind": "relu"}):
        with pytest.raises(ValueError, match="activation"):
            activation.glu(g, u, **wrong)


def test_greedy_takes_the_lower_id_on_ties() -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [0.0, 0.0, 0.0, 0.0], [-1.0, -3.0, -2.0, -1.0]])
    assert sample.greedy(logits).tolist() == [1, 0, 0]
