"""A figure of a record as what the page shows: picture, keys, and the same data as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from markupsafe import Markup

from dayzero.acceptance.page import bars, curves, heat, histogram, ladder
from dayzero.acceptance.page.numbers import value_text
from dayzero.acceptance.page.shapes import Drawn, Plot, Undrawable
from dayzero.acceptance.page.svg import picture

DRAWERS: Mapping[str, Callable[[Plot], Drawn]] = {
    "ladder": ladder.draw,
    "histogram": histogram.draw,
    "heat": heat.draw,
    "curves": curves.draw,
    "bars": bars.draw,
}
MOST_ROWS, MOST_CELLS = 200, 4000  # of a figure's table on the page


@dataclass(frozen=True, slots=True)
class Picture:
    """svg: None where it could not be drawn, and problem says why. left_out: what the picture does not show.
    rows: cells as text, the first ones of num_rows."""

    title: str
    svg: Markup | None
    problem: str = ""
    says: str = ""
    left_out: str = ""
    keys: tuple[tuple[Markup, str], ...] = ()
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    num_rows: int = 0


def draw(plot: Plot) -> Picture:
    """Never an error: data that are not what the kind says are a sentence in the picture's place."""
    drawer = DRAWERS.get(plot.kind)
    if drawer is None:
        return Picture(plot.title, None, f"not drawn: there is no picture of kind “{plot.kind}”")
    try:
        drawn = drawer(plot)
    except Undrawable as error:
        return Picture(plot.title, None, f"not drawn: {error}")
    if not drawn.rows:
        return Picture(plot.title, None, "nothing was measured for it")
    most = max(1, min(MOST_ROWS, MOST_CELLS // len(drawn.columns)))
    rows = tuple(tuple(value_text(cell) for cell in row) for row in drawn.rows[:most])
    svg = picture(drawn.height, drawn.says, drawn.parts, plot.identity)
    return Picture(
        plot.title, svg, "", drawn.says, drawn.left_out, tuple(drawn.keys), drawn.columns, rows, len(drawn.rows)
    )
