"""Whole models on one GPU against goals: decode at several batch sizes and prefill, weights made from a seed.

    python benchmarks/models.py --only qwen3_8b,gpt_oss_20b --out FOLDER

Each model is opened as ``dayzero profile`` opens it, and each of its steps measured the same way. A line is printed as
soon as a cell is measured, so that a run that is stopped loses little. FOLDER gets, for each model, NAME.json,
NAME.txt with all hotspots, and NAME.md with the table for the log. Exit 1 where a cell is missed or fails.

Goals are what a peer did on one card of this kind, prompt 1,024, greedy (one machine on one day, without a spread). A
cell is met ahead of the peer, where the peer is below a share of what this run's ceilings allow: of the floors of our
operators in decode, of the bf16 rate in prefill. Above that it is met within SPREAD of the peer. A goal that is set
by itself is met when it is reached.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from dayzero.acceptance.profile.report import PhaseReport, ProfileReport, Reporter, findings_of
from dayzero.acceptance.profile.show import show_phase
from dayzero.arch.spec import ModelSpec
from dayzero.commands.profile import opened
from dayzero.console import Console, plain
from dayzero.engine.config import EngineConfig, ExpertInputs
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.profiling.measure import Bench, Measured, Phase
from dayzero.errors import UserError

CONFIGS = Path(__file__).parents[1] / "tests" / "paper" / "configs"
CONTEXT, BATCHES, PROMPTS = 1024, (1, 16, 64, 256), (8192, 32768)
DECODE_SHARE, PREFILL_SHARE = 0.90, 0.85  # of the floor, of the bf16 rate: a peer below is to be passed
SPREAD = 0.03  # of a peer's figure, which came without one
GIB = 1 << 30


@dataclass(frozen=True)
class Model:
    """config: a file of CONFIGS, with a cut behind ``?``. decode, prefill: tokens a second of a peer, by batch size or
    prompt. goals: to be reached at batch 1 whatever the peer did. batches: that fit. step_tokens: of a prefill step.
    pool: GiB of cache."""

    name: str
    config: str
    pool: int
    decode: Mapping[int, float] = field(default_factory=dict)
    prefill: Mapping[int, float] = field(default_factory=dict)
    goal: float | None = None
    batches: tuple[int, ...] = BATCHES
    step_tokens: int = 16384
    expert_inputs: ExpertInputs = "bf16"


MODELS = {
    model.name: model
    for model in (
        Model(
            "kimi_linear_48b", "kimi_linear_48b_a3b.json", 18, {1: 255.9, 16: 1381, 64: 3009, 256: 8290},
            {8192: 47229, 32768: 46491}, goal=420,
        ),
        Model(
            "qwen3_8b", "qwen3_8b.json", 60, {1: 193, 16: 2793, 64: 8094, 256: 13914}, {8192: 37179, 32768: 25771},
        ),
        Model(
            "gpt_oss_20b", "gpt_oss_20b.json", 40, {1: 343.9, 16: 2859, 64: 8064, 256: 18947},
            {8192: 66970, 32768: 52532}, goal=520,
        ),
        Model(
            "deepseek_v32_4", "deepseek_v32.json?layers=4&first_k_dense_replace=1", 24,
            {1: 606.6, 16: 3583, 64: 7634}, {8192: 78250, 32768: 74657},
        ),
        # Cuts of what no single device holds; nobody else was measured on them. A sequence has 37 and 124 MiB of state.
        Model("kimi_k3_8", "kimi_k3.json?layers=8", 4, batches=(1, 16, 64), step_tokens=8192),
        Model("kimi_k3_26", "kimi_k3.json?layers=26&experts=128", 20, batches=(1, 16, 64, 128), step_tokens=8192),
        Model("kimi_k3_1_8", "kimi_k3_1.json?layers=8", 4, batches=(1, 16, 64), step_tokens=8192),
        Model("kimi_k3_1_26", "kimi_k3_1.json?layers=26&experts=128", 20, batches=(1, 16, 64, 128), step_tokens=8192),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One measured phase against its goal. ceiling: tokens a second that the run's ceilings allow. peer_share: of that;
    for prefill of what the bf16 rate allows. need: tokens a second; None without a peer."""

    phase: str
    tokens_per_second: float
    step_ms: float
    floor_ms: float
    ceiling: float
    idle: float | None
    host: float
    peer: float | None
    peer_share: float | None
    need: float | None

    @property
    def share(self) -> float:
        return self.tokens_per_second / self.ceiling

    @property
    def verdict(self) -> str:
        if self.need is None:
            return "no peer"
        return "met" if self.tokens_per_second >= self.need else f"missed: {self.tokens_per_second / self.need:.2f} x"

    def row(self) -> list[str]:
        peer = "–" if self.peer is None else f"{self.peer:,.0f} ({self.peer_share:.0%})"
        need = "–" if self.need is None else f"{self.need:,.0f}"
        idle = "–" if self.idle is None else f"{self.idle:.0%}"
        return [
            self.phase, f"{self.tokens_per_second:,.0f}", f"{self.step_ms:.3f}", f"{self.floor_ms:.3f}",
            f"{self.share:.0%}", idle, f"{self.host:.0%}", peer, need, self.verdict,
        ]  # fmt: skip

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "share": self.share, "verdict": self.verdict}


