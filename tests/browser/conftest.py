"""One chromium for all tests of pages; every test below is marked ``browser``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import NAMES, Page, chromium, find_chromium

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest takes out what -m does not name
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.browser)


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser that is missing is a failure, never a skip: these tests are only run where they are asked for."""
    program = find_chromium()
    if program is None:
        pytest.fail(f"no browser is installed (looked for {', '.join(NAMES)}): as root, apt-get install chromium")
    with chromium(program, tmp_path_factory.mktemp("chromium")) as page:
        yield page
