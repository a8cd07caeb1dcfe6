"""/v1/messages and its count of tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.paper.server_support import ScriptedEngine, World, client, events, ids, make

URL = "/v1/messages"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
TOOL = {"name": "look", "input_schema": {"type": "object"}}
ANSWER = f"<think>so, hm</think>It is 🙂.{CALL}{CALL}"


def reply(text: str, **more: Any) -> World:
    return make(ScriptedEngine(reply=lambda request: ids(text), **more))


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 500, "messages": [{"role": "user", "content": "hi"}], "tools": [TOOL]} | more


def test_the_order_of_events() -> None:
    text = client(reply(ANSWER)).post(URL, json=body(stream=True)).text
    seen = [e["type"] for e in events(text)]
    short = [k for n, k in enumerate(seen) if n == 0 or seen[n - 1] != k]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert short == ["message_start", *block * 4, "message_delta", "message_stop"]
    for block_text in text.strip().split("\n\n"):
        name, data = block_text.split("\n")
        assert name == f"event: {json.loads(data[6:])['type']}"


@pytest.mark.parametrize("pieces", [1, 5, 1000])
@pytest.mark.parametrize("more", [{}, {"max_tokens": 30}, {"stop_sequences": ["is"]}, {"tools": []}])
def test_streamed_equals_not_streamed(more: dict[str, Any], pieces: int) -> None:
    plain = client(reply(ANSWER)).post(URL, json=body(**more)).json()
    message: dict[str, Any] = {}
    parts: list[str] = []
    for event in events(client(reply(ANSWER, pieces=pieces)).post(URL, json=body(**more, stream=True)).text):
        match event["type"]:
            case "message_start":
                message = event["message"]
                assert message["usage"]["input_tokens"] == plain["usage"]["input_tokens"]
            case "content_block_start":
                assert event["index"] == len(message["content"])
                message["content"].append(event["content_block"])
                parts = []
            case "content_block_delta":
                delta = event["delta"]
                parts.append(delta.get("text") or delta.get("thinking") or delta.get("partial_json") or "")
            case "content_block_stop":
                last = message["content"][-1]
                if last["type"] == "tool_use":
                    cut = plain["stop_reason"] != "tool_use"
                    last["input"] = {} if cut else json.loads("".join(parts))
                else:
                    last[last["type"]] = "".join(parts)
            case "message_delta":
                message |= event["delta"]
                message["usage"] = event["usage"]
    for answer in (message, plain):
        answer.pop("id")
        for block in answer["content"]:
            block.pop("id", None)
    assert message == plain


def test_stop_reasons() -> None:
    def reason(text: str, **more: Any) -> tuple[str, str | None]:
        answer = client(reply(text)).post(URL, json=body(**more)).json()
        return answer["stop_reason"], answer["stop_sequence"]

    assert reason("hello") == ("end_turn", None)
    assert reason("hello", max_tokens=2) == ("max_tokens", None)
    assert reason("hello", stop_sequences=["ll"]) == ("stop_sequence", "ll")
    assert reason(CALL) == ("tool_use", None)


def test_cached_tokens_are_counted_apart() -> None:
    usage = client(reply("ok")).post(URL, json=body(tools=[])).json()["usage"]
    prompt = len(ids("<|start|>user\nhi<|end|><|start|>assistant\n"))
    assert usage == {"input_tokens": prompt - 3, "output_tokens": 3, "cache_read_input_tokens": 3,
                     "cache_creation_input_tokens": 0}  # fmt: skip
    count = client(make()).post(f"{URL}/count_tokens", json={"messages": body()["messages"]})
    assert count.json() == {"input_tokens": prompt}


def test_blocks_become_turns() -> None:
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "where", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "let me look"},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "is_error": True,
             "content": [{"type": "text", "text": "sea"}]},
            {"type": "text", "text": "well?"}]},
    ]  # fmt: skip
    world = reply("ok")
    answer = client(world).post(URL, json=body(messages=messages, system=[{"type": "text", "text": "s"}], tools=[]))
    assert answer.status_code == 200, answer.text
    text = bytes(i for i in world.engine.seen[0].prompt if i < 256).decode()
    assert text == 'system\nsuser\nwhereassistant\nhmlet me looklook{"at": 1}tool\nseauser\nwell?assistant\n'
    assert set(answer.headers["x-dayzero-ignored"].split(", ")) == {
        "messages[].content[].cache_control", "messages[].content[].is_error",
    }  # fmt: skip


def test_a_last_message_of_the_assistant_is_gone_on_from() -> None:
    world = reply("ok")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "It"}]
    assert client(world).post(URL, json=body(messages=turns, tools=[])).status_code == 200
    assert bytes(i for i in world.engine.seen[0].prompt if i < 256).decode() == "user\nhiassistant\nIt"


def test_thinking_and_choice_of_tools() -> None:
    answer = client(reply("so</think>yes")).post(URL, json=body(thinking={"type": "enabled", "budget_tokens": 9}))
    assert answer.json()["content"][0] == {"type": "thinking", "thinking": "so", "signature": ""}
    assert answer.headers["x-dayzero-ignored"] == "thinking.budget_tokens"
    world = reply(CALL)
    assert client(world).post(URL, json=body(tool_choice={"type": "any"})).status_code == 200
    assert world.engine.seen[0].params.grammar is not None
    hosted = client(make()).post(URL, json=body(tools=[TOOL, {"type": "web_search_20250305", "name": "web_search"}]))
    assert hosted.headers["x-dayzero-ignored"] == "tools[].web_search_20250305"


@pytest.mark.parametrize(
    "more",
    [
        {"max_tokens": 0},
        {"max_tokens": 10**6},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]}]},
        {"temperature": 1.5},
        {"tool_choice": {"type": "tool", "name": "other"}},
        {"tool_choice": {"type": "some"}},
        {"stop_sequences": [""]},
        {"system": 3},
    ],
)
def test_errors_have_the_shape_of_this_api(more: dict[str, Any]) -> None:
    answer = client(make()).post(URL, json=body(**more))
    assert answer.status_code == 400
    error = answer.json()
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
    assert error["error"]["message"].endswith(".")


def test_a_broken_call_is_flagged() -> None:
    answer = client(reply('<tool_call>{"name": "look", "arguments": {"at": </tool_call>')).post(URL, json=body()).json()
    assert answer["tool_problems"]
    missing = client(make()).post(URL, json=body(model="other"))
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "not_found_error")
    dead = client(reply("x", state="dead")).post(URL, json=body())
    assert (dead.status_code, dead.json()["error"]["type"]) == (503, "overloaded_error")
    late = events(client(reply("Hello", dies_after=2)).post(URL, json=body(stream=True)).text)
    assert late[-1]["type"] == "error"
