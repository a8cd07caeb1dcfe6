"""The pages of an acceptance in a real browser: no complaint, no overflow, dark where it is asked for, scripts or none.

``DAYZERO_SCREENSHOTS`` names a folder that the pictures are kept in, to be looked at.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from dayzero.acceptance.accept.compare import compare_records
from dayzero.acceptance.page import write_comparison_page, write_page
from tests.browser.chromium import Page
from tests.paper.accept_records import finding, record, showcase, stage

WIDTHS = {"phone": 390, "tablet": 768, "laptop": 940, "desktop": 1280}
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&" + "unbroken" * 60


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By name: a full record, one that is as bad as can be, an empty one, a thousand findings, a comparison."""
    full = showcase()
    other = copy.deepcopy(full)
    other["stages"][4]["findings"][0] |= {"verdict": "fail", "measured": "2.3 MiB a minute"}
    many = [
        finding(("pass", "note", "fail")[at % 3], f"kind.of{at}", claim=f"claim number {at}.") for at in range(1000)
    ]
    made: dict[str, Any] = {
        "full": full,
        "hostile": _hostile(full),
        "empty": {},
        "many": record(stage("weights", many)),
    }
    out = {}
    for name, content in made.items():
        out[name] = write_page(content, tmp_path_factory.mktemp(name))
    compared = compare_records(full, other)
    out["comparison"] = write_comparison_page(compared, tmp_path_factory.mktemp("comparison"))
    out["hostile comparison"] = write_comparison_page(_hostile(compared), tmp_path_factory.mktemp("hostile"))
    return out


