"""/v1/responses and /v1/messages: shapes, the order of a stream's events, and the same text streamed as whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dayzero.acceptance.accept.http import Answer, Event
from dayzero.acceptance.stages.answers import CHAT, Malformed, Refused, at
from dayzero.acceptance.stages.asking import Ask, Check, Checks

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
QUESTION = "Count to five."
NUM_TOKENS = 10
ORDER = "Send the events in the order of the API's reference, each with its type, ids and numbers."


def checks() -> tuple[Check, ...]:
    return (
        Check("responses", "/v1/responses answers as its API has it", _responses, "chat", apis=CHAT),
        Check("responses.items", "/v1/responses takes items of earlier turns", _items, "tools", apis=CHAT),
        Check("messages", "/v1/messages answers as its API has it", _messages, "chat", apis=CHAT),
        Check("messages.count", "count_tokens counts what a message uses", _count, "chat", apis=CHAT),
    )


def _sent(ask: Ask, path: str, body: dict[str, Any]) -> Answer:
    answer = ask.client.post(path, {"model": ask.model, **body})
    if not answer.ok:
        raise Refused(answer)
    streams = answer.headers.get("content-type", "").startswith("text/event-stream")
    if streams != bool(body.get("stream")):
        raise Malformed(
            "it is a stream, though none was asked for" if streams else "a stream was asked for; it is none"
        )
    return answer


def _types(events: Sequence[Event]) -> list[str]:
    out = []
    for event in events:
        kind = at(event.json, "type", kind=str) if not event.done else "[DONE]"
        if event.name and event.name != kind:
            raise Malformed(f"an event named {event.name!r} is of type {kind!r}")
        out.append(kind)
    return out


# --- responses


def _response_text(body: Any) -> str:
    out = []
    for item in at(body, "output", kind=list):
        if item.get("type") == "message":
            for part in at(item, "content", kind=list):
                if at(part, "type", kind=str) == "output_text":
                    out.append(at(part, "text", kind=str))
        elif item.get("type") == "reasoning":
            out += [part.get("text") or "" for part in item.get("content") or item.get("summary") or []]
    return "".join(out)


def _responses(ask: Ask, out: Checks) -> None:
    asked = {"input": QUESTION, "max_output_tokens": NUM_TOKENS, "temperature": 0}
    body = _sent(ask, RESPONSES, asked).json
    status, usage = at(body, "status", kind=str), at(body, "usage", kind=dict)
    sums = [at(usage, name, kind=int) for name in ("input_tokens", "output_tokens", "total_tokens")]
    out.judge(
        "responses.shape", "a response has the fields of its API",
        at(body, "object", kind=str) == "response" and bool(at(body, "id", kind=str))
        and status in ("completed", "incomplete") and bool(at(body, "output", kind=list)),
        f"{body['object']}, {status}, {len(body['output'])} items", "response, completed or incomplete, its items",
        remedy="Give every field of the reference.",
    )  # fmt: skip
    cut = sums[1] >= NUM_TOKENS
    reason = (body.get("incomplete_details") or {}).get("reason")
    right = sums[0] + sums[1] == sums[2] and sums[1] <= NUM_TOKENS
    right &= (status, reason) == ("incomplete", "max_output_tokens") if cut and status == "incomplete" else True
    out.judge(
        "responses.usage", "its usage adds up, and max_output_tokens is held", right, f"{sums}, {status} {reason}",
        f"{NUM_TOKENS} output tokens at most", remedy="Count as for chat.",
    )  # fmt: skip
    _response_stream(ask, out, body, asked)


def _response_stream(ask: Ask, out: Checks, body: Any, asked: dict[str, Any]) -> None:
    answer = _sent(ask, RESPONSES, {**asked, "stream": True})
    events = [event for event in answer.events if not event.done]
    types = _types(events)
    wrong = []
    if types[:1] != ["response.created"] or types[-1] not in ("response.completed", "response.incomplete"):
        wrong.append(f"it begins with {types[:1]} and ends with {types[-1:]}")
    numbers = [event.json.get("sequence_number") for event in events]
    if numbers != list(range(numbers[0] if isinstance(numbers[0], int) else 0, len(numbers) + (numbers[0] or 0))):
        wrong.append(f"sequence numbers {numbers[:6]}")
    wrong += _item_faults(events)
    out.judge("responses.order", "events of a streamed response come in their order", not wrong, wrong or len(types),
              "created, in_progress, items and parts opened before their deltas and closed behind, completed",
              remedy=ORDER)  # fmt: skip
    deltas = "".join(
        event.json["delta"] for event in events
        if event.json["type"] in ("response.output_text.delta", "response.reasoning_text.delta")
    )  # fmt: skip
    last = at(events[-1].json, "response", kind=dict)
    said = _response_text(body)
    if said != deltas:  # it was the first of its prompt; one that finds the prompt in a cache too must agree
        said = _response_text(_sent(ask, RESPONSES, asked).json)
    texts = (said, deltas, _response_text(last))
    out.judge("responses.stream", "deltas, the last event and the whole answer hold one text", len(set(texts)) == 1,
              texts, "equal", remedy="Build the last event from what was streamed.")  # fmt: skip
    first = at(events[0].json, "response", "id", kind=str)
    kept = last.get("id") == first
    out.judge("responses.id", "the response keeps its id through the stream", kept,
              "one id" if kept else [first, last.get("id")], "one", remedy=ORDER)  # fmt: skip


def _item_faults(events: Sequence[Event]) -> list[str]:
    """Deltas of items that were never opened, or are closed already."""
    opened: dict[Any, str] = {}
    closed: set[Any] = set()
    wrong = []
    for event in events:
        kind, index = event.json["type"], event.json.get("output_index")
        if kind == "response.output_item.added":
            opened[index] = at(event.json, "item", "id", kind=str)
        elif kind == "response.output_item.done":
            closed.add(index)
            if at(event.json, "item", "id", kind=str) != opened.get(index):
                wrong.append(f"item {index} ends with another id")
        elif index is not None:
            if index not in opened or index in closed:
                wrong.append(f"{kind} of item {index}, which is not open")
            if event.json.get("item_id") not in (None, opened.get(index)):
                wrong.append(f"{kind} names item {event.json['item_id']!r}, not {opened.get(index)!r}")
    if set(opened) != closed:
        wrong.append(f"items {sorted(set(opened) - closed)} are never ended")
    return wrong[:4]


def _items(ask: Ask, out: Checks) -> None:
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "Is it raining?"}]},
        {"type": "function_call", "call_id": "call_1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "call_1", "output": "It is, very much so, in all of the town."},
    ]
    tool = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    asked = {"max_output_tokens": 1, "temperature": 0, "tools": [tool], "tool_choice": "none"}
    short = at(_sent(ask, RESPONSES, {**asked, "input": turns[:1]}).json, "usage", "input_tokens", kind=int)
    full = at(_sent(ask, RESPONSES, {**asked, "input": turns}).json, "usage", "input_tokens", kind=int)
    out.judge(
        "responses.items", "earlier calls and their outputs reach the prompt", full > short + 8,
        f"{full - short} tokens more", "more than 8", layer="tokenizer+template",
        remedy="Turn function_call and function_call_output items into turns of the conversation.",
    )  # fmt: skip


# --- messages


def _message_text(body: Any) -> str:
    return "".join(
        at(block, "text", kind=str) if block.get("type") == "text" else block.get("thinking") or ""
        for block in at(body, "content", kind=list)
    )


def _messages(ask: Ask, out: Checks) -> None:
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": NUM_TOKENS, "temperature": 0}
    body = _sent(ask, MESSAGES, asked).json
    usage = at(body, "usage", kind=dict)
    counts = at(usage, "input_tokens", kind=int), at(usage, "output_tokens", kind=int)
    stop = at(body, "stop_reason", kind=str)
    right = (at(body, "type", kind=str), at(body, "role", kind=str)) == ("message", "assistant")
    ends = ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    right &= bool(at(body, "id", kind=str)) and stop in ends and 0 < counts[1] <= NUM_TOKENS
    right &= (stop == "max_tokens") == (counts[1] == NUM_TOKENS) or stop == "end_turn"
    out.judge("messages.shape", "a message has the fields of its API", right, f"{body['type']}, {stop}, {counts}",
              f"a message of {NUM_TOKENS} tokens at most, stop_reason one of {ends}",
              remedy="Give every field of the reference.")  # fmt: skip
    _message_stream(ask, out, body, asked)


def _message_stream(ask: Ask, out: Checks, body: Any, asked: dict[str, Any]) -> None:
    answer = _sent(ask, MESSAGES, {**asked, "stream": True})
    events = [event for event in answer.events if event.json and event.json.get("type") != "ping"]
    types = _types(events)
    wrong = [f"event {kind} without a name" for kind, event in zip(types, events) if not event.name][:1]
    if types[:1] != ["message_start"] or types[-2:] != ["message_delta", "message_stop"]:
        wrong.append(f"it begins with {types[:1]} and ends with {types[-2:]}")
    open_block, number, deltas = None, -1, []
    for event, kind in zip(events, types):
        index = event.json.get("index")
        if kind == "content_block_start":
            wrong += (
                [f"block {index} begins within {open_block}"] if open_block is not None or index != number + 1 else []
            )
            open_block = number = index
        elif kind in ("content_block_delta", "content_block_stop"):
            wrong += [f"{kind} of block {index}, which is not open"] if index != open_block else []
            if kind == "content_block_stop":
                open_block = None
            else:
                delta = at(event.json, "delta", kind=dict)
                deltas.append(delta.get("text") or delta.get("thinking") or "")
    wrong += [f"block {open_block} is never closed"] if open_block is not None else []
    out.judge("messages.order", "events of a streamed message come in their order", not wrong, wrong[:4] or len(types),
              "message_start, blocks opened and closed in turn, message_delta, message_stop", remedy=ORDER)  # fmt: skip
    if "".join(deltas) != _message_text(body):  # as for responses: the first of its prompt was computed whole
        body = _sent(ask, MESSAGES, asked).json
    texts = ("".join(deltas), _message_text(body))
    out.judge("messages.stream", "deltas and the whole message hold one text", len(set(texts)) == 1, texts, "equal",
              remedy="Stream what the whole answer holds.")  # fmt: skip
    end: dict[str, Any] = next((e.json for e in reversed(events) if e.json["type"] == "message_delta"), {})
    told = ((end.get("delta") or {}).get("stop_reason"), (end.get("usage") or {}).get("output_tokens"))
    wanted = (body["stop_reason"], body["usage"]["output_tokens"])
    out.judge("messages.end", "the stream tells the end and the count of the whole message", told == wanted, told,
              wanted, remedy="Put stop_reason and usage into message_delta.")  # fmt: skip


def _count(ask: Ask, out: Checks) -> None:
    turns = [{"role": "user", "content": "How many tokens are these words?"}]
    counted = at(_sent(ask, f"{MESSAGES}/count_tokens", {"messages": turns}).json, "input_tokens", kind=int)
    usage = at(_sent(ask, MESSAGES, {"messages": turns, "max_tokens": 1}).json, "usage", kind=dict)
    used = at(usage, "input_tokens", kind=int) + sum(
        usage.get(f"cache_{way}_input_tokens") or 0 for way in ("read", "creation")
    )
    out.judge("messages.count", "count_tokens counts what a message uses", counted == used, (counted, used), "equal",
              layer="tokenizer+template", remedy="Count the rendered prompt.")  # fmt: skip
