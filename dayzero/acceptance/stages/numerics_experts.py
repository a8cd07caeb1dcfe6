"""Experts with fp8 inputs (W4A8) against the error that the format predicts, on the inputs that the model really has.

Measured: what the bound variant of ``moe.experts_fp8_128`` gives against ``moe.experts`` of the same inputs. Predicted:
``moe.experts`` with the inputs of its products moved at random within half a step of the format.

T tokens, R rows of one expert, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.acceptance.rounding import RECORD_FACTOR, step_of
from dayzero.arch.channels import ExpertInputs, MoE
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import expert_sites, stacked_experts
from dayzero.blocks.open import LoadedModel
from dayzero.blocks.site import binder
from dayzero.blocks.stack import Stack, vocabulary_matrices
from dayzero.decl import TILE, PackedRow
from dayzero.finding import Finding
from dayzero.ops.activation import glu
from dayzero.ops.bindings import variant_at
from dayzero.ops.contract import relative_l2
from dayzero.ops.experts_mxfp4 import dense
from dayzero.ops.linear import matmul
from dayzero.ops.moe import experts, summed_by_expert
from dayzero.planner.bindings import choose
from dayzero.planner.detect import detect
from dayzero.planner.experts import with_expert_inputs

INPUTS: ExpertInputs = "fp8_128"
CONTRACT = "moe.experts_fp8_128"
SEED = 31
REMEDY = (
    "Too large: look at the scale of inputs (each token and 128 columns), its clamp, and whether the product takes it "
    "the right way round. Too small: the inputs were not rounded, so the variant is not what the plan says."
)


@dataclass(frozen=True, slots=True)
class ExpertError:
    """Relative L2 error of one layer's routed experts, from rounding their inputs."""

    site: str
    variant: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else float("inf")

    @property
    def passed(self) -> bool:
        return 1 / RECORD_FACTOR <= self.ratio <= RECORD_FACTOR


def expert_errors(model: LoadedModel, tokens: Sequence[int], most: int, expert_bytes: int) -> list[ExpertError]:
    """Of the first ``most`` layers with experts, behind layers with fp8 inputs; none where there are no experts."""
    sites = list(expert_sites(model.spec))
    if not sites:
        return []
    spec = with_expert_inputs(model.spec, INPUTS)
    uses = [use for use in spec.contracts() if use.contract == CONTRACT]
    bindings = choose(uses, detect("cpu")[0], "f32")
    found: list[ExpertError] = []
    draw = torch.Generator().manual_seed(SEED)
    plain = binder(bindings)

    def bind(contract: str, site: str) -> Callable[..., Any]:
        op = plain(contract, site)
        if contract != CONTRACT:
            return op

        def watched(*args: Any, **options: Any) -> Tensor:
            got = op(*args, **options)
            want = experts.body(*args, **options)
            predicted = relative_l2(_moved(draw, *args, **options), want)
            variant = variant_at(CONTRACT, site, bindings)
            found.append(ExpertError(site, variant, relative_l2(got, want), predicted))
            return got

        return watched

    lazy = stacked_experts(spec, bindings) | vocabulary_matrices(spec)
    load = partial(model.loader.load, lazy=lazy, keep_bytes=expert_bytes)
    stack = Stack(spec, load, bind=bind, resident=False)
    view = LocalCache(spec, torch.float32).view(list(tokens))
    carry = stack.open(view)
    last = [i for i, layer in enumerate(spec.layers) if isinstance(layer.channel, MoE)][:most][-1]
    for number in range(last + 1):
        carry = stack.layer(number, carry, view)
    return found


def _moved(
    draw: torch.Generator,
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    *rest: Any,
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """``moe.experts`` with inputs of products moved. rest: gate, up, down, activation."""
    gates, ups, downs, activation = rest

    def one(x_RD: Tensor, expert: int) -> Tensor:
        b_gate, b_up, b_down = (b[expert] for b in biases) if biases is not None else (None, None, None)
        x_RD = _noisy(x_RD, draw)
        gate = matmul.body(x_RD, dense(gates[expert], x_RD.dtype), b_gate)
        up = matmul.body(x_RD, dense(ups[expert], x_RD.dtype), b_up)
        hidden = _noisy(glu.body(gate, up, **activation), draw)
        return matmul.body(hidden, dense(downs[expert], hidden.dtype), b_down)

    return summed_by_expert(x_TD, ids_TN, weights_TN, one)


def _noisy(x_RD: Tensor, draw: torch.Generator) -> Tensor:
    row = PackedRow(INPUTS, (x_RD.shape[-1],), TILE, "f32")
    noise = torch.rand(x_RD.shape, generator=draw, dtype=torch.float64) - 0.5
    return (x_RD.double() + noise * step_of(x_RD, row)).to(x_RD.dtype)


def expert_findings(prefix: str, found: Sequence[ExpertError]) -> Iterator[Finding]:
    """One finding; not applicable to a model without routed experts."""
    claim = "experts with fp8 inputs are off by what the format predicts"
    if not found:
        yield Finding(f"{prefix}.experts_fp8", "operator", "not applicable", claim, "no layer routes to experts")
        return
    at = max(found, key=lambda e: max(e.ratio, 1 / max(e.ratio, 1e-9)))
    bad = tuple(e.site for e in found if not e.passed)
    yield Finding(
        f"{prefix}.experts_fp8",
        "operator",
        "fail" if bad else "pass",
        claim,
        f"relative error {at.measured:.2e} at {at.site} ({at.variant}), {at.ratio:.2f} of what is predicted",
        f"{at.predicted:.2e}, by a factor of {RECORD_FACTOR:g} both ways: inputs moved within half a step of e4m3",
        bad or tuple(e.site for e in found),
        REMEDY if bad else "",
    )


def facts_of(found: Sequence[ExpertError]) -> Mapping[str, str]:
    """site -> variant."""
    return {e.site: e.variant for e in found}