def _hostile(value: Any) -> Any:
    """Every text of a record but the words that the page goes by."""
    kept = ("verdict", "kind", "status")
    if isinstance(value, dict):
        return {key: item if key in kept and isinstance(item, str) else _hostile(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_hostile(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def keep(picture: Image.Image, name: str) -> None:
    folder = os.environ.get("DAYZERO_SCREENSHOTS")
    if folder:
        picture.save(Path(folder) / f"{name}.png")


NAMES = ("full", "hostile", "empty", "many", "comparison", "hostile comparison")


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_a_page_loads_without_a_complaint_and_fits(
    browser: Page, pages: dict[str, Path], name: str, width: str
) -> None:
    browser.open(pages[name], width=WIDTHS[width])
    assert browser.problems == []
    # with everything that can be unfolded unfolded: a table in there must fit as well
    browser.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert browser.value("document.documentElement.scrollWidth") <= WIDTHS[width], browser.value(WIDEST)
    assert browser.value("document.querySelector('h1').getBoundingClientRect().top") < 300
    assert browser.problems == []
    widths = browser.value("""[...document.querySelectorAll('td, tbody th')].filter((one) => one.checkVisibility())
        .filter((one) => one.textContent.length > 3).map((one) => one.getBoundingClientRect().width)""")
    assert min(widths, default=99) >= 30, "a column is too narrow for a word"
    values = "[...document.querySelectorAll('td.value:not(:empty)')].map((one) => one.getBoundingClientRect().width)"
    assert min(browser.value(values), default=99) >= 80
    if name == "full":
        browser.open(pages[name], width=WIDTHS[width])
        keep(browser.picture(), f"{name}-{width}")


# Who sticks out, for the message of a failure.
WIDEST = """[...document.querySelectorAll('body *')]
  .filter((one) => one.getBoundingClientRect().right > innerWidth + 1 && !one.closest('.scroll'))
  .slice(0, 5).map((one) => one.tagName + '.' + one.getAttribute('class')).join(' ')"""


def test_text_is_large_enough_on_a_phone(browser: Page, pages: dict[str, Path]) -> None:
    """Nine pixels and more, in pictures too, which are drawn smaller there; on a screen of 390 they must be read."""
    browser.open(pages["full"], width=390)
    sizes = browser.value("""[...document.querySelectorAll('svg.picture text')].map((one) =>
        parseFloat(getComputedStyle(one).fontSize) * one.ownerSVGElement.getScreenCTM().a)""")
    assert len(sizes) > 100 and min(sizes) >= 9
    assert browser.value("parseFloat(getComputedStyle(document.body).fontSize)") >= 14


def test_no_label_of_a_picture_leaves_it_or_lies_on_another(browser: Page, pages: dict[str, Path]) -> None:
    browser.open(pages["full"], width=1280)
    assert (
        browser.value("""[...document.querySelectorAll('svg.picture')].flatMap((svg) => {
        const frame = svg.getBoundingClientRect();
        return [...svg.querySelectorAll('text')].filter((one) => {
          const box = one.getBoundingClientRect();
          return box.left < frame.left - 2 || box.right > frame.right + 2 || box.bottom > frame.bottom + 2;
        }).map((one) => one.textContent);
      })""")
        == []
    )
    assert (
        browser.value("""[...document.querySelectorAll('svg.picture')].flatMap((svg) => {
        const texts = [...svg.querySelectorAll('text')], boxes = texts.map((one) => one.getBoundingClientRect());
        const touching = [];
        for (let a = 0; a < boxes.length; a++) for (let b = 0; b < a; b++) {
          const wide = Math.min(boxes[a].right, boxes[b].right) - Math.max(boxes[a].left, boxes[b].left);
          const high = Math.min(boxes[a].bottom, boxes[b].bottom) - Math.max(boxes[a].top, boxes[b].top);
          if (wide > 2 && high > 6) touching.push(texts[a].textContent + ' | ' + texts[b].textContent);
        }
        return touching;
      })""")
        == []
    )


@pytest.mark.parametrize("name", ["full", "comparison"])
def test_dark_mode_is_dark(browser: Page, pages: dict[str, Path], name: str) -> None:
    """By its pixels: nearly all of a page is ground, and the ground is dark; in the light it is light."""
    shares = {}
    for dark in (False, True):
        browser.open(pages[name], dark=dark)
        picture = browser.picture()
        grey = picture.convert("L").histogram()
        shares[dark] = sum(grey[:64]) / sum(grey)
        keep(picture, f"{name}-{'dark' if dark else 'light'}")
        corner = picture.getpixel((2, 2))
        assert isinstance(corner, tuple) and (max(corner) < 40 if dark else min(corner) > 240), corner
    assert shares[True] > 0.85 and shares[False] < 0.15, shares


@pytest.mark.parametrize("name", NAMES)
def test_all_of_it_is_there_without_scripts(browser: Page, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    with_scripts = browser.value("document.body.innerText.length")
    browser.open(pages[name], scripts=False)
    assert browser.problems == []
    # the tools that scripts drive are not shown, and nothing else is missing
    assert browser.value("getComputedStyle(document.querySelector('.tools') ?? document.head).display") == "none"
    assert browser.value("document.body.innerText.length") >= with_scripts - 100
    assert browser.value("document.querySelector('h1').innerText").strip()


def test_the_verdict_is_words_and_a_sign(browser: Page, pages: dict[str, Path]) -> None:
    """Never colour alone: every sign of a verdict that is drawn has its word beside it."""
    browser.open(pages["full"])
    assert browser.value("document.querySelector('h1').innerText") == "Not accepted"
    assert browser.value("document.querySelector('h1 svg use').getAttribute('href')") == "#v-fail"
    assert browser.value("document.querySelector('h1 svg').getBoundingClientRect().width") > 30
    assert browser.value("""[...document.querySelectorAll('.verdict')].every((one) =>
        one.textContent.trim() && one.querySelector('svg use'))""")


def test_the_filter(browser: Page, pages: dict[str, Path]) -> None:
    browser.open(pages["many"])
    shown = "document.querySelectorAll('tr[data-verdict]:not([hidden])').length"
    assert browser.value(shown) == 1000
    assert browser.value("document.querySelectorAll('.tools[hidden]').length") == 0
    browser.value("document.querySelector('.tools input[value=pass]').click()")
    assert browser.value(shown) == 666
    browser.value("""(() => { const one = document.querySelector('.tools input[type=search]');
        one.value = 'number 77'; one.dispatchEvent(new Event('input')); })()""")
    wanted = sum("77" in str(at) and at % 3 > 0 for at in range(1000))
    assert browser.value(shown) == wanted
    assert browser.value("document.querySelector('.tools output').textContent") == f"{wanted} of 1000 findings"
    assert browser.problems == []


def test_a_link_opens_what_it_leads_into(browser: Page, pages: dict[str, Path]) -> None:
    browser.open(pages["many"])
    browser.value("location.hash = '#finding-900'")
    assert browser.value("""new Promise((done) => setTimeout(() => {
        const box = document.querySelector('#finding-900').getBoundingClientRect();
        done(box.height > 0 && box.top >= 0 && box.top < innerHeight);
      }, 200))""")


def test_names_run_nothing(browser: Page, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    assert browser.problems == []
    assert browser.value("document.scripts.length") == 1 and browser.value("document.images.length") == 0
    # and if a script got in, the page's own policy would stop it
    browser.value("""(() => { const one = document.createElement('script'); one.textContent = 'window.ran = 1';
        document.body.append(one); })()""")
    assert browser.value("typeof window.ran") == "undefined"
    assert any("Content Security Policy" in problem for problem in browser.problems)


def test_it_can_be_printed(browser: Page, pages: dict[str, Path]) -> None:
    """On paper nothing is folded away, and it is light whatever the screen is."""
    browser.open(pages["full"], dark=True)
    folded = """[...document.querySelectorAll('details.fold')].filter((one) =>
        !one.querySelector('table, dl, ul').checkVisibility()).length"""
    assert browser.value(folded) > 0
    browser.ask("Emulation.setEmulatedMedia", media="print")
    try:
        assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.value(folded) == 0
        assert browser.printed().startswith(b"%PDF")
    finally:
        browser.ask("Emulation.setEmulatedMedia", media="")
