"""A twin of the model that writes XTML behind the real server: chat, calls and formats over HTTP, streamed and not.

Its weights are random, so what it says means nothing; grammars and a bias make answers whose shape is known.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dayzero.chat.tiktoken_form import TiktokenTokenizer
from dayzero.chat.tokenizer import Tokenizer, open_tokenizer
from dayzero.checkpoint.source import open_source
from dayzero.console import no_progress
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.clients.service import Service, serving

CONFIG = Path(__file__).parents[1] / "paper" / "configs" / "kimi_k3.json"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Paris", "北京"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
        },
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "Weather <|open|>tools<|sep|>?"}]
OFF: dict[str, Any] = {"thinking": {"type": "disabled"}}
END, OPEN, CLOSE, SEP = 258, 259, 260, 261


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("xtml") / "twin"
    write_twin(str(CONFIG), str(folder), TwinOptions(seed=5), no_progress)
    return folder


@pytest.fixture(scope="module")
def service(twin: Path) -> Iterator[Service]:
    with serving(twin, twin.parent / "log.txt", "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def tokens(twin: Path) -> Tokenizer:
    found, where = open_tokenizer(open_source(str(twin)))
    assert isinstance(found, TiktokenTokenizer) and where == "tiktoken.model"
    return found


def whole(service: Service, **body: Any) -> dict[str, Any]:
    answer = service.post("/v1/chat/completions", {"messages": USER, "temperature": 0, "max_tokens": 200} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(service: Service, **body: Any) -> dict[str, Any]:
    """The same fields as of an answer that is not streamed, put together from its pieces."""
    out: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": [], "finish": None, "usage": None}
    asked = {"messages": USER, "temperature": 0, "max_tokens": 200} | body
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{service.address}/v1/chat/completions", json=asked, timeout=60) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            out["usage"] = chunk.get("usage") or out["usage"]
            for choice in chunk["choices"]:
                delta = choice["delta"]
                out["content"] += delta.get("content") or ""
                out["reasoning_content"] += delta.get("reasoning_content") or ""
                out["finish"] = choice["finish_reason"] or out["finish"]
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(out["calls"]):
                        out["calls"].append([call["function"]["name"], ""])
                    out["calls"][call["index"]][1] += call["function"].get("arguments") or ""
    return out


def same(answer: dict[str, Any], pieces: dict[str, Any]) -> None:
    """Streamed equals not streamed."""
    (choice,) = answer["choices"]
    message = choice["message"]
    calls = [[c["function"]["name"], c["function"]["arguments"]] for c in message.get("tool_calls") or ()]
    assert (message["content"] or "", message.get("reasoning_content") or "") == (
        pieces["content"],
        pieces["reasoning_content"],
    )
    assert (calls, choice["finish_reason"]) == (pieces["calls"], pieces["finish"])
    used = [
        {k: v for k, v in usage.items() if k != "prompt_tokens_details"} for usage in (answer["usage"], pieces["usage"])
    ]
    assert used[0] == used[1]


def test_prompt_tokens_are_those_that_the_encoder_makes(service: Service) -> None:
    asked = service.post("/tokenize", {"messages": USER}).json()
    ids = asked["tokens"]
    assert whole(service, max_tokens=1)["usage"]["prompt_tokens"] == len(ids)
    assert [ids.count(i) for i in (END, OPEN, CLOSE, SEP)] == [1, 3, 1, 4]  # the user's own are letters


def test_a_plain_answer_streamed_and_not(service: Service) -> None:
    for more in ({}, OFF):
        answer = whole(service, max_tokens=40, **more)
        same(answer, streamed(service, max_tokens=40, **more))
        message = answer["choices"][0]["message"]
        assert not any(mark in (message["content"] or "") for mark in ("<|open|>", "<|close|>", "<|sep|>"))


def test_the_end_of_a_message_stops_an_answer(service: Service) -> None:
    answer = whole(service, logit_bias={str(END): 100})
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    assert not answer["choices"][0]["message"]["content"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
@pytest.mark.parametrize("thinks", [False, True])
def test_a_forced_call(service: Service, choice: Any, thinks: bool) -> None:
    more: dict[str, Any] = {"tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    more |= {"logit_bias": {str(CLOSE): 100}} if thinks else OFF
    answer = whole(service, **more)
    same(answer, streamed(service, **more))
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    values = json.loads(call["function"]["arguments"])
    assert call["function"]["name"] == "get_weather"
    assert values["city"] in ("Paris", "北京") and type(values["days"]) is int


@pytest.mark.parametrize("thinks", [False, True])
def test_a_json_schema(service: Service, thinks: bool) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
    more: dict[str, Any] = {"response_format": form} | ({"logit_bias": {str(CLOSE): 100}} if thinks else OFF)
    answer = whole(service, **more)
    same(answer, streamed(service, **more))
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert type(json.loads(answer["choices"][0]["message"]["content"])["ok"]) is bool


def test_the_next_turn_shows_calls_and_results(service: Service, tokens: Tokenizer) -> None:
    first = whole(service, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, **OFF)
    message = first["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "18 °C"}
    turns = [*USER, message, result]
    ids = service.post("/tokenize", {"messages": turns, "tools": [WEATHER]}).json()["tokens"]
    text = tokens.decode(ids, skip_special=False)
    assert '<|open|>message role="tool" tool="get_weather" index="1"<|sep|>18 °C<|close|>message<|sep|>' in text
    again = whole(service, messages=turns, tools=[WEATHER], max_tokens=5)
    assert again["usage"]["prompt_tokens"] == len(ids)


def test_what_the_format_cannot_show_is_refused(service: Service) -> None:
    for more, said in [
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"mood": 1}}, "does not know"),
        ({"chat_template_kwargs": {"preserve_thinking": False}}, "preserve_thinking"),
    ]:
        answer = service.post("/v1/chat/completions", {"messages": USER} | more)
        assert answer.status_code == 400 and said in answer.text
