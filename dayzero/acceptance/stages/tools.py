"""Tool calls and reasoning: called as asked, valid arguments, streamed as whole, no marker in a text, accepted back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from dayzero.acceptance.stages.answers import CHAT, Refused, Reply, ToolCall, at, whole
from dayzero.acceptance.stages.asking import QUESTION, Ask, Check, Checks, lost_in_thought
from dayzero.acceptance.stages.robust_ask import at_once

CITIES = ("Paris", "Rome", "New York")
DAYS = (1, 2, 30)
PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": list(CITIES)}, "days": {"type": "integer", "enum": list(DAYS)}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Look out of the window.", "parameters": dict(PARAMETERS)},
}
TIME: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_time", "description": "Look at the clock.", "parameters": dict(PARAMETERS)},
}
USER = {"role": "user", "content": "What is the weather in Paris in two days? Use the tool."}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
LONG_ENOUGH = 300  # tokens: for a call with all the white space that its grammar may allow; reasoning comes on top
# What no text that is meant for people holds: markers of calls, of reasoning and of turns, in the forms that are usual.
MARKER = re.compile(
    r"</?(?:tool_calls?|tool_response|think|thinking|function|invoke|parameter)\b[^>\n]*>"
    r"|<[|\uff5c][^<>\n]{1,40}[|\uff5c]>|\[/?TOOL_CALLS?\]|\[/?THINK\]"
)
LAYER = "tokenizer+template"
PARSER = "Look at the call parser: where the format's markers begin and end, and what it holds back while streaming."


def checks() -> tuple[Check, ...]:
    return (
        Check("tools.required", "tool_choice required gives a call", _required, "tools", apis=CHAT),
        Check("tools.named", "a named tool is called", _named, "tools", apis=CHAT),
        Check("tools.round", "a call and its result are taken back", _round_trip, "tools", layer=LAYER, apis=CHAT),
        Check("tools.none", "tool_choice none gives no call", _none, "tools", apis=CHAT),
        Check("reasoning", "reasoning is told apart", _reasoning, "reasoning", layer=LAYER, apis=CHAT),
        Check("markers", "no marker stands in an answer's text", _markers, "chat", layer=LAYER, apis=CHAT),
    )  # fmt: skip


def good(values: Any) -> bool:
    """Whether arguments are what PARAMETERS allows, and nothing else."""
    return (
        isinstance(values, dict)
        and set(values) == {"city", "days"}
        and values["city"] in CITIES
        and type(values["days"]) is int
        and values["days"] in DAYS
    )


def _fields(ask: Ask, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": ask.room(LONG_ENOUGH), "parallel_tool_calls": False, **more}


def _parsed(call: ToolCall) -> Any:
    try:
        return json.loads(call.arguments)
    except ValueError:
        return None


def _forced(ask: Ask, out: Checks, kind: str, choice: Any, tools: list[Any], ends: tuple[str, ...]) -> Reply:
    fields = _fields(ask, tools=tools, tool_choice=choice)
    reply, stream = ask.whole("chat", [USER], **fields), ask.streamed("chat", [USER], **fields)
    one = reply.one
    if lost_in_thought(one):
        why = f"all {reply.used.completion} tokens were spent on reasoning: {one.reasoning[-60:]!r}"
        out.skip(f"tools.{kind}", "a call that is asked for is made", why)
        return reply
    called = len(one.calls) == 1 and one.calls[0].name == "get_weather" and bool(one.calls[0].id)
    word = choice if isinstance(choice, str) else "of one name"
    out.judge(
        f"tools.{kind}", f"tool_choice {word} gives one call of that tool", called,
        [(call.name, call.arguments) for call in one.calls] or one.said[:60], "get_weather, with an id",
        remedy="Hold the answer to a call by a grammar, and parse it as one.",
    )  # fmt: skip
    out.judge(
        f"tools.{kind}-arguments", f"its arguments obey their schema ({word})",
        called and good(_parsed(one.calls[0])), one.calls[0].arguments if one.calls else None, "valid JSON",
        remedy="Hold arguments to the tool's schema, and pass them on as JSON text.",
    )  # fmt: skip
    out.judge(
        f"tools.{kind}-finish", f"finish_reason says that it was a call ({word})", one.finish in ends, one.finish,
        " or ".join(ends), bad="fail" if one.finish == "length" or ask.ours else "note", remedy="Say 'tool_calls'.",
    )  # fmt: skip
    out.judge(
        f"tools.{kind}-stream", f"the call is the same streamed ({word})", one.shown == stream.one.shown,
        [(call.name, call.arguments) for call in stream.one.calls], "equal to the whole answer's", remedy=PARSER,
    )  # fmt: skip
    _pieces(out, kind, word, stream)
    text = one.text + stream.one.text
    out.judge(
        f"tools.{kind}-text", f"nothing of the call stands in the text ({word})",
        not MARKER.search(text) and '"city"' not in text, text[:80], "no marker, no arguments", layer=LAYER,
        remedy=PARSER,
    )  # fmt: skip
    return reply


def _pieces(out: Checks, kind: str, word: str, stream: Reply) -> None:
    """Clients put calls together by these: the name and the id come first and once, then pieces of arguments."""
    seen: dict[int, list[Mapping[str, Any]]] = {}
    for chunk in stream.answer.chunks:
        for choice in chunk.get("choices") or []:
            for part in (choice.get("delta") or {}).get("tool_calls") or []:
                seen.setdefault(at(part, "index", kind=int), []).append(part)
    wrong = []
    for index, parts in seen.items():
        names = [bool((part.get("function") or {}).get("name")) for part in parts]
        ids = [bool(part.get("id")) for part in parts]
        if not names[0] or any(names[1:]) or not ids[0] or len({part["id"] for part in parts if part.get("id")}) > 1:
            wrong.append(f"call {index}: names {names}, ids {ids}")
    out.judge(
        f"tools.{kind}-pieces", f"a streamed call begins with its id and name, once ({word})", bool(seen) and not wrong,
        wrong or len(seen), "id and name with the first piece alone",
        remedy="Send index, id, type and name first, then arguments with the index alone.",
    )  # fmt: skip


def _required(ask: Ask, out: Checks) -> None:
    _forced(ask, out, "required", "required", [WEATHER], ("tool_calls",))


def _named(ask: Ask, out: Checks) -> None:
    _forced(ask, out, "named", NAMED, [TIME, WEATHER], ("tool_calls", "stop"))


def _round_trip(ask: Ask, out: Checks) -> None:
    """The second turn: where parsers and templates break after the first one worked."""
    first = ask.whole("chat", [USER], **_fields(ask, tools=[WEATHER], tool_choice="required"))
    if lost_in_thought(first.one):
        out.skip("tools.round", "a call and its result are taken back", "the model reasoned and made no call", LAYER)
        return
    if not first.one.calls:
        out.judge("tools.round", "a call and its result are taken back", False, "there was no call to answer")
        return
    call = first.one.calls[0]
    made = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    turns: list[Any] = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "blue", "wind": 3}'},
    ]
    fields = _fields(ask, tools=[WEATHER], tool_choice="none", max_tokens=1)  # some formats offer no tools then
    before = ask.whole("chat", [USER], **fields).used.prompt
    second = ask.whole("chat", turns, **fields)
    grown = second.used.prompt - before
    # the arguments alone are several tokens, and so is the result
    out.judge(
        "tools.round", "a call and its result are taken back into the prompt", grown > 8, f"{grown} tokens more",
        "more than 8: the call, and the result", layer=LAYER,
        remedy="Render earlier calls and tool messages: the template must write both.",
    )  # fmt: skip
    turns[2] = {**turns[2], "content": '{"sky": "grey, with a wind that goes round the houses", "wind": 3}'}
    longer = ask.whole("chat", turns, **fields).used.prompt
    out.judge(
        "tools.result", "the text of a tool's result reaches the prompt", longer > second.used.prompt,
        f"{longer - second.used.prompt} tokens more for a longer result", "more than 0", layer=LAYER,
        remedy="Render the content of tool messages.",
    )  # fmt: skip


def _none(ask: Ask, out: Checks) -> None:
    reply = ask.whole("chat", [USER], **_fields(ask, tools=[WEATHER], tool_choice="none"))
    out.judge(
        "tools.none", "tool_choice none gives no call", not reply.one.calls and reply.one.finish != "tool_calls",
        reply.one.finish, "no tool_calls", remedy="Offer no tools, and parse no call, with tool_choice none.",
    )  # fmt: skip


# --- reasoning


def _reasoning(ask: Ask, out: Checks) -> None:
    claim = "reasoning stands apart from the answer"
    options = {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    fields: dict[str, Any] = {"temperature": 0, "max_tokens": ask.amount(24, 64, 128), **options}
    try:
        reply = ask.whole("chat", QUESTION, **fields)
    except Refused:
        fields.pop("chat_template_kwargs")
        reply = ask.whole("chat", QUESTION, **fields)
    one = reply.one
    if not one.reasoning and not MARKER.search(one.text) and not ask.promises("reasoning"):
        out.skip("reasoning", claim, "the answer has no reasoning", LAYER)
        return
    apart = bool(one.reasoning) and not MARKER.search(one.said)
    out.judge(
        "reasoning", claim, apart, {"reasoning": one.reasoning[:40], "text": one.text[:40]},
        "in a field of its own, no marker in either", layer=LAYER, remedy=PARSER,
    )  # fmt: skip
    stream = ask.streamed("chat", QUESTION, **fields).one
    out.judge(
        "reasoning.stream", "reasoning is the same streamed", one.shown == stream.shown,
        {"reasoning": stream.reasoning[:40], "text": stream.text[:40]}, "equal to the whole answer's", remedy=PARSER,
    )  # fmt: skip
    message = at(reply.answer.json, "choices", 0, "message", kind=dict)
    names = [name for name in ("reasoning", "reasoning_content") if message.get(name) == one.reasoning]
    out.judge(
        "reasoning.names", "reasoning comes under both names that clients know", len(names) == 2, names,
        "reasoning and reasoning_content, equal", bad="fail" if ask.ours else "note",
        remedy="Give the same text under both names.",
    )  # fmt: skip
    spent = reply.used.reasoning
    out.judge(
        "reasoning.usage", "reasoning tokens are counted among the answer's",
        spent is not None and 0 < spent <= reply.used.completion, f"{spent} of {reply.used.completion}",
        "above 0, at most completion_tokens", bad="fail" if ask.ours else "note",
        remedy="Give completion_tokens_details.reasoning_tokens.",
    )  # fmt: skip
    _taken_back(ask, out, one.reasoning)


def _taken_back(ask: Ask, out: Checks, reasoning: str) -> None:
    """Agents send an answer back with its reasoning, under either name."""
    question, more = {"role": "user", "content": "2 + 2?"}, {"role": "user", "content": "And 3 + 3?"}
    refused, counted = {}, {}
    for name in ("reasoning_content", "reasoning"):
        turns = [question, {"role": "assistant", "content": "4", name: reasoning or "Adding."}, more]
        answer = ask.post("chat", turns, max_tokens=1, temperature=0)
        if not answer.ok:
            refused[name] = answer.said
        else:
            counted[name] = whole(answer, "chat").used.prompt
    out.judge(
        "reasoning.back", "reasoning of earlier answers is accepted back", not refused, refused or "under both names",
        "status 200", layer=LAYER, bad="fail" if ask.ours else "note",
        remedy="Accept reasoning and reasoning_content in assistant messages.",
    )  # fmt: skip
    if not refused:
        # some templates drop it on purpose; whoever reads one name and not the other drops it by chance
        out.judge(
            "reasoning.back-names", "and both names are read alike", len(set(counted.values())) == 1, counted,
            "equal prompt_tokens", layer="server", bad="fail" if ask.ours else "note",
            remedy="Read reasoning and reasoning_content as one field.",
        )  # fmt: skip


def _markers(ask: Ask, out: Checks) -> None:
    """Answers to the end: special tokens of turns are what an answer ends with."""
    leaks = {}
    ways = [(prompt, stream) for prompt in ("Say hello.", "What is 1 + 1?") for stream in (False, True)]

    def answer(way: tuple[str, bool]) -> str:
        prompt, stream = way
        return (ask.streamed if stream else ask.whole)("chat", prompt, temperature=0, max_tokens=24).one.text

    for (prompt, stream), text in zip(ways, at_once(answer, ways, len(ways)), strict=True):
        found = MARKER.search(text)
        if found:
            leaks[f"{prompt}{' streamed' * stream}"] = text[max(0, found.start() - 20) : found.end() + 20]
    out.judge(
        "markers", "no marker stands in an answer's text", not leaks, leaks or "none", "none", layer=LAYER,
        remedy="Leave special tokens out of the text, and parse reasoning and calls out of it.",
    )  # fmt: skip
