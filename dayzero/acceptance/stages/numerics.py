"""Stage 2, numerics: our forward against an independent oracle, on a twin and on the real weights; the service in its
own number type against what that type loses; quantised paths against what their formats lose.

A source that is a twin itself is the twin. Real weights are aligned where an oracle is available and they lie on this
machine; the record says ``twin only`` otherwise, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dayzero.acceptance.accept.stage import Context, Figure, Stage, StageResult
from dayzero.acceptance.align import AlignOptions, AlignReport, align_source
from dayzero.acceptance.oracle import choose
from dayzero.acceptance.prompt import is_paper, is_twin, token_ids
from dayzero.acceptance.stages.numerics_experts import expert_errors, expert_findings, facts_of
from dayzero.acceptance.stages.numerics_floor import Floor, noise_floors
from dayzero.acceptance.stages.numerics_ladder import (
    carried_over,
    choice_findings,
    kl_figure,
    ladder_figure,
    ladder_findings,
    logit_findings,
    record_findings,
)
from dayzero.acceptance.stages.numerics_served import Served, ask_service, kl_of_floor, kl_of_places, served_findings
from dayzero.acceptance.trace import Trace
from dayzero.arch.cost import total_params
from dayzero.arch.record_choice import NARROW, PLAIN, with_records
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.engine.llm import LLM
from dayzero.errors import UsageError
from dayzero.finding import Finding
from dayzero.planner.memory import available_bytes
from dayzero.rehearse.twin import TwinOptions, write_twin

TWIN, REAL = "twin", "real"
TWIN_TOKENS = {"quick": 48, "release-day": 96, "long": 192}
REAL_TOKENS = {"quick": 64, "release-day": 256, "long": 1024}
SMALL_TOKENS = {"quick": 192, "release-day": 512, "long": 1024}  # of real weights that take seconds
SMALL_PARAMS = 50_000_000
EXPERT_LAYERS = {"quick": 2, "release-day": 8, "long": 1 << 20}
NOTHING_PACKED = "this model keeps no rows that a plan could quantise"


@dataclass(slots=True)
class _Side:
    """One set of weights: where it is, and what was found."""

    name: str
    where: str
    model: LoadedModel
    num_tokens: int
    tokens: list[int] = field(default_factory=list)
    report: AlignReport | None = None
    narrow: AlignReport | None = None
    floors: dict[str, Floor] = field(default_factory=dict)

    @property
    def prefix(self) -> str:
        return f"numerics.{self.name}"


def run(context: Context) -> StageResult:
    """Errors: those of ``align_source``, of opening a checkpoint, and of an engine."""
    source = context.subject.source
    assert source is not None, "the stage needs a source"
    model = open_model(source, recipe=context.subject.recipe)
    if is_paper(model):
        raise UsageError(
            f"{source} is a paper twin: it has no values to compare; give the checkpoint, or a small twin."
        )
    why = _no_oracle(model)
    sides, why_not_real = _sides(context, source, model, why)
    findings = [_scope(sides, model, why or why_not_real)]
    figures: list[Figure] = []
    for side in sides:
        side.tokens = _align_side(context, side, why)
    main = sides[-1]
    served = _ask(context, main)
    for side in sides:
        dtypes = dict.fromkeys(["f32", served.dtype] if side is main else ["f32"])
        made = noise_floors(side.model, side.tokens, list(dtypes), available_bytes() // 4)
        side.floors = {floor.dtype: floor for floor in made}
        findings += _side_findings(side, why)
        if side.report is not None:
            figures += _pictures(side, side.report)
    oracle_TV = main.floors["f32"].clean_TV if why else Trace(_trace(context, main)).get("logits")
    floor = main.floors[served.dtype].first(len(served.tokens))
    findings += served_findings(main.prefix, served, oracle_TV, floor)
    figures.append(_served_picture(main, served, oracle_TV, floor))
    errors = expert_errors(main.model, served.tokens, EXPERT_LAYERS[context.profile], available_bytes() // 4)
    findings += expert_findings(main.prefix, errors)
    return StageResult(tuple(findings), tuple(figures), _facts(sides, served, why) | {"experts_fp8": facts_of(errors)})


def _no_oracle(model: LoadedModel) -> str:
    """Why nothing independent can judge this model here; empty when something can."""
    try:
        choose(model.recipe, None, False, model.config, model.source.files())
    except UsageError as error:
        return str(error)
    return ""


def _sides(context: Context, source: str, model: LoadedModel, why: str) -> tuple[list[_Side], str]:
    """The twin and, where they can be aligned, the real weights; else why not."""
    profile = context.profile

    def most(tokens: int, of: LoadedModel) -> int:
        return min(tokens, of.spec.max_positions - 1)

    if is_twin(model):
        return [_Side(TWIN, source, model, most(TWIN_TOKENS[profile], model))], ""
    made = context.folder / "twin"
    if not made.exists():
        options = TwinOptions(seed=context.seed, recipe=context.subject.recipe)
        write_twin(source, str(made), options, context.progress)
    twin = open_model(str(made), recipe=context.subject.recipe)
    sides = [_Side(TWIN, str(made), twin, most(TWIN_TOKENS[profile], twin))]
    if why or model.source.path("config.json") is None:
        return sides, why or "the weights do not lie on this machine, and the oracle reads files of this machine"
    lengths = SMALL_TOKENS if total_params(model.spec) <= SMALL_PARAMS else REAL_TOKENS
    return [*sides, _Side(REAL, source, model, most(lengths[profile], model))], ""


def _scope(sides: Sequence[_Side], model: LoadedModel, why: str) -> Finding:
    claim = "the forward was aligned on the weights that are served"
    if is_twin(model) or sides[-1].name == REAL:
        return Finding(
            "numerics.scope", "operator", "pass", claim, TWIN + " only" if is_twin(model) else "real weights"
        )
    return Finding(
        "numerics.scope", "operator", "note", claim, "twin only", "real weights", (why,),
        "Run this stage where the checkpoint and an oracle are, or record a trace there: `dayzero align --record`.",
    )  # fmt: skip


def _align_side(context: Context, side: _Side, why: str) -> list[int]:
    """Align, with plain and with quantised rows, where there is an oracle. The ids that were read."""
    if why:
        return token_ids(side.model, None, None, side.num_tokens).tokens
    side.report = _align(context, side, PLAIN)
    if any(need.packed is not None for need in with_records(side.model.spec, NARROW).cache()):
        side.narrow = _align(context, side, NARROW)
    return Trace(_trace(context, side)).tokens


def _trace(context: Context, side: _Side) -> Path:
    return context.folder / f"{side.name}.trace"


def _align(context: Context, side: _Side, cache: str) -> AlignReport:
    """A trace that an earlier run left is used again, unless it is another checkpoint's."""
    trace, recipe, progress = _trace(context, side), context.subject.recipe, context.progress
    if trace.exists():
        try:
            return align_source(side.where, AlignOptions(trace=str(trace), recipe=recipe, cache=cache), progress)
        except UsageError:
            trace.unlink()
    options = AlignOptions(record=str(trace), recipe=recipe, num_tokens=side.num_tokens, cache=cache)
    return align_source(side.where, options, progress)


