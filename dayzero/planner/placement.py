"""Which rank holds what: pipeline stages, cuts, and the copies that fill a rank's parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from dayzero.arch.cost import extra_params
from dayzero.checkpoint.coverage import cover, stored_format
from dayzero.checkpoint.index import Progress, read_index
from dayzero.checkpoint.rules import Group, Target
from dayzero.checkpoint.source import open_source
from dayzero.checkpoint.weight_plan import Box, WeightPlan, copy_bytes, group_formats, plan_rank, prove
from dayzero.console import Bar
from dayzero.decl import Format, ParamDecl
from dayzero.errors import CheckpointError
from dayzero.models.blueprint import Blueprint, blueprint, read_config, refuse, require_recipe
from dayzero.parallel.cut import is_expert, piece_of
from dayzero.parallel.mesh import Mesh, Place
from dayzero.planner.budget import stage_bounds
from dayzero.planner.floors import WeightBytes
from dayzero.planner.plan_report import Layout, PlanReport

Part = int | str  # see part_of


@dataclass
class PaperModel:
    """A model on paper with the format each group is stored in, found in the headers or claimed by the config.

    extra_params, extra_bytes: of the layers beside the plain forward, whether or not they are among the groups.
    """

    paper: Blueprint
    groups: Sequence[Group]
    formats: list[Format]
    num_ignored: int
    by_param: Mapping[str, Format]
    decls: list[ParamDecl]
    extra_params: int = 0
    extra_bytes: int = 0

    @cached_property
    def alike(self) -> list[tuple[Format, Target, Counter[Part]]]:
        """One target of each kind, its stored format, and how many of its kind each part has.

        Two of a kind differ in their names alone, so a mesh cuts them in the same way, to the same bytes.
        """
        kinds: dict[tuple[object, ...], tuple[Format, Target, Counter[Part]]] = {}
        for group, fmt in zip(self.groups, self.formats, strict=True):
            for target in group.targets:
                decl = target.decl
                key = (fmt, target.stacked, target.of_tensor, target.of_param, decl.shape, decl.cuts)
                kinds.setdefault(key, (fmt, target, Counter()))[2][part_of(decl.name)] += 1
        return list(kinds.values())

    @cached_property
    def one_of_each(self) -> list[tuple[ParamDecl, Format | None]]:
        """The first parameter, in their order, of all that a mesh cuts alike, with its stored format."""
        found: dict[tuple[object, ...], tuple[ParamDecl, Format | None]] = {}
        for decl in self.decls:
            fmt = self.by_param.get(decl.name)
            found.setdefault((decl.shape, decl.cuts, fmt), (decl, fmt))
        return list(found.values())

    @cached_property
    def whole_bytes(self) -> Counter[Part]:
        """Stored bytes of each part."""
        return part_bytes(self, Mesh())


@lru_cache(maxsize=1 << 16)
def part_of(param: str) -> Part:
    """A layer's number, or for what lies outside of layers: ``embed``, ``first`` or ``last``, the stage it is on, or
    ``extra``, which is on the last one too."""
    if param.startswith("layers."):
        return int(param.split(".")[1])
    if param == "embed":
        return param
    if param.startswith("extra."):
        return "extra"
    return "first" if param.startswith(("vision.", "projector.")) else "last"


def read_model(
    source: str, recipe: str | None, progress: Progress | None = None, *, drafts: bool = False
) -> PaperModel:
    """``source`` on paper. drafts: with the layers beside the plain forward. Errors: CheckpointError when its tensors
    are not those that the recipe asks for."""
    opened = open_source(source)
    config = read_config(opened)
    has_weights = not opened.config_only and any(f.endswith(".safetensors") for f in opened.files())
    index = read_index(opened, progress)
    refuse(f"{source} is damaged", [p.claim for p in index.problems if p.verdict == "fail"], CheckpointError)
    entries = index.entries if has_weights else {}
    paper = blueprint(config, require_recipe(config, recipe), source=opened, entries=entries)
    groups: Sequence[Group] = paper.expansion.groups
    decls = paper.spec.params()
    if has_weights:
        coverage = cover(paper.expansion, entries, paper.quant)
        if not coverage.complete:
            raise CheckpointError(
                f"{source}: {len(coverage.missing)} tensors are missing, {len(coverage.unknown)} unknown, "
                f"{len(coverage.misfit)} do not fit; run `dayzero inspect {source}` for their names."
            )
        # A file may store a parameter in another of the ways the rules allow, or leave out what has a default.
        groups, decls = coverage.groups, [d for d in decls if d not in coverage.filled]
        formats, ignored = group_formats(coverage), len(coverage.ignored)
        beside = zip(coverage.extra_groups, group_formats(coverage.whole())[len(groups) :], strict=True)
    else:
        formats = [stored_format(g, g.name, paper.expansion, paper.quant, paper.plain) for g in groups]
        asked = paper.expansion.extra.groups if paper.expansion.extra is not None else []
        beside = zip(asked, [stored_format(g, g.name, paper.expansion, paper.quant, paper.plain) for g in asked])
        ignored = 0
    own = {decl.name: decl for decl in paper.spec.extra.params()} if paper.spec.extra is not None else {}
    extra = [(group, fmt) for group, fmt in beside if group.targets[0].decl.name in own]  # copies are not held twice
    extra_bytes = sum(copy_bytes(fmt, target, _all_of(target.decl)) for g, fmt in extra for target in g.targets)
    if drafts and extra:
        groups, formats = [*groups, *(g for g, _ in extra)], [*formats, *(fmt for _, fmt in extra)]
        decls = [*decls, *own.values()]
    by_param = {t.decl.name: fmt for g, fmt in zip(groups, formats, strict=True) for t in g.targets}
    num_extra = extra_params(paper.spec) if extra else 0
    return PaperModel(paper, groups, formats, ignored, by_param, decls, num_extra, extra_bytes)


def _all_of(decl: ParamDecl) -> Box:
    return (0,) * len(decl.shape), decl.shape


def weight_bytes(model: PaperModel) -> WeightBytes:
    """Stored bytes of the plain forward, by how a step reads them."""
    sums = {"experts": 0, "table": 0, "rest": 0}
    for fmt, target, parts in model.alike:
        size = copy_bytes(fmt, target, _all_of(target.decl))
        for part, count in parts.items():
            if part == "extra":
                continue  # no step reads it
            lookup = part == "embed" and not model.paper.spec.tie.tied
            sums["experts" if is_expert(target.decl) else "table" if lookup else "rest"] += count * size
    return WeightBytes(**sums)


def part_bytes(model: PaperModel, mesh: Mesh, *, experts_only: bool = False) -> Counter[Part]:
    """Bytes, in the model's formats, that a rank holds of each part, or of the routed experts in it. Cuts are equal, so
    all ranks hold as many; the first is asked."""
    sums: Counter[Part] = Counter()
    for fmt, target, parts in model.alike:
        if experts_only and not is_expert(target.decl):
            continue
        piece = piece_of(target.decl, mesh, mesh.place(0))
        size = copy_bytes(fmt, target, (piece.starts, piece.stops))
        for part, count in parts.items():
            sums[part] += count * size
    return sums


def stages_of(model: PaperModel, mesh: Mesh) -> list[tuple[int, int]]:
    """The layers [start, stop) of each stage."""
    whole = model.whole_bytes
    sizes = [whole[i] for i in range(len(model.paper.spec.layers))]
    return stage_bounds(sizes, whole["embed"] + whole["first"], whole["last"] + whole["extra"], mesh.pp)


def stage_bytes(
    model: PaperModel, mesh: Mesh, bounds: list[tuple[int, int]], *, experts_only: bool = False
) -> list[int]:
    """Bytes, in the model's formats, that each rank of a stage holds, or those of routed experts among them."""
    parts = part_bytes(model, mesh, experts_only=experts_only).items()
    return [sum(size for part, size in parts if _on_stage(model, part, s, bounds)) for s in range(mesh.pp)]


