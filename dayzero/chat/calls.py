"""The tool calls of one answer as they are written: names checked, arguments passed on, JSON judged at the end."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from dayzero.chat.conversation import Tool
from dayzero.chat.pieces import Piece, ToolArguments, ToolCallStart, ToolProblem

NewId = Callable[[int], str]
_QUOTE_OR_ESCAPE = re.compile(r'["\\]')
_PYTHON_WORDS = {"True": True, "False": False, "None": None}


def random_id(index: int) -> str:
    """An id for a call whose format has none."""
    return f"call_{secrets.token_hex(12)}"


class JsonText:
    """Follows JSON text far enough to know whether its end lies inside a string."""

    def __init__(self) -> None:
        self.quoted = False
        self._escaped = False

    def feed(self, text: str) -> None:
        at = 0
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = _QUOTE_OR_ESCAPE.search(text, at)
            if match is None:
                return
            at = match.end()
            if match[0] == '"':
                self.quoted = not self.quoted
            else:
                self._escaped = self.quoted


@dataclass(slots=True)
class _Open:
    index: int
    name: str
    arguments: str = ""
    keys: int = 0


class Calls:
    """Writes pieces of calls to ``out``. Calls are numbered in the order in which their names became known.

    Where no tools are offered there are no calls: what the model wrote as one is the text of a problem.
    """

    def __init__(self, tools: Sequence[Tool], *, parallel: bool = True, new_id: NewId = random_id) -> None:
        self.out: list[Piece] = []
        self.tools: Mapping[str, Tool] = {tool.name: tool for tool in tools}
        self.count = 0
        self.open: _Open | None = None
        self.stray = ""  # text that should be part of a call and has no place in it
        self._parallel = parallel
        self._new_id = new_id

    def problem(self, sentence: str, text: str = "") -> None:
        self.out.append(ToolProblem(self.open.index if self.open and self.tools else None, sentence, text))

    def start(self, name: str, own_id: str | None = None) -> None:
        """A call's name is known. A call still open was never closed."""
        if self.open is not None:
            self.end(cut=True)
        index = self.count
        self.open = _Open(index, name)
        if not self.tools:
            return
        self.count += 1
        self.out.append(ToolCallStart(index, own_id or self._new_id(index), name))
        if name not in self.tools:
            offered = ", ".join(self.tools)
            self.problem(f"the model called {name[:80]!r}, which the request does not offer (offered: {offered[:200]})")
        if index and not self._parallel:
            self.problem("the model made more than one call, which parallel_tool_calls false does not allow")

    def write(self, text: str) -> None:
        """More of the arguments' JSON text."""
        if not text:
            return
        if self.open is None:
            self.stray += text
            return
        self.open.arguments += text
        if self.tools:
            self.out.append(ToolArguments(self.open.index, text))

    def key(self, key: str) -> None:
        """Begin the argument ``key`` of a call whose arguments come one by one."""
        if self.open is None:
            return
        self.write(("{" if not self.open.keys else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self.open.keys += 1

    def schema(self, key: str) -> Any:
        """The JSON schema of an argument of the open call, None when it has none."""
        tool = self.tools.get(self.open.name) if self.open else None
        properties = (tool.parameters or {}).get("properties") if tool else None
        return properties.get(key) if isinstance(properties, Mapping) else None

    def end(self, *, cut: bool = False) -> None:
        """The open call is over; cut: because the answer ended, so it may be incomplete."""
        if self.stray.strip():
            what = "a value without the name of its argument" if self.open else "arguments without a function's name"
            self.problem(what, self.stray)
        self.stray = ""
        if self.open is None:
            return
        call = self.open
        if not self.tools:
            self.open = None
            self.problem(
                f"the model wrote a call of {call.name[:80]!r}, but the request offers no tools", call.arguments
            )
            return
        if call.keys and not cut:
            self.write("}")
        if not call.arguments.strip() and not cut:
            self.write("{}")
        why = not_an_object(call.arguments)
        if why and cut:
            self.problem(f"the call of {call.name[:80]!r} was cut off before its arguments were complete")
        elif why:
            self.problem(f"the arguments of the call of {call.name[:80]!r} are no JSON object: {why}")
        self.open = None


def not_an_object(text: str) -> str:
    """Why a text is no JSON object, "" when it is one that strict readers accept."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no JSON value")

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            raise ValueError("a key stands twice")
        return out

    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=pairs)
    except RecursionError:
        return "nested too deeply"
    except ValueError as error:
        return str(error)[:120]
    return "" if isinstance(value, dict) else f"it is a {type(value).__name__}"


class RawArguments:
    """Arguments given as JSON text: passes them on without the white space and the code fence around them.

    Some models put the object into a JSON string; that is undone at the end.
    """

    def __init__(self, calls: Calls, fence: tuple[str, str] | None) -> None:
        self._calls = calls
        self._fence = fence
        self._lead: str | None = ""
        self._held = ""
        self._string: str | None = None
        self._json = JsonText()
        self._around = " \t\r\n" + (fence[1][:1] if fence else "")

    @property
    def quoted(self) -> bool:
        """Whether the text so far ends inside a JSON string."""
        return self._json.quoted

    def feed(self, text: str) -> None:
        if self._lead is not None:
            text = self._begin(self._lead + text)
            if self._lead is not None:
                return
        self._json.feed(text)
        if self._string is not None:
            self._string += text
            return
        text = self._held + text
        out = text if self._json.quoted else text.rstrip(self._around)
        self._held = text[len(out) :]
        self._calls.write(out)

    def _begin(self, text: str) -> str:
        """What comes behind white space and an opening fence; ``_lead`` stays while that is not yet decided."""
        text = text.lstrip()
        if self._fence and text and (self._fence[0].startswith(text) or text.startswith(self._fence[0])):
            if len(text) >= len(self._fence[0]):
                text = text[len(self._fence[0]) :].lstrip()
                self._fence = None
        elif text:
            self._fence = None
        self._lead = text if not text or self._fence else None
        if self._lead is None and text.startswith('"'):
            self._string = ""
        return text

    def end(self) -> None:
        """No more text: what is left goes out."""
        rest = self._lead or ""
        if self._string is not None:
            rest = self._string.rstrip(self._around)
            try:
                inner = json.loads(rest)
            except ValueError:
                inner = None
            if isinstance(inner, str) and not not_an_object(inner):
                rest = inner
        self._calls.write(rest)


class Value:
    """One argument whose value is written as plain text between markers, made into JSON.

    string: the value is text (True), JSON (False), or what the schema says (None).
    """

    def __init__(self, calls: Calls, key: str, string: bool | None, padding: bool) -> None:
        self._calls = calls
        self._schema = calls.schema(key)
        self._text = only_text(self._schema) if string is None else string
        self._declared = string is not None
        self._padding = padding
        self._first = True
        self._raw = ""
        calls.key(key)
        if self._text:
            calls.write('"')

    def feed(self, text: str) -> None:
        """More of the value. Text goes on at once, except a last line break, which may be padding."""
        self._raw += text
        if self._padding and self._first and self._raw:
            self._raw = self._raw.removeprefix("\n")
            self._first = False
        if self._text:
            keep = 1 if self._padding and self._raw.endswith("\n") else 0
            out = self._raw[: len(self._raw) - keep]
            self._raw = self._raw[len(out) :]
            self._calls.write(_escaped(out))

    def end(self, *, cut: bool = False) -> None:
        """The value is complete; cut: it is not, so what came stays open."""
        raw = self._raw.removesuffix("\n") if self._padding and not cut else self._raw
        if self._text:
            self._calls.write(_escaped(raw) + ("" if cut else '"'))
        elif cut:
            self._calls.write(raw)
        else:
            self._calls.write(_as_json(raw, None if self._declared else self._schema, self._declared))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_types(schema: Any) -> frozenset[str]:
    """JSON types a schema allows as far as it says; empty when it says nothing."""
    if not isinstance(schema, Mapping):
        return frozenset()
    found: set[str] = set()
    said = schema.get("type")
    found.update([said] if isinstance(said, str) else said if isinstance(said, list) else [])
    for word in ("anyOf", "oneOf"):
        for part in schema.get(word) or ():
            found |= json_types(part)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not found and isinstance(values, list):
        found = {_type_of(v) for v in values}
    if schema.get("nullable") is True and found:
        found.add("null")
    return frozenset(t for t in found if isinstance(t, str))


def only_text(schema: Any) -> bool:
    """Whether a schema allows nothing but text."""
    return json_types(schema) == {"string"}


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def _as_json(raw: str, schema: Any, declared: bool) -> str:
    """The JSON text of a value: itself where it is JSON of a type the schema allows, else a string.

    declared: the model itself said that it is JSON, so it is passed on as it is and judged with the whole.
    """
    text = raw.strip()
    if declared:
        return text
    allowed = json_types(schema)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        if text in _PYTHON_WORDS and (allowed - {"string"} or not allowed):
            return json.dumps(_PYTHON_WORDS[text])
        return json.dumps(raw, ensure_ascii=False)
    kind = _type_of(value)
    fits = not allowed or kind in allowed or (kind == "integer" and "number" in allowed)
    if (isinstance(value, float) and value != value) or (not fits and "string" in allowed):
        return json.dumps(raw, ensure_ascii=False)
    if kind == "string" and not allowed:
        return json.dumps(raw, ensure_ascii=False)  # no schema: the quotes are the model's own
    return text
