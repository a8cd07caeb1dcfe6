"""What a plan is asked for and what it answers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dayzero.arch.cost import CacheCost
from dayzero.checkpoint.weight_plan import Proof, WeightPlan
from dayzero.finding import Finding, Verdict, worst
from dayzero.hardware import HARDWARE, Hardware
from dayzero.ops.catalog import CATALOG, Catalog
from dayzero.parallel.mesh import Mesh
from dayzero.planner.budget import RankBudget
from dayzero.planner.floors import Floors


@dataclass(frozen=True)
class PlanOptions:
    """What to plan for. Axis sizes None: tried out. context, concurrency: tokens and sequences to hold at once.
    known: device records by name. drafts: count layers beside the plain forward, on the last stage.
    expert_bytes: memory of a rank for routed experts, the others being brought up when they are chosen; None: all.
    expert_inputs: format that inputs of routed experts are rounded to; linear_inputs: those of linear layers whose
    weights are stored in blocks of FP8. bindings: variants of ``catalog`` asked for; all other sites get what is chosen
    for the device."""

    hardware: str
    tp: int | None = None
    ep: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    context: int | None = None
    concurrency: int = 1
    cache: str = "bf16"
    recipe: str | None = None
    drafts: bool = False
    expert_bytes: int | None = None
    expert_inputs: str = "bf16"
    linear_inputs: str = "bf16"
    bindings: Mapping[str, str] = field(default_factory=dict)
    catalog: Catalog = field(default_factory=lambda: CATALOG, repr=False)
    known: Mapping[str, Hardware] = field(default_factory=lambda: HARDWARE, repr=False)


@dataclass(frozen=True)
class Layout:
    """One way to spread the model. refusal: why it is not legal or does not fit; None when it can be used."""

    mesh: Mesh
    legal: bool
    refusal: str | None
    ranks: tuple[RankBudget, ...] = ()
    max_context: int = 0
    max_concurrency: int = 0
    floors: Floors | None = None

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "layout": self.mesh.text(), "legal": self.legal, "fits": self.refusal is None, "refusal": self.refusal,
        }  # fmt: skip
        if self.ranks:
            tight = min(self.ranks, key=lambda r: r.cache_bytes)
            out["tightest_rank"] = {
                "rank": tight.rank, "weights_bytes": tight.weights, "workspace_bytes": tight.workspace,
                "carry_bytes": tight.carry, "headroom_bytes": tight.headroom, "cache_bytes": tight.cache_bytes,
                "bytes_per_token": tight.token_bytes, "bytes_per_sequence": tight.sequence_bytes,
            }  # fmt: skip
        if self.floors:
            out |= {"max_context_tokens": self.max_context, "max_concurrency": self.max_concurrency}
            out |= {"ttft_floor_s": self.floors.ttft, "tpot_floor_s": self.floors.tpot}
        return out


def said_refusal(layout: Layout) -> str:
    """``layout: why not``; a refusal that names the layout already is not named twice."""
    name, why = layout.mesh.text(), layout.refusal or ""
    return why if why.startswith(f"{name}:") else f"{name}: {why}"


@dataclass
class PlanReport:
    """layouts in order of preference, chosen first; weight_plans and proof are of the chosen layout. carry: bytes a
    token of a chunk of each part of what layers hand on. drafts: parameters and stored bytes of the layers beside the
    plain forward, and whether ranks were planned with them; None when there are none. operators: contract -> variant ->
    sites. measured: what stored measurements decide on this device, as rows. expert_form: how ranks keep routed
    experts, in words; linear_form: how many weights of linear layers stay as they are stored; empty without any."""

    source: str
    family: str
    hardware: Hardware
    num_devices: int
    context: int
    concurrency: int
    cache: CacheCost
    weight_bytes: int
    parameters: tuple[int, int]
    layouts: list[Layout]
    carry: Mapping[str, int] = field(default_factory=dict)
    drafts: Mapping[str, Any] | None = None
    operators: Mapping[str, Mapping[str, list[str]]] = field(default_factory=dict)
    measured: list[tuple[str, str]] = field(default_factory=list)
    expert_form: str = ""
    linear_form: str = ""
    weight_plans: list[WeightPlan] = field(default_factory=list)
    proof: Proof | None = None
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    @property
    def chosen(self) -> Layout | None:
        return next((layout for layout in self.layouts if layout.refusal is None), None)

    def to_json(self) -> dict[str, Any]:
        chosen = self.chosen
        return {
            "verdict": self.verdict,
            "source": self.source,
            "family": self.family,
            "hardware": {"name": self.hardware.name, "devices": self.num_devices},
            "context_tokens": self.context,
            "concurrency": self.concurrency,
            "weights_bytes": self.weight_bytes,
            "parameters": {"total": self.parameters[0], "active": self.parameters[1]},
            "carry_bytes_per_token": dict(self.carry),
            "draft_layers": None if self.drafts is None else dict(self.drafts),
            "operators": {
                contract: {variant: len(sites) for variant, sites in variants.items()}
                for contract, variants in self.operators.items()
            },
            "measured": dict(self.measured),
            "expert_form": self.expert_form or None,
            "linear_form": self.linear_form or None,
            "chosen": chosen.to_json() if chosen else None,
            "ranks": [_rank_json(b, p) for b, p in zip(chosen.ranks, self.weight_plans, strict=True)] if chosen else [],
            "exactly_once": None if self.proof is None else {
                "holds": self.proof.holds, "parameters": self.proof.params, "elements": self.proof.elements,
                "gaps": self.proof.gaps, "overlaps": self.proof.overlaps,
            },
            "layouts": [layout.to_json() for layout in self.layouts],
            "findings": [f.to_json() for f in self.findings],
        }  # fmt: skip


def _rank_json(budget: RankBudget, plan: WeightPlan) -> dict[str, Any]:
    return {
        "rank": budget.rank, "stage": budget.stage, "layers": list(budget.layers), "copies": len(plan),
        "bytes_read": plan.bytes_read, "weights_bytes": budget.weights, "workspace_bytes": budget.workspace,
        "carry_bytes": budget.carry, "headroom_bytes": budget.headroom, "cache_bytes": budget.cache_bytes,
        "expert_bytes": budget.experts, "expert_ring_bytes": budget.ring,
        "experts_held": None if budget.swapping is None else budget.swapping.to_json(),
    }  # fmt: skip
