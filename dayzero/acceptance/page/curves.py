"""Lines over a common axis, each named at its end; bounds as dashed lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from markupsafe import Markup

from dayzero.acceptance.page.numbers import Scale, number, numbers, scale_of, value_text
from dayzero.acceptance.page.shapes import Drawn, Plot, Undrawable, listed, mapped
from dayzero.acceptance.page.svg import (
    CHARACTER,
    WIDTH,
    Frame,
    el,
    fitted,
    line,
    spread,
    text,
    tick_room,
    title,
    x_axis,
    y_axis,
)

TOP, BODY = 24.0, 180.0
MOST_MARKED = 40  # points of a line that are drawn as points too
MOST_POINTS = 600  # of a line; longer ones keep the least and the largest of each run
NUM_STYLES = 6
LABEL_ROOM = 92.0
Point = tuple[float, float]


def draw(plot: Plot) -> Drawn:
    xs = numbers(listed(plot.data, "x"))
    series = {name: _series(name, values, len(xs)) for name, values in mapped(plot.data, "series").items()}
    found = mapped(plot.data, "bounds")
    bounds = {name: place for name, value in found.items() if (place := number(value)) is not None}
    labels = [*series, *bounds]
    room = min(LABEL_ROOM, max((len(name) for name in labels), default=0) * CHARACTER + 12)
    held = [value for values in series.values() for value in values]
    bottom = TOP + BODY
    up = scale_of([*held, *bounds.values()], bottom, TOP, log=plot.log_y, zero=not plot.log_y, pad=0.05)
    frame = Frame(tick_room(up), TOP, WIDTH - room, bottom)
    across = scale_of(xs, frame.left + 4, frame.right - 4, log=plot.log_x)
    parts = y_axis(frame, up, plot.y_label)
    parts += x_axis(frame, across, plot.x_label, _own_ticks(xs, across))
    places = [up.at(value) for value in bounds.values()]
    parts += [line(frame.left, y, frame.right, y, "bound-line") for y in places]
    ends = []
    for number_of, (name, values) in enumerate(series.items()):
        points = [(x, value) for x, value in zip(xs, values, strict=True)]
        parts += _line(points, across, up, f"series s{number_of % NUM_STYLES}", name)
        last = next((value for value in reversed(values) if value is not None), None)
        ends.append(bottom if last is None else up.at(last))
    heights = spread([*ends, *places], 13, TOP + 2, bottom)
    for at, (name, y) in enumerate(zip(labels, heights, strict=True)):
        style = f"series-name t{at % NUM_STYLES}" if at < len(series) else "tick"
        words = text(frame.right + 4, y + 4, fitted(name, room - 4), "start", style)
        parts.append(el("g", title(name), words))
    return Drawn(
        bottom + (36 if plot.x_label else 20),
        parts,
        f"{plot.title}: {_said(series, bounds)}",
        (plot.x_label or "x", *series),
        [(x, *(values[at] for values in series.values())) for at, x in enumerate(listed(plot.data, "x"))],
        _keys(list(series), room),
        _lost(series, found, bounds),
    )


def _series(name: str, values: Any, count: int) -> list[float | None]:
    if not isinstance(values, list | tuple) or len(values) != count:
        raise Undrawable(f"the series “{name}” has not one value for each of {count} places")
    return numbers(values)


def _own_ticks(xs: Sequence[float | None], across: Scale) -> list[tuple[float, str]] | None:
    """Where few places were measured, those are the ticks."""
    held = sorted({x for x in xs if x is not None})
    if not 1 <= len(held) <= 7:
        return None
    return [(across.at(x), f"{int(x):,}" if x == int(x) and abs(x) < 1e6 else value_text(x)) for x in held]


def _line(
    points: Sequence[tuple[float | None, float | None]], across: Scale, up: Scale, style: str, name: str
) -> list[Markup]:
    """One path a run without gaps, and a mark for each point of a short line or of a run of one."""
    out: list[Markup] = []
    marked = len(points) <= MOST_MARKED
    for whole, run in groupby(points, lambda point: None not in point):
        if not whole:
            continue
        held = thinned([(x, y) for x, y in run if x is not None and y is not None])
        placed = [(across.at(x), up.at(y)) for x, y in held]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in placed)
        out.append(el("path", title(name), d=path, class_=style))
        if marked or len(held) == 1:
            for (x, y), (value_x, value_y) in zip(placed, held, strict=True):
                told = title(f"{name}: {value_text(value_y)} at {value_text(value_x)}")
                out.append(el("circle", told, cx=x, cy=y, r=2.6, class_=f"{style} point"))
    return out


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most about ``most`` points: of each run the least and the largest value, so that no peak is lost."""
    if len(points) <= most:
        return list(points)
    size = -(-len(points) // (most // 2))
    out: list[Point] = []
    for start in range(0, len(points), size):
        run = points[start : start + size]
        low, high = (pick(run, key=lambda point: point[1]) for pick in (min, max))
        out += sorted({low, high})
    return out


def _said(series: Mapping[str, Sequence[float | None]], bounds: Mapping[str, float]) -> str:
    parts = []
    for name, values in series.items():
        held = [value for value in values if value is not None]
        if held:
            parts.append(f"{name} from {value_text(min(held))} to {value_text(max(held))}")
        else:
            parts.append(f"{name} has no values")
    parts += [f"bound {name} {value_text(value)}" for name, value in bounds.items()]
    return "; ".join(parts) or "no series"


def _keys(names: Sequence[str], room: float) -> list[tuple[Markup, str]]:
    """Only where a name did not fit beside its line."""
    if all(fitted(name, room - 4) == name for name in names):
        return []
    swatch = "M0 7H14"
    return [
        (el("svg", el("path", d=swatch, class_=f"series s{at % NUM_STYLES}"), viewBox="0 0 14 14", class_="key",
            aria_hidden="true"), name)
        for at, name in enumerate(names)
    ]  # fmt: skip


def _lost(series: Mapping[str, Sequence[float | None]], found: Mapping[str, Any], bounds: Mapping[str, float]) -> str:
    gaps = sum(value is None for values in series.values() for value in values)
    parts = [f"{gaps} without a number: gaps"] if gaps else []
    parts += [f"bound without a number: {name}" for name in found if name not in bounds]
    return "; ".join(parts)