def _ask(context: Context, main: _Side) -> Served:
    """The service's side of the ids in front of the first image, alone in its engine."""
    tower = main.model.spec.vision
    text = main.tokens
    if tower is not None and tower.pad_id in text:
        text = text[: text.index(tower.pad_id)]
    longest = min(main.model.spec.max_positions, len(main.tokens) + 1)
    options: dict[str, Any] = {"recipe": context.subject.recipe, "max_running": 1, "seed": context.seed}
    with LLM(main.where, max_model_len=longest, **options) as llm:
        return ask_service(llm, text)


def _side_findings(side: _Side, why: str) -> list[Finding]:
    prefix, spec, report = side.prefix, side.model.spec, side.report
    if report is None:
        claim = "the forward agrees with an independent oracle"
        return [Finding(f"{prefix}.oracle", "operator", "not applicable", claim, why)]
    floor = side.floors["f32"]
    found = [*ladder_findings(prefix, spec, report), *choice_findings(prefix, report)]
    found += [*logit_findings(prefix, report, floor), *carried_over(prefix, report)]
    if side.narrow is None:
        claim = "quantised rows of the cache lose what their format predicts"
        return [*found, Finding(f"{prefix}.record", "cache", "not applicable", claim, NOTHING_PACKED)]
    return [*found, *record_findings(prefix, side.narrow)]


def _pictures(side: _Side, report: AlignReport) -> list[Figure]:
    floor_T, logits = side.floors["f32"].kl_T, report.logits
    marks = {"mean": logits.kl_mean, "p99": logits.kl_p99, "floor": float(floor_T.mean())}
    found = [ladder_figure(f"Error ladder, {report.aligned}", report)]
    if side.narrow is not None:
        found.append(ladder_figure(f"Error ladder with rows in {NARROW}, {report.aligned}", side.narrow))
    return [*found, kl_figure(f"KL to the oracle in float32, {report.aligned}", logits.kl_T, marks)]


def _served_picture(main: _Side, served: Served, oracle_TV: Tensor, floor: Floor) -> Figure:
    kl_T, floor_T = kl_of_places(oracle_TV, served.places), kl_of_floor(floor, served.places)
    marks = {"mean": float(kl_T.mean()), "floor": float(floor_T.mean())} if len(kl_T) else {}
    return kl_figure(f"KL of the service in {served.dtype} to the oracle, {main.name}", kl_T.tolist(), marks)


def _facts(sides: Sequence[_Side], served: Served, why: str) -> dict[str, Any]:
    reports = {side.name: side.report for side in sides if side.report is not None}
    return {
        "aligned": [report.aligned for report in reports.values()],
        "no_oracle": why,
        "oracle": {name: report.oracle for name, report in reports.items()},
        "text": {name: f"{report.num_tokens} tokens of {report.text}" for name, report in reports.items()},
        "fingerprint": {name: report.fingerprint for name, report in reports.items()},
        "seconds": {name: report.seconds for name, report in reports.items()},
        "service": {"dtype": served.dtype, "bindings": served.bindings, "tokens": len(served.tokens)},
    }


STAGE = Stage("numerics", "Numerics against an independent oracle", frozenset({"source"}), run)
