"""Pictures as inline SVG: escaped elements, axes, marks. Colours are classes of the page's style, so a picture follows
its light and dark mode; a verdict has a shape as well as a colour."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from markupsafe import Markup, escape

from dayzero.acceptance.page.numbers import Scale

WIDTH = 400.0  # user units; a phone shows a picture at about nine tenths of its size
CHARACTER = 6.8  # width of a character of the pictures' text in a wide font; names in bold are a tenth wider
LINE = 15.0
Anchor = Literal["start", "middle", "end"]


def el(name: str, *children: str, **attributes: object) -> Markup:
    """One element. Strings among ``children`` and all values are escaped; ``class_`` is class, ``_`` is a hyphen in
    names; an attribute of None is left out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_plain(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{written}>{''.join(escape(child) for child in children)}</{name}>")


def _plain(value: object) -> str:
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else str(value)


def text(x: float, y: float, words: str, anchor: Anchor = "start", class_: str | None = None) -> Markup:
    return el("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    return el("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def rect(x: float, y: float, width: float, height: float, class_: str, *inside: str) -> Markup:
    return el("rect", *inside, x=x, y=y, width=max(0.0, width), height=max(0.0, height), class_=class_)


def fitted(words: str, room: float) -> str:
    """``words`` in ``room`` user units: what does not fit is left out in the middle, as names differ at their ends."""
    most = max(3, int(room / CHARACTER))
    if len(words) <= most:
        return words
    tail = (most - 1) // 2
    return f"{words[: most - 1 - tail]}…{words[len(words) - tail :]}"


def mark(x: float, y: float, verdict: str, *inside: str) -> Markup:
    """The shape of a verdict: a disc passes, a triangle is a note, a cross fails, a ring is not applicable."""
    if verdict == "fail":
        path = f"M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8"
        return el("path", *inside, d=path, class_="mark-fail")
    if verdict == "note":
        return el("path", *inside, d=f"M{x:.1f} {y - 4.8:.1f}l4.8 8.4h-9.6z", class_="mark-note")
    if verdict == "pass":
        return el("circle", *inside, cx=x, cy=y, r=3.6, class_="mark-pass")
    return el("circle", *inside, cx=x, cy=y, r=3.4, class_="mark-none")


def title(words: str) -> Markup:
    """What a pointer that rests on an element is shown."""
    return el("title", words)


@dataclass(frozen=True, slots=True)
class Frame:
    """The rectangle of a picture that values are drawn in, in user units."""

    left: float
    top: float
    right: float
    bottom: float


def x_axis(frame: Frame, scale: Scale, label: str, ticks: Sequence[tuple[float, str]] | None = None) -> list[Markup]:
    """Lines from top to bottom with labels below them; a label that would touch its neighbour is left out."""
    out: list[Markup] = []
    end = -1e9
    for place, words in scale.ticks() if ticks is None else ticks:
        out.append(line(place, frame.top, place, frame.bottom, "grid"))
        half = len(words) * CHARACTER / 2
        if place - half > end + 4:
            at = min(max(place, half), WIDTH - half)
            out.append(text(at, frame.bottom + 14, words, "middle", "tick"))
            end = at + half
    out.append(line(frame.left, frame.bottom, frame.right, frame.bottom, "axis"))
    if label:
        shown = fitted(label, WIDTH - 8)
        middle = (frame.left + frame.right) / 2
        half = len(shown) * CHARACTER / 2
        out.append(text(min(max(middle, half), WIDTH - half), frame.bottom + 30, shown, "middle", "label"))
    return out


def y_axis(frame: Frame, scale: Scale, label: str, most: int = 5) -> list[Markup]:
    """Lines from left to right with labels before them; the axis' own label stands above, where it can be read."""
    out: list[Markup] = []
    for place, words in scale.ticks(most):
        out.append(line(frame.left, place, frame.right, place, "grid"))
        out.append(text(frame.left - 5, place + 4, words, "end", "tick"))
    if label:
        out.append(text(0.0, 11.0, fitted(label, WIDTH - 4), "start", "label"))
    return out


def tick_room(scale: Scale, most: int = 5) -> float:
    """Width that the labels of a vertical axis take."""
    return max((len(words) for _, words in scale.ticks(most)), default=1) * CHARACTER + 9


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """``places`` moved apart until neighbours are ``gap`` apart, in their order, within low and high where they fit."""
    order = sorted(range(len(places)), key=lambda at: places[at])
    out = list(places)
    top = low
    for at in order:
        out[at] = top = max(places[at], top)
        top += gap
    bottom = high
    for at in reversed(order):
        out[at] = bottom = min(out[at], bottom)
        bottom -= gap
    return out


def picture(height: float, label: str, parts: Iterable[str], identity: str) -> Markup:
    """The whole as one image for a reader that cannot see it. label: what it shows, in a sentence."""
    head = el("title", label, id=identity)
    return el(
        "svg",
        head,
        *parts,
        viewBox=f"0 0 {WIDTH:.0f} {height:.0f}",
        role="img",
        aria_labelledby=identity,
        class_="picture",
    )
