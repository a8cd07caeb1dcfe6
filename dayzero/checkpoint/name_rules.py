"""Rules that name modules: whole names, runs of segments, globs and regular expressions, each hit counted.

Never a substring: ``layers.1`` does not hit ``layers.10``, ``mlp.gate`` does not hit ``mlp.gate_proj``. Built for a
few hundred rules over a few hundred thousand names: literals are looked up, globs are tried by their literal prefix.
"""

from __future__ import annotations

import re
from collections import defaultdict
from enum import Enum
from typing import NamedTuple

from dayzero.errors import ConfigError


class Style(Enum):
    """How an entry's text is read. Every style but ALL also takes ``re:PATTERN``, matched from the name's start.

    WHOLE: the whole name, or a glob on it. RUN: a leading or trailing run of whole segments, globs and regular
    expressions included. GLOB: a shell glob on the whole name, where ``*`` crosses dots. BELOW: the name and all
    below it. ALL: every module.
    """

    WHOLE = "whole"
    RUN = "run"
    GLOB = "glob"
    BELOW = "below"
    ALL = "all"


class Entry(NamedTuple):
    """A rule as written, the config key it stands in, and how its text is read."""

    text: str
    kind: str
    style: Style


_GLOB_CHARS = frozenset("*?[")
_REGEX_CHARS = frozenset("\\()|+^${}")


class NameRules:
    """Entries in order of precedence; ``hits`` finds all that hit a name and counts them.

    entries: as given. counts: hits per entry so far; mutated by ``hits``.
    """

    def __init__(self, entries: list[Entry], roots: tuple[str, ...]) -> None:
        self.entries = entries
        self.counts = [0] * len(entries)
        self._roots = roots
        self._always = [i for i, e in enumerate(entries) if e.style is Style.ALL]
        self._whole: dict[str, list[int]] = defaultdict(list)
        self._leading: dict[str, list[int]] = defaultdict(list)
        self._trailing: dict[str, list[int]] = defaultdict(list)
        self._patterns: dict[str, list[tuple[int, re.Pattern[str]]]] = defaultdict(list)
        for i, entry in enumerate(entries):
            if entry.style is not Style.ALL:
                self._add(i, entry)
        self._prefix_sizes = sorted({len(prefix) for prefix in self._patterns})

    def _add(self, i: int, entry: Entry) -> None:
        text, style = entry.text, entry.style
        if text.startswith("re:"):
            self._patterns[""].append((i, _compiled(text[3:], entry)))
        elif style is Style.RUN and _REGEX_CHARS & set(text):
            self._patterns[""].append((i, _compiled(rf"(?:{text})(?:\.|$)", entry)))
        elif _GLOB_CHARS & set(text) and style is not Style.BELOW:
            self._add_glob(i, entry)
        else:
            self._whole[text].append(i)
            if style in (Style.RUN, Style.BELOW):
                self._leading[text].append(i)
            if style is Style.RUN:
                self._trailing[text].append(i)

    def _add_glob(self, i: int, entry: Entry) -> None:
        body = _glob_body(entry.text)
        prefix = re.split(r"[*?\[]", entry.text, maxsplit=1)[0]
        if entry.style is Style.RUN:
            self._patterns[prefix].append((i, _compiled(rf"{body}(?:\.|\Z)", entry)))
            self._patterns[""].append((i, _compiled(rf"(?:.*\.)?{body}\Z", entry)))
        else:
            self._patterns[prefix].append((i, _compiled(rf"{body}\Z", entry)))

    def hits(self, name: str) -> list[int]:
        """Indices of all entries that hit ``name``, best first; adds one to the count of each."""
        found = set(self._always)
        self._collect(name, found)
        for root in self._roots:
            if name.startswith(root):
                self._collect(name[len(root) :], found)
        for i in found:
            self.counts[i] += 1
        return sorted(found)

    def _collect(self, name: str, found: set[int]) -> None:
        found.update(self._whole.get(name, ()))
        if self._leading or self._trailing:
            at = name.find(".")
            while at >= 0:
                found.update(self._leading.get(name[:at], ()))
                found.update(self._trailing.get(name[at + 1 :], ()))
                at = name.find(".", at + 1)
        for size in self._prefix_sizes:
            for i, pattern in self._patterns.get(name[:size], ()):
                if i not in found and pattern.match(name):
                    found.add(i)


def _glob_body(text: str) -> str:
    """A shell glob as a regular expression: ``*`` any run, dots included, ``?`` one character, ``[ab]`` a set."""
    out, i = "", 0
    while i < len(text):
        char, i = text[i], i + 1
        if char == "*":
            out += ".*"
        elif char == "?":
            out += "."
        elif char == "[" and "]" in text[i + 1 :]:
            end = text.index("]", i + 1)
            body = text[i:end].replace("\\", "\\\\").replace("[", "\\[")
            out += "[" + ("^" + body[1:] if body.startswith("!") else body) + "]"
            i = end + 1
        else:
            out += re.escape(char)
    return out


def _compiled(pattern: str, entry: Entry) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except (re.error, OverflowError, RecursionError) as error:
        raise ConfigError(f"{entry.kind} entry {entry.text!r} is no valid pattern: {error}") from None
