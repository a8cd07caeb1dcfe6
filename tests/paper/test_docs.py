"""Documents, as a newcomer reads them: commands exist with these options, and so do the files that links lead to."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from dayzero.cli import COMMANDS
from tests.paper.command_lines import calls, check_call, options_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = {
    "README.md": 30, "docs/operations.md": 30, "docs/inspect.md": 1, "docs/new-model.md": 5, "docs/new-operator.md": 1,
    "examples/rehearsal/README.md": 4, "CONTRIBUTING.md": 0, "CHANGELOG.md": 0,
}  # fmt: skip


def text_of(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_commands_exist_with_these_options(document: str) -> None:
    found = list(calls(text_of(document)))
    assert len(found) >= DOCUMENTS[document]
    for words in found:
        check_call(words)


@pytest.mark.parametrize("document", ["README.md", "docs/operations.md"])
def test_options_named_in_the_text_exist(document: str) -> None:
    known = {name for command in COMMANDS for name in options_of(command)}
    named = set(re.findall(r"`(--[a-z][a-z-]+)", text_of(document)))
    assert named and named <= known, named - known


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document: str) -> None:
    text, folder = text_of(document), (ROOT / document).parent
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text):
        assert "://" in target or (folder / target).exists(), target
    anchors = {
        re.sub(r"[^a-z0-9 -]", "", head.lower()).replace(" ", "-") for head in re.findall(r"^#+ (.*)$", text, re.M)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= anchors


def test_extras_that_are_installed_exist() -> None:
    known = set(tomllib.loads(text_of("pyproject.toml"))["project"]["optional-dependencies"])
    named = re.findall(r"(?:\.|dayzero)\[([a-z,]+)\]", text_of("README.md"))
    assert named and {extra for names in named for extra in names.split(",")} <= known


def test_the_check_of_calls_sees_faults() -> None:
    check_call(shlex.split("serve SOURCE --port 8000 --host=0.0.0.0 --upstream"))
    for bad in ("serve X --ports 1", "serve X --port", "serve X --upstream=1", "serve A B C"):
        with pytest.raises(AssertionError):
            check_call(shlex.split(bad))
    with pytest.raises(KeyError):
        check_call(["server", "X"])


def test_calls_are_found_wherever_they_stand() -> None:
    text = """Run `dayzero demo --where` or `--json`.
```bash
A=1 .venv/bin/dayzero plan "$(dayzero demo --where)" --tp 2 | head  # not this: dayzero x
rm -rf x && dayzero chat "a b" \\
  --prompt c
```
```python
dayzero no call
```
"""
    assert sorted(calls(text)) == [
        ["chat", "a b", "--prompt", "c"], ["demo", "--where"], ["demo", "--where"], ["plan", "X", "--tp", "2"],
    ]  # fmt: skip
