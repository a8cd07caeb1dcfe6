"""The error ladder: how far each module's output is from the oracle's, against what rounding explains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from dayzero.acceptance.page.numbers import Scale, number, scale_of, value_text
from dayzero.acceptance.page.shapes import Drawn, Plot, counted_verdicts, row_objects, verdict_of
from dayzero.acceptance.page.svg import (
    CHARACTER,
    LINE,
    WIDTH,
    Frame,
    el,
    fitted,
    line,
    mark,
    spread,
    text,
    tick_room,
    title,
    x_axis,
    y_axis,
)

MOST_NAMED = 32  # rungs that each get a line of their own
MOST_CALLED = 4  # of a long ladder, failing rungs that are named in the picture
HEIGHT = 240.0


def draw(plot: Plot) -> Drawn:
    """One rung a line while they can be read, else all in order from left to right."""
    rows = row_objects(plot.data)
    judged = [verdict_of(row) or _judged(row) for row in rows]
    values = [number(row.get("value")) for row in rows]
    bounds = [number(row.get("bound")) for row in rows]
    parts, height = (_named if len(rows) <= MOST_NAMED else _ordered)(plot, rows, judged)
    missing = sum(value is None for value in values)
    keys = [(_key("pass"), "within its bound")] if "pass" in judged else []
    keys += [(_key("note"), "note")] if "note" in judged else []
    keys += [(_key("fail"), "fails")] if "fail" in judged else []
    keys += [(_bound_key(len(rows) > MOST_NAMED), "bound")] if any(bound is not None for bound in bounds) else []
    table = [
        (str(row.get("name", "")), row.get("value"), row.get("bound"), verdict)
        for row, verdict in zip(rows, judged, strict=True)
    ]
    return Drawn(
        height,
        parts,
        f"{plot.title}: {len(rows)} rungs, {counted_verdicts(judged)}",
        ("name", "value", "bound", "verdict"),
        table,
        keys,
        f"{missing} without a value: not drawn" if missing else "",
    )


def _judged(row: Mapping[str, Any]) -> str:
    """By its bound, where the row does not say."""
    value, bound = number(row.get("value")), number(row.get("bound"))
    return "" if value is None or bound is None else "pass" if value <= bound else "fail"


def _key(verdict: str) -> Markup:
    return el("svg", mark(7, 7, verdict), viewBox="0 0 14 14", class_="key", aria_hidden="true")


def _bound_key(across: bool) -> Markup:
    drawn = line(0, 7, 14, 7, "bound-line") if across else line(7, 1, 7, 13, "bound")
    return el("svg", drawn, viewBox="0 0 14 14", class_="key", aria_hidden="true")


def _numbers(rows: Sequence[Mapping[str, Any]]) -> list[float | None]:
    return [number(row.get(key)) for row in rows for key in ("value", "bound")]


def _named(plot: Plot, rows: Sequence[Mapping[str, Any]], judged: Sequence[str]) -> tuple[list[Markup], float]:
    names = [str(row.get("name", "")) for row in rows]
    left = min(150.0, max((len(name) for name in names), default=0) * CHARACTER) + 10
    frame = Frame(left, 4.0, WIDTH - 12, 4.0 + LINE * max(1, len(rows)))
    scale = scale_of(_numbers(rows), left + 6, WIDTH - 18, log=True)
    parts = x_axis(frame, scale, plot.x_label)
    for at, (row, name, verdict) in enumerate(zip(rows, names, judged, strict=True)):
        y = frame.top + LINE * (at + 0.5)
        value, bound = number(row.get("value")), number(row.get("bound"))
        style = "name name-fail" if verdict == "fail" else "name"
        parts.append(el("g", title(name), text(left - 6, y + 4, fitted(name, left - 10), "end", style)))
        if bound is not None:
            parts.append(line(scale.at(bound), y - 5.5, scale.at(bound), y + 5.5, "bound"))
        if value is None:
            parts.append(text(left + 6, y + 4, value_text(row.get("value")), "start", "tick"))
            continue
        place = scale.at(value)
        parts.append(line(left, y, place, y, "stem"))
        told = (
            f"{name}: {value_text(row.get('value'))}, bound {value_text(row.get('bound'))}, {verdict or 'not judged'}"
        )
        parts.append(mark(place, y, verdict, title(told)))
        if verdict == "fail":
            words = value_text(row.get("value"))
            right = place + 10 + len(words) * CHARACTER * 1.15 < WIDTH
            parts.append(text(place + (8 if right else -8), y + 4, words, "start" if right else "end", "value-fail"))
    return parts, frame.bottom + (36 if plot.x_label else 20)


def _ordered(plot: Plot, rows: Sequence[Mapping[str, Any]], judged: Sequence[str]) -> tuple[list[Markup], float]:
    label = plot.x_label or plot.y_label
    top = 34.0
    scale = scale_of(_numbers(rows), HEIGHT - 40, top, log=True)
    frame = Frame(tick_room(scale), top, WIDTH - 8, HEIGHT - 40)
    step = (frame.right - frame.left) / len(rows)
    parts = y_axis(frame, scale, label)
    parts.append(line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"))
    parts.append(_bounds(frame, scale, step, rows))
    dots: list[str] = []
    called: list[tuple[float, float, str]] = []
    shapes: list[Markup] = []
    for at, (row, verdict) in enumerate(zip(rows, judged, strict=True)):
        value = number(row.get("value"))
        if value is None:
            continue
        x, y = frame.left + step * (at + 0.5), scale.at(value)
        if verdict in ("fail", "note"):
            told = f"{row.get('name', '')}: {value_text(row.get('value'))}, bound {value_text(row.get('bound'))}"
            shapes.append(mark(x, y, verdict, title(told)))
            if verdict == "fail" and len(called) < MOST_CALLED:
                called.append((x, y, str(row.get("name", ""))))
        else:
            dots.append(f"M{x:.1f} {y:.1f}h0")
    parts.append(el("path", d="".join(dots), class_="dots"))
    parts += shapes + _called(called, frame) + _ends(rows, frame, step)
    return parts, HEIGHT


def _bounds(frame: Frame, scale: Scale, step: float, rows: Sequence[Mapping[str, Any]]) -> Markup:
    """The bounds as one line with steps, broken where a rung has none."""
    path, drawing = [], False
    for at, row in enumerate(rows):
        bound = number(row.get("bound"))
        if bound is None:
            drawing = False
            continue
        path.append(f"{'L' if drawing else 'M'}{frame.left + step * at:.1f} {scale.at(bound):.1f}h{step:.2f}")
        drawing = True
    return el("path", d="".join(path), class_="bound-line")


def _called(called: Sequence[tuple[float, float, str]], frame: Frame) -> list[Markup]:
    """Names of the first failing rungs beside their marks, one below the other where they would touch."""
    heights = spread([y + 4 for _, y, _ in called], 12, frame.top + 4, frame.bottom - 2)
    out = []
    for (x, _, name), y in zip(called, heights, strict=True):
        right = x < (frame.left + frame.right) / 2
        room = (frame.right - x if right else x - frame.left) - 12
        words = fitted(name, min(room, 170.0))
        out.append(text(x + (9 if right else -9), y, words, "start" if right else "end", "value-fail halo"))
    return out


def _ends(rows: Sequence[Mapping[str, Any]], frame: Frame, step: float) -> list[Markup]:
    """Names of the first and the last rung, and that they are in the order of the forward."""
    first, last = (fitted(str(rows[at].get("name", "")), 120) for at in (0, -1))
    middle = f"{len(rows)} in order →"
    return [
        text(frame.left, frame.bottom + 15, first, "start", "tick"),
        text((frame.left + frame.right) / 2, frame.bottom + 30, middle, "middle", "label"),
        text(frame.right, frame.bottom + 15, last, "end", "tick"),
    ]
