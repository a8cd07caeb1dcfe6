"""Routed experts on paper: bytes as they are kept, the ring they are converted in, what holding some of them costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from dayzero.arch.channels import ExpertInputs, MoE
from dayzero.arch.spec import ModelSpec
from dayzero.decl import Format
from dayzero.errors import UsageError
from dayzero.ops.experts_sizes import ring_bytes
from dayzero.parallel.mesh import Mesh

HOST_LINK = 64e9  # bytes a second
HOST_LINK_WHY = "PCIe 5.0 x16 one way, at its peak; a disk or a store is slower"


def expert_inputs_of(text: str) -> ExpertInputs:
    """The format of experts' inputs by its name; UsageError for one that there is not."""
    known = get_args(ExpertInputs)
    if text not in known:
        raise UsageError(f"--expert-inputs {text}: it must be one of {', '.join(known)}.")
    return cast(ExpertInputs, text)


def with_expert_inputs(spec: ModelSpec, inputs: ExpertInputs) -> ModelSpec:
    """The spec with the inputs of all experts rounded to this format, which is a plan's choice for all token counts.
    UsageError where there are none to round them for."""
    if inputs != "bf16" and not any(isinstance(layer.channel, MoE) for layer in spec.layers):
        raise UsageError(f"--expert-inputs {inputs}: {spec.family} has no experts; leave the option out.")
    layers = [
        replace(layer, channel=replace(layer.channel, inputs=inputs)) if isinstance(layer.channel, MoE) else layer
        for layer in spec.layers
    ]
    return replace(spec, layers=type(spec.layers)(layers))


def rank_ring_bytes(spec: ModelSpec, formats: Mapping[str, Format], mesh: Mesh) -> int:
    """The ring of a rank on which experts in 4 bits are converted to e4m3; 0 without any.

    formats: by parameter. One ring serves all layers; its slices hold the largest matrix.
    """
    sizes = [ring_bytes(m.inner // mesh.expert_tp, m.width) for m in _in_four_bits(spec, formats)]
    return max(sizes, default=0)


def expert_bits(spec: ModelSpec, formats: Mapping[str, Format]) -> int:
    """Bits of a code of the routed experts that some layers keep packed; 0 where none does. formats: by parameter, as
    they are kept."""
    forms = (formats.get(f"layers.{i}.channel.experts.gate") for i in range(len(spec.layers)))
    return next((fmt.bits for fmt in forms if fmt is not None and fmt.form is not None), 0)


def _in_four_bits(spec: ModelSpec, formats: Mapping[str, Format]) -> list[MoE]:
    return [
        layer.channel
        for i, layer in enumerate(spec.layers)
        if isinstance(layer.channel, MoE) and _bits(formats, f"layers.{i}.channel.experts.gate") == 4
    ]


def _bits(formats: Mapping[str, Format], param: str) -> int:
    return formats[param].bits if param in formats else 0


@dataclass(frozen=True, slots=True)
class Swapping:
    """Experts of a rank of which only some are held. total: bytes of all of them as they are kept; held: of those
    that fit.

    least_misses: experts that a step of one token must bring up on this rank, at best: what its layers choose less
    what is held. usual_misses: the same when all experts are chosen equally often. Bytes are of these misses.
    """

    total: int
    held: int
    num_experts: int
    num_held: int
    chosen: float
    expert_bytes: int

    @property
    def least_misses(self) -> float:
        return max(0.0, self.chosen - self.num_held)

    @property
    def usual_misses(self) -> float:
        return self.chosen * (1 - self.num_held / self.num_experts)

    def seconds(self, misses: float) -> float:
        """Time to bring up so many experts over the host's link: a step cannot be faster."""
        return misses * self.expert_bytes / HOST_LINK

    def to_json(self) -> dict[str, Any]:
        return {
            "bytes": self.held, "experts": self.num_held, "of_experts": self.num_experts, "chosen_a_step": self.chosen,
            "misses": {"least": self.least_misses, "alike": self.usual_misses},
            "step_floor_s": {"least": self.seconds(self.least_misses), "alike": self.seconds(self.usual_misses)},
        }  # fmt: skip


def swapping(spec: ModelSpec, expert_total: int, budget: int, mesh: Mesh) -> Swapping | None:
    """What a budget of bytes holds of the experts of a rank; None without experts, or where all of them fit.

    expert_total: bytes of the routed experts on the rank, as they are kept. A step's choices spread evenly over expert
    ranks.
    """
    mixtures = [layer.channel for layer in spec.layers if isinstance(layer.channel, MoE)]
    if not mixtures or expert_total <= budget:
        return None
    ranks = mesh.ep * mesh.pp
    num_experts = max(1, sum(m.router.experts for m in mixtures) // ranks)
    expert_bytes = expert_total // num_experts
    num_held = min(num_experts, budget // expert_bytes)
    chosen = sum(m.router.top_k for m in mixtures) / ranks
    return Swapping(expert_total, num_held * expert_bytes, num_experts, num_held, chosen, expert_bytes)
