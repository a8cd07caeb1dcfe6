"""Faults of a port of models with residuals over depth, a norm behind their experts, an index without rope, images."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dayzero.arch.channels import GLU, MoE
from dayzero.arch.mixers import MLA, Delta
from dayzero.arch.norms import Activation
from dayzero.arch.rope import Rope
from dayzero.blocks import stack
from dayzero.blocks.latent import LatentBlock
from dayzero.blocks.moe import MoEBlock
from dayzero.blocks.residual import Carry, DepthBlock
from dayzero.checkpoint import dequant
from dayzero.checkpoint.rules import Stored
from tests.cpu.faults.catalogue import Fault, Plant, first
from tests.cpu.faults.layers import _reversed_nibbles, channels, index, mixers, patch, router, spec
from tests.cpu.faults.stand import other_recipe

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def vision(**changes: Any) -> Plant:
    """Change the vision tower."""
    return spec(lambda s: replace(s, vision=replace(s.vision, **changes)))  # type: ignore[type-var]


def of_tower(change: Callable[[Any], Any]) -> Plant:
    return spec(lambda s: replace(s, vision=change(s.vision)))


def at_block_start(change: Callable[[Carry, Carry, Tensor], Carry]) -> Plant:
    """Change what the first mixer of a block of layers leaves. change: carry before, carry after, output -> carry."""

    def make(leave: Any) -> Any:
        def changed(block: DepthBlock, carry: Carry, site: Any, out_TD: Tensor) -> Carry:
            after = leave(block, carry, site, out_TD)
            return change(carry, after, out_TD) if site == "mixer" and block.starts_block else after

        return changed

    return patch(DepthBlock, "leave", make)


def _newest(after: Carry, row_TD: Tensor) -> Carry:
    """The carry with another newest row of its bank."""
    return Carry({"partial": after["partial"], "bank": torch.cat((after["bank"][:, :-1], row_TD[:, None]), dim=1)})


def _appended_late(before: Carry, after: Carry, out_TD: Tensor) -> Carry:
    return _newest(after, before["partial"] + out_TD)


def _appended_normed(before: Carry, after: Carry, out_TD: Tensor) -> Carry:
    row = before["partial"]
    return _newest(after, row / (row.square().mean(-1, keepdim=True) + 1e-5).sqrt())


def _sum_goes_on(before: Carry, after: Carry, out_TD: Tensor) -> Carry:
    return Carry({"partial": before["partial"] + out_TD, "bank": after["bank"]})


def _appended_early(enter: Any) -> Any:
    """The running sum stands in the bank already when the first mixer of a block reads it."""

    def changed(block: DepthBlock, carry: Carry, site: Any) -> Tensor:
        if site == "mixer" and block.starts_block:
            bank = torch.cat((carry["bank"], carry["partial"][:, None]), dim=1)
            carry = Carry({"partial": carry["partial"], "bank": bank})
        return enter(block, carry, site)

    return changed


def _sum_alone(close: Any) -> Any:
    """The final norm reads the running sum; the last mix is forgotten."""
    return lambda spec, carry, params, site: carry["partial"]


def _normed_by_halves(forward: Any) -> Any:
    """Two ranks norm their part of the experts' sum before the parts are added."""

    def changed(block: MoEBlock, x_TD: Tensor, view: Any) -> Tensor:
        norm, run = block.latent_norm, block.experts
        assert norm is not None

        def halves(x: Tensor, ids: Tensor, weights: Tensor, *rest: Any, **given: Any) -> Tensor:
            return sum(norm(run(x, ids, weights * (ids % 2 == rank), *rest, **given)) for rank in (0, 1))

        block.latent_norm, block.experts = None, halves
        try:
            return forward(block, x_TD, view)
        finally:
            block.latent_norm, block.experts = norm, run

    return changed


def _gate_behind(forward: Any) -> Any:
    """The gate multiplies the output projection's result, which has as many channels in this twin."""

    def changed(block: LatentBlock, x_TD: Tensor, view: Any) -> Tensor:
        kept = block.gate
        assert kept is not None
        block.gate = None
        try:
            return forward(block, x_TD, view) * torch.sigmoid(block.project(x_TD)[-1])
        finally:
            block.gate = kept

    return changed


def _claims_taken_at_their_word(into: ExitStack) -> Mapping[str, str]:
    """The recipe forgets which matrices are stored plainly though the config claims 4 bits."""

    def changed(recipe: Any) -> Any:
        make = recipe.make_rules
        return replace(recipe, make_rules=lambda s: tuple(r for r in make(s) if not isinstance(r, Stored)))

    other_recipe(into, changed)
    return {}


def _with_rope(m: MLA) -> MLA:
    return replace(m, rope=Rope(m.shared, 10000.0, "interleaved"))


