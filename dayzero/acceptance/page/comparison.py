"""``index.html`` of two records side by side: what broke, what was mended, what cannot be compared and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from dayzero.acceptance.page.numbers import number, value_text
from dayzero.acceptance.page.reading import (
    Item,
    at,
    cleaned,
    item_of,
    moment_text,
    object_of,
    objects_of,
    text_of,
)
from dayzero.acceptance.page.write import render, write_file
from dayzero.finding import VERDICTS
from dayzero.units import counted

# As ``accept/compare.py`` names them -> the verdict whose sign each is shown with.
SIGNS: Mapping[str, str] = {
    "broken": "fail", "mended": "pass", "changed": "note", "only in A": "note", "only in B": "note",
    "same": "not applicable",
}  # fmt: skip
SIDES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("Record", "where", text_of),
    ("Source", "subject.source", text_of),
    ("Server", "subject.url", text_of),
    ("Model", "subject.model", text_of),
    ("Profile", "profile", text_of),
    ("Seed", "seed", text_of),
    ("Began", "began", moment_text),
    ("Verdict", "verdict", text_of),
    ("Findings", "counts", text_of),
    ("Digest", "digest", text_of),
)


def write_comparison_page(comparison: Mapping[str, Any], folder: Path) -> Path:
    """Write ``index.html`` of ``comparison`` (``accept/compare.py``) into ``folder`` and return its path. OSError."""
    return write_file(folder, comparison_html(comparison))


def comparison_html(comparison: Mapping[str, Any]) -> str:
    """The page as one HTML document."""
    content = cleaned(comparison)
    warnings: list[str] = []
    pairs = [_pair(one) for one in objects_of(content.get("findings"), "findings", warnings)]
    differences = [_difference(one) for one in objects_of(content.get("differences"), "differences", warnings)]
    statistics = [_statistic(one) for one in objects_of(content.get("statistics"), "statistics", warnings)]
    a, b = object_of(content.get("a")), object_of(content.get("b"))
    for letter, side in (("A", a), ("B", b)):
        if side.get("sound") is False:
            warnings.append(f"{letter} was changed after it was written: its digest does not fit, it is no evidence.")
    found = Counter(pair["status"] for pair in pairs)
    counts = {status: found[status] for status in (*SIGNS, *sorted(found.keys() - SIGNS.keys()))}
    verdict = content.get("verdict")
    order = {status: place for place, status in enumerate(counts)}
    moved = sorted((pair for pair in pairs if pair["status"] != "same"), key=lambda pair: order[pair["status"]])
    return render(
        "comparison.jinja",
        headline=_headline(counts, verdict, not pairs),
        verdict=verdict if verdict in VERDICTS else "",
        why=_why(counts, differences),
        where_a=text_of(a.get("where") or "A"),
        where_b=text_of(b.get("where") or "B"),
        sides=list(_sides(a, b)),
        counts=counts,
        signs=SIGNS,
        moved=moved,
        same=[pair for pair in pairs if pair["status"] == "same"],
        differences=differences,
        statistics=statistics,
        warnings=warnings,
    )


def _headline(counts: Mapping[str, int], verdict: Any, empty: bool) -> str:
    if empty:
        return "Nothing to compare"
    if counts["broken"]:
        return f"B breaks {counted(counts['broken'], 'check')}"
    if verdict == "fail":
        return "No evidence"
    return "B breaks nothing" if verdict == "note" else "The same"


def _why(counts: Mapping[str, int], differences: list[dict[str, str]]) -> str:
    total = sum(counts.values())
    parts = [f"{counts['same']:,} of {counted(total, 'finding')} have the same verdict"]
    parts += [f"{counts['mended']:,} mended"] if counts["mended"] else []
    said = "; ".join(parts) + "."
    if differences:
        said += f" The runs differ in {', '.join(dict.fromkeys(one['what'] for one in differences))}: see below."
    return said


def _sides(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterable[tuple[str, str, str]]:
    for what, place, spell in SIDES:
        first, second = (at(side, place) for side in (a, b))
        if any(value not in (None, "", [], {}) for value in (first, second)):
            yield what, "" if first is None else spell(first), "" if second is None else spell(second)


def _pair(one: Mapping[str, Any]) -> dict[str, Any]:
    sides = [one.get(letter) for letter in ("a", "b")]
    items: list[Item | None] = [item_of(side, 0, "") if isinstance(side, dict) else None for side in sides]
    words = {key: text_of(one.get(key) or "") for key in ("stage", "kind", "layer", "claim", "status")}
    return words | {"a": items[0], "b": items[1]}


def _difference(one: Mapping[str, Any]) -> dict[str, str]:
    stages = one.get("stages")
    reach = [f"stages: {', '.join(map(str, stages))}"] if isinstance(stages, list) else []
    reach += ["so items are not paired"] if one.get("blocks") else []
    words = {key: text_of(one.get(key)) for key in ("what", "a", "b", "why")}
    return words | {"reach": "; ".join(reach)}


def _statistic(one: Mapping[str, Any]) -> dict[str, str]:
    """One row, in words; where there is no test, why."""
    out = {key: text_of(one.get(key) or "") for key in ("stage", "name")}
    alone = [f"{one[key]} only in {key[-1].upper()}" for key in ("only_a", "only_b") if one.get(key)]
    items = [text_of(one["num_items"])] if one.get("num_items") is not None else []
    out |= {"paired": "; ".join(items + alone), "a": "", "b": "", "difference": ""}
    if one.get("test") == "mcnemar":
        right = {letter: text_of(one.get(f"right_{letter}")) + " right" for letter in "ab"}
        adjusted = one.get("p_adjusted")
        test = f"p {_p(one.get('p'))}" + ("" if adjusted is None else f", adjusted {_p(adjusted)}")
        changed = f"{text_of(one.get('mended'))} mended, {text_of(one.get('broken'))} broken"
        return out | right | {"difference": changed, "test": test}
    if one.get("test") == "bootstrap":
        means = {letter: value_text(one.get(f"mean_{letter}")) for letter in "ab"}
        low, high = one.get("low"), one.get("high")
        inside = number(low) is None or number(high) is None
        test = "one item: no interval" if inside else f"95 %: {value_text(low)} to {value_text(high)}"
        return out | means | {"difference": value_text(one.get("difference")), "test": test}
    return out | {"test": f"not compared: {text_of(one.get('why') or 'the comparison does not say why')}"}


def _p(value: Any) -> str:
    found = number(value)
    return text_of(value) if found is None else "below 0.001" if found < 0.001 else f"{found:.3f}"
