"""Mixtures of experts: router, routed experts (at a latent width where the spec says so), shared expert.

T tokens, D model width, E experts, N chosen experts a token, W width the experts work at.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from functools import partial
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from dayzero.arch.channels import MoE
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.glu import GLUBlock
from dayzero.blocks.site import Params, Site, activation_args
from dayzero.view import StepView

RENORMALISE_EPS = 1e-20  # what the publishers' routers add to the sum; it changes nothing unless the sum is 0
MATRICES = ("gate", "up", "down")


def stacked_experts(spec: ModelSpec, bound: Container[str] = ()) -> frozenset[str]:
    """Parameters [E, …] that are only ever indexed by expert, so that a loader may give them one expert at a time.

    bound: ``contract@site`` of operators that run a variant: those may want the tensor, so theirs are left out.
    """
    sites = expert_sites(spec).items()
    return frozenset(f"{s}.{matrix}" for s, moe in sites if f"{moe.contract}@{s}" not in bound for matrix in MATRICES)


def expert_sites(spec: ModelSpec) -> dict[str, MoE]:
    """Site of a layer's experts, which is also the prefix of their matrices, and the layer's spec of them."""
    mixtures = ((i, layer.channel) for i, layer in enumerate(spec.layers))
    return {f"layers.{i}.channel.experts": channel for i, channel in mixtures if isinstance(channel, MoE)}


@runtime_checkable
class Fetched(Protocol):
    """The matrices of a layer's experts, where they are fetched when they are asked for."""

    def expect(self, experts: Sequence[int]) -> None:
        """These experts come next, in this order, each once."""


class MoEBlock:
    """``MoE``. Shows the chosen expert ids [T, N] at ``layers.{i}.experts``."""

    def __init__(self, spec: MoE, params: Params, site: Site) -> None:
        self.spec, self.site = spec, site
        router = spec.router
        self.logits = site.linear(params, "router", bias=router.bias == "logit", f32=True)
        self.select_bias_E = params["router_bias"] if router.bias == "select" else None
        self.route = site.op("moe.route", "route")
        self.experts = site.op(spec.contract, "experts")
        self.weights = tuple(site.laid_out(spec.contract, "experts", params[f"experts.{n}"]) for n in MATRICES)
        self.fetched = self.weights[0] if isinstance(self.weights[0], Fetched) else None
        self.biases = tuple(params[f"experts.{n}_bias"] for n in MATRICES) if spec.bias else None
        self.act_args = activation_args(spec.act)
        self.latent_down = site.linear(params, "latent_down") if spec.latent else None
        self.latent_up = site.linear(params, "latent_up") if spec.latent else None
        self.latent_norm = site.norm(spec.latent_norm, params, "latent_norm") if spec.latent_norm else None
        self.shared = GLUBlock(spec.shared, params.below("shared"), site.below("shared")) if spec.shared else None
        self.shared_gate = site.linear(params, "shared_gate") if spec.shared_gate else None

    def forward(self, x_TD: Tensor, view: StepView) -> Tensor:
        """x [T, dim] -> [T, dim]. The router sees x itself, not the latent."""
        router = self.spec.router
        ids_TN, weights_TN = self.route(
            self.logits(x_TD), router.top_k, score=router.score, bias_E=self.select_bias_E,
            groups=(router.groups, router.top_groups), renormalise=router.renormalise, scale=router.scale,
            eps=RENORMALISE_EPS,
        )  # fmt: skip
        self.site.show_layer("experts", ids_TN)
        x_TW = x_TD if self.latent_down is None else self.latent_down(x_TD)
        chosen = partial(self._chosen, x_TW, ids_TN, weights_TN)
        out = chosen() if self.fetched is None else view.on_host(chosen, x_TW)
        if self.latent_norm is not None:
            out = self.latent_norm(out)
        if self.latent_up is not None:
            out = self.latent_up(out)
        return out if self.shared is None else out + self._shared(self.shared, x_TD, view)

    def _chosen(self, x_TW: Tensor, ids_TN: Tensor, weights_TN: Tensor) -> Tensor:
        """[T, W] what the chosen experts make of x; those that are fetched are asked for by the host."""
        if self.fetched is not None:
            self.fetched.expect([e for e in ids_TN.unique().tolist() if e >= 0])
        return self.experts(x_TW, ids_TN, weights_TN, *self.weights, self.act_args, biases=self.biases)

    def _shared(self, shared: GLUBlock, x_TD: Tensor, view: StepView) -> Tensor:
        out_TD = shared.forward(x_TD, view)
        if self.shared_gate is None:
            return out_TD
        share_T1 = torch.sigmoid(self.shared_gate(x_TD).double()).float()
        return (share_T1 * out_TD.float()).to(out_TD.dtype)
