"""From failing findings to the layer at fault: which gate failed first, what it explains, what it does not. Paper."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero.acceptance.accept.registry import NAMES
from dayzero.acceptance.doctor.rules import (
    BY_NAME,
    LINKS,
    MACHINE,
    ORDER,
    PLAN,
    SERVICE,
    Gate,
    gate_of,
    stage_place,
)
from dayzero.finding import Finding, Verdict, worst

SEEDED = "seeded:"
# A stage that is doctor's own -> the one of an acceptance that looks closer at what it looks at.
NEAREST = {MACHINE: "performance", PLAN: "weights", SERVICE: "contract"}
NO_ANSWERS = ("server.reached", "server.ready")


@dataclass(frozen=True, slots=True)
class Placed:
    """A finding and the stage that made it."""

    stage: str
    finding: Finding

    @property
    def gate(self) -> Gate:
        return gate_of(self.finding.layer, self.finding.kind)

    def to_json(self) -> dict[str, Any]:
        return {"stage": self.stage, "gate": self.gate.name} | self.finding.to_json()


@dataclass(frozen=True, slots=True)
class Explained:
    """A failing finding that follows from an earlier gate's, and why."""

    placed: Placed
    why: str


@dataclass(frozen=True, slots=True)
class Cause:
    """A gate that fails and that no earlier one explains. found: its unexplained findings, first one first.
    command: what to run next, and why_command what that shows."""

    gate: Gate
    found: tuple[Placed, ...]
    explained: tuple[Explained, ...]
    command: str
    why_command: str

    @property
    def first(self) -> Placed:
        return self.found[0]

    def to_json(self) -> dict[str, Any]:
        return {
            "gate": self.gate.name,
            "layer": self.gate.layer,
            "opens": self.gate.opens,
            "found": self.found,
            "explained": [one.placed.to_json() | {"why": one.why} for one in self.explained],
            "command": self.command,
            "why_command": self.why_command,
        }


@dataclass(frozen=True, slots=True)
class Target:
    """What was looked at, for the commands that are named. where: as the caller named it."""

    where: str
    source: str | None = None
    url: str | None = None
    recipe: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """causes: first one first; empty where nothing fails. suspects: notes of gates before the first cause, worth a look
    since a note fails nothing. warnings: what makes the diagnosis itself doubtful."""

    target: Target
    placed: tuple[Placed, ...]
    causes: tuple[Cause, ...]
    suspects: tuple[Placed, ...]
    warnings: tuple[str, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        return [one.finding for one in self.placed]

    @property
    def layer(self) -> str | None:
        """The layer at fault."""
        return self.causes[0].gate.layer if self.causes else None

    @property
    def verdict(self) -> Verdict:
        found = worst(self.findings)
        return "note" if found == "pass" and self.warnings else found

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "target": self.target.where,
            "layer": self.layer,
            "gate": self.causes[0].gate.name if self.causes else None,
            "next": self.causes[0].command if self.causes else None,
            "causes": self.causes,
            "suspects": self.suspects,
            "warnings": self.warnings,
            "facts": self.facts,
            "findings": self.placed,
        }


def diagnose(
    target: Target, placed: Iterable[Placed], warnings: Sequence[str] = (), facts: Mapping[str, Any] | None = None
) -> Diagnosis:
    """The diagnosis of all findings of a run, in the order they were made."""
    listed = tuple(placed)
    fails = [one for one in listed if one.finding.verdict == "fail"]
    fails.sort(key=lambda one: (ORDER[one.gate.name], stage_place(one.stage)))
    causes = _causes(target, fails)
    before = ORDER[causes[0].gate.name] if causes else 0
    suspects = tuple(one for one in listed if one.finding.verdict == "note" and ORDER[one.gate.name] < before)
    return Diagnosis(target, listed, causes, suspects, tuple(warnings), facts or {})


def _causes(target: Target, fails: Sequence[Placed]) -> tuple[Cause, ...]:
    """fails: by gate, then by stage, so that whatever explains one stands before it."""
    root: dict[int, int] = {}  # a failure -> the one at the root of it, itself where nothing explains it
    why: dict[int, str] = {}
    for at, one in enumerate(fails):
        found = next(((before, said) for before in range(at) if (said := _explains(fails[before], one))), None)
        root[at] = at if found is None else root[found[0]]
        if found is not None:
            why[at] = found[1]
    gates = dict.fromkeys(fails[at].gate.name for at in range(len(fails)) if root[at] == at)
    out = []
    for name in gates:
        own = [at for at in range(len(fails)) if root[at] == at and fails[at].gate.name == name]
        following = [at for at in range(len(fails)) if root[at] != at and fails[root[at]].gate.name == name]
        found_here = tuple(fails[at] for at in own)
        explained = tuple(Explained(fails[at], why[at]) for at in following)
        out.append(Cause(BY_NAME[name], found_here, explained, *next_command(target, found_here[0])))
    return tuple(out)


def _explains(cause: Placed, effect: Placed) -> str | None:
    """Why ``effect`` follows from ``cause``; None where it does not."""
    if stage_place(cause.stage) > stage_place(effect.stage):
        return None
    for link in LINKS:
        fits = link.cause == cause.gate.name and effect.gate.name in link.effects and effect.stage in link.stages
        of_kind = cause.finding.kind.startswith(link.kinds or "") and effect.finding.kind.startswith(link.of or "")
        if fits and of_kind:
            return link.why
    return None


def next_command(target: Target, first: Placed) -> tuple[str, str]:
    """(command, what it shows) for a cause whose first finding is ``first``."""
    gate = first.gate
    source, why = target.source, gate.why
    if source is not None:
        command = gate.command
        if source.startswith(SEEDED) and command.startswith(("dayzero align", "dayzero inspect {source} --hash")):
            # there are no files of weights: the stage makes them from the seed
            command, why = "dayzero accept {source} --stages {stage}{recipe}", "it runs that stage alone"
        elif not command.startswith("dayzero accept"):
            source = source.removeprefix(SEEDED)
    elif target.url is not None:
        command = gate.black_box
        if first.finding.kind in NO_ANSWERS:
            command, why = (
                "dayzero doctor",
                "a server that does not answer cannot be asked; it looks at this machine",
            )
    else:
        command, why = "dayzero doctor", "the record names neither a checkpoint nor a server; it looks at this machine"
    words = {
        "source": shlex.quote(source or ""),
        "url": shlex.quote(target.url or ""),
        "stage": first.stage if first.stage in NAMES else NEAREST.get(first.stage, "weights"),
        "recipe": f" --recipe {shlex.quote(target.recipe)}" if target.recipe else "",
    }
    return command.format(**words), why
