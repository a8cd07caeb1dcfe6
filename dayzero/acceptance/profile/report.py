"""What a profile says: where the time of a step goes, what of it could be had back, and what to try next."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero import __version__
from dayzero.arch.cost import flops_per_token
from dayzero.arch.spec import ModelSpec
from dayzero.decl import OpUse
from dayzero.engine.expert_choice import FLOOR, Evenness
from dayzero.engine.profiling.measure import Measured
from dayzero.finding import Finding, Verdict, worst
from dayzero.hardware import Hardware
from dayzero.ops.bindings import variant_at
from dayzero.ops.catalog import Catalog
from dayzero.planner.next_bindings import Untried, untried

SCHEMA = 1
LEAST_ACCOUNTED = 0.9
LONGER = 1.05  # times the context asked for: some steps go by until all rows decode, and while they are measured
JOINED = ("linear.matmul", "linear.matmul_fp8_128")  # products of one input, which may be called as one
_REST = {  # where the time is that no operator took
    "kernels": "the rest is in kernels and copies that no operator launched: glue of blocks, inputs, the sampler",
    "marks": "the rest lies between operators: the host, copies, glue of blocks; see its share",
    "clock": "the rest lies between operators: the host, copies, glue of blocks; see its share",
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True)
class Row:
    """An operator at all sites of one kind. seconds, floor: in a step. bound: what its floor is made of, ``memory`` or
    ``compute``. share: of the step in which it was timed. next: what to bind in its place."""

    contract: str
    sites: str
    num_sites: int
    variant: str
    calls: int
    seconds: float
    floor: float
    bound: str
    flops: float
    num_bytes: float
    share: float
    next: tuple[Untried, ...] = ()

    @property
    def recoverable(self) -> float:
        """Seconds above the floor."""
        return max(0.0, self.seconds - self.floor)

    @property
    def at_floor(self) -> float:
        """Share of the time that the floor is."""
        return self.floor / self.seconds if self.seconds else 1.0

    def to_json(self) -> dict[str, Any]:
        return {
            "operator": self.contract, "sites": self.sites, "num_sites": self.num_sites, "variant": self.variant,
            "calls": self.calls, "seconds": self.seconds, "floor_seconds": self.floor, "bound": self.bound,
            "flops": self.flops, "bytes": self.num_bytes, "share_of_step": self.share, "share_of_floor": self.at_floor,
            "recoverable_seconds": self.recoverable, "next": self.next,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class PhaseReport:
    """rows: most time above the floor first. spec_flops: of a step, as ``arch/cost`` counts them of the whole model."""

    measured: Measured
    rows: tuple[Row, ...]
    spec_flops: float

    @property
    def operators(self) -> float:
        """Seconds of a step in operators."""
        return sum(row.seconds for row in self.rows)

    @property
    def floor(self) -> float:
        """Seconds: the floors of all operators, one after another."""
        return sum(row.floor for row in self.rows)

    @property
    def accounted(self) -> float:
        """Operators, as a share of the step in which they were timed."""
        return self.operators / self.measured.looked_at_seconds

    @property
    def host_share(self) -> float:
        """Of a step as served, what the device was not busy with."""
        return max(0.0, 1 - self.measured.device_seconds / self.measured.step_seconds)

    @property
    def idle_share(self) -> float | None:
        """Of a step as served, in which no kernel ran; None where kernels are not recorded."""
        busy = self.measured.busy_seconds
        return None if busy is None else max(0.0, 1 - busy / self.measured.step_seconds)

    @property
    def longer_context(self) -> float | None:
        """Tokens behind each row of a decode step, the mean, where that is not what was asked for."""
        m = self.measured
        return m.context if m.phase.decode and m.context > LONGER * m.phase.tokens else None

    def to_json(self) -> dict[str, Any]:
        m = self.measured
        return {
            "phase": m.phase.name, "decode": m.phase.decode, "requests": m.phase.rows, "tokens": m.phase.tokens,
            "context": m.context, "tokens_a_step": m.tokens, "steps": m.num_steps, "step_seconds": m.step_seconds,
            "tokens_per_second": m.tokens / m.step_seconds, "device_seconds": m.device_seconds,
            "looked_at_seconds": m.looked_at_seconds, "timed_by": m.timed, "busy_seconds": m.busy_seconds,
            "idle_share": self.idle_share,
            "operator_seconds": self.operators, "floor_seconds": self.floor, "accounted": self.accounted,
            "host_share": self.host_share, "launches": m.launches, "recorded_pieces": m.replays,
            "spec_flops": self.spec_flops, "expert_choice": m.evenness, "operators": self.rows,
        }  # fmt: skip


@dataclass
class ProfileReport:
    """ceilings: measured in this run. table: the start table of the engine."""

    source: str
    family: str
    hardware: Hardware
    dtype: str
    ceilings: Mapping[str, float]
    table: Sequence[tuple[str, str]]
    phases: list[PhaseReport]
    findings: list[Finding] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        return worst(self.findings)

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "dayzero": __version__, "source": self.source, "family": self.family,
            "hardware": self.hardware.name, "dtype": self.dtype, "ceilings": dict(self.ceilings),
            "phases": self.phases, "findings": self.findings, "verdict": self.verdict,
        }  # fmt: skip


class Reporter:
    """Turns what was measured of one model into a report of it."""

    def __init__(
        self, spec: ModelSpec, hardware: Hardware, dtype: str, bindings: Mapping[str, str],
        ceilings: Mapping[str, float], catalog: Catalog,
    ) -> None:  # fmt: skip
        self._spec, self._hardware, self._dtype, self._bindings = spec, hardware, dtype, bindings
        self._ceilings, self._catalog = ceilings, catalog
        self._uses = {(use.contract, use.site): use for use in spec.contracts()}

    def phase(self, measured: Measured) -> PhaseReport:
        grouped: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
        together = self._together(measured)
        for contract, site in measured.times:
            pattern = _NUMBER.sub("*", site) + together.get((contract, site), "")
            grouped.setdefault((contract, pattern, self._variant(contract, site)), []).append((contract, site))
        rows = [self._row(group, keys, measured) for group, keys in grouped.items()]
        context = measured.phase.tokens
        mean = float(context) if measured.phase.decode else context / 2
        flops = measured.tokens * flops_per_token(self._spec, mean)
        return PhaseReport(measured, tuple(sorted(rows, key=lambda row: -row.recoverable)), flops)

    def _together(self, measured: Measured) -> dict[tuple[str, str], str]:
        """Products of one input that are called as one, at the first one's site: what the others add to its name."""
        out: dict[tuple[str, str], str] = {}
        called: dict[tuple[str, str], tuple[str, str]] = {}  # contract and parent -> the last one that was called
        for contract, site in self._uses:
            parent, _, word = site.rpartition(".")
            if (contract, site) in measured.times:
                called[contract, parent] = contract, site
            elif contract in JOINED and (contract, parent) in called:
                first = called[contract, parent]
                out[first] = f"{out.get(first, '')}+{word}"
        return out

    def _row(self, group: tuple[str, str, str], keys: Sequence[tuple[str, str]], measured: Measured) -> Row:
        contract, pattern, variant = group
        works = [work for key in keys for work in measured.works.get(key, ())]
        seconds = sum(measured.times[key][0] for key in keys)
        compute = sum(work.compute(self._ceilings) for work in works)
        floor = sum(work.floor(self._ceilings) for work in works)
        num_bytes = sum(work.num_bytes for work in works)
        use = self._uses.get(keys[0], OpUse(contract, keys[0][1]))
        return Row(
            contract, pattern, len(keys), variant, sum(measured.times[key][1] for key in keys), seconds, floor,
            "compute" if compute > num_bytes / self._ceilings["copy"] else "memory", sum(work.flops for work in works),
            num_bytes, seconds / measured.looked_at_seconds,
            tuple(untried(use, variant, self._hardware, self._dtype, self._catalog)),
        )  # fmt: skip

    def _variant(self, contract: str, site: str) -> str:
        return variant_at(contract, site, self._bindings)


