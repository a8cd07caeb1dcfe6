"""A profile as a person reads it: hotspots first."""

from __future__ import annotations

from dayzero.acceptance.profile.report import PhaseReport, ProfileReport, Row
from dayzero.console import Console
from dayzero.units import counted

COLUMNS = ("operator", "sites", "variant", "calls", "ms", "of step", "floor ms", "by", "at floor", "recoverable ms")
MOST_ROWS = 12  # of a table, unless all are asked for
LOOKED = {
    "kernels": "kernels of an eager step {ms:.4g} ms, of operators: {share:.0%} ({operators:.4g} ms)",
    "marks": "with operators timed {ms:.4g} ms, accounted for: {share:.0%} ({operators:.4g} ms in operators)",
    "clock": "with operators timed {ms:.4g} ms, accounted for: {share:.0%} ({operators:.4g} ms in operators)",
}
HOT = 0.02  # of a step: what to try next is told of operators above it


def show(report: ProfileReport, console: Console) -> None:
    console.headline(report.verdict, f"{report.source} on {report.hardware.name}, {report.dtype}", report.findings)
    rates = ", ".join(
        f"{element} {rate / 1e12:.3g} TFLOP/s" for element, rate in report.ceilings.items() if element != "copy"
    )
    console.line(f"ceilings of this run: copy {report.ceilings['copy'] / 1e9:.4g} GB/s, {rates}")
    for phase in report.phases:
        show_phase(phase, console)
    console.findings(report.findings, report.verdict)


def show_phase(phase: PhaseReport, console: Console) -> None:
    """What was measured of one phase, and its hotspots."""
    m = phase.measured
    console.line(
        f"{m.phase.name}: {m.step_seconds * 1e3:.4g} ms a step, {m.tokens / m.step_seconds:,.1f} tokens a second; "
        f"floors of its operators {phase.floor * 1e3:.4g} ms ({phase.floor / m.step_seconds:.0%})"
    )
    parts = [
        f"host {phase.host_share:.0%}",
        "not recorded" if not m.replays else f"recorded in {counted(int(m.replays), 'piece')}",
    ]
    if m.launches is not None:
        parts.append(f"{m.launches:,} launches of an eager step")
    looked = LOOKED[m.timed]
    parts.append(looked.format(ms=m.looked_at_seconds * 1e3, share=phase.accounted, operators=phase.operators * 1e3))
    if m.evenness is not None:
        parts.append(f"expert choice: {m.evenness.text()}")
    console.line("; ".join(parts))
    if phase.longer_context is not None:
        console.line(
            f"rows hold {phase.longer_context:,.0f} tokens: those whose prompts came first decoded on meanwhile; a "
            "larger --max-step-tokens keeps them together"
        )
    if m.busy_seconds is not None and phase.idle_share is not None:
        idle = m.step_seconds - m.busy_seconds
        console.line(
            f"idle {phase.idle_share:.0%}: kernels run for {m.busy_seconds * 1e3:.4g} ms of a step as served, none for "
            f"{max(0.0, idle) * 1e3:.4g} ms"
        )
    if m.timed == "marks":
        console.line(
            "times of operators are the device's between calls, gaps of the host in them: nobody records kernels here "
            "(CUPTI)"
        )
    rows = phase.rows if console.show_all else phase.rows[:MOST_ROWS]
    left = len(phase.rows) - len(rows)
    title = "hotspots, by time above the floor" + (f" (the first {len(rows)} of {len(phase.rows)})" if left else "")
    console.table(title, COLUMNS, [_cells(row) for row in rows])
    hot = [row for row in phase.rows if row.share >= HOT and row.recoverable > 0]
    tries = [(row.contract, row.sites, one.variant, one.why) for row in hot for one in row.next]
    console.table("variants that are not bound", ("operator", "sites", "variant", "why"), tries)
    none = list(dict.fromkeys(row.contract for row in hot if not any(one.ready for one in row.next)))
    if none:
        console.words("nothing else fits here, a new variant would be needed for", none)


def _cells(row: Row) -> tuple[object, ...]:
    return (
        row.contract, row.sites if row.num_sites == 1 else f"{row.sites} ×{row.num_sites}", row.variant, row.calls,
        f"{row.seconds * 1e3:.3f}", f"{row.share:.1%}", f"{row.floor * 1e3:.3f}", row.bound, f"{row.at_floor:.0%}",
        f"{row.recoverable * 1e3:.3f}",
    )  # fmt: skip
