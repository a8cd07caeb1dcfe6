"""Bars by name, the value at each end and the bound as a tick: share of the roofline by operator, for one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.acceptance.page.numbers import number, scale_of, value_text
from dayzero.acceptance.page.shapes import Drawn, Plot, row_objects, verdict_of
from dayzero.acceptance.page.svg import CHARACTER, WIDTH, Frame, el, fitted, line, mark, rect, text, title, x_axis

MOST_DRAWN = 40
STEP = 19.0


def draw(plot: Plot) -> Drawn:
    rows = row_objects(plot.data)
    shown = _shown(rows)
    names = [str(row.get("name", "")) for row in shown]
    values = [number(row.get("value")) for row in shown]
    bounds = [number(row.get("bound")) for row in shown]
    left = min(140.0, max((len(name) for name in names), default=0) * CHARACTER) + 10
    words = [value_text(row.get("value")) for row in shown]
    room = max((len(word) for word in words), default=1) * CHARACTER + 10
    negative = any(value is not None and value < 0 for value in values)
    frame = Frame(left, 4.0, WIDTH - 6, 4.0 + STEP * max(1, len(shown)))
    start = left + (room if negative else 0)
    scale = scale_of([*values, *bounds], start, WIDTH - room, log=plot.log_x, zero=not plot.log_x)
    zero = scale.start if plot.log_x else scale.at(0.0)
    parts = x_axis(frame, scale, plot.x_label)
    for at, (row, name, value, bound) in enumerate(zip(shown, names, values, bounds, strict=True)):
        y = frame.top + STEP * (at + 0.5)
        told = f"{name}: {words[at]}" + (f", bound {value_text(bound)}" if bound is not None else "")
        parts.append(el("g", title(told), text(left - 6, y + 4, fitted(name, left - 10), "end", "name")))
        end = zero if value is None else scale.at(value)
        if value is not None:
            parts.append(rect(min(zero, end), y - 5.5, abs(end - zero), 11, "bar", title(told)))
        if bound is not None:
            parts.append(line(scale.at(bound), y - 8, scale.at(bound), y + 8, "bound"))
        down = value is not None and value < 0
        parts.append(text(_beside(end, scale.at(bound) if bound is not None else None, down), y + 4, words[at],
                          "end" if down else "start", "value halo"))  # fmt: skip
        if verdict_of(row) in ("note", "fail"):
            parts.append(mark(WIDTH - 6, y, verdict_of(row)))
    parts.append(line(zero, frame.top, zero, frame.bottom, "axis"))
    keys = []
    if any(bound is not None for bound in bounds):
        key = el("svg", line(7, 1, 7, 13, "bound"), viewBox="0 0 14 14", class_="key", aria_hidden="true")
        keys.append((key, "bound"))
    return Drawn(
        frame.bottom + (36 if plot.x_label else 20),
        parts,
        f"{plot.title}: {len(rows)} bars" + _extremes(rows),
        ("name", "value", "bound"),
        [(str(row.get("name", "")), row.get("value"), row.get("bound")) for row in rows],
        keys,
        f"{len(shown)} of {len(rows)} are drawn, the largest" if len(shown) < len(rows) else "",
    )


def _shown(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All, or the largest in the order they came in."""
    if len(rows) <= MOST_DRAWN:
        return list(rows)
    order = sorted(range(len(rows)), key=lambda at: -abs(number(rows[at].get("value")) or 0.0))
    return [rows[at] for at in sorted(order[:MOST_DRAWN])]


def _beside(end: float, bound: float | None, down: bool) -> float:
    """Where a value's text begins: past the bar, and past the bound's tick where that would strike it through."""
    place = end - 5 if down else end + 5
    if bound is None or down:
        return place
    return bound + 5 if end - 4 < bound < end + 40 else place


def _extremes(rows: Sequence[Mapping[str, Any]]) -> str:
    held = [(value, str(row.get("name", ""))) for row in rows if (value := number(row.get("value"))) is not None]
    if not held:
        return ""
    (low, least), (high, most) = min(held), max(held)
    return f", from {value_text(low)} ({least}) to {value_text(high)} ({most})"
