"""Seeded values that look like trained ones: what each kind of parameter is drawn from.

Matrices N(0, 1/fan_in); norm weights around the mean their convention has; decay rates and step biases as the papers
initialise them (A in [1, 16], step in [1e-3, 0.1], Mamba-2 and KDA); router biases around 7, spread over a quarter,
so that rounding them to bfloat16 changes which experts are chosen.
"""

from __future__ import annotations

import hashlib

import torch

from dayzero.checkpoint.rules import Group, Narrow
from dayzero.decl import ParamDecl

EMBED_STD = 0.05  # trained embeddings are small, and so the eps of the first norm counts for something


def generator(seed: int, name: str) -> torch.Generator:
    """A generator that depends on the tensor's name alone, so that order and sharding do not matter."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def logical_values(group: Group, name: str, seed: int, *, tied: bool) -> torch.Tensor:
    """float32 values for one logical tensor ``name`` of ``group``, shape group.shape. tied: the embedding is the head,
    so its rows are scaled as a head's are, or every next token would be certain."""
    decl = group.targets[0].decl
    out = _draw(decl, group.shape, generator(seed, name))
    if decl.name == "embed" and tied:
        out *= group.shape[-1] ** -0.5 / EMBED_STD
    if isinstance(group.rule, Narrow):
        piece = group.targets[0].of_tensor
        assert piece is not None
        out[piece.stop :] = 0  # what lies behind is padding in the real files, too
    return out


def _draw(decl: ParamDecl, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor:
    word = decl.name.rsplit(".", 1)[-1]
    if word == "a_log":
        return torch.empty(shape).uniform_(1, 16, generator=rng).log()
    if word == "dt_bias":
        step = torch.exp(torch.empty(shape).uniform_(-6.9, -2.3, generator=rng))
        return step + torch.log(-torch.expm1(-step))  # inverse of softplus
    if word == "router_bias" and decl.stored == "f32":
        return 7.0 + torch.empty(shape).uniform_(0, 0.25, generator=rng)
    if decl.role == "norm":
        return (decl.center if decl.center is not None else 1.0) + 0.1 * torch.randn(shape, generator=rng)
    if decl.role in ("bias", "scalar"):
        return 0.1 * torch.randn(shape, generator=rng) if decl.role == "bias" else torch.randn(shape, generator=rng)
    if decl.role == "embed":
        return torch.randn(shape, generator=rng) * (EMBED_STD if decl.name == "embed" else shape[-1] ** -0.5)
    fan_in = shape[-1] if decl.role != "conv" else max(1, shape[-1])
    return torch.randn(shape, generator=rng) * fan_in**-0.5
