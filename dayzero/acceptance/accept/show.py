"""A record and a comparison as a person reads them on a terminal: verdict first."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dayzero.acceptance.accept.record import all_findings
from dayzero.console import Console, duration_text
from dayzero.finding import VERDICTS
from dayzero.units import counted

MAX_ROWS = 12


def subject_text(subject: Mapping[str, Any]) -> str:
    """``models/nova at http://…``."""
    return " at ".join(part for part in (subject["source"], subject["url"]) if part)


def show_record(record: Mapping[str, Any], folder: Path, console: Console) -> None:
    """Print ``record``, which lies in ``folder``."""
    findings, protocol = all_findings(record), record["protocol"]
    console.headline(record["verdict"], f"{subject_text(record['subject'])}, profile {record['profile']}", findings)
    if protocol["left_out"]:
        console.words(f"{counted(len(protocol['left_out']), 'stage')} left out", protocol["left_out"])
    rows = [
        (
            stage["name"],
            stage["verdict"],
            *(stage["counts"][verdict] for verdict in VERDICTS),
            duration_text(stage["seconds"]),
            "taken from an earlier run" if stage["taken"] else "",
        )
        for stage in record["stages"]
    ]
    console.table("stages", ("stage", "verdict", *VERDICTS, "time", ""), rows)
    package, machine = protocol["package"], protocol["machine"]
    commit = f" ({package['commit'][:12]}{', with changes' if package['changed'] else ''})" if package["commit"] else ""
    console.line(f"{package['name']} {package['version']}{commit}, seed {record['seed']}, {machine_text(machine)}")
    console.line(f"digest {record['digest']}")
    console.line(f"record {folder / 'record.json'}, page {folder / 'index.html'}, JUnit {folder / 'junit.xml'}")
    console.findings(findings, record["verdict"])


def machine_text(machine: Mapping[str, Any]) -> str:
    """``8 x Some CPU``, or the accelerators."""
    if machine.get("accelerator"):
        return f"{machine['num_accelerators']} x {machine['accelerator']}"
    return f"{machine['cpus']} x {machine['cpu']}"


def show_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    """Print ``comparison``."""
    counts = comparison["counts"]
    said = ", ".join(f"{number} {status}" for status, number in counts.items() if number)
    console.result(f"{comparison['verdict']}: B against A: {said or 'no findings'}")
    for letter in "ab":
        head = comparison[letter]
        numbers = ", ".join(f"{head['counts'][verdict]} {verdict}" for verdict in VERDICTS)
        sound = "" if head["sound"] else "; changed after it was written"
        console.line(
            f"{letter.upper()}: {head['where']}: {subject_text(head['subject'])}, {head['profile']}, {head['began']}: "
            f"{head['verdict']} ({numbers}){sound}"
        )
    odd = [
        (d["what"], "all" if d["stages"] is None else ", ".join(d["stages"]), d["why"])
        for d in comparison["differences"]
    ]
    if odd:
        console.table("not the same in both", ("what", "stages", "why it matters"), odd)
    # what stands in a stage that one record leaves out is no news of its own
    alone = {name for d in comparison["differences"] if d["what"] == "stages" for name in {*d["a"]} ^ {*d["b"]}}
    rows = [
        (f["status"], f["stage"], f["kind"], *(_verdict(f[letter]) for letter in "ab"), f["claim"])
        for f in comparison["findings"]
        if f["status"] != "same" and f["stage"] not in alone
    ]
    rows.sort(key=lambda row: list(counts).index(row[0]))
    shown = rows if console.show_all else rows[:MAX_ROWS]
    more = f" (+{len(rows) - len(shown)} more, --all shows them)" if len(shown) < len(rows) else ""
    if rows:
        console.table(f"findings{more}", ("status", "stage", "kind", "A", "B", "claim"), shown)
    if comparison["statistics"]:
        told = [(s["stage"], s["name"], statistic_text(s)) for s in comparison["statistics"]]
        console.table("paired items, B against A", ("stage", "what", "result"), told)


def _verdict(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "-"
    measured = found["measured"]
    return f"{found['verdict']}" if measured is None else f"{found['verdict']}: {str(measured)[:40]}"


def statistic_text(one: Mapping[str, Any]) -> str:
    """What one paired test says, in a line."""
    if one["test"] is None:
        return f"not comparable: {one['why']}"
    if one["test"] == "mcnemar":
        return (
            f"{one['right_b']} of {one['num_items']} right, {one['right_a']} before; {one['broken']} broken, "
            f"{one['mended']} mended; p {one['p']:.3g}, {one['p_adjusted']:.3g} after Holm"
        )
    spread = "" if one["low"] is None else f", 95 % interval {one['low']:.4g} to {one['high']:.4g}"
    return (
        f"mean {one['mean_b']:.4g}, {one['mean_a']:.4g} before; difference {one['difference']:+.4g}{spread}, "
        f"{one['num_items']} items"
    )