LATENT, FIRST_MOE, INDEX = first("layers.3.mixer"), first("layers.1.channel"), first("layers.3.index")
BLOCK = first("vision.blocks.0")

# (name, kind, report, twin, pattern, plant)
TABLE: tuple[tuple[str, str, str, str, str, Plant], ...] = (
    ("sum appended to the bank after attention", "F", "", "depth", first("layers.0.channel"),
     at_block_start(_appended_late)),
    ("sum appended to the bank before it is mixed", "F", "", "depth", first("layers.4.mixer"),
     patch(DepthBlock, "enter", _appended_early)),
    ("bank of normed sums", "F", "", "depth", first("layers.0.channel"), at_block_start(_appended_normed)),
    ("running sum not started anew", "F", "", "depth", first("layers.0.channel"), at_block_start(_sum_goes_on)),
    ("last mix forgotten", "F", "", "depth", first("final_norm"), patch(stack, "close_carry", _sum_alone)),
    ("decay unbounded for bounded", "F", "", "depth", first("layers.0.mixer"),
     mixers(Delta, lambda m: replace(m, lower=None))),
    ("latent keys rotated where nothing is", "E", "", "depth", LATENT, mixers(MLA, _with_rope)),
    ("softmax scale of the own part of a key", "E", "", "depth", LATENT,
     mixers(MLA, lambda m: replace(m, softmax_scale=m.nope**-0.5))),
    ("norms of the latents with the model's eps", "F", "", "depth", LATENT,
     mixers(MLA, lambda m: replace(m, norm_eps=1e-5))),
    ("gate behind the output projection", "E", "", "depth_square", LATENT, patch(LatentBlock, "forward", _gate_behind)),
    ("experts' sum normed before it is complete", "G", "", "depth", FIRST_MOE,
     patch(MoEBlock, "forward", _normed_by_halves)),
    ("experts' sum not normed", "G", "", "depth", r"routed_expert_norm",
     channels(MoE, lambda c: replace(c, latent_norm=None))),
    ("silu for situ in experts", "F", "aiconfigurator", "depth", FIRST_MOE,
     channels(MoE, lambda c: replace(c, act=Activation()))),
    ("silu for situ in dense layers", "F", "aiconfigurator", "depth", first("layers.0.channel"),
     channels(GLU, lambda c: replace(c, act=Activation()))),
    ("situ without the second tanh", "F", "", "depth", FIRST_MOE,
     channels(MoE, lambda c: replace(c, act=replace(c.act, linear_beta=1e6)))),
    ("nibbles of experts reversed", "D", "", "depth", FIRST_MOE, patch(dequant, "_codes", _reversed_nibbles)),
    ("plain matrices missing from the ignore list", "C", "", "depth", r"routed_expert_down_proj",
     _claims_taken_at_their_word),
    ("routed scale of a sister model", "G", "", "depth_square", FIRST_MOE, router(scale=2.446)),
    ("shares of a sum not renormalised", "G", "", "depth_square", FIRST_MOE, router(renormalise=False)),
    ("local window forced into the index", "E", "", "depth_index", INDEX, index(window=3)),
    ("first token forced into the index", "E", "", "depth_index", INDEX, index(sinks=1)),
    ("index rotated where nothing is", "E", "", "depth_index", INDEX, index(rope=Rope(16, 10000.0, "half"))),
    ("one row too many in the index", "E", "", "depth_index", INDEX, index(top_k=9)),
    ("image normalised as another tower's", "F", "", "depth", first("vision.embed"),
     of_tower(lambda v: replace(v, pixels=replace(v.pixels, mean=CLIP_MEAN, std=CLIP_STD)))),
    ("positions stretched from corner to corner", "E", "", "depth", first("vision.embed"), vision(corners=True)),
    ("row turns first", "E", "", "depth", BLOCK, vision(first="row")),
    ("pairs of the tower half apart", "E", "", "depth", BLOCK, vision(style="half")),
    ("tower's eps of bfloat16", "F", "", "depth", BLOCK,
     of_tower(lambda v: replace(v, norm=replace(v.norm, eps=2.0**-7)))),
)  # fmt: skip

SMALL = "patches have a mean square around 1: an eps of 1e-5 for 1e-7 changes less than float32 rounding is allowed to"

FAULTS = (
    *(Fault(name, kind, report, twin, "align", names, plant=plant) for name, kind, report, twin, names, plant in TABLE),
    Fault(
        "tower's eps of the text model", "F", "", "depth", "align", "vision",
        plant=of_tower(lambda v: replace(v, norm=replace(v.norm, eps=1e-5))), missed=SMALL,
    ),
)  # fmt: skip
