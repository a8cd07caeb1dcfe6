"""Counting: parameters, FLOPs, cache bytes, and the floors that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from dayzero.arch.channels import MoE
from dayzero.arch.record_choice import records_text, with_records
from dayzero.arch.records import record_bytes
from dayzero.arch.spec import ModelSpec
from dayzero.decl import ParamDecl


def total_params(spec: ModelSpec) -> int:
    """Weights, not packed bytes; a tied head counts once, vision included."""
    return sum(decl.numel for decl in spec.params())


def extra_params(spec: ModelSpec) -> int:
    """Weights of the layers that the plain forward does not run, without copies of embedding and head."""
    return sum(decl.numel for decl in spec.extra.params()) if spec.extra else 0


def active_params(spec: ModelSpec) -> int:
    """Weights one text token meets in the matmuls of a forward pass: head included, embedding row and vision not."""
    total = spec.vocab * spec.dim + spec.final_norm.dim
    total += sum(d.numel for d in spec.layers[-1].residual.close_params())
    for layer in spec.layers:
        total += sum(d.numel for d in layer.residual.params("p")) + sum(d.numel for d in layer.mixer.params("p"))
        total += layer.channel.active_params()
        if isinstance(layer.channel, MoE):
            total += layer.channel.latent_norm.dim if layer.channel.latent_norm else 0
            total += layer.channel.router.experts if layer.channel.router.bias else 0
    return total


def flops_per_token(spec: ModelSpec, context: float) -> float:
    """Multiply-adds × 2 for one token that attends ``context`` tokens."""
    return 2.0 * active_params(spec) + sum(layer.mixer.flops(context) for layer in spec.layers)


def expert_share(spec: ModelSpec, tokens: int) -> float:
    """Expected share of the routed experts' weights that ``tokens`` rows touch, by the chance that a row chose them."""
    total = touched = 0.0
    for layer in spec.layers:
        if isinstance(layer.channel, MoE):
            router = layer.channel.router
            weights = 3.0 * layer.channel.inner * layer.channel.width * router.experts
            total += weights
            touched += weights * (1.0 - (1.0 - router.top_k / router.experts) ** tokens)
    return touched / total if total else 0.0


@dataclass(frozen=True, slots=True)
class CacheCost:
    """Bytes for the whole model, unsharded. per_token: growth for each token of context, window layers left out (they
    stop growing). per_sequence: recurrent state. window: bytes a sequence holds in window layers once they are full.
    records: what tokens are kept in."""

    records: str
    per_token: int
    per_sequence: int
    window: int


def cache_cost(spec: ModelSpec, cache: str) -> CacheCost:
    """cache: the records of tokens, as ``record_choice.parse_records`` reads it; aliased needs count once."""
    spec = with_records(spec, cache)
    per_token = per_sequence = window = 0
    for need in spec.cache():
        if need.shares is not None:
            continue
        size = record_bytes(need)
        if need.unit == "state":
            per_sequence += size
        elif need.window is not None:
            window += size * need.window
        else:
            per_token += size
    return CacheCost(records_text(spec), per_token, per_sequence, window)


def numel(decls: list[ParamDecl]) -> int:
    return sum(decl.numel for decl in decls)
