"""/v1/responses: the grammar of events, ids that agree, input items as turns; stateless."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.paper.server_support import ScriptedEngine, World, chat_with, client, events, ids, make

URL = "/v1/responses"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
ANSWER = f"<think>so, hm</think>It is 🙂.{CALL}{CALL}"


def reply(text: str, **more: Any) -> World:
    return make(ScriptedEngine(reply=lambda request: ids(text), **more))


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": "hi", "tools": [TOOL]} | more


def kinds(text: str) -> list[str]:
    """Types of events, runs of deltas shown once."""
    out: list[str] = []
    for event in events(text):
        if not out or out[-1] != event["type"]:
            out.append(event["type"].removeprefix("response."))
    return list(map(str, [k for n, k in enumerate(out) if n == 0 or out[n - 1] != k]))


def test_the_order_of_events() -> None:
    text = client(reply(ANSWER)).post(URL, json=body(stream=True)).text
    call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
    assert kinds(text) == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
        "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done",
        "content_part.done", "output_item.done",
        *call, *call, "completed",
    ]  # fmt: skip
    assert [event["sequence_number"] for event in events(text)] == list(range(len(events(text))))
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        assert name == f"event: {json.loads(data[6:])['type']}"


def without_ids(value: Any) -> Any:
    """Ids and times of a response are its own."""
    if isinstance(value, dict):
        return {k: without_ids(v) for k, v in value.items() if k not in ("id", "call_id", "created_at", "completed_at")}
    return [without_ids(v) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize("pieces", [1, 5, 1000])
@pytest.mark.parametrize(
    "more", [{}, {"max_output_tokens": 30}, {"max_output_tokens": 3}, {"input": [{"role": "user", "content": "x"}]}]
)
def test_streamed_equals_not_streamed(more: dict[str, Any], pieces: int) -> None:
    plain = client(reply(ANSWER)).post(URL, json=body(**more)).json()
    got = events(client(reply(ANSWER, pieces=pieces)).post(URL, json=body(**more, stream=True)).text)
    final = got[-1]["response"]
    assert without_ids(final) == without_ids(plain)
    assert final["status"] == ("incomplete" if "max_output_tokens" in more else "completed")
    assert got[-1]["type"] == f"response.{final['status']}"
    assert got[0]["response"]["id"] == final["id"]
    # Items as the events build them are the items of the final response.
    built: dict[int, dict[str, Any]] = {}
    for event in got:
        index = event.get("output_index")
        if event["type"].endswith("output_item.added"):
            assert index == len(built)
            built[index] = event["item"]
        elif event["type"].endswith(".delta"):
            item = built[index]
            assert event["item_id"] == item["id"]
            key = "arguments" if item["type"] == "function_call" else "text"
            item[key] = item.get(key, "") + event["delta"]
        elif event["type"].endswith("output_item.done"):
            assert event["item"] == final["output"][index]
    for item, end in zip(built.values(), final["output"], strict=True):
        assert item["id"] == end["id"]
        said = end["arguments"] if end["type"] == "function_call" else end["content"][0]["text"]
        assert item.get("arguments", item.get("text", "")) == said


def test_earlier_items_become_turns() -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "where"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
         "content": [{"type": "output_text", "text": "let me look", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "sea"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sky"}]},
    ]  # fmt: skip
    world = reply("ok")
    answer = client(world).post(URL, json=body(input=items, instructions="be brief", tools=[]))
    assert answer.status_code == 200, answer.text
    text = bytes(i for i in world.engine.seen[0].prompt if i < 256).decode()
    assert text == "system\nbe briefuser\nwhereassistant\nhmlet me looklook{}look{}tool\nseatool\nskyassistant\n"
    assert answer.json()["instructions"] == "be brief"


def test_an_answer_goes_back_in_as_it_came_out() -> None:
    first = client(reply(ANSWER)).post(URL, json=body()).json()
    outputs = [{"type": "function_call_output", "call_id": i["call_id"], "output": "x"} for i in first["output"][2:]]
    world = reply("done")
    again = body(input=[{"role": "user", "content": "hi"}, *first["output"], *outputs])
    answer = client(world).post(URL, json=again)
    assert answer.status_code == 200, answer.text
    text = bytes(i for i in world.engine.seen[0].prompt if i < 256).decode()
    assert 'so, hmIt is 🙂.look{"at": "sea"}look{"at": "sea"}tool\nxtool\nx' in text


def test_what_needs_a_store_is_refused() -> None:
    for more in (
        {"previous_response_id": "resp_1"},
        {"background": True},
        {"conversation": "c"},
        {"prompt": {"id": "p"}},
    ):
        answer = client(make()).post(URL, json=body(**more))
        assert answer.status_code == 400
        assert "not stored" in answer.json()["error"]["message"]
    answer = client(make()).post(URL, json=body(store=True, include=["reasoning.encrypted_content"]))
    assert answer.status_code == 200
    assert answer.json()["store"] is False
    assert answer.headers["x-dayzero-ignored"] == "store, include.reasoning.encrypted_content"


def test_tools_of_others_are_left_out_and_named() -> None:
    tools = [TOOL, {"type": "web_search"}, {"type": "custom", "name": "x"}]
    answer = client(make()).post(URL, json=body(tools=tools))
    assert answer.status_code == 200
    assert answer.json()["tools"] == [TOOL]
    assert answer.headers["x-dayzero-ignored"] == "tools[].web_search, tools[].custom"


@pytest.mark.parametrize(
    "more, param",
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "function_call", "name": "x"}]}, "input[0].call_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_object"}}, "guided_regex": "a"}, "guided_regex"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]}]}, "input"),
    ],
)  # fmt: skip
def test_bad_input_is_400_and_names_its_field(more: dict[str, Any], param: str) -> None:
    answer = client(make()).post(URL, json=body(**more))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_a_stream_that_fails_says_so_within() -> None:
    text = client(reply("Hello", dies_after=3)).post(URL, json=body(stream=True)).text
    *_, problem, failed = events(text)
    assert problem["type"] == "error"
    assert problem["code"] == "engine_died"
    assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["code"] == "engine_died"


TWICE = f"<think>hm</think>\nIt is 🙂{CALL}and so on"


@pytest.mark.parametrize("pieces", [1, 4, 1000])
def test_log_probabilities_are_of_the_text_alone(pieces: int) -> None:
    """Neither of reasoning, nor of markers, nor of calls; each text of the answer has its own."""
    more = {"top_logprobs": 2, "include": ["message.output_text.logprobs"]}
    plain = client(reply(TWICE)).post(URL, json=body(**more)).json()
    texts = [item["content"][0] for item in plain["output"] if item["type"] == "message"]
    assert [text["text"] for text in texts] == ["It is 🙂", "and so on"]
    for text in texts:
        assert bytes(b for item in text["logprobs"] for b in item["bytes"]) == text["text"].encode()
        assert {len(item["top_logprobs"]) for item in text["logprobs"]} == {2}
    assert plain["top_logprobs"] == 2
    answer = client(reply(TWICE, pieces=pieces)).post(URL, json=body(**more, stream=True))
    assert "x-dayzero-ignored" not in answer.headers
    got = events(answer.text)
    assert without_ids(got[-1]["response"]) == without_ids(plain)
    for number, text in zip((1, 3), texts, strict=True):
        deltas = [e for e in got if e["type"] == "response.output_text.delta" and e["output_index"] == number]
        assert [item for e in deltas for item in e["logprobs"]] == text["logprobs"]
        (done,) = [e for e in got if e["type"] == "response.output_text.done" and e["output_index"] == number]
        assert done["logprobs"] == text["logprobs"]


def test_log_probabilities_are_given_only_to_those_who_ask() -> None:
    plain = client(reply("ok")).post(URL, json=body()).json()
    assert plain["output"][0]["content"][0]["logprobs"] == []
    asked = client(reply("ok")).post(URL, json=body(include=["message.output_text.logprobs"])).json()
    assert [(p["token"], p["top_logprobs"]) for p in asked["output"][0]["content"][0]["logprobs"]] == [
        ("o", []),
        ("k", []),
    ]


def test_a_format_beside_tools() -> None:
    world = reply("{}")
    assert client(world).post(URL, json=body(text={"format": {"type": "json_object"}})).status_code == 200
    grammar = world.engine.seen[0].params.grammar
    assert grammar is not None and grammar.kind == "lark" and "look" in grammar.text


def test_what_is_wrong_with_the_turns_is_the_input() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{"}
    answer = client(reply("x")).post(URL, json=body(input=[{"role": "user", "content": "a"}, call], tools=[TOOL, TOOL]))
    assert answer.json()["error"]["param"] == "tools"
    template = "{{ raise_exception('no') }}"
    answer = client(make(chat=chat_with(template))).post(URL, json=body())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
