"""How a model marks its reasoning and its tool calls, as data: a small table of states that one parser reads.

A state says what its text is (``sink``) and which markers end it. A grammar is states by name; ``families`` holds those
of the formats in use. Nothing here is code for one model: a new format is a new table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Sink = Literal["content", "reasoning", "gap", "header", "object", "arguments", "value"]


@dataclass(frozen=True, slots=True)
class Edge:
    """``marker`` leads to the state ``to``.

    ends_call: the call that is open is complete. routes: a header's text is now looked up in its routes. keep: the
    marker itself begins the next state's text. follows: it is a marker only when this text comes next, white space
    aside; otherwise it is text (for markers that people also write about). quoted: it is a marker even where a JSON
    string is open, because only a control token spells it.
    """

    marker: str
    to: str
    ends_call: bool = False
    routes: bool = False
    keep: bool = False
    follows: str = ""
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Route:
    """A header that ``pattern`` matches as a whole opens what its groups name and goes to ``to`` (None: the edge's).

    Groups: ``name`` opens a call; ``id`` is the model's own id for it; ``key`` opens an argument, whose value is text
    when the group ``string`` is "true" or ``type`` is "string", JSON when it is anything else, and told from the tool's
    schema when both are absent.
    """

    pattern: str
    to: str | None = None

    def match(self, header: str) -> re.Match[str] | None:
        return re.fullmatch(self.pattern, header, re.DOTALL)


@dataclass(frozen=True, slots=True)
class State:
    """sink: what the text here is.

    ``content``, ``reasoning``: text for the reader. ``gap``: white space between markers; anything else is a problem.
    ``header``: collected until a marker, then routed. ``object``: a call as one JSON object with its name in it.
    ``arguments``: the JSON text of the open call. ``value``: one argument of it.

    words: what a header may begin with; text that is something else does not belong there. loose: it is the answer's
    then, else a problem. bare: the state (sink ``object``) to
    go to when the text begins with "{" though no marker opened a call. tentative: such an object is a call only when it
    names an offered function, else it is text of the answer, and the state ``fallback`` goes on. fence: what a model
    may put around arguments. padding: a line break on each side of a value that is not part of it.
    """

    sink: Sink
    edges: tuple[Edge, ...] = ()
    routes: tuple[Route, ...] = ()
    words: str = ""
    loose: bool = False
    bare: str | None = None
    tentative: bool = False
    fallback: str = "content"
    fence: tuple[str, str] | None = None
    padding: bool = False


@dataclass(frozen=True, slots=True)
class Grammar:
    """states by name; starts: where an answer begins: a new one (``content``), one whose reasoning the prompt opened
    (``reasoning``), or one that goes on from the prompt's own text (``continued``). trim: characters beside a marker
    that belong to the markup. literals: further texts that only control tokens spell, inside headers. escapes: (as
    written, what is meant) in names and keys, undone in this order."""

    states: Mapping[str, State]
    starts: Mapping[str, str]
    trim: str = "\n"
    literals: tuple[str, ...] = ()
    escapes: tuple[tuple[str, str], ...] = ()

    def markers(self) -> frozenset[str]:
        """Every text that may not reach a reader."""
        return frozenset(e.marker for s in self.states.values() for e in s.edges) | frozenset(self.literals)

    @property
    def finds(self) -> tuple[str, ...]:
        """Of ``reasoning`` and ``tools``, those the grammar knows."""
        sinks = {state.sink for state in self.states.values()}
        tools = bool(sinks & {"object", "arguments", "value"})
        return tuple(n for n, has in (("reasoning", "reasoning" in sinks), ("tools", tools)) if has)

    def problems(self) -> Iterator[str]:
        """What is wrong with the table itself: edges to nowhere, and markers that could not be told apart."""
        for name, state in self.states.items():
            targets = [e.to for e in state.edges] + [r.to for r in state.routes if r.to is not None]
            targets += [state.bare] if state.bare else []
            targets += [state.fallback] if state.tentative else []
            for target in targets:
                if target not in self.states:
                    yield f"{name} leads to {target!r}, which is no state"
            markers = [e.marker for e in state.edges]
            for a in markers:
                for b in markers:
                    # One may begin or end with another: what begins first counts, and of two there the longer.
                    if a is not b and (b in a[1:-1] or any(a.endswith(b[:n]) for n in range(1, min(map(len, (a, b)))))):
                        yield f"{name}: {a!r} may overlap {b!r}"
        for target in self.starts.values():
            if target not in self.states:
                yield f"an answer starts at {target!r}, which is no state"
