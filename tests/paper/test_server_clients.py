"""The official clients against a real server on loopback, and clients that leave."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from dayzero.engine.request import NewRequest
from tests.paper.server_support import ScriptedEngine, World, ask, eventually, ids, make, serving

CALL = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
SCHEMA = {"type": "object", "properties": {"at": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


def answers(request: NewRequest) -> list[int]:
    """Calls the tool once it is offered and has not answered yet; else some text with reasoning before it."""
    text = bytes(i for i in request.prompt if i < 256).decode()
    if "<|tool|>" in text and "tool\nblue" not in text:
        return ids(f"<think>I must look</think>{CALL}")
    return ids('<think>hm</think>{"at": "the 🌊"}')


@pytest.fixture(scope="module")
def world() -> World:
    return make(ScriptedEngine(reply=answers), api_keys=("key",))


@pytest.fixture(scope="module")
def address(world: World) -> Iterator[str]:
    with serving(world) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="key", max_retries=0)


@pytest.fixture(scope="module")
def claude(address: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=address, api_key="key", max_retries=0)


HI: Any = [{"role": "user", "content": "hi"}]


def test_openai_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=HI, logprobs=True, top_logprobs=2, n=2, seed=1, stop=["never"], logit_bias={"5": 1}
    )
    assert [c.message.content for c in answer.choices] == ['{"at": "the 🌊"}'] * 2
    assert answer.choices[0].message.to_dict()["reasoning_content"] == "hm"
    assert answer.choices[0].finish_reason == "stop"
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    assert client.models.list().data[0].id == "tiny"
    assert client.models.retrieve("also-tiny").to_dict()["max_model_len"] == 2000


def test_openai_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=HI, stream_options={"include_usage": True}
    ) as stream:  # the helper checks the order of what comes
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == '{"at": "the 🌊"}'
    assert final.usage is not None
    assert final.usage.total_tokens == final.usage.prompt_tokens + final.usage.completion_tokens


def test_openai_tool_loop(client: openai.OpenAI) -> None:
    turns: Any = [*HI]
    for stream in (False, True):
        tools: Any = [TOOL]
        if stream:
            with client.chat.completions.stream(model="tiny", messages=turns, tools=tools) as events:
                message: Any = events.get_final_completion().choices[0].message
        else:
            message = client.chat.completions.create(model="tiny", messages=turns, tools=tools).choices[0].message
        call = message.tool_calls[0]
        assert (call.function.name, json.loads(call.function.arguments)) == ("look", {"at": "sea"})
        result: Any = {"role": "tool", "tool_call_id": call.id, "content": "blue"}
        again = client.chat.completions.create(model="tiny", messages=[*turns, message.to_dict(), result], tools=tools)
        assert again.choices[0].message.content == '{"at": "the 🌊"}'


def test_openai_json_schema(client: openai.OpenAI, world: World) -> None:
    import pydantic

    class Place(pydantic.BaseModel):
        at: str

    answer = client.chat.completions.parse(model="tiny", messages=HI, response_format=Place)
    assert answer.choices[0].message.parsed == Place(at="the 🌊")
    assert world.engine.seen[-1].params.grammar is not None


def test_openai_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=[[1, 2], [3]], echo=True, logprobs=1, max_tokens=1)
    assert [len(c.logprobs.tokens) for c in answer.choices if c.logprobs and c.logprobs.tokens] == [3, 2]
    assert list(client.completions.create(model="tiny", prompt="a", stream=True, max_tokens=3))[-1].choices


def test_openai_responses(client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "name": "look", "parameters": SCHEMA}
    items: Any = [{"role": "user", "content": "hi"}]
    answer = client.responses.create(model="tiny", input=items, tools=[tool], store=False)
    assert [item.type for item in answer.output] == ["reasoning", "function_call"]
    with client.responses.stream(model="tiny", input=items, tools=[tool]) as stream:  # the helper builds items up
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert [item.type for item in final.output] == ["reasoning", "function_call"]
    call: Any = answer.output[1]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
    again = client.responses.create(model="tiny", input=[*items, *[i.to_dict() for i in answer.output], result])
    assert again.output_text == '{"at": "the 🌊"}'
    assert again.usage is not None
    assert again.usage.output_tokens_details.reasoning_tokens == 2


def test_openai_errors(client: openai.OpenAI, address: str) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="tiny", messages=HI, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{address}/v1", api_key="x", max_retries=0).models.list()
    with serving(make(ScriptedEngine(dies_after=3))) as dying:
        other = openai.OpenAI(base_url=f"{dying}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.APIError, match="the process ended"):
            for _ in other.chat.completions.create(model="tiny", messages=HI, stream=True):
                pass
        kinds = [event.type for event in other.responses.create(model="tiny", input="hi", stream=True)]
        assert kinds[-2:] == ["error", "response.failed"]
        anthropic_client = anthropic.Anthropic(base_url=dying, api_key="x", max_retries=0)
        with pytest.raises(anthropic.APIStatusError, match="the process ended"):
            with anthropic_client.messages.stream(model="tiny", max_tokens=99, messages=HI) as stream:
                stream.until_done()


def test_anthropic(claude: anthropic.Anthropic) -> None:
    tool: Any = {"name": "look", "input_schema": SCHEMA}
    answer = claude.messages.create(model="tiny", max_tokens=200, messages=HI, tools=[tool])
    assert [block.type for block in answer.content] == ["thinking", "tool_use"]
    assert answer.stop_reason == "tool_use"
    with claude.messages.stream(model="tiny", max_tokens=200, messages=HI, tools=[tool]) as stream:
        final = stream.get_final_message()
    assert [block.type for block in final.content] == ["thinking", "tool_use"]
    assert final.content[1].to_dict()["input"] == {"at": "sea"}
    assert final.usage.output_tokens == answer.usage.output_tokens
    call: Any = answer.content[1]
    result: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "blue"}]}
    said: Any = {"role": "assistant", "content": [block.to_dict() for block in answer.content]}
    again = claude.messages.create(model="tiny", max_tokens=200, messages=[*HI, said, result], tools=[tool])
    assert again.content[-1].to_dict()["text"] == '{"at": "the 🌊"}'
    assert claude.messages.count_tokens(model="tiny", messages=HI).input_tokens > 5
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=200, messages=HI)


# --- clients that leave -------------------------------------------------------------------------------------------

LEAVING = [
    ("/v1/chat/completions", ask(n=3)),
    ("/v1/chat/completions", ask(n=3, stream=True)),
    ("/v1/completions", {"prompt": ["a", "b"], "stream": True, "max_tokens": 1000}),
    ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1000}),
    ("/v1/responses", {"input": "a", "stream": True}),
    ("/v1/messages", {"max_tokens": 999, "messages": HI}),
]


def leave(address: str, path: str, body: dict[str, Any], seconds: float) -> None:
    """Send a request and close the connection after a while."""
    host, port = address.removeprefix("http://").split(":")
    text = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        head = (
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
        )
        connection.sendall(head.encode() + text)
        time.sleep(seconds)


@pytest.mark.parametrize("seconds", [0.0, 0.15])
def test_a_client_that_leaves_frees_what_it_held(seconds: float) -> None:
    """Before the first token or in the middle, streamed or not, every sequence of the request is aborted."""
    engine = ScriptedEngine(reply=lambda request: ids("x" * 900), delay=0.05)
    world = make(engine)
    with serving(world) as address:
        for path, body in LEAVING:
            leave(address, path, body, seconds)
        assert eventually(lambda: len(world.log) == len(LEAVING)), world.log
        assert eventually(lambda: not engine.live)
        metrics = httpx.get(f"{address}/metrics").text
    if seconds:
        assert len(engine.seen) == 12
    assert sorted(engine.aborted) == sorted(request.id for request in engine.seen)
    assert {(line["status"], line["client_gone"]) for line in world.log} == {(499, True)}
    assert f'requests_client_gone_total{{engine="0",model_name="tiny"}} {float(len(LEAVING))}' in metrics
    assert f'finished_reason="abort",model_name="tiny"}} {float(len(engine.seen))}' in metrics


def test_a_stop_string_ends_the_sequence_in_the_engine() -> None:
    engine = ScriptedEngine(reply=lambda request: ids("one STOP" + "x" * 500), delay=0.001)
    with serving(make(engine)) as address:
        answer = httpx.post(f"{address}/v1/chat/completions", json=ask(stop="STOP")).json()
        assert eventually(lambda: not engine.live)
    assert answer["choices"][0]["message"]["content"] == "one "
    assert answer["choices"][0]["stop_reason"] == "STOP"
    assert answer["usage"]["completion_tokens"] == len("one STOP")
    assert engine.aborted == [engine.seen[0].id]


def test_a_silent_stream_is_kept_alive() -> None:
    engine = ScriptedEngine(reply=lambda request: ids("ab"), delay=0.3)
    with serving(make(engine, keepalive_s=0.1)) as address:
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=ask(stream=True)) as answer:
            text = answer.read().decode()
    assert text.startswith(": keep-alive\n\n")
    assert text.count("data: ") == 5


def test_tokens_that_are_ready_together_go_out_in_one_write() -> None:
    """A client that reads slowly gets larger pieces, not more of them."""
    engine = ScriptedEngine(reply=lambda request: ids("x" * 300), pieces=100)
    with serving(make(engine)) as address:
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=ask(stream=True)) as answer:
            text = answer.read().decode()
    assert text.count('"content":"x') == 3