HEAD = ("phase", "tok/s", "ms", "floor ms", "of floor", "idle", "host", "peer (of ceiling)", "need", "verdict")


def cell_of(model: Model, report: PhaseReport, ceilings: Mapping[str, float]) -> Cell:
    """A measured phase by the rule of this file."""
    measured = report.measured
    phase = measured.phase
    rate = measured.tokens / measured.step_seconds
    ceiling = measured.tokens / report.floor if report.floor else float("inf")
    peer = model.decode.get(phase.rows) if phase.decode else model.prefill.get(phase.tokens)
    limit, most = DECODE_SHARE, ceiling
    if not phase.decode:
        limit, most = PREFILL_SHARE, measured.tokens * ceilings["bf16"] / sum(row.flops for row in report.rows)
    share = None if peer is None else peer / most
    need = None if peer is None or share is None else peer if share < limit else peer * (1 - SPREAD)
    if model.goal is not None and phase.decode and phase.rows == 1:
        need = model.goal
    return Cell(
        phase.name, rate, measured.step_seconds * 1e3, report.floor * 1e3, ceiling, report.idle_share,
        report.host_share, peer, share, need,
    )  # fmt: skip


def by_kind(spec: ModelSpec, measured: Measured, ceilings: Mapping[str, float]) -> list[list[str]]:
    """Of a step: seconds and floor of each kind of mixer, channel and residual, over the layers that have it; then of
    what stands outside the layers. Rows of text."""
    found: dict[str, tuple[set[str], float, float]] = {}
    for key, (seconds, _) in measured.times.items():
        words = key[1].split(".")
        kind = "outside the layers"
        if words[0] == "layers":
            layer = spec.layers[int(words[1])]
            part = {"mixer": layer.mixer, "channel": layer.channel}.get(words[2], layer.residual)
            kind = type(part).__name__
        places, spent, floor = found.get(kind, (set(), 0.0, 0.0))
        floor += sum(work.floor(ceilings) for work in measured.works.get(key, ()))
        found[kind] = places | {words[1] if words[0] == "layers" else ""}, spent + seconds, floor
    ordered = sorted(found.items(), key=lambda one: -one[1][1])
    return [
        [kind, str(len(places)), f"{spent * 1e3:.3f}", f"{floor * 1e3:.3f}", f"{floor / spent if spent else 1:.0%}"]
        for kind, (places, spent, floor) in ordered
    ]


def launch_of(model: Model, phases: list[Phase]) -> LaunchSpec:
    """The engine as a server of this load would be started; nothing is reused between prompts."""
    rows = max([phase.rows for phase in phases if phase.decode], default=1)
    step_tokens = max(model.step_tokens, rows)
    longest = max(phase.tokens + phase.answer_tokens(step_tokens) for phase in phases)
    config = EngineConfig(
        max_running=rows, max_step_tokens=step_tokens, max_model_len=longest,
        pool_bytes=model.pool * GIB, prefix_cache=False, dtype="bfloat16", expert_inputs=model.expert_inputs,
    )  # fmt: skip
    return LaunchSpec(source=f"seeded:{CONFIGS / model.config}", config=config, device="auto")


