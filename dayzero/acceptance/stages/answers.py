"""Answers of an OpenAI-compatible server, whole or streamed, read into one shape, and what is malformed about them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

from dayzero.acceptance.accept.http import Answer

Api = Literal["chat", "completions"]
PATHS: Mapping[Api, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
CHAT: tuple[Api, ...] = ("chat",)
T = TypeVar("T")


class Malformed(Exception):
    """An answer with status 200 that is not what its API has. The sentence says where."""


class Ended(Malformed):
    """A stream that ended with an error object: half an answer, and the server says so."""


class Refused(Exception):
    """An answer with another status."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.said)
        self.answer = answer


def at(value: Any, *path: str | int, kind: type[T] | tuple[type[T], ...]) -> T:
    """``value[path[0]][path[1]]…``, of ``kind``. Malformed names the place where it is not."""
    where = "the answer"
    for step in path:
        where += f"[{step}]" if isinstance(step, int) else f".{step}"
        inside = isinstance(value, dict) if isinstance(step, str) else isinstance(value, list) and len(value) > step
        if not inside or (isinstance(step, str) and step not in value):
            raise Malformed(f"{where} is missing")
        value = value[step]
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        wanted = getattr(kind, "__name__", None) or " or ".join(one.__name__ for one in kind)  # type: ignore[union-attr]
        raise Malformed(f"{where} is {str(value)[:60]!r}, not of type {wanted}")
    return value


@dataclass(frozen=True)
class Score:
    """Log-probability of one token. key: what tells it from others: its bytes, else its text. top: the likeliest of
    the same place as (key, logprob), in the server's order."""

    key: tuple[int, ...] | str
    logprob: float
    top: tuple[tuple[tuple[int, ...] | str, float], ...]


@dataclass
class ToolCall:
    id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass
class Choice:
    """text, reasoning: "" where there is none. scores, ids: None where none were given."""

    index: int
    role: str | None = None
    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish: str | None = None
    scores: list[Score] | None = None
    ids: list[int] | None = None

    @property
    def said(self) -> str:
        """All that the model wrote, calls apart."""
        return self.reasoning + self.text

    @property
    def shown(self) -> tuple[str, str, tuple[tuple[str, str], ...], str | None]:
        """What must be equal in both modes; ids of calls are drawn anew."""
        return self.text, self.reasoning, tuple((call.name, call.arguments) for call in self.calls), self.finish


@dataclass(frozen=True)
class Usage:
    """Counts as they were told. total: None where none is."""

    prompt: int
    completion: int
    total: int | None = None
    cached: int | None = None
    reasoning: int | None = None


@dataclass(frozen=True)
class Reply:
    """choices: by index. usage: None where none was told. prompt_ids: None where none were given. prompt_scores: what
    ``prompt_logprobs`` asks for, as it came: one entry a token of the prompt; None where none were given."""

    answer: Answer
    choices: list[Choice]
    usage: Usage | None
    prompt_ids: list[int] | None = None
    prompt_scores: list[Any] | None = None

    @property
    def one(self) -> Choice:
        return self.choices[0]

    @property
    def used(self) -> Usage:
        if self.usage is None:
            raise Malformed("the answer tells no usage")
        return self.usage


def usage_of(value: Any) -> Usage:
    """Malformed where a count is missing or none; the details may be left out."""

    def count(*path: str) -> int | None:
        try:
            return at(value, *path, kind=int)
        except Malformed:
            return None

    return Usage(
        at({"usage": value}, "usage", "prompt_tokens", kind=int),
        at({"usage": value}, "usage", "completion_tokens", kind=int),
        count("total_tokens"),
        count("prompt_tokens_details", "cached_tokens"),
        count("completion_tokens_details", "reasoning_tokens"),
    )


def whole(answer: Answer, api: Api) -> Reply:
    """An answer that came at once. Refused; Malformed."""
    if not answer.ok:
        raise Refused(answer)
    body = answer.json
    choices: dict[int, Choice] = {}
    for part in at(body, "choices", kind=list):
        one = choices.setdefault(at(part, "index", kind=int), Choice(part["index"]))
        _grow(one, part, api, "message")
        one.finish = at(part, "finish_reason", kind=str)
        if api == "chat" and one.role is None:
            raise Malformed("the answer.choices[].message.role is missing")
    usage = usage_of(body["usage"]) if body.get("usage") is not None else None
    return Reply(answer, _in_order(choices), usage, _of_prompt(body, "token_ids"), _of_prompt(body, "logprobs"))


