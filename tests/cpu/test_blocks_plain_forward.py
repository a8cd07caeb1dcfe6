"""A model of the kinds no library has, against a forward written token by token and head by head in float64.

Covers: channel decay with a lower bound, full-rank output gate, ungrouped convolutions, latent attention without
rotation and with a channel gate, latent experts with a norm and the saturating activation, residuals over depth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from random_models import CHANNELS, DIM, NORM, delta, in_chunks, latent, model, random_params, stack_of, token_ids
from torch import Tensor

from dayzero.arch.channels import MoE
from dayzero.arch.mixers import MLA, Delta
from dayzero.arch.residuals import AttnRes
from dayzero.arch.spec import ModelSpec

SPEC = model(
    (delta(lower=-5.0, gate_rank=None), latent(rope=None, gate=True), delta(lower=-5.0, gate_rank=None), delta()),
    (CHANNELS["glu"], CHANNELS["moe_latent"]),
    AttnRes(NORM, 2, 2),
)


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def mix(sources: list[Tensor], norm: Tensor, proj: Tensor) -> Tensor:
    """Softmax over sources, token by token; unit keys, raw values."""
    out = torch.empty_like(sources[0])
    for t in range(out.shape[0]):
        scores = []
        for source in sources:
            key = source[t] / math.sqrt(float((source[t] ** 2).mean()) + NORM.eps)
            scores.append(float((key * norm * proj[0]).sum()))
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        out[t] = sum(
            (w / sum(weights) * s[t] for w, s in zip(weights, sources, strict=True)), torch.zeros(DIM).double()
        )
    return out


def plain_delta(spec: Delta, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    num_tokens = x.shape[0]
    parts = {}
    for part in ("q", "k", "v"):
        inputs, taps = x @ p[part].T, p[f"{part}_conv"]
        mixed = torch.zeros_like(inputs)
        for t in range(num_tokens):
            for j in range(4):
                if t - 3 + j >= 0:
                    mixed[t] += taps[:, j] * inputs[t - 3 + j]
        parts[part] = mixed / (1 + torch.exp(-mixed))
    z = x @ p["f_a"].T @ p["f_b"].T + p["dt_bias"]
    beta = 1 / (1 + torch.exp(-(x @ p["beta"].T)))
    out = torch.zeros(num_tokens, spec.heads * spec.value_dim).double()
    for h in range(spec.heads):
        keys, values = slice(h * 8, h * 8 + 8), slice(h * 6, h * 6 + 6)
        rate = math.exp(float(p["a_log"][h]))
        state = torch.zeros(8, 6).double()
        for t in range(num_tokens):
            q, k, v = parts["q"][t, keys], parts["k"][t, keys], parts["v"][t, values]
            q, k = q / torch.sqrt((q * q).sum() + 1e-6) / math.sqrt(8), k / torch.sqrt((k * k).sum() + 1e-6)
            if spec.lower is None:
                g = -rate * torch.log1p(torch.exp(z[t, keys]))
            else:
                g = spec.lower / (1 + torch.exp(-rate * z[t, keys]))
            state = torch.exp(g)[:, None] * state
            state = state + torch.outer(k, beta[t, h] * (v - state.T @ k))
            out[t, values] = rms(state.T @ q, p["o_norm"], spec.norm_eps)
    gate = x @ p["gate"].T if spec.gate_rank is None else x @ p["gate_a"].T @ p["gate_b"].T
    return (out / (1 + torch.exp(-gate))) @ p["o"].T


def plain_latent(spec: MLA, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    q = (rms(x @ p["q_a"].T, p["q_a_norm"], 1e-6) @ p["q_b"].T).view(-1, 4, 16)
    row = x @ p["kv_a"].T
    kv = (rms(row[:, :18], p["kv_a_norm"], 1e-6) @ p["kv_b"].T).view(-1, 4, 19)
    out = torch.zeros(x.shape[0], 36).double()
    for h in range(4):
        key = torch.cat((kv[:, h, :10], row[:, 18:]), dim=-1)
        for t in range(x.shape[0]):
            weights = torch.softmax(key[: t + 1] @ q[t, h] * spec.softmax_scale, 0)
            out[t, 9 * h : 9 * h + 9] = weights @ kv[: t + 1, h, 10:]
    return (out / (1 + torch.exp(-(x @ p["gate"].T)))) @ p["o"].T


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) / (1 + torch.exp(-gate)) * 25 * torch.tanh(up / 25)


def plain_channel(spec: object, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    if not isinstance(spec, MoE):
        gate = x @ p["gate"].T
        return (gate / (1 + torch.exp(-gate)) * (x @ p["up"].T)) @ p["down"].T
    scores = 1 / (1 + torch.exp(-(x @ p["router"].T)))
    z = x @ p["latent_down"].T
    routed = torch.zeros_like(z)
    for t in range(x.shape[0]):
        for e in torch.argsort(scores[t] + p["router_bias"], descending=True)[:3].tolist():
            hidden = situ(p["experts.gate"][e] @ z[t], p["experts.up"][e] @ z[t])
            routed[t] += scores[t, e] * (p["experts.down"][e] @ hidden)
    shared = situ(x @ p["shared.gate"].T, x @ p["shared.up"].T) @ p["shared.down"].T
    return rms(routed, p["latent_norm"], 1e-5) @ p["latent_up"].T + shared


def plain_forward(spec: ModelSpec, params: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    everything = {name: value.double() for name, value in params.items()}
    running: Tensor | None = everything["embed"][tokens]
    bank: list[Tensor] = []
    for i, layer in enumerate(spec.layers):
        p = {n.removeprefix(f"layers.{i}."): v for n, v in everything.items() if n.startswith(f"layers.{i}.")}
        mixer = {n.removeprefix("mixer."): v for n, v in p.items() if n.startswith("mixer.")}
        channel = {n.removeprefix("channel."): v for n, v in p.items() if n.startswith("channel.")}
        assert running is not None
        h = mix([*bank, running], p["mixer_mix_norm"], p["mixer_mix_proj"]) if bank else running
        if i % 2 == 0:
            bank.append(running)
            running = None
        x = rms(h, p["mixer_norm"], NORM.eps)
        out = plain_latent(layer.mixer, mixer, x) if isinstance(layer.mixer, MLA) else (
            plain_delta(layer.mixer, mixer, x)  # type: ignore[arg-type]
        )  # fmt: skip
        running = out if running is None else running + out
        h = mix([*bank, running], p["channel_mix_norm"], p["channel_mix_proj"])
        running = running + plain_channel(layer.channel, channel, rms(h, p["channel_norm"], NORM.eps))
    assert running is not None
    h = mix([*bank, running], everything["close_mix_norm"], everything["close_mix_proj"])
    return rms(h, everything["final_norm"], NORM.eps) @ everything["head"].T


def test_stack_equals_the_plain_forward() -> None:
    """float32 rounding once per operator over four layers against float64: some 1e-6 of the spread."""
    tokens, stack = token_ids(19), stack_of(SPEC)
    want = plain_forward(SPEC, random_params(SPEC), tokens)
    got = stack.head(in_chunks(stack, tokens, 6)).double()
    assert (got - want).abs().max() / want.std() < 1e-5
