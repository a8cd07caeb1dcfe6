"""One picture of a profile: for each phase, its hotspots as bars of time, what is floor of each in the darker part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dayzero.acceptance.profile.report import PhaseReport, ProfileReport

MOST_BARS = 10
WIDTH, BAR_HEIGHT, REST_HEIGHT = 11.0, 0.32, 1.1  # inches


def draw(report: ProfileReport, path: Path) -> None:
    """Writes a PNG."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found]  # an extra

    heights = [REST_HEIGHT + BAR_HEIGHT * min(MOST_BARS + 2, len(phase.rows) + 2) for phase in report.phases]
    figure = Figure(figsize=(WIDTH, sum(heights) + 0.5), layout="constrained")
    figure.suptitle(f"{report.family} on {report.hardware.name}, {report.dtype}: time of a step by operator")
    panels = figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, phase in zip(panels, report.phases, strict=True):
        _panel(axes, phase)
    figure.savefig(path, dpi=110, format="png")


def _panel(axes: Any, phase: PhaseReport) -> None:
    measured, step = phase.measured, phase.measured.looked_at_seconds
    bars = [(f"{row.contract}  {row.sites} ×{row.num_sites}", row.seconds, row.floor) for row in phase.rows[:MOST_BARS]]
    others = phase.rows[MOST_BARS:]
    if others:
        bars.append((f"{len(others)} others", sum(r.seconds for r in others), sum(r.floor for r in others)))
    between = max(0.0, step - phase.operators)
    rest = "kernels of no operator" if measured.timed == "kernels" else "between operators, and the host"
    bars.append((rest, between, 0.0))
    places = range(len(bars))
    axes.barh(places, [seconds * 1e3 for _, seconds, _ in bars], color="C0", alpha=0.35, label="measured")
    axes.barh(places, [min(floor, s) * 1e3 for _, s, floor in bars], color="C0", label="floor by this run's ceilings")
    for place, (_, seconds, _) in zip(places, bars, strict=True):
        axes.annotate(f" {seconds / step:.1%}", (seconds * 1e3, place), va="center", fontsize=8)
    axes.set_yticks(places, [name for name, _, _ in bars], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel("ms")
    axes.set_title(
        f"{measured.phase.name}: {measured.step_seconds * 1e3:.4g} ms as served (host {phase.host_share:.0%}), "
        f"{step * 1e3:.4g} ms here, operators {phase.accounted:.0%} of it, their floors {phase.floor / step:.0%}",
        fontsize=10,
    )
    axes.legend(fontsize=8, loc="lower right")
