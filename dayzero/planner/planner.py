"""``dayzero plan``: which layouts are legal on some devices, what each rank holds, and how fast it can be at best.

Everything follows from config and headers; no device is touched. A layout that is not legal comes with the sentence
why; a legal one that does not fit comes with the bytes it lacks.
"""

from __future__ import annotations

from dataclasses import replace

from dayzero.arch.cost import active_params, cache_cost, total_params
from dayzero.arch.record_choice import parse_records, with_records
from dayzero.arch.spec import ModelSpec
from dayzero.console import ProgressFactory, no_progress
from dayzero.errors import UsageError
from dayzero.finding import Finding
from dayzero.hardware import Hardware, parse_hardware
from dayzero.parallel.cut import why_not
from dayzero.parallel.mesh import Mesh
from dayzero.planner.bindings import decide
from dayzero.planner.budget import RankBudget, cache_by_layer, carry_parts, image_bytes, rank_budget, workspace_bytes
from dayzero.planner.detect import HERE, detect
from dayzero.planner.experts import (
    Swapping,
    expert_bits,
    expert_inputs_of,
    rank_ring_bytes,
    swapping,
    with_expert_inputs,
)
from dayzero.planner.floors import floors, work_of
from dayzero.planner.kept import as_kept, expert_form, expert_lines, linear_form, stored_forms
from dayzero.planner.linear_inputs import linear_inputs_of, with_linear_inputs
from dayzero.planner.packed_linears import linear_lines
from dayzero.planner.placement import PaperModel, place_weights, read_model, stage_bytes, stages_of, weight_bytes
from dayzero.planner.plan_report import Layout, PlanOptions, PlanReport, said_refusal
from dayzero.planner.variants import binds_ring, by_contract, measured_rows, reference_findings
from dayzero.units import bytes_text, counted

DTYPE = "bf16"  # of activations, which variants are chosen for


def plan_source(source: str, options: PlanOptions, progress: ProgressFactory = no_progress) -> PlanReport:
    """Plan ``source`` (a checkpoint or a config.json). Errors: UsageError for options, CheckpointError for damage."""
    here = options.hardware == HERE
    hardware, devices = detect() if here else parse_hardware(options.hardware, options.known)
    parse_records(options.cache)
    with progress("reading headers", None, "shards") as bar:
        model = read_model(source, options.recipe, bar.reach, drafts=options.drafts)
    spec = model.paper.spec
    context = options.context or spec.max_positions
    if context < 1 or options.concurrency < 1:
        raise UsageError("--context and --concurrency must be at least 1.")
    if context > spec.max_positions:
        raise UsageError(f"--context {context} is beyond the model's context of {spec.max_positions}; give fewer.")
    if options.expert_bytes is not None and not _has_experts(spec):
        raise UsageError(f"--expert-memory: {spec.family} has no experts; leave the option out.")
    bound = with_expert_inputs(with_records(spec, options.cache), expert_inputs_of(options.expert_inputs))
    bound = with_linear_inputs(bound, linear_inputs_of(options.linear_inputs), stored_forms(model))
    uses = tuple(bound.contracts())
    bindings = decide(uses, hardware, DTYPE, options.bindings, options.catalog)
    linears = linear_lines(uses, bindings, options.catalog)
    kept = as_kept(model, expert_lines(bound, bindings, options.catalog) | linears)
    trials = _Trials(model, kept, hardware, options, context, binds_ring(bindings, uses, options.catalog))
    report = PlanReport(
        source, spec.family, hardware, devices, context, options.concurrency, trials.cache, trials.sizes.total,
        (total_params(spec), active_params(spec)), [], carry_parts(spec),
    )  # fmt: skip
    meshes = _meshes(options, devices, spec)
    tried = []
    with progress("trying layouts", len(meshes), "layouts") as bar:
        for mesh in meshes:
            tried.append(trials.layout(mesh))
            bar.advance()
    if model.extra_params:
        report.drafts = {"parameters": model.extra_params, "bytes": model.extra_bytes, "counted": options.drafts}
    report.layouts = sorted(tried, key=_preference)
    if report.chosen is not None:
        with progress("placing every byte", report.chosen.mesh.num_ranks, "ranks") as bar:
            place_weights(report, model, report.chosen, bar)
    report.operators = by_contract(bindings, uses)
    report.expert_form = expert_form(spec, kept.by_param)
    forms = (fmt.form for name, fmt in kept.by_param.items() if name in linears)
    report.linear_form = linear_form([form for form in forms if form is not None], options.linear_inputs)
    report.measured = measured_rows(bindings, uses, hardware, expert_bits(spec, kept.by_param))
    report.findings = [*_findings(report, options), *reference_findings(bindings, uses, hardware)]
    return report


