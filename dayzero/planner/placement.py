"""Which rank holds what: pipeline stages, cuts, and the copies that fill a rank's parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dayzero.checkpoint.coverage import cover, stored_format
from dayzero.checkpoint.index import read_index
from dayzero.checkpoint.rules import Group
from dayzero.checkpoint.source import open_source
from dayzero.checkpoint.weight_plan import Box, WeightPlan, group_formats, plan_rank, prove
from dayzero.decl import Format, ParamDecl
from dayzero.errors import CheckpointError
from dayzero.models.blueprint import Blueprint, blueprint, read_config, refuse, require_recipe
from dayzero.parallel.cut import is_expert, piece_of
from dayzero.parallel.mesh import Mesh, Place
from dayzero.planner.budget import stage_bounds
from dayzero.planner.floors import WeightBytes
from dayzero.planner.plan_report import Layout, PlanReport


@dataclass
class PaperModel:
    """A model on paper with the format each group is stored in, found in the headers or claimed by the config."""

    paper: Blueprint
    groups: Sequence[Group]
    formats: list[Format]
    num_ignored: int
    by_param: Mapping[str, Format]
    decls: list[ParamDecl]


def read_model(source: str, recipe: str | None) -> PaperModel:
    """``source`` on paper. Errors: CheckpointError when its tensors are not those that the recipe asks for."""
    opened = open_source(source)
    config = read_config(opened)
    has_weights = not opened.config_only and any(f.endswith(".safetensors") for f in opened.files())
    index = read_index(opened)
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
    else:
        formats = [stored_format(g, g.name, paper.expansion, paper.quant, paper.plain) for g in groups]
        ignored = 0
    by_param = {t.decl.name: fmt for g, fmt in zip(groups, formats, strict=True) for t in g.targets}
    return PaperModel(paper, groups, formats, ignored, by_param, decls)


def weight_bytes(model: PaperModel) -> WeightBytes:
    """Stored bytes of the whole model, by how a step reads them."""
    experts = {d.name for d in model.decls if is_expert(d)}
    sums = {"experts": 0, "table": 0, "rest": 0}
    for copy in plan_rank(model.groups, model.formats, 0, _whole).copies:
        lookup = copy.param == "embed" and not model.paper.spec.tie.tied
        sums["experts" if copy.param in experts else "table" if lookup else "rest"] += copy.read_bytes
    return WeightBytes(**sums)


def _whole(decl: ParamDecl) -> Box:
    return (0,) * len(decl.shape), decl.shape


def stages_of(model: PaperModel, mesh: Mesh) -> list[tuple[int, int]]:
    sizes = [0] * len(model.paper.spec.layers)
    outer = [0, 0]
    for copy in plan_rank(model.groups, model.formats, 0, _whole).copies:
        if copy.param.startswith("layers."):
            sizes[int(copy.param.split(".")[1])] += copy.read_bytes
        else:
            outer[0 if _first_stage(copy.param) else 1] += copy.read_bytes
    return stage_bounds(sizes, outer[0], outer[1], mesh.pp)


def _first_stage(param: str) -> bool:
    return param == "embed" or param.startswith(("vision.", "projector."))


def held_by(
    model: PaperModel, mesh: Mesh, place: Place, bounds: list[tuple[int, int]]
) -> Callable[[ParamDecl], Box | None]:
    tied = model.paper.spec.tie.tied

    def held(decl: ParamDecl) -> Box | None:
        if decl.name.startswith("layers."):
            start, stop = bounds[place.stage]
            if not start <= int(decl.name.split(".")[1]) < stop:
                return None
        else:
            first, last = place.stage == 0, place.stage == mesh.pp - 1
            here = first if _first_stage(decl.name) else last
            if not here and not (tied and decl.name == "embed" and last):
                return None
        piece = piece_of(decl, mesh, place)
        return piece.starts, piece.stops

    return held


def plan_of(model: PaperModel, mesh: Mesh, place: Place, bounds: list[tuple[int, int]]) -> WeightPlan:
    held = held_by(model, mesh, place, bounds)
    return plan_rank(model.groups, model.formats, place.rank, held, model.num_ignored)


def place_weights(report: PlanReport, model: PaperModel, chosen: Layout) -> None:
    mesh = chosen.mesh
    bounds = stages_of(model, mesh)
    places = list(mesh.places())
    report.weight_plans = [plan_of(model, mesh, place, bounds) for place in places]
    report.proof = prove(model.decls, [held_by(model, mesh, place, bounds) for place in places], report.weight_plans)
