"""What paper says of a checkpoint that will not run: inspect it, plan it here, weigh it against free memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dayzero.acceptance.accept.run import LAYER_OF_ERROR
from dayzero.acceptance.doctor.diagnosis import Diagnosis, Placed, Target, diagnose
from dayzero.acceptance.doctor.machine import Look, machine_findings
from dayzero.acceptance.doctor.rules import MACHINE, PLAN
from dayzero.console import ProgressFactory, no_progress
from dayzero.errors import UsageError, UserError
from dayzero.finding import Finding
from dayzero.hardware import load_hardware_entry_points
from dayzero.ops.bind import load_entry_points
from dayzero.planner.inspect import inspect_source
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.planner import plan_source
from dayzero.units import bytes_text

PAPER = "weights"  # the stage of an acceptance that inspects
HERE, CPU = "here", "cpu"


def diagnose_machine(look: Look) -> Diagnosis:
    """This machine alone."""
    return diagnose(Target("this machine"), [Placed(MACHINE, one) for one in machine_findings(look)])


def diagnose_source(
    source: str, look: Look, *, recipe: str | None = None, progress: ProgressFactory = no_progress
) -> Diagnosis:
    """The cheap checks of a checkpoint, and this machine's. No weights are read.

    What is wrong with a checkpoint is a finding, never an error. Errors: UsageError when ``source`` is none at all.
    """
    facts: dict[str, Any] = {}
    placed = [Placed(MACHINE, one) for one in machine_findings(look)]
    placed += [Placed(PAPER, one) for one in _inspected(source, recipe, facts, progress)]
    if look.torch is None:
        why = "it asks torch what device is here, and torch cannot be imported"
        placed.append(
            Placed(PLAN, Finding("plan.made", "hardware", "not applicable", "a layout fits this machine", why))
        )
    else:
        placed += [Placed(PLAN, one) for one in _planned(source, recipe, facts, progress)]
    placed += [Placed(PLAN, one) for one in _weighed(facts, look)]
    return diagnose(Target(source, source, recipe=recipe), _once(placed), facts=facts)


def _inspected(source: str, recipe: str | None, facts: dict[str, Any], progress: ProgressFactory) -> list[Finding]:
    def work() -> list[Finding]:
        report = inspect_source(source, recipe=recipe, progress=progress, catalog=load_entry_points()[0])
        facts.update(family=report.family, total_bytes=report.total_bytes)
        return report.findings

    return _guarded("inspect", "the checkpoint can be read", work)


def _planned(source: str, recipe: str | None, facts: dict[str, Any], progress: ProgressFactory) -> list[Finding]:
    def work() -> list[Finding]:
        options = PlanOptions(HERE, context=1, recipe=recipe, known=load_hardware_entry_points())
        report = plan_source(source, options, progress)
        facts.update(hardware=report.hardware.name, devices=report.num_devices, target=report.hardware.target,
                     weight_bytes=report.weight_bytes)  # fmt: skip
        return report.findings

    return _guarded("plan", "a layout fits this machine", work)


def _guarded(what: str, claim: str, work: Callable[[], list[Finding]]) -> list[Finding]:
    """What ``work`` finds; an error of the checkpoint's or the machine's is a finding too, at the layer of its kind."""
    try:
        return work()
    except UsageError as error:
        if what == "inspect" and type(error) is UsageError:  # no checkpoint at all: the call was wrong
            raise
        return [_failed(what, claim, error)]
    except UserError as error:
        return [_failed(what, claim, error)]


def _failed(what: str, claim: str, error: UserError) -> Finding:
    layer = next((layer for kind, layer in LAYER_OF_ERROR if isinstance(error, kind)), "weights")
    # An unreadable file is the files' fault, whatever else could be missing after it.
    kind = "integrity.read" if what == "inspect" and layer == "weights" else f"{what}.made"
    return Finding(
        kind, layer, "fail", claim, str(error), "no error", (type(error).__name__,), "Do what the sentence says."
    )


def _weighed(facts: dict[str, Any], look: Look) -> list[Finding]:
    """Weights against what is free now; a plan reckons with what the device has when nothing else runs on it."""
    needed = facts.get("weight_bytes") or 0
    if not needed:
        return []
    on_cpu = facts.get("target") == CPU
    free = look.available_bytes if on_cpu else sum(look.free_devices)
    claim = f"the weights, {bytes_text(needed)} as stored, fit into what is free now"
    where = "this machine's memory" if on_cpu else f"{len(look.free_devices)} devices"
    if needed < free:
        return [Finding("plan.free", "hardware", "pass", claim, f"{bytes_text(free)} in {where}")]
    remedy = "Close what else holds memory there, keep fewer experts (--expert-memory), or take a larger machine."
    return [
        Finding(
            "plan.free", "hardware", "fail", claim, f"{bytes_text(free)} in {where}", bytes_text(needed), (), remedy
        )
    ]


def _once(placed: list[Placed]) -> list[Placed]:
    """Planning meets the faults of a checkpoint that inspecting has named: what fails there alike is left out here."""
    told = {str(one.finding.measured) for one in placed if one.stage == PAPER and one.finding.verdict == "fail"}
    return [
        one
        for one in placed
        if not (one.stage == PLAN and one.finding.verdict == "fail" and str(one.finding.measured) in told)
    ]
