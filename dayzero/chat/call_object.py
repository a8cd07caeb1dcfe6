"""A tool call written as one JSON object with its name in it, read character by character."""

from __future__ import annotations

import json

from dayzero.chat.calls import Calls

NAME_KEYS = ("name",)
ARGUMENT_KEYS = ("arguments", "parameters")
KNOWN_KEYS = (*NAME_KEYS, *ARGUMENT_KEYS, "type", "id")
_SPACE = " \t\r\n"


class CallObject:
    """``{"name": …, "arguments": {…}}`` in any order of keys.

    raw: all text taken so far. name: once known. first_key: the first key, once known. done: the object is complete.
    broken: it is no JSON object, or says a thing twice; from then on text is only collected.
    """

    def __init__(self) -> None:
        self.raw = ""
        self.name: str | None = None
        self.first_key: str | None = None
        self.done = False
        self.broken = False
        self._step = "open"
        self._key = ""
        self._value = ""
        self._kind = ""
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self._arguments = ""
        self._seen: set[str] = set()

    @property
    def quoted(self) -> bool:
        """Whether the end of the text taken lies inside a string."""
        if self.broken or self.done:
            return False
        return self._quoted or (self._step == "value" and self._kind == "string")

    def feed(self, text: str) -> int:
        """Take characters up to the object's end, or until the name becomes known; returns how many."""
        nameless = self.name is None
        for number, letter in enumerate(text):
            if self.done or (nameless and self.name is not None):
                return number
            self.raw += letter
            if not self.broken:
                self._take(letter)
        return len(text)

    def take_arguments(self) -> str:
        """JSON text of the arguments that came since the last call."""
        out, self._arguments = self._arguments, ""
        return out

    def _take(self, letter: str) -> None:
        if self._step == "value":
            self._in_value(letter)
        elif letter in _SPACE and not self._quoted:
            return
        elif self._step == "open":
            self._expect(letter, "{", "key")
        elif self._step == "key":
            self._in_key(letter)
        elif self._step == "colon":
            self._expect(letter, ":", "value")
            self._value = self._kind = ""
        elif letter == "}":
            self.done = True
        else:
            self._expect(letter, ",", "key")

    def _expect(self, letter: str, wanted: str, then: str) -> None:
        if letter != wanted:
            self.broken = True
        self._step = then

    def _in_key(self, letter: str) -> None:
        if not self._quoted:
            if letter == '"':
                self._quoted, self._value = True, letter
            elif letter == "}" and not self._seen:
                self.done = True
            else:
                self.broken = True
            return
        if self._string(letter):
            self._quoted = False
            self._key = self._loads(self._value) or ""
            if self.first_key is None:
                self.first_key = self._key
            meaning = "arguments" if self._key in ARGUMENT_KEYS else self._key
            self.broken = self.broken or meaning in self._seen
            self._seen.add(meaning)
            self._step = "colon"

    def _string(self, letter: str) -> bool:
        """Add a letter of a JSON string; whether it was the closing quote."""
        self._value += letter
        if self._escaped:
            self._escaped = False
        elif letter == "\\":
            self._escaped = True
        else:
            return letter == '"'
        return False

    def _in_value(self, letter: str) -> None:
        if not self._kind:
            if letter in _SPACE:
                return
            self._kind = "string" if letter == '"' else "nest" if letter in "{[" else "scalar"
            self._depth = 1
            self._add(letter)
        elif self._kind == "string":
            if self._string(letter):
                self._value_ends()
        elif self._kind == "nest":
            self._in_nest(letter)
        elif letter in _SPACE + ",}":
            self._value_ends()
            self._take(letter)
        else:
            self._add(letter)

    def _in_nest(self, letter: str) -> None:
        self._add(letter)
        if self._quoted:
            if self._escaped:
                self._escaped = False
            elif letter == "\\":
                self._escaped = True
            elif letter == '"':
                self._quoted = False
        elif letter == '"':
            self._quoted = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            if not self._depth:
                self._value_ends()

    def _add(self, letter: str) -> None:
        if self._kind == "nest" and self._key in ARGUMENT_KEYS:
            self._arguments += letter
        else:
            self._value += letter

    def _value_ends(self) -> None:
        self._step = "next"
        if self._key in NAME_KEYS:
            self.name = self._loads(self._value)
        elif self._key in ARGUMENT_KEYS and self._kind == "string":
            self._arguments += self._loads(self._value) or ""
        elif self._key in ARGUMENT_KEYS and self._kind == "scalar" and self._value != "null":
            self._arguments += self._value
        self._value = ""

    def _loads(self, text: str) -> str | None:
        """The string, None (and broken) when it is none."""
        try:
            value = json.loads(text)
        except ValueError:
            value = None
        if not isinstance(value, str):
            self.broken = True
            return None
        return value


class ObjectReader:
    """Calls written as objects, one behind the other, read into ``calls``.

    tentative: no marker opened them, so an object is a call only when it names an offered function; everything else is
    given back as text. space: what stood before the first object.
    """

    def __init__(self, calls: Calls, tentative: bool, space: str = "") -> None:
        self._calls = calls
        self._tentative = tentative
        self._before = space
        self._object = CallObject()
        self._behind = ""
        self._committed = not tentative

    @property
    def quoted(self) -> bool:
        return self._object.quoted

    def feed(self, text: str) -> str | None:
        """Take text. A string: what turned out to be no call (with what stood before it); the reader is then spent."""
        while text:
            if self._object.done:
                self._behind += text
                rest = self._behind.lstrip(_SPACE + (";" if self._tentative else ""))
                if not rest.startswith("{"):
                    if rest and self._tentative:
                        self._calls.end()
                        return self._behind
                    return None
                self._calls.end()
                self._before = self._behind[: len(self._behind) - len(rest)]
                self._behind, text = "", rest
                self._object = CallObject()
                self._committed = not self._tentative
            taken = self._object.feed(text)
            text = text[taken:]
            if not self._committed and self._is_text():
                return self._before + self._object.raw + text
            self._advance()
        return None

    def give_up(self) -> str | None:
        """The answer has ended: the text of an object that never became a call, None when there is none."""
        return None if self._committed else self._before + self._object.raw

    def end(self, *, cut: bool) -> None:
        """The marker behind the objects has come, or (cut) the answer has ended."""
        found = self._object
        if self._behind.strip():
            self._calls.problem("text behind the object of a tool call", self._behind)
        if found.done and not found.broken:
            if found.name is None:
                self._calls.problem("a tool call has no name", found.raw)
        elif not found.raw.strip():
            if not cut:
                self._calls.problem("a tool call is empty")
        elif self._calls.open is None or found.broken:
            why = "was cut off" if cut and not found.broken else "is no JSON object with a name and arguments"
            self._calls.problem(f"a tool call {why}", found.raw)
        if not cut or found.done:
            self._calls.end()

    def _is_text(self) -> bool:
        """Judge an object without a marker by what it has told so far: it commits, waits (False), or is text (True)."""
        found = self._object
        if found.name is not None and found.name in self._calls.tools and not found.broken:
            self._committed = True
            return False
        odd_key = found.first_key is not None and found.first_key not in KNOWN_KEYS
        return found.broken or found.done or odd_key or found.name is not None

    def _advance(self) -> None:
        """Pass on what the object has told so far."""
        if not self._committed:
            return
        if self._calls.open is None and self._object.name is not None and not self._object.broken:
            self._calls.start(self._object.name)
        if self._calls.open is not None:
            self._calls.write(self._object.take_arguments())