def _meshes(options: PlanOptions, devices: int, spec: ModelSpec) -> list[Mesh]:
    """Every mesh of that many devices that the options leave open; those asked for are returned even if illegal."""
    num_layers, experts = len(spec.layers), _has_experts(spec)
    sizes = [n for n in range(1, devices + 1) if devices % n == 0]
    out = []
    for pp in [options.pp] if options.pp else [s for s in sizes if s <= num_layers]:
        for cp in [options.cp] if options.cp else [1]:
            for tp in [options.tp] if options.tp else sizes:
                inner = tp * pp * cp
                dp = options.dp or max(1, devices // inner)
                if inner * dp != devices and not (options.tp and options.pp and options.dp):
                    if not _asked(options):
                        continue
                for ep in [options.ep] if options.ep else sorted({1, tp, dp * cp * tp} if experts else {1}):
                    mesh = Mesh(tp, ep, pp, cp, dp)
                    if mesh.num_ranks == devices and mesh not in out:
                        out.append(mesh)
    reasons = [mesh.why_not() for mesh in out]
    if all(reasons):
        asked = {n: getattr(options, n) for n in ("tp", "ep", "pp", "cp", "dp") if getattr(options, n)}
        said = " ".join(f"--{n} {v}" for n, v in asked.items())
        why = reasons[0] if reasons else f"tp × pp × cp × dp must be {devices}"
        raise UsageError(f"{said} makes no mesh of {counted(devices, 'device')}: {why}.")
    return out


def _has_experts(spec: ModelSpec) -> bool:
    return any(layer.channel.kind == "moe" for layer in spec.layers)


def _asked(options: PlanOptions) -> bool:
    return any((options.tp, options.ep, options.pp, options.cp, options.dp))


class _Trials:
    """Layouts of one model on some devices. What several meshes have in common is computed once."""

    def __init__(
        self, model: PaperModel, held: PaperModel, hardware: Hardware, options: PlanOptions, context: int, rings: bool
    ) -> None:
        """held: the model as ranks keep it."""
        self.model, self.hardware, self.options, self.context = model, hardware, options, context
        self._held, self._rings = held, rings
        self.spec = model.paper.spec
        self.sizes = weight_bytes(model)
        self.kept = with_records(self.spec, options.cache)
        self.cache = cache_cost(self.spec, options.cache)
        self._work = work_of(self.spec, context)
        self._element = "e4m3" if any(f.element == "e4m3" for f in model.formats) else "bf16"
        self._caches: dict[int, list[tuple[int, int]]] = {}  # by tp

    def layout(self, mesh: Mesh) -> Layout:
        """What each rank would hold, and how fast a step could be; or why the mesh cannot be used."""
        reason = self._why_not(mesh)
        if reason is not None:
            return Layout(mesh, False, reason)
        options = self.options
        ranks = self._ranks(mesh)
        per_group = -(-options.concurrency // mesh.dp)
        longest = min(r.max_context(per_group, mesh.cp) for r in ranks)
        most = min(r.max_concurrency(self.context, mesh.cp) for r in ranks) * mesh.dp
        best = floors(
            self.spec, self.hardware, mesh, self.sizes, self.cache, self._element, self._work, options.concurrency
        )
        refusal = _misfit(ranks, longest, most, self.context, options)
        return Layout(mesh, True, refusal, tuple(ranks), min(longest, self.spec.max_positions), most, best)

    def _why_not(self, mesh: Mesh) -> str | None:
        reason = mesh.why_not() or next(
            (why for decl, stored in self.model.one_of_each if (why := why_not(decl, mesh, stored))), None
        )
        if reason is None and mesh.pp > len(self.spec.layers):
            reason = f"pp{mesh.pp}: the model has {len(self.spec.layers)} layers"
        if reason is None and mesh.ep > 1 and not _has_experts(self.spec):
            reason = f"ep{mesh.ep}: the model has no experts"
        return reason

    def _ranks(self, mesh: Mesh) -> list[RankBudget]:
        bounds = stages_of(self.model, mesh)
        weights = stage_bytes(self._held, mesh, bounds)
        ring = rank_ring_bytes(self.spec, self.model.by_param, mesh) if self._rings else 0
        scratch, image = workspace_bytes(self.spec, mesh, ring), image_bytes(self.spec)
        experts = stage_bytes(self._held, mesh, bounds, experts_only=True)
        swapped = [self._swapping(size, mesh) for size in experts]
        weights = [size - (swap.total - swap.held if swap else 0) for size, swap in zip(weights, swapped, strict=True)]
        if mesh.tp not in self._caches:
            self._caches[mesh.tp] = cache_by_layer(self.kept, mesh.tp, self.context)
        caches = self._caches[mesh.tp]
        firsts = [
            rank_budget(self.spec, mesh, mesh.place(s * mesh.stage_ranks), bounds[s], weights[s],
                        scratch + (0 if s else image), self.hardware, caches)
            for s in range(mesh.pp)
        ]  # fmt: skip
        firsts = [
            replace(budget, experts=size, ring=ring if size else 0, swapping=swap)
            for budget, size, swap in zip(firsts, experts, swapped, strict=True)
        ]
        return [replace(firsts[place.stage], rank=place.rank) for place in mesh.places()]

    def _swapping(self, expert_total: int, mesh: Mesh) -> Swapping | None:
        budget = self.options.expert_bytes
        swap = None if budget is None else swapping(self.spec, expert_total, budget, mesh)
        if swap is not None and swap.num_held < 2:
            least = bytes_text(2 * swap.expert_bytes)
            raise UsageError(f"--expert-memory {budget} is too little: two experts of a rank take {least}.")
        return swap


def _misfit(ranks: list[RankBudget], longest: int, most: int, context: int, options: PlanOptions) -> str | None:
    tight = min(ranks, key=lambda r: r.cache_bytes)
    if not tight.fits:
        lacks, scratch = bytes_text(-tight.cache_bytes), bytes_text(tight.workspace + tight.carry)
        return (
            f"rank {tight.rank} lacks {lacks}: weights {bytes_text(tight.weights)} + workspace {scratch} "
            f"+ headroom {bytes_text(tight.headroom)} exceed the device"
        )
    if options.context and longest < context:
        return (
            f"rank {tight.rank} holds {longest:,} tokens for each of {options.concurrency:,} sequences, not {context:,}"
        )
    if longest < 1 or (options.context and most < options.concurrency):
        return f"rank {tight.rank} holds {most:,} sequences of {context:,} tokens, not {options.concurrency:,}"
    return None


def _preference(layout: Layout) -> tuple[int, int, float, int]:
    """Usable first, then by the floor of a step, then by fewer pipeline stages."""
    slow = layout.floors.tpot if layout.floors else float("inf")
    return (0 if layout.refusal is None else 1 if layout.legal else 2, layout.mesh.pp, slow, layout.mesh.ep)


def _findings(report: PlanReport, options: PlanOptions) -> list[Finding]:
    chosen = report.chosen
    if chosen is None:
        return [_nothing_fits(report)]
    fits = Finding(
        "plan.fit", "hardware", "pass", f"{chosen.mesh.text()} fits on {report.num_devices} × {report.hardware.name}",
        f"largest context {chosen.max_context:,} tokens, {chosen.max_concurrency:,} sequences of {report.context:,}",
        "weights, workspace, carry and cache within device memory",
    )  # fmt: skip
    out = [fits, _placed_once(report)]
    if options.context is None and chosen.max_context < report.context:
        out.append(
            Finding(
                "plan.context", "cache", "note", f"the trained context of {report.context:,} tokens does not fit",
                f"{chosen.max_context:,} tokens", f"{report.context:,} tokens", (),
                "take more devices or --cache fp8 for the full length",
            )
        )  # fmt: skip
    return out


def _nothing_fits(report: PlanReport) -> Finding:
    legal = [layout for layout in report.layouts if layout.legal]
    closest = max(legal, key=lambda one: min(r.cache_bytes for r in one.ranks)) if legal else report.layouts[0]
    memory = report.hardware.memory_bytes
    return Finding(
        "plan.fit", "hardware" if legal else "parallel", "fail",
        f"no layout fits on {report.num_devices} × {report.hardware.name}",
        f"{counted(len(report.layouts), 'layout')} tried; {bytes_text(report.weight_bytes)} of weights for "
        f"{bytes_text(memory * report.num_devices)} of device memory",
        f"each rank holds whole heads and scale blocks, and weights, workspace and cache within {bytes_text(memory)}",
        (said_refusal(closest),),
        "take more or larger devices" if legal else "choose other axis sizes; every refusal is listed",
    )  # fmt: skip


def _placed_once(report: PlanReport) -> Finding:
    proof = report.proof
    assert proof is not None
    return Finding(
        "plan.exactly_once", "weights", "pass" if proof.holds else "fail",
        "every element of every parameter is placed exactly once on each replica",
        f"{proof.params} parameters, {len(proof.gaps)} gaps, {len(proof.overlaps)} overlaps", 0,
        tuple(proof.gaps + proof.overlaps)[:8],
        "" if proof.holds else "the cuts declared for these parameters do not tile them",
    )  # fmt: skip
