"""Seeded values that look like trained ones: what each kind of parameter is drawn from.

Matrices N(0, 1/fan_in), their magnitude differing from scale block to scale block where they are stored with scales;
norm weights around the mean their convention has; decay rates and step biases as the papers initialise them (A in
[1, 16], step in [1e-3, 0.1], Mamba-2 and KDA), for bounded decays around A = 1 with steps up to 10, so that channels
reach from remembering a thousand tokens to forgetting at once; latents small in front of their norms, so that the eps
of those counts; router biases around 7, spread over a quarter, so that rounding them to bfloat16 changes which experts
are chosen.
"""

from __future__ import annotations

import hashlib
import math

import torch

from dayzero.arch.mixers import MLA, Delta, Mixer
from dayzero.checkpoint.rules import Group, Narrow
from dayzero.decl import ParamDecl

EMBED_STD = 0.05  # trained embeddings are small, and so the eps of the first norm counts for something
LATENT_STD = 0.05
BLOCK_OCTAVES = 1.0  # standard deviation of a scale block's magnitude: exponents then span about eight, as trained ones


def generator(seed: int, name: str) -> torch.Generator:
    """A generator that depends on the tensor's name alone, so that order and sharding do not matter."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))


def logical_values(
    group: Group,
    name: str,
    seed: int,
    *,
    tied: bool,
    mixer: Mixer | None = None,
    block: tuple[int, int] | None = None,
) -> torch.Tensor:
    """float32 values for one logical tensor ``name`` of ``group``, shape group.shape. tied: the embedding is the head,
    so its rows are scaled as a head's are, or every next token would be certain. mixer: what the tensor belongs to,
    where it is a mixer's. block: (rows, columns) that will share one scale."""
    decl = group.targets[0].decl
    rng = generator(seed, name)
    bounded = isinstance(mixer, Delta) and mixer.lower is not None
    out = _draw_bounded(decl, group.shape, rng) if bounded else None
    if out is None:
        out = _draw(decl, group.shape, rng)
    if isinstance(mixer, MLA):
        _shrink_latents(decl, mixer, out)
    if block is not None:
        out *= _block_factors(out.shape, block, rng)
    if decl.name.endswith("embed") and tied:
        out *= group.shape[-1] ** -0.5 / EMBED_STD
    if isinstance(group.rule, Narrow):
        piece = group.targets[0].of_tensor
        assert piece is not None
        out[piece.stop :] = 0  # what lies behind is padding in the real files, too
    return out


def _draw_bounded(decl: ParamDecl, shape: tuple[int, ...], rng: torch.Generator) -> torch.Tensor | None:
    """Parameters of g = lower * sigmoid(e^A_log (z + dt_bias)); None for all others. With A in [1, 16], as for the
    unbounded gate, the sigmoid would be 0 to the last bit at nearly every channel, and no decay would be tested."""
    word = decl.name.rsplit(".", 1)[-1]
    if word == "a_log":
        return 0.3 * torch.randn(shape, generator=rng)
    if word == "dt_bias":
        return torch.empty(shape).uniform_(-6.9, 2.3, generator=rng)  # log of a step in [1e-3, 10]
    return None


def _shrink_latents(decl: ParamDecl, mixer: MLA, values: torch.Tensor) -> None:
    """In place: rows of the projections into the two latents. The shared key's rows, which no norm follows, stay."""
    word = decl.name.rsplit(".", 1)[-1]
    if word in ("q_a", "kv_a"):
        values[: mixer.q_rank if word == "q_a" else mixer.kv_rank] *= LATENT_STD


def _block_factors(shape: torch.Size, block: tuple[int, int], rng: torch.Generator) -> torch.Tensor:
    """A log-normal factor for each block of the last two dimensions, their mean square 1."""
    *stack, num_rows, num_columns = shape
    rows, columns = block
    grid = torch.randn(*stack, -(-num_rows // rows), -(-num_columns // columns), generator=rng) * BLOCK_OCTAVES
    factors = torch.exp2(grid - math.log(2) * BLOCK_OCTAVES**2)
    return factors.repeat_interleave(rows, -2).repeat_interleave(columns, -1)[..., :num_rows, :num_columns]


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
        return torch.randn(shape, generator=rng) * (EMBED_STD if word == "embed" else shape[-1] ** -0.5)
    fan_in = shape[-1] if decl.role != "conv" else max(1, shape[-1])
    return torch.randn(shape, generator=rng) * fan_in**-0.5
