"""A distribution: counts between edges, with marks such as its mean and largest."""

from __future__ import annotations

from markupsafe import Markup

from dayzero.acceptance.page.numbers import Scale, number, numbers, scale_of, value_text
from dayzero.acceptance.page.shapes import Drawn, Plot, Undrawable, listed, mapped
from dayzero.acceptance.page.svg import (
    CHARACTER,
    WIDTH,
    Frame,
    fitted,
    line,
    rect,
    text,
    tick_room,
    title,
    x_axis,
    y_axis,
)

BODY = 150.0  # height of the largest count
MARK_LINE = 14.0


def draw(plot: Plot) -> Drawn:
    edges, counts = numbers(listed(plot.data, "edges")), numbers(listed(plot.data, "counts"))
    if len(edges) != len(counts) + 1:
        raise Undrawable(f"{len(counts)} counts need {len(counts) + 1} edges, it has {len(edges)}")
    found = mapped(plot.data, "marks")
    marks = sorted((place, name) for name, value in found.items() if (place := number(value)) is not None)
    top = 20.0 + MARK_LINE * len(marks)
    bottom = top + BODY
    heights = scale_of([*counts, 0.0], bottom, top, log=plot.log_y, zero=not plot.log_y)
    frame = Frame(tick_room(heights, 4), top, WIDTH - 10, bottom)
    across = scale_of([*edges, *(place for place, _ in marks)], frame.left, frame.right, log=plot.log_x)
    parts = y_axis(frame, heights, plot.y_label or "count", 4)
    parts += x_axis(frame, across, plot.x_label)
    parts += _bars(edges, counts, across, heights, bottom)
    parts += _marks(marks, across, frame)
    total = sum(count for count in counts if count is not None)
    rows = [(low, high, count) for low, high, count in zip(edges, edges[1:], counts, strict=False)]
    lost = [name for name, value in found.items() if number(value) is None]
    return Drawn(
        bottom + (36 if plot.x_label else 20),
        parts,
        f"{plot.title}: {value_text(int(total))} values"
        + "".join(f", {name} {value_text(place)}" for place, name in marks),
        ("from", "to", "count"),
        rows,
        left_out=f"without a number, not drawn: {', '.join(lost)}" if lost else "",
    )


def _bars(
    edges: list[float | None], counts: list[float | None], across: Scale, heights: Scale, bottom: float
) -> list[Markup]:
    out = []
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        if low is None or high is None or not count or count < 0:
            continue
        left, right = sorted((across.at(low), across.at(high)))
        y = min(heights.at(count), bottom - 1)  # one value among many is seen too
        told = title(f"{value_text(low)} to {value_text(high)}: {value_text(count)}")
        out.append(rect(left + 0.4, y, max(1.2, right - left - 0.8), bottom - y, "bar", told))
    return out


def _marks(marks: list[tuple[float, str]], across: Scale, frame: Frame) -> list[Markup]:
    """Each mark's label has a line of its own above the bars, on the side where there is room."""
    out = [line(across.at(value), 17.0 + MARK_LINE * at, across.at(value), frame.bottom, "bound")
           for at, (value, _) in enumerate(marks)]  # fmt: skip
    for at, (value, name) in enumerate(marks):
        x, y = across.at(value), 25.0 + MARK_LINE * at
        words = f"{name} {value_text(value)}"
        right = x + 5 + len(words) * CHARACTER < WIDTH
        room = (WIDTH - x if right else x) - 6
        out.append(text(x + (5 if right else -5), y, fitted(words, room), "start" if right else "end", "value halo"))
    return out
