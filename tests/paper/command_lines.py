"""Command lines in documents: whether ``dayzero`` has the command, its options, and a value where one is needed."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import typer

from dayzero.cli import build_app

ENDS = ("|", "&", "&&", ">", "2>", ";")
SUBSTITUTED = re.compile(r"\"\$\((.*?)\)\"")


def options_of(command: str) -> dict[str, Any]:
    """Spelling -> parameter of ``dayzero COMMAND``."""
    found = typer.main.get_command(build_app()).commands[command]  # type: ignore[attr-defined]
    return {name: parameter for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}


def check_call(words: list[str]) -> None:
    """AssertionError unless ``dayzero WORDS`` names a command, its options, and values where they are needed."""
    command, *rest = words
    if "--" in rest:  # behind it: options of the servers that are started
        at = rest.index("--")
        check_call(["serve", "SOURCE", *rest[at + 1 :]])
        rest = rest[:at]
    options, waiting, positional = options_of(command), False, 0
    for word in rest:
        if word.startswith("-") and not waiting:
            name, equals, _ = word.partition("=")
            assert name in options, f"dayzero {command} has no option {name}"
            flag = options[name].is_flag
            assert not (flag and equals), f"{name} takes no value"
            waiting = not flag and not equals
        elif waiting:
            waiting = False
        else:
            positional += 1
    assert not waiting, f"the last option of {words} lacks its value"
    assert positional <= 2, words


def calls(text: str) -> Iterator[list[str]]:
    """Words of each call of ``dayzero`` in a document, by whatever path, behind whatever sets its environment: in
    fenced blocks, with the calls whose output others take, and between back quotes in the text."""
    lines = [line for block in re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S) for line in _lines(block)]
    lines += re.findall(r"`((?:\S*/)?dayzero [^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))
    for line in lines:
        for inner in (*SUBSTITUTED.findall(line), SUBSTITUTED.sub("X", line)):
            yield from _calls_of(inner)


def _lines(block: str) -> list[str]:
    return [line for line in block.replace("\\\n", " ").splitlines() if "dayzero " in line]  # quotes may span others


def _calls_of(line: str) -> Iterator[list[str]]:
    words = shlex.split(line, comments=True)
    ends = [at for at, word in enumerate(words) if word in ENDS]
    for start in [0, *(at + 1 for at in ends)]:
        stop = min([at for at in ends if at >= start], default=len(words))
        part = [word for word in words[start:stop] if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        if part and part[0].rpartition("/")[2] == "dayzero":
            yield part[1:]
