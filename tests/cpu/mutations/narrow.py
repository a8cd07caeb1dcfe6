"""Stages cut down to what a mutation can touch, and to sizes that take seconds."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dayzero.acceptance.accept.registry import stage_named
from dayzero.acceptance.accept.stage import Context, Stage, StageResult
from dayzero.finding import Finding
from tests.cpu.mutations.mutation import Part, Patches

LONG_SECONDS = 20.0
FREED_SECONDS, READY_SECONDS = 4.0, 25.0
LEFT_OUT = Finding("robust.left_out", "server", "not applicable", "what takes longer than a mutation may", "left out")

# One setting a feature, as the stage's own tests have it; a mutation adds the settings it can touch.
PLAIN: Mapping[str, tuple[Any, ...]] = {
    "path": ("reference",), "prefix": (False,), "chunk": (None,), "together": (False,), "tight": (False,),
    "narrow": (False,), "sampled": (False,), "page": (64,),
}  # fmt: skip
SETTINGS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    "prefix": {"prefix": (False, True)},
    "chunk": {"chunk": (None, 7)},
    "together": {"together": (False, True)},
    "tight": {"together": (False, True), "tight": (False, True), "page": (64, 16)},
    "page": {"page": (64, 16)},
    "narrow": {"narrow": (False, True)},
    "sampled": {"sampled": (False, True)},
}
SINGLE = "single"  # streamed, cancelled, and what quantised rows cost


def merged(parts: Iterable[Part]) -> tuple[Part, ...]:
    """One part a stage, with all that is chosen of it."""
    chosen: dict[str, dict[str, None]] = {}
    whole: set[str] = set()
    for part in parts:
        chosen.setdefault(part.stage, {}).update(dict.fromkeys(part.chosen))
        whole |= {part.stage} if not part.chosen else set()
    return tuple(Part(stage, () if stage in whole else tuple(names)) for stage, names in chosen.items())


def narrowed(part: Part, trace: Path | None) -> Stage:
    """The stage with what is chosen. trace: of the twin, recorded with the sound product."""
    stage = stage_named(part.stage)
    run = _RUNS.get(part.stage)
    return stage if run is None else replace(stage, run=lambda context: run(context, part.chosen, trace))


def _numerics(context: Context, chosen: tuple[str, ...], trace: Path | None) -> StageResult:
    from dayzero.acceptance.stages import numerics

    assert trace is not None
    if trace.exists():
        shutil.copy(trace, context.folder / "twin.trace")
    found = numerics.run(context)
    if not trace.exists():
        trace.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(context.folder / "twin.trace", trace)
    return found


def _equalities(context: Context, chosen: tuple[str, ...], trace: Path | None) -> StageResult:
    from dayzero.acceptance.stages import equalities

    features = dict(PLAIN)
    for name in chosen:
        for feature, settings in SETTINGS.get(name, {"narrow": (False, True)}).items():
            features[feature] = tuple(dict.fromkeys((*features[feature], *settings)))
    patches = Patches()
    with patches.stack:
        packed = equalities._features
        if chosen:
            patches.setattr(equalities, "_features", lambda c, m: _allowed(features, packed(c, m)))
            if SINGLE not in chosen:
                patches.setattr(equalities, "single_findings", lambda *given: iter(()))
            elif set(chosen) == {SINGLE}:
                patches.setattr(equalities, "covering", lambda given, possible: [])
        return equalities.run(context)


def _allowed(features: Mapping[str, tuple[Any, ...]], model: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Quantised rows only where the model has such."""
    return {**features, "narrow": features["narrow"] if len(model["narrow"]) > 1 else (False,)}


def _checks(name: str) -> Callable[[Context, tuple[str, ...], Path | None], StageResult]:
    def run(context: Context, chosen: tuple[str, ...], trace: Path | None) -> StageResult:
        from dayzero.acceptance.stages import contract, functional, probes
        from dayzero.acceptance.stages.asking import ask_all

        every = {"contract": contract, "functional": functional}[name].checks()
        some = [check for check in every if not chosen or check.name in chosen]
        assert not set(chosen) - {check.name for check in some}, f"no such check of {name}: {chosen}"
        patches = Patches()
        with patches.stack:
            patches.setattr(probes, "FREED_SECONDS", FREED_SECONDS)
            return ask_all(name, tuple(some), context)

    return run


def _long_context(context: Context, chosen: tuple[str, ...], trace: Path | None) -> StageResult:
    """chosen: ``exact``, ``limits``; the needles of a twin without training say nothing."""
    from dayzero.acceptance.stages import long_context

    patches = Patches()
    with patches.stack:
        patches.setattr(long_context, "SECONDS", {"quick": LONG_SECONDS})
        exact, grid = long_context.long_exact, SimpleNamespace()
        patches.setattr(long_context, "Haystack", lambda *given: None)
        grid.run, grid.figure = lambda *given: None, lambda *given: None
        grid.findings, grid.samples = lambda *given: [], lambda *given: {}
        patches.setattr(long_context, "long_grid", grid)
        if "exact" not in chosen:
            none = SimpleNamespace(**vars(exact))
            none.try_all = lambda *given: SimpleNamespace(trials={}, skipped={}, noise=0.0)
            none.findings, none.samples = lambda *given: [], lambda *given: {}
            patches.setattr(long_context, "long_exact", none)
        return long_context.run(context)


def _performance(context: Context, chosen: tuple[str, ...], trace: Path | None) -> StageResult:
    from dayzero.acceptance.stages import perf_load, performance

    patches = Patches()
    with patches.stack:
        patches.setattr(perf_load, "PLANS", {"quick": perf_load.Plan(16, 6, (1, 2), 4, 3, 20.0, 30.0, 256, 2)})
        patches.setattr(performance, "PLANS", perf_load.PLANS)
        return performance.run(context)


def _robustness(context: Context, chosen: tuple[str, ...], trace: Path | None) -> StageResult:
    """chosen: ``load``, ``hurt``: frozen, killed and drained."""
    from dayzero.acceptance.stages import robust_load, robust_soak, robustness

    size = replace(robustness.SIZES["quick"], soak=1.5, storm=20, flood=40, burst=24, timeout=20.0, levels=(1, 4))
    patches = Patches()
    with patches.stack:
        patches.setattr(robustness, "SIZES", {"quick": size})
        patches.setattr(robustness, "_warm", lambda *given: LEFT_OUT)
        patches.setattr(robustness, "_longest", lambda *given: "left out")
        for module in (robust_soak, robust_load):
            patches.setattr(module, "held", partial(robust_soak.held, seconds=FREED_SECONDS))
        patches.setattr(robustness, "_ready_seconds", lambda started: READY_SECONDS)
        patches.setattr(robustness, "_again", lambda *given: LEFT_OUT)
        if "load" not in chosen:
            patches.setattr(robustness, "_loaded", lambda *given: (robust_soak.Soak(seconds=1.0), [], {}))
        if "hurt" not in chosen:
            patches.setattr(robustness, "_hurt", lambda *given: [])
        return robustness.run(context)


_RUNS: Mapping[str, Callable[[Context, tuple[str, ...], Path | None], StageResult]] = {
    "numerics": _numerics,
    "equalities": _equalities,
    "functional": _checks("functional"),
    "contract": _checks("contract"),
    "long_context": _long_context,
    "performance": _performance,
    "robustness": _robustness,
}