def _on_stage(model: PaperModel, part: Part, stage: int, bounds: list[tuple[int, int]]) -> bool:
    if isinstance(part, int):
        return bounds[stage][0] <= part < bounds[stage][1]
    first, last = stage == 0, stage == len(bounds) - 1
    return (first if part in ("embed", "first") else last) or (
        part == "embed" and last and model.paper.spec.tie.tied  # a tied head reads it too
    )


def held_by(
    model: PaperModel, mesh: Mesh, place: Place, bounds: list[tuple[int, int]]
) -> Callable[[ParamDecl], Box | None]:
    """What the rank at ``place`` holds of a parameter."""
    boxes: dict[tuple[object, ...], Box] = {}  # a layer's parameters are cut as those of other layers are

    def held(decl: ParamDecl) -> Box | None:
        if not _on_stage(model, part_of(decl.name), place.stage, bounds):
            return None
        key = (decl.shape, decl.cuts)
        if key not in boxes:
            piece = piece_of(decl, mesh, place)
            boxes[key] = (piece.starts, piece.stops)
        return boxes[key]

    return held


def plan_of(model: PaperModel, mesh: Mesh, place: Place, bounds: list[tuple[int, int]]) -> WeightPlan:
    held = held_by(model, mesh, place, bounds)
    return plan_rank(model.groups, model.formats, place.rank, held, model.num_ignored)


def place_weights(report: PlanReport, model: PaperModel, chosen: Layout, bar: Bar) -> None:
    """Fill ``report`` with each rank's weight plan and the proof that every byte lands once. bar: counts the ranks."""
    mesh = chosen.mesh
    bounds = stages_of(model, mesh)
    places = list(mesh.places())
    for place in places:
        report.weight_plans.append(plan_of(model, mesh, place, bounds))
        bar.advance()
    report.proof = prove(model.decls, [held_by(model, mesh, place, bounds) for place in places], report.weight_plans)
