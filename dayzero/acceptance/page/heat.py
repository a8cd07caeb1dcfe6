"""A map of shares: rows by columns, darker is more, with the number in each cell that has room for it."""

from __future__ import annotations

from typing import Any

from markupsafe import Markup

from dayzero.acceptance.page.numbers import number
from dayzero.acceptance.page.shapes import Drawn, Plot, Undrawable, listed
from dayzero.acceptance.page.svg import CHARACTER, WIDTH, el, fitted, rect, text, title

SHADES = 10
MOST = 64  # rows or columns that are drawn one by one
WIDEST = 3 * CHARACTER + 2  # of a number in a cell: without room for all, none is written
TALLEST, CELL, LOWEST = 320.0, 24.0, 3.0


def draw(plot: Plot) -> Drawn:
    rows, columns = ([str(name) for name in listed(plot.data, key)] for key in ("rows", "columns"))
    values = listed(plot.data, "values")
    if len(values) != len(rows) or any(not isinstance(row, list) or len(row) != len(columns) for row in values):
        raise Undrawable(f"its values are not {len(rows)} rows of {len(columns)}")
    if not rows or not columns:
        raise Undrawable("it has no cells")
    table = [(name, *row) for name, row in zip(rows, values, strict=True)]
    every_column = ("", *columns)
    held = [value for row in values for value in row if number(value) is not None]
    num_cells = len(rows) * len(columns)
    rows, columns, values, left_out = pooled(rows, columns, values)
    left = min(90.0, max(len(name) for name in rows) * CHARACTER) + 12
    top = 20.0 if plot.y_label else 4.0
    width = (WIDTH - left - 2) / len(columns)
    height = max(LOWEST, min(CELL, TALLEST / len(rows)))
    bottom = top + height * len(rows)
    parts = [text(0.0, 11.0, fitted(plot.y_label, WIDTH), "start", "label")] if plot.y_label else []
    every = max(1, -int(-11 // height)) if height < 11 else 1
    for at, name in enumerate(rows):
        y = top + height * at
        if at % every == 0:
            parts.append(text(left - 5, y + height / 2 + 4, fitted(name, left - 8), "end", "tick"))
        for across, column in enumerate(columns):
            told = f"{name} × {column}: {_said(values[at][across])}"
            parts.append(_cell(values[at][across], (left + width * across, y, width, height), told))
    parts += _column_names(columns, left, width, bottom)
    if plot.x_label:
        parts.append(text((left + WIDTH) / 2, bottom + 30, fitted(plot.x_label, WIDTH - left), "middle", "label"))
    absent = num_cells - len(held)
    keys = [(_swatch("h0"), "0"), (_swatch("h5"), "0.5"), (_swatch("h10"), "1")]
    keys += [(_crossed(), "not measured")] if absent else []
    mean = f", mean {sum(map(float, held)) / len(held):.3f}, least {min(held):.3g}" if held else ""
    return Drawn(
        bottom + (36 if plot.x_label else 20),
        parts,
        f"{plot.title}: {len(held)} of {num_cells} cells measured{mean}",
        every_column,
        table,
        keys,
        left_out,
    )


def pooled(rows: list[str], columns: list[str], values: list[Any]) -> tuple[list[str], list[str], list[Any], str]:
    """A map of more than MOST rows or columns with neighbours drawn as one cell, which shows the least of them: what
    was not found is what such a map is looked at for. The last: what was done, in a sentence."""
    down, across = (-(-len(names) // MOST) for names in (rows, columns))
    if down == across == 1:
        return rows, columns, values, ""
    out = []
    for top in range(0, len(rows), down):
        lines = []
        for left in range(0, len(columns), across):
            block = (value for row in values[top : top + down] for value in row[left : left + across])
            lines.append(min((value for value in block if number(value) is not None), default=None))
        out.append(lines)
    said = f"{len(rows)} × {len(columns)} cells: each one drawn shows the least of {down} × {across}"
    return rows[::down], columns[::across], out, said


def _said(value: Any) -> str:
    found = number(value)
    return "not measured" if found is None else f"{found:.4g}"


def _cell(value: Any, place: tuple[float, float, float, float], told: str) -> Markup:
    x, y, width, height = place
    found = number(value)
    if found is None and height >= 13 and width >= WIDEST:
        box = rect(x + 0.5, y + 0.5, width - 1, height - 1, "missing", title(told))
        return el("g", box, text(x + width / 2, y + height / 2 + 4, "–", "middle", "tick"))
    if found is None:
        cross = f"M{x + 1:.1f} {y + height - 1:.1f}L{x + width - 1:.1f} {y + 1:.1f}"
        return el("path", title(told), d=cross, class_="hatch")
    gap = 1.0 if min(width, height) > 8 else 0.3
    shade = f"h{round(SHADES * min(1.0, max(0.0, found)))}"
    box = rect(x + gap / 2, y + gap / 2, width - gap, height - gap, shade, title(told))
    words = f"{found:.2f}".strip("0") if 0.005 <= found < 0.995 else f"{found:.0f}"
    if height < 13 or width < WIDEST:
        return box
    return el("g", box, text(x + width / 2, y + height / 2 + 4, words, "middle", f"{shade}-ink"))


def _column_names(columns: list[str], left: float, width: float, bottom: float) -> list[Markup]:
    """Below the cells; names that would touch the one before are left out, the last one never is."""
    out: list[Markup] = []
    longest = max(len(name) for name in columns) * CHARACTER + 6
    every = 1 if longest <= width else -int(-longest // width)
    last = len(columns) - 1
    for at, name in enumerate(columns):
        if at == last or (at % every == 0 and last - at >= every):
            words = fitted(name, max(width * every, 40.0))
            half = len(words) * CHARACTER / 2
            x = min(left + width * (at + 0.5), WIDTH - half)
            out.append(text(x, bottom + 14, words, "middle", "tick"))
    return out


def _swatch(shade: str) -> Markup:
    return el("svg", rect(1, 1, 12, 12, shade), viewBox="0 0 14 14", class_="key", aria_hidden="true")


def _crossed() -> Markup:
    cross = el("path", d="M1 13L13 1", class_="hatch")
    return el("svg", cross, viewBox="0 0 14 14", class_="key", aria_hidden="true")