def findings_of(report: ProfileReport, made: bool) -> list[Finding]:
    """made: the weights are, so that an uneven choice of experts voids the run."""
    out = []
    for phase in report.phases:
        out.append(_accounted(phase))
        if phase.measured.evenness is not None:
            out.append(_choice(phase, phase.measured.evenness, made))
    return out


def _accounted(phase: PhaseReport) -> Finding:
    good = phase.accounted >= LEAST_ACCOUNTED
    return Finding(
        "profile.accounted", "operator", "pass" if good else "note",
        f"{phase.measured.phase.name}: operators add up to the step",
        f"{phase.accounted:.0%} of {phase.measured.looked_at_seconds * 1e3:.3g} ms", f"{LEAST_ACCOUNTED:.0%}",
        remedy="" if good else _REST[phase.measured.timed],
    )  # fmt: skip


def _choice(phase: PhaseReport, found: Evenness, made: bool) -> Finding:
    verdict: Verdict = "pass" if not found.void else "fail" if made else "note"
    remedy = "the run is void: give another seed" if made else "this text, or this model, prefers few experts"
    return Finding(
        "profile.expert_choice", "weights", verdict, f"{phase.measured.phase.name}: experts are chosen evenly",
        found.text(), f"{FLOOR:.0%} of an even choice's entropy", remedy="" if verdict == "pass" else remedy,
    )  # fmt: skip
