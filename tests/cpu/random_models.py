"""Small specs with random parameters, straight from the arch records, for tests of blocks.

Values are of a scale at which nothing saturates and nothing vanishes; every parameter is away from 0 and 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dayzero.arch.channels import GLU, Channel, MoE, Router
from dayzero.arch.index import Index, LocalIndex, Pool
from dayzero.arch.mixers import MLA, Attention, Delta, Mixer
from dayzero.arch.norms import Activation, Norm
from dayzero.arch.residuals import AttnRes, Plain, Residual
from dayzero.arch.rope import Rope, Yarn
from dayzero.arch.spec import LayerSpec, ModelSpec, Tie
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.stack import Forms, Stack

DIM, VOCAB = 36, 53
USUAL = Forms()
NORM = Norm(DIM, 1e-5)
ROPE = Rope(8, 10000.0)


def attention(**over: object) -> Attention:
    values: dict[str, object] = {"rope": ROPE, "softmax_scale": 12**-0.5, **over}
    return Attention(DIM, 6, 2, 12, **values)  # type: ignore[arg-type]


def latent(**over: object) -> MLA:
    values: dict[str, object] = {
        "q_rank": 14, "rope": Rope(6, 10000.0, "interleaved"), "softmax_scale": 16**-0.5, "norm_eps": 1e-6, **over,
    }  # fmt: skip
    return MLA(DIM, 4, kv_rank=18, nope=10, shared=6, v_dim=9, **values)  # type: ignore[arg-type]


def index(**over: object) -> Index:
    values: dict[str, object] = {"rope": Rope(6, 10000.0), "top_k": 5, **over}
    return Index(DIM, 14, 8, 16, key_norm=Norm(16, 1e-6, "layer", bias=True), **values)  # type: ignore[arg-type]


def delta(**over: object) -> Delta:
    values: dict[str, object] = {
        "key_heads": 4, "decay": "channel", "norm_eps": 1e-5, "out_gate": "sigmoid", "decay_rank": 5, "gate_rank": 5,
        **over,
    }  # fmt: skip
    return Delta(DIM, 4, key_dim=8, value_dim=6, conv=4, **values)  # type: ignore[arg-type]


def moe(router: Router | None = None, **over: object) -> MoE:
    return MoE(DIM, 20, router or Router(8, 3, "softmax"), **over)  # type: ignore[arg-type]


YARN_ROPE = Rope(12, 10000.0, "half", scaling=Yarn(4.0, 32, truncate=False, magnitude=1.1))
BLOCKS, GATED = Pool(4, "max", local=1, tail="scored"), Pool(3, "gated")
MIXERS: dict[str, tuple[Mixer, ...]] = {
    "attention": (attention(), attention()),
    "window_sinks": (attention(window=5, sinks=True, bias=True, out_bias=True, rope=YARN_ROPE), attention(sinks=True)),
    "qk_norm_gate": (attention(qk_norm=Norm(12, 1e-6, offset=True, scale_in="f32"), gate=True), attention(rope=None)),
    "latent": (latent(), latent(q_rank=None)),
    "latent_raw_gate": (latent(rope=None, gate=True), latent(gate=True)),
    "latent_index": (latent(index=index()), latent(index=index(rope=None, top_k=7))),
    "latent_shared_index": (latent(index=index()), latent(index=index(shared=True))),
    "latent_pools": (latent(index=index(pool=BLOCKS, top_k=8)), latent(index=index(shared=True, pool=BLOCKS, top_k=8))),
    "latent_gated": (latent(index=index(pool=GATED, top_k=6)), latent(rope=None, index=index(pool=GATED, top_k=3))),
    "latent_near": (latent(index=LocalIndex(5)), latent(index=LocalIndex(3, sinks=2))),
    "latent_forced": (latent(index=index(sinks=1, window=2)), latent(index=index(window=1))),
    "delta_softplus": (delta(), delta()),
    "delta_bounded": (delta(lower=-5.0, gate_rank=None), delta(decay_rank=None, lower=-5.0)),
    "delta_head": (delta(decay="head", key_heads=2, decay_rank=None, gate_rank=None, out_gate="silu"), attention()),
}
CHANNELS: dict[str, Channel] = {
    "glu": GLU(DIM, 28),
    "glu_clamped": GLU(DIM, 28, Activation("silu_clamped", limit=0.4)),
    "moe_softmax": moe(),
    "moe_softmax_topk": moe(
        Router(8, 3, "softmax_topk", "logit"), act=Activation("clamped", limit=0.5, alpha=1.702), bias=True
    ),
    "moe_sigmoid_groups": moe(
        Router(8, 3, "sigmoid", "select", 4, 2, scale=2.5), shared=GLU(DIM, 24), shared_gate=True
    ),
    "moe_latent": moe(
        Router(8, 3, "sigmoid", "select", renormalise=False), act=Activation("situ", beta=4.0, linear_beta=25.0),
        latent=22, latent_norm=Norm(22, 1e-5), shared=GLU(DIM, 24, Activation("situ", beta=4.0, linear_beta=25.0)),
    ),
}  # fmt: skip
RESIDUALS: dict[str, Callable[[], Residual]] = {
    "plain": lambda: Plain(NORM),
    "sandwich": lambda: Plain(NORM, sandwich=True),
    "attn_res": lambda: AttnRes(NORM, 2, 3),
}


def model(
    mixers: tuple[Mixer, ...], channels: tuple[Channel, ...], residual: Residual, *, tied: bool = False
) -> ModelSpec:
    """One layer for each mixer; channels are repeated in turn."""
    layers = tuple(LayerSpec(m, channels[i % len(channels)], residual) for i, m in enumerate(mixers))
    return ModelSpec("test", DIM, VOCAB, layers, NORM, Tie(tied, "test"), 256)


def random_params(spec: ModelSpec, seed: int = 0) -> dict[str, Tensor]:
    """Every declared parameter, float32."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for decl in spec.params():
        noise = torch.randn(decl.shape, generator=generator)
        if decl.role == "norm":
            out[decl.name] = 0.1 * noise if decl.name.endswith("_bias") else 1 + 0.1 * noise
        elif decl.role in ("bias", "scalar"):
            out[decl.name] = 0.3 * noise
        else:
            out[decl.name] = noise * (1.0 if decl.role == "embed" else decl.shape[-1] ** -0.5)
    return out


def loader(params: dict[str, Tensor]) -> Callable[[str], dict[str, Tensor]]:
    def load(prefix: str) -> dict[str, Tensor]:
        found = {n: v for n, v in params.items() if n == prefix or n.startswith(f"{prefix}.")}
        assert found, prefix
        return found

    return load


def stack_of(spec: ModelSpec, seed: int = 0, forms: Forms = USUAL) -> Stack:
    return Stack(spec, loader(random_params(spec, seed)), forms=forms)


def token_ids(count: int, seed: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (count,), generator=torch.Generator().manual_seed(seed))


def in_chunks(stack: Stack, tokens: Tensor, chunk_tokens: int) -> Tensor:
    """Hidden states [T, D] of one sequence that goes through a fresh cache in chunks."""
    cache = LocalCache(stack.spec, torch.float32)
    return torch.cat([stack.forward(cache.view(part)) for part in tokens.split(chunk_tokens)])
