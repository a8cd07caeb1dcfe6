"""A diagnosis for a person: the layer at fault, its evidence, what follows from it, what to run next."""

from __future__ import annotations

from collections import Counter

from dayzero.acceptance.doctor.diagnosis import Cause, Diagnosis, Explained
from dayzero.console import Console, short_list
from dayzero.units import counted

MOST_SHOWN = 3  # findings of one cause, and reasons, that are written out


def show(found: Diagnosis, console: Console) -> None:
    """Everything goes through ``console``, which leaves it out with --json and shortens it when quiet."""
    console.headline(found.verdict, _headline(found), found.findings)
    for words in found.warnings:
        console.line(f"doubtful: {words}")
    for number, cause in enumerate(found.causes):
        _cause(cause, number, console)
    if found.causes and found.suspects:
        names = [f"{one.finding.claim} ({one.finding.layer})" for one in found.suspects]
        console.line(f"worth a look first, as earlier notes: {short_list(names, console.show_all)}")
    if not found.causes:
        # what is there is the whole answer
        console.findings(found.findings, found.verdict)
        return
    cause = found.causes[0]
    console.result(f"at fault: {cause.gate.layer}; next: {cause.command}")


def _headline(found: Diagnosis) -> str:
    if not found.causes:
        return f"{found.target.where}: no layer is found at fault"
    first = found.causes[0]
    return f"{found.target.where}: {first.gate.layer} is at fault; the first gate that fails: {first.gate.opens}"


def _cause(cause: Cause, number: int, console: Console) -> None:
    console.line()
    head = "at fault" if number == 0 else "also at fault, and not explained by the above"
    console.line(f"{head}: {cause.gate.layer} ({counted(len(cause.found), 'finding')} at the gate “{cause.gate.name}”)")
    most = len(cause.found) if console.show_all else MOST_SHOWN
    for placed in cause.found[:most]:
        finding = placed.finding
        console.line(f"  fail  {finding.claim}   [{placed.stage}, {finding.kind}]", "bold red")
        rows = [("measured", finding.measured), ("held to", finding.bound),
                ("evidence", short_list(finding.evidence, console.show_all)), ("remedy", finding.remedy)]  # fmt: skip
        for name, value in rows:
            if value not in (None, ""):
                console.line(f"        {name}: {value}")
    if len(cause.found) > most:
        console.line(f"  and {len(cause.found) - most} more; --all shows them")
    _explained(cause.explained, console)
    console.line(f"  next: {cause.command}")
    console.line(f"        {cause.why_command}")


def _explained(explained: tuple[Explained, ...], console: Console) -> None:
    """Later failures by reason: what is mended with the cause need not be looked at now."""
    for why, count in Counter(one.why for one in explained).items():
        of_it = [one.placed for one in explained if one.why == why]
        names = [f"{one.finding.claim} ({one.finding.layer}, {one.stage})" for one in of_it]
        console.line(f"  explains {counted(count, 'later failure')}, as {why}:")
        for name in names if console.show_all else names[:MOST_SHOWN]:
            console.line(f"        {name}")
        if not console.show_all and count > MOST_SHOWN:
            console.line(f"        and {count - MOST_SHOWN} more; --all shows them")
