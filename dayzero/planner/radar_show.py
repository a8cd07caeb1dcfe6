"""The radar as a person reads it, and as a picture: families by traits."""

from __future__ import annotations

from html import escape

from dayzero.console import Console
from dayzero.planner.radar import STANDINGS, RadarReport

WORDS = {
    "fast": "a fast variant",
    "reference": "a reference, slow",
    "wiring": "wiring, no operator",
    "missing": "not here yet",
}
_COLOURS = {"fast": "#1a7f5a", "reference": "#c98a00", "wiring": "#5c6f82", "missing": "#c0392b"}
_CELL, _LEFT, _TOP, _FOOT = 18, 330, 190, 64
MOST_FAMILIES = 12


def show_radar(report: RadarReport, console: Console) -> None:
    """Print ``report``; nothing is computed here."""
    counts = report.radar.recurrence()
    by_name = {trait.name: trait for trait in report.radar.traits}
    numbers = ", ".join(f"{sum(s == word for s in report.standings.values())} {word}" for word in STANDINGS)
    console.line(f"{len(report.radar.families)} families, {len(counts)} traits; on {report.hardware}: {numbers}")
    rows = (
        (name, n, report.standings[name], by_name[name].rests_on, by_name[name].about) for name, n in counts.items()
    )
    console.table("traits by recurrence", ("trait", "families", "here", "rests on", "what it is"), rows)
    shown = report.radar.families if console.show_all else report.radar.families[-MOST_FAMILIES:]
    left = len(report.radar.families) - len(shown)
    title = "families" + (f", the last {len(shown)} (+{left} more, --all shows them)" if left else "")
    lacks = {f.name: [t for t in f.traits if report.standings[t] == "missing"] for f in shown}
    console.table(
        title, ("family", "date", "size", "first run by", "not here yet"),
        ((f.name, f.date, f.size, f.first_run_by, ", ".join(lacks[f.name]) or "nothing") for f in shown),
    )  # fmt: skip
    if report.source is not None:
        _show_source(report, console)
    console.words("read from", report.radar.sources)


def _show_source(report: RadarReport, console: Console) -> None:
    console.line()
    console.words(f"{report.source} carries", report.carries or ("no trait that is known",))
    for name in report.carries:
        if report.standings[name] != "fast":
            console.line(f"  {name}: {WORDS[report.standings[name]]}")
    for kind, entries in report.operators.items():
        if kind != "reuse" and entries:
            console.words(f"operators to {kind}", (str(e["contract"] or e.get("about", "")) for e in entries))
    console.words(
        "most alike", (f"{name} ({n} traits shared)" for name, n in report.nearest) if report.nearest else ("none",)
    )


def radar_svg(report: RadarReport) -> str:
    """A matrix: a row for each family, newest first, a column for each trait, most frequent first; a dot where a family
    carries the trait, coloured and shaped by what there is for it here."""
    counts = report.radar.recurrence()
    families = tuple(reversed(report.radar.families))
    width, height = _LEFT + _CELL * len(counts) + 90, _TOP + _CELL * len(families) + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="11">',
        "<title>Families by operator traits</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for column, (name, count) in enumerate(counts.items()):
        x = _LEFT + _CELL * column + _CELL / 2
        colour = _COLOURS[report.standings[name]]
        place = f"translate({x + 4} {_TOP - 8}) rotate(-60)"
        parts.append(f'<text transform="{place}" fill="{colour}">{escape(name)} · {count}</text>')
        parts.append(f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{height - _FOOT}" stroke="#eceff1"/>')
    for row, family in enumerate(families):
        y = _TOP + _CELL * row + _CELL / 2
        if row % 2 == 0:
            parts.append(
                f'<rect x="0" y="{y - _CELL / 2}" width="{width}" height="{_CELL}" fill="#90a4ae" opacity="0.08"/>'
            )
        name = family.name if len(family.name) <= 46 else family.name[:45] + "…"
        parts.append(f'<text x="{_LEFT - 10}" y="{y + 4}" text-anchor="end" fill="#222">{escape(name)}</text>')
        for column, trait in enumerate(counts):
            if trait in family.traits:
                parts.append(_dot(_LEFT + _CELL * column + _CELL / 2, y, report.standings[trait]))
    x = 20.0
    for word in STANDINGS:
        parts.append(_dot(x, height - 30, word))
        parts.append(f'<text x="{x + 12}" y="{height - 26}" fill="#222">{escape(WORDS[word])}</text>')
        x += 150
    parts.append(f'<text x="{x}" y="{height - 26}" fill="#555">on {escape(report.hardware)}</text></svg>')
    return "\n".join(parts) + "\n"


def _dot(x: float, y: float, standing: str) -> str:
    """Shapes as well as colours: full, ring, square, cross."""
    colour = _COLOURS[standing]
    if standing == "fast":
        return f'<circle cx="{x}" cy="{y}" r="5" fill="{colour}"/>'
    if standing == "reference":
        return f'<circle cx="{x}" cy="{y}" r="4.2" fill="none" stroke="{colour}" stroke-width="2"/>'
    if standing == "wiring":
        return f'<rect x="{x - 3.5}" y="{y - 3.5}" width="7" height="7" fill="{colour}"/>'
    return f'<path d="M{x - 4} {y - 4}l8 8m0 -8l-8 8" stroke="{colour}" stroke-width="2" fill="none"/>'