def streamed(answer: Answer, api: Api) -> Reply:
    """The chunks of a stream, put together. Refused; Malformed, and Ended for an error within the stream."""
    if not answer.ok:
        raise Refused(answer)
    choices: dict[int, Choice] = {}
    usage, prompt_ids, scores = None, None, None
    for chunk in answer.chunks:
        if chunk.get("error"):
            raise Ended(f"the stream ended with an error: {str(chunk['error'])[:200]}")
        if isinstance(chunk.get("usage"), dict):
            usage = usage_of(chunk["usage"])
        prompt_ids = prompt_ids or _of_prompt(chunk, "token_ids")
        scores = scores or _of_prompt(chunk, "logprobs")
        for part in at(chunk, "choices", kind=list):
            one = choices.setdefault(at(part, "index", kind=int), Choice(part["index"]))
            _grow(one, part, api, "delta")
            one.finish = _text(part, "finish_reason") or one.finish
    return Reply(answer, _in_order(choices), usage, prompt_ids, scores)


def _in_order(choices: Mapping[int, Choice]) -> list[Choice]:
    if not choices:
        raise Malformed("the answer holds no choice")
    return [choices[index] for index in sorted(choices)]


def _of_prompt(body: Mapping[str, Any], name: str) -> list[Any] | None:
    """``prompt_NAME``, which stands in the answer or in its first choice."""
    found = body.get(f"prompt_{name}")
    if found is None and isinstance(body.get("choices"), list) and body["choices"]:
        first = body["choices"][0]
        found = first.get(f"prompt_{name}") if isinstance(first, dict) else None
    return found if isinstance(found, list) and found else None


def _grow(one: Choice, part: Any, api: Api, key: str) -> None:
    """More of a choice: its message, its delta, or its text."""
    if api == "completions":
        one.text += at(part, "text", kind=str)
        new = _legacy_scores(part.get("logprobs"))
    else:
        message = at(part, key, kind=dict)
        one.role = _text(message, "role") or one.role
        one.text += _text(message, "content")
        # two names of one thing; where both are given they are equal
        one.reasoning += _text(message, "reasoning_content") or _text(message, "reasoning")
        calls = at(message, "tool_calls", kind=list) if message.get("tool_calls") else []
        _grow_calls(one, calls, key == "delta")
        new = _chat_scores(part.get("logprobs"))
    if new is not None:
        one.scores = [*(one.scores or []), *new]
    if isinstance(part.get("token_ids"), list):
        one.ids = [*(one.ids or []), *(at(part, "token_ids", i, kind=int) for i in range(len(part["token_ids"])))]


def _text(message: Mapping[str, Any], key: str) -> str:
    value = message.get(key)
    if value is not None and not isinstance(value, str):
        raise Malformed(f"{key} is {str(value)[:60]!r}, no text")
    return value or ""


def _grow_calls(one: Choice, parts: Iterable[Any], delta: bool) -> None:
    for number, part in enumerate(parts):
        if not isinstance(part, dict):
            raise Malformed(f"tool_calls[{number}] is {str(part)[:60]!r}, no object")
        index = at(part, "index", kind=int) if delta else number
        if index < 0 or index > len(one.calls):
            raise Malformed(f"tool_calls index {index} comes before index {len(one.calls)}")
        if index == len(one.calls):
            one.calls.append(ToolCall())
        call = one.calls[index]
        function = at(part, "function", kind=dict) if part.get("function") else {}
        call.id += _text(part, "id")
        call.name += _text(function, "name")
        call.arguments += _text(function, "arguments")


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise Malformed(f"a logprob is {value!r}, no finite number")
    return float(value)


def _key(entry: Any) -> tuple[int, ...] | str:
    data = entry.get("bytes") if isinstance(entry, dict) else None
    if not isinstance(data, list):
        return at(entry, "token", kind=str)
    if not all(type(byte) is int and 0 <= byte < 256 for byte in data):
        raise Malformed(f"the bytes of a token are {str(data)[:60]}")
    return tuple(data)


def _chat_scores(value: Any) -> list[Score] | None:
    if not isinstance(value, dict) or not isinstance(value.get("content"), list):
        return None
    out = []
    for entry in value["content"]:
        own = _number(at(entry, "logprob", kind=(int, float)))
        top = at(entry, "top_logprobs", kind=list) if entry.get("top_logprobs") else []
        pairs = tuple((_key(one), _number(at(one, "logprob", kind=(int, float)))) for one in top)
        out.append(Score(_key(entry), own, pairs))
    return out


def _legacy_scores(value: Any) -> list[Score] | None:
    """Of /v1/completions. The first token of an echoed prompt, which nothing predicts, is left out."""
    if not isinstance(value, dict) or not isinstance(value.get("token_logprobs"), list):
        return None
    tokens = at(value, "tokens", kind=list)
    tops = at(value, "top_logprobs", kind=list) if value.get("top_logprobs") else []
    out = []
    for number, own in enumerate(value["token_logprobs"]):
        if own is None and number == 0:
            continue
        found = at(tops, number, kind=dict) if number < len(tops) and tops[number] is not None else {}
        top = tuple((text, _number(each)) for text, each in found.items())
        key = at(tokens, number, kind=str)
        out.append(Score(key, _number(own), tuple(sorted(top, key=lambda pair: -pair[1]))))
    return out
