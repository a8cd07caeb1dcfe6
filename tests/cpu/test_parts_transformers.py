"""Blocks of bounded delta attention, gated latent attention and latent experts against transformers' modules, where
those have the part, and against the missing line written here where they lack one."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ops_support import close, poisoned_memory  # noqa: F401
from random_models import DIM, NORM, delta, index, latent, model, moe, random_params
from torch import Tensor

from dayzero.arch.channels import GLU, Router
from dayzero.arch.mixers import Mixer
from dayzero.arch.norms import Activation, Norm
from dayzero.arch.residuals import Plain
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import MoEBlock
from dayzero.blocks.site import Params, Site
from dayzero.blocks.stack import Forms, build_mixer
from dayzero.ops.activation import glu
from dayzero.view import in_turn

BOUND = 1e-5  # float32 sums of 36 to 70 terms in another order, through four matrices
CHUNKS = (1, 7, 64, 70)
LENGTH = 70
SITU = Activation("situ", beta=4.0, linear_beta=25.0)


def block_out(mixer: Mixer, params: dict[str, Tensor], x_TD: Tensor, chunk: int, forms: Forms) -> Tensor:
    """What the block of ``mixer`` makes of x in chunks, through a cache."""
    spec = model((mixer,), (GLU(DIM, 8),), Plain(NORM))
    block = build_mixer(mixer, Params(params), Site("layers.0.mixer"), forms)
    cache = LocalCache(spec, torch.float32)
    return torch.cat([block.forward(part, cache.view([0] * len(part))) for part in x_TD.split(chunk)])


def mixer_params(mixer: Mixer, seed: int = 5) -> dict[str, Tensor]:
    spec = model((mixer,), (GLU(DIM, 8),), Plain(NORM))
    named = random_params(spec, seed)
    return {n.removeprefix("layers.0.mixer."): v for n, v in named.items() if n.startswith("layers.0.mixer.")}


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(LENGTH, DIM, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("recurrence", ["recurrent", "chunked"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_bounded_delta_with_a_full_rank_gate(chunk: int, recurrence: Any) -> None:
    bailing = pytest.importorskip("transformers.models.bailing_hybrid.modeling_bailing_hybrid")
    config = SimpleNamespace(
        hidden_size=DIM, linear_num_heads=3, linear_head_dim=8, linear_conv_kernel_dim=4, hidden_act="silu",
        rms_norm_eps=1e-5, kda_safe_gate=True, kda_lower_bound=-5.0,
    )  # fmt: skip
    mixer = replace(delta(key_heads=3, lower=-5.0, gate_rank=None), heads=3, value_dim=8)
    ours = mixer_params(mixer)
    theirs = bailing.BailingHybridDeltaAttention(config, 0).eval().requires_grad_(False)
    values = {
        **{f"{n}_proj.weight": ours[n] for n in "qkv"},
        "conv1d.weight": torch.cat([ours[f"{n}_conv"] for n in "qkv"])[:, None],
        "forget_gate.A_log": ours["a_log"], "forget_gate.dt_bias": ours["dt_bias"],
        "forget_gate.f_proj.weight": ours["f_b"] @ ours["f_a"],  # a pair of ours without anything in between
        "b_proj.weight": ours["beta"], "g_proj.weight": ours["gate"], "o_norm.weight": ours["o_norm"],
        "o_proj.weight": ours["o"],
    }  # fmt: skip
    theirs.load_state_dict(values)
    x = inputs()
    close(block_out(mixer, ours, x, chunk, Forms(recurrence=recurrence)), theirs(x[None])[0], BOUND)


def their_latent(params: dict[str, Tensor], x_TD: Tensor, allowed_TL: Tensor, gated: bool) -> Tensor:
    """The library's module, and in front of its last projection the output gate that it lacks."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    config = SimpleNamespace(
        attention_dropout=0.0, hidden_size=DIM, num_attention_heads=4, num_key_value_heads=4, q_lora_rank=14,
        qk_rope_head_dim=6, kv_lora_rank=18, v_head_dim=9, qk_nope_head_dim=10, attention_bias=False,
        _attn_implementation="eager",
    )  # fmt: skip
    theirs = kimi.KimiLinearAttention(config, 0).eval().requires_grad_(False)
    names = {
        "q_a_proj": "q_a", "q_a_layernorm": "q_a_norm", "q_b_proj": "q_b", "kv_a_proj_with_mqa": "kv_a",
        "kv_a_layernorm": "kv_a_norm", "kv_b_proj": "kv_b", "o_proj": "o",
    }  # fmt: skip
    theirs.load_state_dict({f"{name}.weight": params[ours] for name, ours in names.items()})
    if gated:
        theirs.o_proj.register_forward_pre_hook(lambda _, args: (args[0] * torch.sigmoid(x_TD @ params["gate"].T),))
    mask = torch.zeros(allowed_TL.shape).masked_fill(~allowed_TL, -torch.inf)
    return theirs(x_TD[None], mask[None, None])[0][0]


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("gated", [True, False])
def test_unturned_latent_attention_with_a_gate_for_each_channel(gated: bool, chunk: int, form: Any) -> None:
    mixer = latent(rope=None, gate=gated, norm_eps=1e-6)
    params = mixer_params(mixer)
    # Small latents, so that the eps of their norms counts: 1e-5 in its place would be seen.
    params["q_a"] *= 0.01
    params["kv_a"][:18] *= 0.01
    x = inputs()
    want = their_latent(params, x, torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), gated)
    close(block_out(mixer, params, x, chunk, Forms(latent=form)), want, BOUND)
    wrong = block_out(latent(rope=None, gate=gated, norm_eps=1e-5), params, x, chunk, Forms(latent=form))
    assert float((wrong - want).norm() / want.norm()) > 1e-3


