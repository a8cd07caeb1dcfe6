"""``index.html`` of a record: one file, no network, readable with scripts off."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from dayzero.acceptance.page.reading import ORDER, UNKNOWN, WORST_FIRST, Item, Report, StagePart, counted, read
from dayzero.acceptance.page.svg import el, rect
from dayzero.checkpoint.files import write_whole
from dayzero.units import counted as counted_noun

PAGE = "index.html"
HERE = Path(__file__).parent
MOST_CARDS = 20  # in the open; the others unfold
MOST_OPEN = 6  # passing findings of a stage that need no folding
HEADLINES = {"pass": "Accepted", "note": "Accepted, with notes", "fail": "Not accepted", UNKNOWN: "Nothing was judged"}
IN_PART = "Passed in part"
MONO = frozenset({"Commit", "Digest", "Outcome", "Source", "Server"})


def write_page(record: Mapping[str, Any], folder: Path) -> Path:
    """Write ``index.html`` of ``record`` (``accept/record.py``) into ``folder`` and return its path.

    A record of any other content makes a page too, which says what is wrong with it. Errors: OSError.
    """
    return write_file(folder, page_html(read(record)))


def write_file(folder: Path, html: str) -> Path:
    path = folder / PAGE
    write_whole(path, html.encode("utf-8"))
    return path


def page_html(report: Report) -> str:
    """The page as one HTML document."""
    return render(
        "page.jinja",
        report=report,
        headline=headline(report),
        why=_why(report),
        strip=strip(report.counts),
        fails=report.of("fail"),
        notes=report.of("note"),
        absent=report.of("not applicable"),
        verdicts=WORST_FIRST,
        anchors={item.number: stage.anchor for stage in report.stages for item in stage.items},
        most_cards=MOST_CARDS,
        mono=MONO,
        stage_line=_stage_line,
        split=_split,
        folded_words=_folded_words,
    )


def headline(report: Report) -> str:
    return IN_PART if report.verdict in ("pass", "note") and not report.complete else HEADLINES[report.verdict]


def symbol(verdict: str) -> str:
    """The class and the sign of a verdict."""
    return verdict.replace(" ", "-") if verdict in ORDER else UNKNOWN


@cache
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    found.globals["symbol"] = symbol
    return found


def render(template: str, **values: Any) -> str:
    """A template of this folder with style and script in it. The page may run that script and load nothing: names in
    a record come from files that nobody has vouched for, and escaping is not the only thing that stands before them."""
    style, script = ((HERE / f"{name}.jinja").read_text("utf-8") for name in ("style", "script"))
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    written = {"style": Markup(style), "script": Markup(script), "policy": Markup(policy)}
    return _environment().get_template(template).render(**written, **values)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _why(report: Report) -> str:
    """The verdict in one sentence."""
    items, fails = report.items, report.of("fail")
    if fails:
        layers = [f"{layer} ({count})" for layer, count in report.layers_at_fault]
        named = layers[0] if len(layers) == 1 else f"{', '.join(layers[:-1])} and {layers[-1]}"
        verb = "fails" if len(fails) == 1 else "fail"
        return f"{len(fails):,} of {counted_noun(len(items), 'check')} {verb}. At fault: {named}."
    judged = [item for item in items if item.verdict != "not applicable"]
    if not judged:
        return "The record holds no finding that was judged."
    notes = report.of("note")
    said = f", {counted_noun(len(notes), 'note')} to read" if notes else ""
    absent = len(items) - len(judged)
    return f"{counted_noun(len(judged), 'check')}, none fails{said}." + (
        f" {absent:,} could not be made here." if absent else ""
    )


def strip(counts: Mapping[str, int]) -> Markup:
    """Shares of the verdicts as one bar; the numbers stand above it."""
    total = sum(counts.values())
    if not total:
        return Markup("")
    parts, x = [], 0.0
    for verdict, count in counts.items():
        width = 1000.0 * count / total
        if count:
            parts.append(rect(x, 0.0, max(2.0, width - 2.0), 6.0, symbol(verdict)))
        x += width
    return el("svg", *parts, viewBox="0 0 1000 6", preserveAspectRatio="none", class_="strip", aria_hidden="true")


def _stage_line(stage: StagePart) -> str:
    counts = ", ".join(f"{count} {verdict}" for verdict, count in stage.counts.items() if count)
    parts = [counts or "no findings", stage.seconds, "taken from an earlier run" if stage.taken else ""]
    return " · ".join(part for part in parts if part)


def _split(stage: StagePart) -> tuple[list[Item], list[Item]]:
    """(shown, folded), worst first: what passes and what is not applicable folds away where there is much of it."""
    listed = sorted(stage.items, key=lambda item: ORDER.get(item.verdict, 0))
    calm = [item for item in listed if item.verdict in ("pass", "not applicable")]
    if len(calm) <= MOST_OPEN:
        return listed, []
    return [item for item in listed if item.verdict not in ("pass", "not applicable")], calm


def _folded_words(items: Sequence[Item]) -> str:
    counts = counted(items)
    parts = [f"{counts['pass']:,} pass" if counts["pass"] else ""]
    parts.append(f"{counts['not applicable']:,} not applicable" if counts["not applicable"] else "")
    return ", ".join(part for part in parts if part)
