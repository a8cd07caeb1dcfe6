"""The page of an acceptance: whole, escaped, and drawn from whatever a record holds."""

from __future__ import annotations

import copy
import json
import math
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from dayzero.acceptance.accept.compare import compare_records
from dayzero.acceptance.accept.digest import digest_of, outcome_of
from dayzero.acceptance.page import write_comparison_page, write_page
from dayzero.acceptance.page.curves import MOST_POINTS, thinned
from dayzero.acceptance.page.numbers import Scale, number, scale_of, value_text
from dayzero.acceptance.page.pictures import draw
from dayzero.acceptance.page.shapes import Plot
from tests.paper.accept_records import figure, finding, record, showcase, stage

VOID = {"meta", "col", "input", "br", "link", "img", "hr"}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&<b>{{ 7 * 7 }}\u202e\x1b[31m\x00"
HUGE = [1e308, -1e308, 5e-324, 0.0, -0.0, 10**400, -(10**400)]
NONE = [None, "nan", "inf", "-inf", math.nan, math.inf, True, "text", {}, []]


class Tree(HTMLParser):
    """Reads a page strictly: every element is closed in order, every id is there once. rows: cells of tables, by the
    id of the section they stand in; scripts: what the page would run; text: all that is shown."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: Counter[str] = Counter()
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()
        self.scripts: list[str] = []
        self.texts: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.feed(html)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        for name, value in attrs:
            self.attributes.append((tag, name, value or ""))
            if name == "id":
                self.ids[value or ""] += 1
            if name == "href":
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] != "style":
            self.texts.append(data)

    @property
    def text(self) -> str:
        return "".join(self.texts)


def page_of(content: Any, folder: Path) -> str:
    path = write_page(content, folder)
    assert path == folder / "index.html" and [p.name for p in folder.iterdir()] == ["index.html"]
    return path.read_text("utf-8")


def check(html: str) -> Tree:
    """What holds of every page, whatever it was made from."""
    tree = Tree(html)
    assert html.startswith("<!doctype html>") or html.lstrip().startswith("<!doctype html>")
    assert max(tree.ids.values()) == 1, [name for name, count in tree.ids.items() if count > 1]
    assert {link.removeprefix("#") for link in tree.links} <= set(tree.ids), "a link leads nowhere"
    assert all(link.startswith("#") for link in tree.links)
    assert (
        tree.tags["h1"] == 1 and tree.tags["script"] <= 1 and not tree.tags.keys() & {"img", "iframe", "object", "link"}
    )
    assert not [one for one in tree.attributes if one[1].startswith("on") or one[1] in ("style", "src", "action")]
    # Only names in a namespace's place may look like an address.
    assert "http://" not in html and "https://" not in html
    for svg in re.findall(r"<svg .*?</svg>", html, re.DOTALL):
        for element in ElementTree.fromstring(svg).iter():
            for name, value in element.attrib.items():
                assert not re.search(r"\b(nan|inf)\b", value, re.I) or name == "aria-label", (element.tag, name, value)
    return tree


def test_a_page_of_everything(tmp_path: Path) -> None:
    content = showcase()
    html = page_of(content, tmp_path)
    tree = check(html)
    text = tree.text
    assert "Not accepted" in text and "3 of 30 checks fail. At fault: weights (1), operator (1) and cache (1)." in text
    assert text.index("Not accepted") < text.index("What fails") < text.index("Worth reading") < text.index("Protocol")
    for word in (
        content["digest"],
        "models/nova-small",
        "quick",
        "6:12 min",
        "2026-07-01 09:00 UTC",
        "A processor, 2 cores",
        "4.69 M, 2.78 M of them active",
        "nova",
    ):
        assert word in text, word
    assert tree.tags["figure"] == sum(len(part["figures"]) for part in content["stages"])
    assert "not drawn" not in text and "changed after" not in text


def test_every_finding_stands_once_in_each_list(tmp_path: Path) -> None:
    verdicts = ("pass", "note", "fail", "not applicable")
    findings = [
        finding(
            verdicts[at % 4],
            f"some.kind{at}",
            claim=f"claim number {at}.",
            measured=f"seen {at}.",
            bound=f"held {at}.",
            evidence=[f"tensor {at}.{n}" for n in range(at % 9)],
            remedy=f"mend {at}." if at % 4 in (1, 2) else "",
        )
        for at in range(1000)
    ]
    html = page_of(record(stage("weights", findings[:400]), stage("numerics", findings[400:])), tmp_path)
    tree = check(html)
    rows = re.findall(r'<tr role="row" data-verdict="([^"]*)".*?</tr>', html, re.DOTALL)
    assert Counter(rows) == dict.fromkeys(verdicts, 250)
    assert sorted(name for name in tree.ids if name.startswith("finding-")) == sorted(
        f"finding-{at + 1}" for at in range(1000) if at % 4 in (1, 2)
    )
    for at, one in enumerate(findings):
        # a row of its stage's table, and a card or a line among what is not applicable
        places = html.count(f">{one['claim']}<") + html.count(f">{one['claim']} <")
        assert places == (1 if one["verdict"] == "pass" else 2), one
        assert f"seen {at}." in html and f"held {at}." in html
        if one["verdict"] in ("note", "fail"):
            assert html.count(one["remedy"]) == 1 and all(
                html.count(f"<code>{name}</code>") == 1 for name in one["evidence"]
            )
    assert len(html) < 3_000_000


@pytest.mark.parametrize("content", [{}, {"stages": None}, {"stages": [], "verdict": "pass"}, record()])
def test_an_empty_record_is_no_acceptance(tmp_path: Path, content: dict[str, Any]) -> None:
    tree = check(page_of(content, tmp_path))
    assert "Nothing was judged" in tree.text and "Accepted" not in tree.text


def test_nothing_applicable_is_no_acceptance(tmp_path: Path) -> None:
    content = record(stage("weights", [finding("not applicable", measured="there are none")]))
    assert content["verdict"] == "pass"
    text = check(page_of(content, tmp_path)).text
    assert "Nothing was judged" in text and "there are none" in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": "pass"}, "The record says “pass”, its findings come to “fail”"),
        ({"counts": {"pass": 9}}, "counts are not those of its findings"),
        ({"seed": 7}, "The digest does not fit the record"),
        ({"stages": "none"}, "stages are no list"),
        ({"stages": [7, {"name": "weights", "findings": [None, finding()]}]}, "1 are no objects"),
    ],
)
def test_what_is_not_as_it_should_be_is_said(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """A record that was changed by hand does not pass for the one that was written."""
    content = record(stage("weights", [finding("fail")])) | change
    text = check(page_of(content, tmp_path)).text
    assert said in text
    assert "Accepted" not in text.replace("Not accepted", "") or change.keys() == {"stages"}


def test_a_sound_record_is_not_warned_of(tmp_path: Path) -> None:
    html = page_of(record(stage("weights", [finding("note")])), tmp_path)
    assert 'class="warnings"' not in html and "Accepted, with notes" in html


def test_a_record_without_all_stages_says_so(tmp_path: Path) -> None:
    content = record(stage("weights", [finding()]), complete=False)
    content["protocol"]["left_out"] = ["numerics", "contract"]
    text = check(page_of(content, tmp_path)).text
    assert "Passed in part" in text and "left out: numerics, contract" in text


def test_hostile_names_are_text(tmp_path: Path) -> None:
    """Names come from downloads: none becomes an element, an attribute, a script, or turns the text around."""
    everywhere = dict.fromkeys(("kind", "claim", "remedy"), HOSTILE)
    listed = [
        finding(verdict, layer="weights", measured=[HOSTILE, 1], bound={HOSTILE: HOSTILE}, evidence=[HOSTILE] * 9)
        | everywhere
        for verdict in ("pass", "note", "fail", "not applicable")
    ]
    odd = finding() | {"verdict": HOSTILE, "layer": HOSTILE}
    words = {"title": HOSTILE, "x_label": HOSTILE, "y_label": HOSTILE}
    figures = (
        figure("ladder", {"rows": [{"name": HOSTILE, "value": 1, "bound": 0.5, "verdict": HOSTILE}]}, **words),
        figure("ladder", {"rows": [{"name": HOSTILE, "value": 1, "bound": 0.5, "verdict": "fail"}] * 50}, **words),
        figure("histogram", {"edges": [0, 1], "counts": [3], "marks": {HOSTILE: 0.5, HOSTILE + "2": HOSTILE}}, **words),
        figure("heat", {"rows": [HOSTILE], "columns": [HOSTILE], "values": [[0.5]]}, **words),
        figure("curves", {"x": [1, 2], "series": {HOSTILE: [1, 2]}, "bounds": {HOSTILE: 1}}, **words),
        figure("bars", {"rows": [{"name": HOSTILE, "value": HOSTILE, "bound": HOSTILE}] * 2}, **words),
        figure(HOSTILE, {}, **words),
    )  # fmt: skip
    content = record(stage("weights", listed, figures, facts={HOSTILE: {HOSTILE: [HOSTILE]}}))
    content["stages"][0]["findings"].append(odd)
    content["stages"][0] |= {"name": HOSTILE, "title": HOSTILE}
    content["subject"] = dict.fromkeys(content["subject"], HOSTILE)
    content |= {"profile": HOSTILE, "digest": HOSTILE, "began": HOSTILE}
    content["protocol"][HOSTILE] = HOSTILE
    html = page_of(content, tmp_path)
    tree = check(html)
    assert tree.tags["script"] == 1 and "alert" not in "".join(tree.scripts)
    assert "<b>{{ 7 * 7 }}" in tree.text and "49\\u202e" not in tree.text
    assert not any(c in html for c in "\u202e\x1b\x00")


def test_a_surrogate_from_a_file_name_can_be_written(tmp_path: Path) -> None:
    check(page_of(record(stage("weights", [finding("fail", claim="a name \udcff of a file")])), tmp_path))


def test_nothing_but_the_page_own_script_may_run(tmp_path: Path) -> None:
    import base64
    import hashlib

    html = page_of(showcase(), tmp_path)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None and policy[1].startswith("default-src 'none';") and "unsafe" not in policy[1]
    for tag in ("script", "style"):
        inside = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert inside is not None
        made = base64.b64encode(hashlib.sha256(inside[1].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{made}'" in policy[1]


def test_nested_beyond_reason(tmp_path: Path) -> None:
    deep: Any = "end"
    for _ in range(400):
        deep = {"a": [deep]}
    content = record(stage("weights", [finding("fail")]))
    content["stages"][0]["facts"] = {"deep": deep}
    content["stages"][0]["findings"][0]["measured"] = deep
    html = page_of(content, tmp_path)
    assert "nested too deeply" in check(html).text


def test_a_long_value_is_cut_and_says_so(tmp_path: Path) -> None:
    html = page_of(record(stage("weights", [finding("fail", measured="x" * 5000)])), tmp_path)
    assert "cut: 5,000 characters" in html and "x" * 5000 not in html


# --- figures ---------------------------------------------------------------------------------------------------------

ROWS = [{"name": f"row {at}", "value": value, "bound": value} for at, value in enumerate([*HUGE, *NONE, 1.0, -3])]
FIGURES: list[tuple[str, dict[str, Any]]] = [
    ("ladder", {"rows": []}),
    ("ladder", {"rows": ROWS}),
    ("ladder", {"rows": ROWS * 3}),
    ("ladder", {"rows": [{"name": "one", "value": 0, "bound": 0}]}),
    ("ladder", {"rows": [{"name": "n" * 500, "value": 1e-7, "bound": 1e-7, "verdict": "pass"}] * 3}),
    ("ladder", {"rows": [{}] * 40}),
    ("histogram", {"edges": [0], "counts": []}),
    ("histogram", {"edges": [0, 1], "counts": [5], "marks": {"max": 1e300, "nan": "nan"}}),
    ("histogram", {"edges": [1, 1, 1], "counts": [0, 0], "marks": {}}),
    ("histogram", {"edges": [*HUGE, 1], "counts": [None, "nan", -3, 0, 1e308, 2, 3]}),
    ("heat", {"rows": ["a"], "columns": ["b"], "values": [[None]]}),
    ("heat", {"rows": ["a", "b"], "columns": ["c"] * 16, "values": [[*NONE, 7, -1, 0, 1, 0.5, 1e308]] * 2}),
    ("heat", {"rows": ["r"] * 300, "columns": ["c"] * 200, "values": [[0.5] * 200] * 300}),
    ("curves", {"x": [1], "series": {"one point": [2]}, "bounds": {}}),
    ("curves", {"x": [1, 2, 3], "series": {"equal": [5] * 3, "none": [None, "nan", 7]}, "bounds": {"b": "inf"}}),
    ("curves", {"x": HUGE, "series": {"huge": HUGE, "turned": HUGE[::-1]}, "bounds": {"b": -1e308}}),
    ("curves", {"x": [None, 1, "nan", 2], "series": {"gaps": [1, None, 2, 3]}}),
    ("curves", {"x": [-2, -1], "series": {"below": [-1, -5]}, "bounds": {"": 0}}),
    ("curves", {"x": [], "series": {}}),
    ("curves", {"x": [1, 2], "series": {f"{'long ' * 9}{at}": [at, -at] for at in range(14)}}),
    ("curves", {"x": list(range(9000)), "series": {"long": [at % 77 for at in range(9000)]}}),
    ("bars", {"rows": ROWS}),
    ("bars", {"rows": [{"name": "equal", "value": 3, "bound": 3}] * 5}),
    ("bars", {"rows": [{"name": f"bar {at}", "value": at} for at in range(500)]}),
]  # fmt: skip
UNDRAWABLE: list[tuple[str, dict[str, Any]]] = [
    ("pie", {}),
    ("ladder", {}),
    ("ladder", {"rows": [7]}),
    ("histogram", {"edges": [0, 1], "counts": [1, 2]}),
    ("histogram", {"edges": [0, 1], "counts": [1], "marks": [2]}),
    ("heat", {"rows": ["a"], "columns": ["b"], "values": [[1, 2]]}),
    ("heat", {"rows": [], "columns": [], "values": []}),
    ("curves", {"x": [1, 2], "series": {"short": [1]}}),
    ("curves", {"x": [1, 2], "series": [1]}),
    ("bars", {"rows": {"a": 1}}),
]


@pytest.mark.parametrize("logs", [(False, False), (True, True), (True, False)])
@pytest.mark.parametrize(("kind", "data"), FIGURES)
def test_any_numbers_can_be_drawn(kind: str, data: dict[str, Any], logs: tuple[bool, bool]) -> None:
    """NaN, null, one point, equal, negative and huge values: a picture whose every place is a number inside it."""
    made = draw(Plot(kind, "A title", data, "across", "up", *logs, identity="x"))
    if made.svg is None:
        assert made.problem == "nothing was measured for it" and not any(
            data.get(key) for key in ("rows", "x", "counts")
        )
        return
    root = ElementTree.fromstring(str(made.svg))
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    for element in root.iter():
        for name, bottom, top in (("x", -width, width), ("cx", 0, width), ("y", 0, height), ("cy", 0, height)):
            if name in element.attrib and element.tag != "text":
                assert bottom <= float(element.attrib[name]) <= top, (element.tag, element.attrib)
        for place in re.findall(r"[-\d.e+]*[a-zA-Z]*", element.attrib.get("d", "")):
            assert "nan" not in place and "inf" not in place
    json.dumps(made.rows)
    assert made.says.startswith("A title")


@pytest.mark.parametrize(("kind", "data"), UNDRAWABLE)
def test_what_cannot_be_drawn_says_why(kind: str, data: dict[str, Any], tmp_path: Path) -> None:
    html = page_of(record(stage("weights", [finding()], (figure(kind, data, "Its title"),))), tmp_path)
    assert "Its title" in html and "not drawn: " in check(html).text


def test_a_ladder_shows_each_verdict_by_shape() -> None:
    rows = [{"name": v, "value": 1, "bound": 2, "verdict": v} for v in ("pass", "note", "fail")]
    for many in (rows, rows * 20):
        svg = str(draw(Plot("ladder", "t", {"rows": many})).svg)
        assert all(svg.count(f'class="mark-{v}"') == len(many) / 3 for v in ("note", "fail"))
    # without a word, the bound decides
    svg = str(draw(Plot("ladder", "t", {"rows": [{"value": 3, "bound": 2}, {"value": 1, "bound": 2}]})).svg)
    assert svg.count("mark-fail") == 1 and svg.count("mark-pass") == 1


def test_a_long_ladder_names_the_first_that_fail() -> None:
    rows = [{"name": f"layers.{at}", "value": 1e-7, "bound": 1e-6, "verdict": "pass"} for at in range(200)]
    rows[77] |= {"value": 0.1, "verdict": "fail"}
    assert ">layers.77</text>" in str(draw(Plot("ladder", "t", {"rows": rows})).svg)


def test_a_table_that_is_cut_says_so(tmp_path: Path) -> None:
    rows = [{"name": f"bar {at}", "value": at} for at in range(500)]
    html = page_of(record(stage("weights", [finding()], (figure("bars", {"rows": rows}),))), tmp_path)
    assert "The first 200 of 500 rows" in html and "40 of 500 are drawn" in html


def test_a_hole_in_a_large_map_is_seen() -> None:
    values: list[list[float | None]] = [[1.0] * 200 for _ in range(300)]
    values[123][77] = 0.0
    values[0][0] = None
    made = draw(Plot("heat", "t", {"rows": [f"r{at}" for at in range(300)], "columns": ["c"] * 200, "values": values}))
    svg = str(made.svg)
    assert svg.count('class="h0"') == 1 and svg.count('class="h10"') == 60 * 50 - 1 and "hatch" not in svg
    assert "300 × 200 cells: each one drawn shows the least of 5 × 4" in made.left_out and "least 0" in made.says


def test_no_peak_is_lost_in_a_long_curve() -> None:
    points = [(float(at), 1.0) for at in range(50_000)]
    points[33_333] = (33_333.0, 9.0)
    points[7] = (7.0, -9.0)
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2 and points[33_333] in kept and points[7] in kept and kept == sorted(kept)


def test_scales() -> None:
    scale = scale_of([1e-8, 0.0, 1e-3], 0.0, 100.0, log=True)
    assert scale.ticks()[0] == (0.0, "0") and scale.at(0.0) < scale.at(1e-8) < scale.at(1e-3) <= 100.0
    assert scale.at(-5.0) == scale.at(0.0)
    assert [text for _, text in Scale(0.0, 1.0, 0.0, 1.0).ticks(5)] == ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]
    assert [text for _, text in Scale(0.0, 50_000.0, 0.0, 1.0).ticks(5)] == ["0", "10k", "20k", "30k", "40k", "50k"]
    assert [text for _, text in Scale(30.0, 900.0, 0.0, 1.0, log=True).ticks(6)] == ["100"] or len(
        Scale(30.0, 900.0, 0.0, 1.0, log=True).ticks(6)
    ) >= 2
    equal = scale_of([7.0, 7.0], 0.0, 10.0)
    assert equal.low < 7.0 < equal.high and 0 < equal.at(7.0) < 10


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (True, "yes"), (12345, "12,345"), (0.83125, "0.8313"), (3.2e-05, "3.2e-05"), (0.0, "0"), ("a", "a"),
     (14.2211, "14.22"), (10**30, "1.000e+30"), (-0.5, "-0.5"), (math.nan, "nan"), (123456.7, "123,457")],
)  # fmt: skip
def test_values_in_words(value: Any, text: str) -> None:
    assert value_text(value) == text


def test_what_is_a_number() -> None:
    assert [number(value) for value in NONE] == [None] * len(NONE)
    assert all(math.isfinite(found) for value in HUGE if (found := number(value)) is not None)


# --- colours ---------------------------------------------------------------------------------------------------------


def luminance(colour: tuple[float, ...]) -> float:
    """WCAG 2.2, relative luminance; channels in 0..1."""
    parts = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", ["light", "dark", "print"])
def test_text_can_be_read_in_every_mode(mode: str) -> None:
    """4.5 to 1 at least (WCAG 2.2, AA) for every colour that text has, on every ground that it stands on."""
    import dayzero.acceptance.page.write as write

    style = (write.HERE / "style.jinja").read_text("utf-8")
    blocks = [
        dict(re.findall(r"--([\w-]+): #([0-9a-f]{6})", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)
    ]
    named = {"light": blocks[0], "dark": blocks[0] | blocks[1], "print": blocks[0] | blocks[2]}[mode]
    colours = {name: tuple(int(text[at : at + 2], 16) / 255 for at in (0, 2, 4)) for name, text in named.items()}
    for ground in ("bg", "raised", "note-bg"):
        for ink in ("ink", "muted", "accent", "pass", "note", "fail"):
            assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
    for ink in ("s0", "s1", "s2"):
        assert contrast(colours[ink], colours["bg"]) >= 4.5, ink
    for shade in range(11):
        ink = colours["heat-low" if shade <= 5 else "heat-mid" if shade <= 8 else "heat-high"]
        ground = tuple(
            shade / 10 * h + (1 - shade / 10) * b for h, b in zip(colours["heat"], colours["bg"], strict=True)
        )
        assert contrast(ink, ground) >= 4.5, (shade, contrast(ink, ground))


# --- two records -----------------------------------------------------------------------------------------------------


def sealed(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"digest": digest_of(content), "outcome": outcome_of(content)}


def two() -> tuple[dict[str, Any], dict[str, Any]]:
    samples = {
        "needle": {f"depth {at}": True for at in range(30)},
        "kl": {f"token {at}": at * 1e-6 for at in range(30)},
    }
    a = showcase()
    a["stages"][2]["samples"] = samples
    b = copy.deepcopy(a)
    b["stages"][2]["samples"]["needle"] |= {f"depth {at}": False for at in range(12)}
    b["stages"][0]["findings"][4]["verdict"] = "pass"
    b["stages"][4]["findings"][0] |= {"verdict": "fail", "measured": "2.3 MiB a minute", "remedy": "Look at the pool."}
    b["stages"][5]["findings"].pop()
    return sealed(a), sealed(b | {"profile": "long"})


def test_a_comparison(tmp_path: Path) -> None:
    compared = compare_records(*two(), "runs/a", "runs/b")
    tree = check(write_comparison_page(compared, tmp_path).read_text("utf-8"))
    text = tree.text
    expected = (
        "B breaks 1 check", "runs/a", "only in A", "2.3 MiB a minute", "Look at the pool.", "0 mended, 12 broken",
        "p below 0.001", "the stages try other amounts", "30 right", "18 right", "memory does not grow",
    )  # fmt: skip
    assert [words for words in expected if words not in text] == []
    assert text.index("broken") < text.index("memory does not grow") < text.index("every scale of a quantised")


def test_the_same_record_twice(tmp_path: Path) -> None:
    a, _ = two()
    text = check(write_comparison_page(compare_records(a, a), tmp_path).read_text("utf-8")).text
    assert "The same" in text and "What is not the same" not in text and "30 the same" in text


def test_a_changed_record_is_no_evidence(tmp_path: Path) -> None:
    a, b = two()
    text = check(write_comparison_page(compare_records(a, a | {"seed": 3}), tmp_path).read_text("utf-8")).text
    assert "No evidence" in text and "B was changed after it was written" in text


def test_a_hostile_comparison(tmp_path: Path) -> None:
    def spoil(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: spoil(item) for key, item in value.items()}
        if isinstance(value, list):
            return [spoil(item) for item in value]
        return HOSTILE if isinstance(value, str) else value

    tree = check(write_comparison_page(spoil(compare_records(*two())), tmp_path).read_text("utf-8"))
    assert not tree.tags["script"]
    check(write_comparison_page({}, tmp_path).read_text("utf-8"))