@pytest.mark.parametrize("form", ["absorbed", "expanded"])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_latent_attention_sees_the_five_best_positions_of_an_unturned_index(chunk: int, form: Any) -> None:
    mixer = latent(rope=None, gate=True, norm_eps=1e-6, index=index(rope=None))
    params = mixer_params(mixer)
    x = inputs()
    scores = their_scores(params, x)
    best = scores.masked_fill(torch.ones(LENGTH, LENGTH).triu(1).bool(), -torch.inf)
    allowed = torch.zeros(LENGTH, LENGTH, dtype=torch.bool).scatter(1, best.topk(5).indices, True).tril()
    want = their_latent(params, x, allowed, gated=True)
    close(block_out(mixer, params, x, chunk, Forms(latent=form)), want, BOUND)


def their_scores(params: dict[str, Tensor], x_TD: Tensor) -> Tensor:
    """[T, L]: sum over 8 heads of w_h relu(q_h . k), from the normed query latent; 1e-6 is the norm's eps."""
    query = torch.nn.functional.rms_norm(x_TD @ params["q_a"].T, (14,), params["q_a_norm"], 1e-6)
    q_THD = (query @ params["index.q"].T).unflatten(-1, (8, 16))
    k_LD = torch.nn.functional.layer_norm(
        x_TD @ params["index.k"].T, (16,), params["index.k_norm"], params["index.k_norm_bias"], 1e-6
    )
    weights_TH = x_TD @ params["index.weights"].T * 8**-0.5
    return torch.einsum("th,thl->tl", weights_TH, torch.einsum("thd,ld->thl", q_THD, k_LD).relu() * 16**-0.5)


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))


def test_latent_experts_with_the_norm_behind_the_whole_sum() -> None:
    """The library's router; each token's experts one after another; weights behind them, then one norm."""
    kimi = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
    spec = moe(
        Router(12, 4, "sigmoid", "select"), act=SITU, latent=22, latent_norm=Norm(22, 1e-5), shared=GLU(DIM, 24, SITU)
    )
    named = random_params(model((latent(),), (spec,), Plain(NORM)), 8)
    params = {n.removeprefix("layers.0.channel."): v for n, v in named.items() if n.startswith("layers.0.channel.")}
    params["router_bias"] += 7
    params["experts.gate"] *= 6  # so that both bounds of the activation are reached
    params["experts.up"] *= 20
    config = SimpleNamespace(
        num_experts_per_tok=4, num_local_experts=12, hidden_size=DIM, routed_scaling_factor=1.0, n_group=1,
        topk_group=1, norm_topk_prob=True,
    )  # fmt: skip
    router = kimi.KimiLinearTopkRouter(config).requires_grad_(False)
    router.weight.copy_(params["router"])
    router.e_score_correction_bias.copy_(params["router_bias"])
    x = inputs(3)
    _, weights, ids = router(x)
    z = x @ params["latent_down"].T
    summed = torch.zeros(LENGTH, 22)
    for t in range(LENGTH):
        for weight, e in zip(weights[t], ids[t], strict=True):
            gate, up = (params[f"experts.{n}"][e] @ z[t] for n in ("gate", "up"))
            summed[t] += weight * (params["experts.down"][e] @ situ(gate, up))
    routed = torch.nn.functional.rms_norm(summed, (22,), params["latent_norm"], 1e-5) @ params["latent_up"].T
    shared = situ(x @ params["shared.gate"].T, x @ params["shared.up"].T) @ params["shared.down"].T
    view = SimpleNamespace(beside=in_turn)
    got = MoEBlock(spec, Params(params), Site("layers.0.channel")).forward(x, view)  # type: ignore[arg-type]
    close(got, routed + shared, BOUND)


def test_the_activation_is_bounded_by_both_of_its_constants() -> None:
    def at(gate: float, up: float) -> float:
        return float(
            glu(torch.tensor([float(gate)]), torch.tensor([float(up)]), kind="situ", beta=4.0, linear_beta=25.0)
        )

    assert at(1e3, 1e3) == pytest.approx(100) and at(1e3, -1e3) == pytest.approx(-100)
    assert at(0, 5) == 0 and at(5, 0) == 0
    # 4 tanh(1/2) sigmoid(2) = 1.6281258, 25 tanh(1/5) = 4.9343830
    assert at(2, 5) == pytest.approx(1.6281258 * 4.9343830, rel=1e-6)
    assert abs(at(-1e3, 1e3)) < 1e-30
