"""One incremental parser for every format that ``markers`` can describe.

What comes out is a function of the text, however it is cut: a marker that may still be coming is held back, nothing
else is. Nothing is lost: a character is content, reasoning, an argument, markup, or the text of a problem.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from dayzero.chat.call_object import ObjectReader
from dayzero.chat.calls import Calls, NewId, RawArguments, Value, random_id
from dayzero.chat.conversation import Tool
from dayzero.chat.markers import Edge, Grammar, Route, State
from dayzero.chat.pieces import Content, Piece, Reasoning, ToolArguments
from dayzero.chat.tokenizer import Tokenizer


class MarkerParser:
    """See ``pieces.OutputParser``. tools: those the model was offered. tokenizer: None counts no reasoning tokens."""

    def __init__(
        self,
        grammar: Grammar,
        *,
        opens: Literal["content", "reasoning", "continued"] = "content",
        tools: Sequence[Tool] = (),
        parallel: bool = True,
        new_id: NewId = random_id,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self._grammar = grammar
        self._calls = Calls(tools, parallel=parallel, new_id=new_id)
        self._buffer = ""
        self._counter = None
        self._keep: frozenset[int] = frozenset()
        if tokenizer is not None:
            ids = {tokenizer.id_of(marker) for marker in grammar.markers()}
            self._keep = frozenset(i for i in ids if i is not None) & tokenizer.special_ids
            if "reasoning" in grammar.finds:
                self._counter = _Counter(MarkerParser(grammar, opens=opens, tools=tools), tokenizer)
        self._value: Value | None = None
        self._enter(grammar.starts[opens])
        # The prompt's own opening marker counts as a marker before the text, the start of an answer does not.
        self._after_marker = opens == "reasoning"

    @property
    def needs_special_text(self) -> bool:
        return bool(self._keep)

    @property
    def keep(self) -> frozenset[int]:
        return self._keep

    @property
    def reasoning_tokens(self) -> int:
        return self._counter.count if self._counter else 0

    @property
    def reasoning(self) -> bool:
        """Whether the text that comes next is reasoning."""
        return self._state.sink == "reasoning"

    @property
    def num_held(self) -> int:
        """Characters that may begin a marker and wait for what comes next."""
        return len(self._buffer)

    def push(self, text: str, ids: Sequence[int] = ()) -> list[Piece]:
        if self._counter:
            self._counter.push(ids)
        self._buffer += text
        self._run(final=False)
        return self._taken()

    def finish(self) -> list[Piece]:
        self._run(final=True)
        state = self._state
        if state.sink == "header":
            self._header_cut(state)
        elif state.sink == "object":
            self._object.end(cut=True)
        elif state.sink == "arguments":
            self._raw.end()
        elif state.sink == "value" and self._value is not None:
            self._value.end(cut=True)
        elif state.sink == "gap":
            self._gap_ends()
        else:
            self._emit(self._held)
        self._calls.end(cut=True)
        return self._taken()

    def _taken(self) -> list[Piece]:
        """Pieces so far, neighbours of one kind joined."""
        out: list[Piece] = []
        if len(self._calls.out) < 2:
            out, self._calls.out = self._calls.out, out
            return out
        for piece in self._calls.out:
            last = out[-1] if out else None
            if isinstance(piece, Content) and isinstance(last, Content):
                out[-1] = Content(last.text + piece.text)
            elif isinstance(piece, Reasoning) and isinstance(last, Reasoning):
                out[-1] = Reasoning(last.text + piece.text)
            elif isinstance(piece, ToolArguments) and isinstance(last, ToolArguments) and last.index == piece.index:
                out[-1] = ToolArguments(last.index, last.text + piece.text)
            else:
                out.append(piece)
        self._calls.out = []
        return out

    # --- from state to state -----------------------------------------------------------------------------------------

    def _enter(self, name: str) -> None:
        self._state: State = self._grammar.states[name]
        self._may_mark = _first_letters(self._state)
        self._after_marker = True
        self._fresh = True  # nothing but white space has come here yet
        self._held = ""  # what may be markup: line breaks at the end, a header, stray text
        self._object = ObjectReader(self._calls, self._state.tentative)
        self._raw = RawArguments(self._calls, self._state.fence)

    def _run(self, final: bool) -> None:
        while True:
            if not self._may_mark.search(self._buffer) and self._prose_only():
                return
            if self._state.bare and self._fresh and self._buffer and not self._bare(self._state.bare, final):
                return
            end, edge = self._find(final)
            text, self._buffer = self._buffer[:end], self._buffer[end:]
            left = self._text(text)
            if left is None and edge is None and final and self._state.sink == "object":
                left = self._object.give_up()
            if left is not None:  # no call after all
                self._buffer = left + self._buffer
                self._enter(self._state.fallback)
                self._after_marker = self._fresh = False
            elif edge is None:
                return
            elif self._quoted() and not edge.quoted:  # a string of the arguments spells the marker
                self._text(self._buffer[0])
                self._buffer = self._buffer[1:]
            else:
                self._buffer = self._buffer[len(edge.marker) :]
                self._leave(edge)

    def _prose_only(self) -> bool:
        """Take a buffer in which no marker begins, as nearly all of them are."""
        if self._state.sink not in ("content", "reasoning") or (self._state.bare and self._fresh):
            return False
        text, self._buffer = self._buffer, ""
        self._prose(text)
        return True

    def _quoted(self) -> bool:
        """Whether the text so far ends inside a JSON string."""
        sink = self._state.sink
        return self._object.quoted if sink == "object" else self._raw.quoted if sink == "arguments" else False

    def _bare(self, target: str, final: bool) -> bool:
        """At the start of a text where a call may begin without a marker. False: wait for more."""
        text = self._buffer.lstrip()
        if not text and not final:
            return False
        tentative = self._grammar.states[target].tentative
        if text.startswith("{") and (self._calls.tools or not tentative):
            space = self._buffer[: len(self._buffer) - len(text)]
            self._enter(target)
            self._object = ObjectReader(self._calls, tentative, space)
            self._buffer = text
        else:
            self._fresh = False
        return True

    def _find(self, final: bool) -> tuple[int, Edge | None]:
        """(where it begins, edge) of the first marker, of several there the longest; without one, or while a longer one
        may still come, (how much of the buffer is text, None). A last marker that a longer one would go on from is as
        long as what is there of that."""
        text, start = self._buffer, 0
        while True:
            places = [(at, e) for e in self._state.edges if (at := text.find(e.marker, start)) >= 0]
            if not places:
                return len(text) - (0 if final else self._may_begin(text)), None
            at, edge = min(places, key=lambda place: (place[0], -len(place[1].marker)))
            rest = text[at:]
            if any(e.marker.startswith(rest) and e is not edge for e in self._state.edges):
                # Cut here, the answer ended within the longer one: all of it is markup, as what it begins with is.
                return at, replace(edge, marker=rest) if final else None
            if edge.follows:
                behind = text[at + len(edge.marker) :].lstrip()
                if len(behind) < len(edge.follows) and edge.follows.startswith(behind) and not final:
                    return at, None
                if not behind.startswith(edge.follows):
                    start = at + 1
                    continue
            return at, edge

    def _may_begin(self, text: str) -> int:
        """Length of the longest end of the text that begins a marker of this state."""
        longest = max((len(edge.marker) for edge in self._state.edges), default=1)
        for length in range(min(longest - 1, len(text)), 0, -1):
            tail = text[-length:]
            if any(len(e.marker) > length and e.marker.startswith(tail) for e in self._state.edges):
                return length
        return 0

    def _leave(self, edge: Edge) -> None:
        """The marker of ``edge`` has come: end what this state was reading, and go on."""
        state, to = self._state, edge.to
        if state.sink == "header":
            to = self._header_ends(state, edge)
        elif state.sink == "object":
            self._object.end(cut=False)
        elif state.sink == "arguments":
            self._raw.end()
        elif state.sink == "value" and self._value is not None:
            self._value.end()
        elif state.sink == "gap":
            self._gap_ends()
        if edge.ends_call:
            self._calls.end()
        self._enter(to)
        if self._state.sink != "value":
            self._value = None
        if edge.keep:
            self._held = edge.marker

    # --- what text is, state by state --------------------------------------------------------------------------------

    def _text(self, text: str) -> str | None:
        """Take text of this state. A string: what of it is not this state's after all."""
        if not text:
            return None
        sink = self._state.sink
        if sink in ("content", "reasoning"):
            self._prose(text)
        elif sink in ("header", "gap"):
            self._held += text
        elif sink == "arguments":
            self._raw.feed(text)
        elif sink == "value":
            if self._value is None:
                self._calls.stray += text
            else:
                self._value.feed(text)
        else:
            return self._object.feed(text)
        return None

    def _emit(self, text: str) -> None:
        if text:
            self._calls.out.append(Reasoning(text) if self._state.sink == "reasoning" else Content(text))

    def _prose(self, text: str) -> None:
        """Content or reasoning, without the line breaks beside markers."""
        trim = self._grammar.trim
        if self._after_marker:
            text = text.lstrip(trim)
            if not text:
                return
            self._after_marker = False
        text = self._held + text
        out = text.rstrip(trim)
        self._held = text[len(out) :]
        self._emit(out)

    def _gap_ends(self) -> None:
        if self._held.strip():
            self._calls.problem("text between the markers of tool calls", self._held)

    def _header_ends(self, state: State, edge: Edge) -> str:
        """Look the header up; returns the state to go to."""
        header = self._held
        if state.words:
            self._misplaced(state, header)
        for route in state.routes if edge.routes else ():
            match = route.match(header)
            if match is not None:
                self._routed(match.groupdict(), route, edge)
                return route.to or edge.to
        if not state.words and header.strip():
            self._calls.problem("the header of a tool call cannot be read", header)
        return edge.to

    def _misplaced(self, state: State, header: str) -> None:
        """Text that stands where only a header should, and is none."""
        found = [at for literal in self._grammar.literals if (at := header.find(literal)) >= 0]
        text = header[: min(found, default=len(header))]
        if re.fullmatch(state.words, text):
            return
        if state.loose:
            self._calls.out.append(Content(text))
        else:
            self._calls.problem("text in the header of a message", text)

    def _routed(self, groups: dict[str, str | None], route: Route, edge: Edge) -> None:
        name, key = groups.get("name"), groups.get("key")
        if name is not None:
            self._calls.start(self._unescaped(name), groups.get("id"))
        if key is not None:
            said, kind = groups.get("string"), groups.get("type")
            text = None if said is None and kind is None else said == "true" or kind == "string"
            padding = self._grammar.states[route.to or edge.to].padding
            self._value = Value(self._calls, self._unescaped(key), text, padding)

    def _unescaped(self, text: str) -> str:
        for written, meant in self._grammar.escapes:
            text = text.replace(written, meant)
        return text

    def _header_cut(self, state: State) -> None:
        """The answer ended inside a header."""
        header = self._held
        if any("?P<name>" in route.pattern and route.match(header) for route in state.routes) or not state.words:
            if header.strip():
                self._calls.problem("the answer ended inside the header of a tool call", header)
        else:
            self._misplaced(state, header)


@lru_cache(maxsize=256)
def _first_letters(state: State) -> re.Pattern[str]:
    """Finds a letter that a marker of this state begins with."""
    letters = {edge.marker[0] for edge in state.edges}
    return re.compile("[" + re.escape("".join(sorted(letters))) + "]" if letters else r"(?!)")


class _Counter:
    """Counts reasoning tokens from the ids alone, by reading each token's text for itself. Tokens that may turn out to
    spell a marker count until they do."""

    def __init__(self, parser: MarkerParser, tokenizer: Tokenizer) -> None:
        self._sure = 0
        self._held = 0  # tokens whose whole text the parser holds back
        self._parser = parser
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def count(self) -> int:
        return self._sure + self._held

    def push(self, ids: Sequence[int]) -> None:
        for token in ids:
            before = self._parser.reasoning
            text = self._utf8.decode(self._tokenizer.token_bytes(token))
            self._parser.push(text)
            if not (before and self._parser.reasoning):
                self._held = 0
            elif text and len(text) <= self._parser.num_held:
                self._held += 1
            else:
                self._sure, self._held = self._sure + self._held + 1, 0