def measure_model(model: Model, phases: list[Phase], out: Path) -> list[Cell | str]:
    """All phases of one model; in the place of a cell what went wrong. Prints as it goes, writes the files at the end
    and after each phase."""
    began = time.perf_counter()
    launch = launch_of(model, phases)
    bench, reporter, report = opened(launch, Console(quiet=True))
    print(f"## {model.name}: {launch.source}, ready in {time.perf_counter() - began:.1f} s", flush=True)
    for key, value in report.table:
        print(f"   {key}: {value}")
    rates = ", ".join(f"{element} {rate / 1e12:.4g} T/s" for element, rate in report.ceilings.items())
    print(f"   ceilings: {rates}\n| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
    cells: list[Cell | str] = []
    kinds: list[dict[str, Any]] = []
    with open(out / f"{model.name}.txt", "w", encoding="utf-8") as text:
        hot = Console(show_all=True, stdout=text)
        for phase in phases:
            cells.append(_measure(bench, phase, model, reporter, report))
            last = cells[-1]
            print(f"| {' | '.join(last.row())} |" if isinstance(last, Cell) else last, flush=True)
            if isinstance(last, Cell):
                rows = by_kind(bench.runner.stack.spec, report.phases[-1].measured, report.ceilings)
                kinds.append({"phase": last.phase, "kinds": rows})
                text.write(f"{last.phase}, by kind of layer (layers, ms, floor ms, of floor)\n")
                text.writelines(f"  {' | '.join(row)}\n" for row in rows)
                show_phase(report.phases[-1], hot)
                text.flush()
            write(out, model, report, cells)
    print("by kind: layers, ms of kernels, floor ms, of floor")
    for one in kinds:
        print(f"   {one['phase']}: {'; '.join(' '.join(row) for row in one['kinds'])}")
    return cells


def _measure(bench: Bench, phase: Phase, model: Model, reporter: Reporter, report: ProfileReport) -> Cell | str:
    try:
        found = reporter.phase(bench.measure(phase))
    except (UserError, RuntimeError, AssertionError) as error:
        traceback.print_exc(limit=-6, file=sys.stdout)
        return f"{phase.name}: {type(error).__name__}: {str(error)[:300]}"
    report.phases.append(found)
    return cell_of(model, found, report.ceilings)


def write(out: Path, model: Model, report: ProfileReport, cells: list[Cell | str]) -> None:
    report.findings = findings_of(report, made=True)
    done = [cell for cell in cells if isinstance(cell, Cell)]
    failed = [cell for cell in cells if isinstance(cell, str)]
    text = json.dumps(plain({"model": model.name, "cells": done, "failed": failed, "profile": report}))
    (out / f"{model.name}.json").write_text(text, encoding="utf-8")
    lines = [f"| {' | '.join(HEAD)} |", f"|{' --- |' * len(HEAD)}", *(f"| {' | '.join(c.row())} |" for c in done)]
    (out / f"{model.name}.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip() != "0")


def models_of(text: str) -> list[Model]:
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in MODELS), None)
    if unknown is not None:
        raise argparse.ArgumentTypeError(f"there is no model {unknown!r}; known are {', '.join(MODELS)}")
    return [MODELS[name] for name in names]


def changes_of(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split("&")]
    wrong = next(("".join(pair) for pair in pairs if not all(pair)), None)
    if wrong is not None:
        raise argparse.ArgumentTypeError(f"{wrong!r} is no change; write KEY=VALUE, several with & between them")
    return {key: value for key, _, value in pairs}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=models_of, default=list(MODELS.values()), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, default=Path("models"))
    parser.add_argument("--batch", type=numbers, help="decode at these batch sizes; 0: at none")
    parser.add_argument("--prefill", type=numbers, help="prompts of so many tokens; 0: none")
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument(
        "--set", type=changes_of, metavar="KEY=VALUE&…", help="a further cut, as layers=4; no goals then"
    )
    parser.add_argument("--pool", type=int, help="GiB of cache")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    good = True
    for model in given.only:
        if given.set:
            model = cut(model, given.set)
        if given.pool:
            model = replace(model, pool=given.pool)
        batches = model.batches if given.batch is None else given.batch
        prompts = PROMPTS if given.prefill is None else given.prefill
        phases = [Phase(True, rows, given.context) for rows in batches]
        phases += [Phase(False, 1, tokens) for tokens in prompts]
        cells = measure_model(model, phases, given.out)
        good &= all(isinstance(cell, Cell) and cell.verdict in ("met", "no peer") for cell in cells)
    return 0 if good else 1


def cut(model: Model, changes: Mapping[str, str]) -> Model:
    """With further keys of the config, which take the place of those that it has; no peer ran that."""
    place, _, query = model.config.partition("?")
    asked = dict(part.split("=", 1) for part in query.split("&") if part)
    query = "&".join(f"{key}={value}" for key, value in (asked | dict(changes)).items())
    return replace(model, config=f"{place}?{query}", decode={}, prefill={}, goal=None)


if __name__ == "__main__":
    sys.exit(main())
