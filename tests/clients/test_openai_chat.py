"""The openai client and /v1/chat/completions of a running service."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any, Literal

import openai
import pydantic
import pytest

from tests.clients.asks import OTHER, QUESTION, TOOL, USER, ask, good_arguments
from tests.clients.service import NAME, Service

LONG_ENOUGH = 300  # tokens: for a call with all the white space that its grammar allows


def chat(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**ask(**more))


def built(client: openai.OpenAI, **more: Any) -> Any:
    """A streamed answer as the client's own helper builds it up. It raises where an answer ends for its length."""
    with client.chat.completions.stream(**ask(stream_options={"include_usage": True}, **more)) as events:
        return events.get_final_completion()


def streamed(client: openai.OpenAI, **more: Any) -> list[Any]:
    """The chunks of an answer."""
    return list(chat(client, stream=True, stream_options={"include_usage": True}, **more))


def said(message: Any) -> dict[str, Any]:
    """What a message or a delta holds, but for ids."""
    given = message.to_dict()
    calls = [(call.function.name or "", call.function.arguments or "") for call in message.tool_calls or []]
    return {"content": given.get("content") or "", "reasoning": given.get("reasoning") or "", "calls": calls}


def joined(deltas: list[Any]) -> dict[str, Any]:
    """Deltas of one choice, put together as their indexes say."""
    out: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    for delta in deltas:
        new = said(delta)
        out["content"] += new["content"]
        out["reasoning"] += new["reasoning"]
        for call, (name, arguments) in zip(delta.tool_calls or [], new["calls"]):
            if call.index == len(out["calls"]):
                out["calls"].append(("", ""))
            before = out["calls"][call.index]
            out["calls"][call.index] = (before[0] + name, before[1] + arguments)
    return out


def test_an_answer_and_its_counts(client: openai.OpenAI, service: Service) -> None:
    answer = chat(client, extra_body={"ignore_eos": True})
    (choice,) = answer.choices
    assert (choice.index, choice.finish_reason, choice.message.role) == (0, "length", "assistant")
    assert choice.message.content
    assert answer.id.startswith("chatcmpl-") and answer.object == "chat.completion" and answer.model == NAME
    prompt = service.post("/tokenize", {"messages": [USER]}).json()
    assert answer.usage.prompt_tokens == prompt["count"]
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == prompt["count"] + 12
    assert answer.usage.prompt_tokens_details.cached_tokens % 64 == 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"n": 3},
        {"temperature": 0},
        {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": LONG_ENOUGH},
        {"stop": ["e", "а"], "max_tokens": 60},
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
        {"response_format": {"type": "json_object"}, "max_tokens": 40},
    ],
    ids=["plain", "n", "greedy", "tools", "stop", "reasoning", "json_object"],
)
def test_streamed_is_whole(client: openai.OpenAI, more: dict[str, Any]) -> None:
    """The same request both ways: the same text, calls, ends and counts. The usage comes once, behind the choices."""
    whole, chunks = chat(client, **more), streamed(client, **more)
    for choice in whole.choices:
        own = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert joined([part.delta for part in own]) == said(choice.message)
        assert own[0].delta.role == "assistant"
        assert [part.finish_reason for part in own] == [None] * (len(own) - 1) + [choice.finish_reason]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens", "completion_tokens_details"):
        assert getattr(chunks[-1].usage, name) == getattr(whole.usage, name)
    assert [bool(chunk.usage) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []


def test_n_and_seed(client: openai.OpenAI) -> None:
    """A seed gives the same answers again; the n answers differ, and the prompt counts once."""
    one, again = (chat(client, n=3, max_tokens=16, extra_body={"ignore_eos": True}) for _ in range(2))
    texts = [choice.message.content for choice in one.choices]
    assert [choice.index for choice in one.choices] == [0, 1, 2]
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    assert one.usage.completion_tokens == 48
    assert chat(client, max_tokens=16, extra_body={"ignore_eos": True}).usage.prompt_tokens == one.usage.prompt_tokens
    assert chat(client, seed=6, max_tokens=16).choices[0].message.content != texts[0]


def test_stop(client: openai.OpenAI) -> None:
    text = chat(client, temperature=0, max_tokens=30).choices[0].message.content
    found = next(text[i : i + 2] for i in range(4, len(text)) if "\ufffd" not in text[i : i + 2])
    answer = chat(client, temperature=0, max_tokens=30, stop=["never in it", found])
    assert answer.choices[0].message.content == text[: text.index(found)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].to_dict()["stop_reason"] == found


def test_logit_bias(client: openai.OpenAI, service: Service) -> None:
    (token,) = service.ids(" the")
    answer = chat(client, logit_bias={str(token): 100}, max_tokens=5)
    assert answer.choices[0].message.content == " the" * 5
    barred = chat(client, logit_bias={str(token): 100, **{str(i): -100 for i in range(token)}}, max_tokens=5)
    assert barred.choices[0].message.content == " the" * 5


def test_logprobs(client: openai.OpenAI) -> None:
    """One entry a token; bytes make up the text; the greedy token is the likeliest; none is above 0."""
    answer = chat(client, temperature=0, logprobs=True, top_logprobs=4, extra_body={"ignore_eos": True})
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens == 12
    spelled = bytes(byte for entry in content for byte in entry.bytes)
    assert spelled.decode(errors="replace") == answer.choices[0].message.content
    for entry in content:
        numbers = [top.logprob for top in entry.top_logprobs]
        assert len(numbers) == 4 and numbers == sorted(numbers, reverse=True)
        assert entry.logprob == numbers[0] <= 0
        assert entry.bytes == entry.top_logprobs[0].bytes
    own = chat(client, temperature=0, logprobs=True, extra_body={"ignore_eos": True}).choices[0].logprobs.content
    assert [entry.top_logprobs for entry in own] == [[]] * 12
    assert [entry.logprob for entry in own] == pytest.approx([entry.logprob for entry in content], abs=1e-4)


class Report(pydantic.BaseModel):
    city: Literal["Paris", "Rome"]
    sunny: bool
    degrees: list[Literal[1, 20, 300]]


@pytest.mark.parametrize("thinking", [False, True])
def test_json_schema(client: openai.OpenAI, service: Service, thinking: bool) -> None:
    """The client's own parser takes the answer; with reasoning on the schema holds behind it."""
    (close,) = service.ids("</think>")
    body = {"chat_template_kwargs": {"enable_thinking": thinking}}
    bias = {str(close): 8} if thinking else {}
    answer = client.chat.completions.parse(
        **ask(max_tokens=2000, extra_body=body, logit_bias=bias), response_format=Report
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(answer.choices[0].message.parsed, Report)
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert (answer.usage.completion_tokens_details.reasoning_tokens or 0) > 0 or not thinking


def test_reasoning_comes_under_both_names(client: openai.OpenAI, service: Service) -> None:
    barred = {str(token): -100 for token in service.ids("</think><tool_call>")}  # either would end the reasoning
    body = {"chat_template_kwargs": {"enable_thinking": True}, "ignore_eos": True}
    answer = chat(client, extra_body=body, logit_bias=barred)
    message = answer.choices[0].message.to_dict()
    assert message["reasoning"] == message["reasoning_content"] != ""
    assert answer.usage.completion_tokens_details.reasoning_tokens == 12


# --- tools --------------------------------------------------------------------------------------------------------

NAMED = {"type": "function", "function": {"name": "get_weather"}}
FORCED = [
    pytest.param({"tool_choice": "required"}, id="required"),
    pytest.param({"tool_choice": NAMED}, id="named"),
    pytest.param({"tool_choice": "auto"}, id="auto"),
]


def _call(call: Any) -> dict[str, Any]:
    """As a client sends it back."""
    function = {"name": call.function.name, "arguments": call.function.arguments}
    return {"id": call.id, "type": "function", "function": function}


def biased(service: Service, more: dict[str, Any]) -> dict[str, Any]:
    """Under ``auto`` the model decides: this one is pushed to the marker behind which a strict tool's grammar holds."""
    if more["tool_choice"] != "auto":
        return more
    (marker,) = service.ids("<tool_call>")
    return {**more, "logit_bias": {str(marker): 100}}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("more", FORCED)
def test_a_tool_loop(client: openai.OpenAI, service: Service, more: dict[str, Any], stream: bool) -> None:
    """A call, its result, and a second turn that calls again: valid arguments each time, no marker in any text."""
    turns: list[Any] = [USER]
    grown = 0
    for turn in range(2):
        asked = biased(service, more) | {
            "messages": turns, "tools": [TOOL, OTHER] if more["tool_choice"] is NAMED else [TOOL],
            "parallel_tool_calls": False, "max_tokens": LONG_ENOUGH, "seed": turn,
        }  # fmt: skip
        answer = (built if stream else chat)(client, **asked)
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        (call,) = choice.message.tool_calls
        assert (call.type, call.function.name) == ("function", "get_weather")
        assert good_arguments(json.loads(call.function.arguments)), call.function.arguments
        assert call.id
        assert not choice.message.content
        assert answer.usage.prompt_tokens > grown
        grown = answer.usage.prompt_tokens
        turns += [{"role": "assistant", "content": None, "tool_calls": [_call(call)]}]
        turns += [{"role": "tool", "tool_call_id": call.id, "content": '{"sky": "blue"}'}]
    assert len({turn["tool_call_id"] for turn in turns if turn["role"] == "tool"}) == 2
    last = chat(client, messages=turns, tools=[TOOL], tool_choice="none")
    assert last.choices[0].message.tool_calls is None
    assert last.choices[0].finish_reason in ("length", "stop")


def test_several_calls_stream_in_order(client: openai.OpenAI) -> None:
    """The name first, with the id, then pieces of the arguments; an index for each call, in order."""
    seen: dict[int, list[Any]] = {}
    for seed in range(12):
        chunks = streamed(client, tools=[TOOL, OTHER], tool_choice="required", max_tokens=LONG_ENOUGH, seed=seed)
        seen = {}
        for chunk in chunks:
            for choice in chunk.choices:
                for delta in choice.delta.tool_calls or []:
                    seen.setdefault(delta.index, []).append(delta)
        if len(seen) > 1:
            break
    assert list(seen) == list(range(len(seen))) and len(seen) > 1, "no seed gave two calls"
    for deltas in seen.values():
        assert deltas[0].id and deltas[0].function.name in ("get_weather", "get_time")
        assert all(delta.id is None and delta.function.name is None for delta in deltas[1:])
    first = json.loads("".join(delta.function.arguments or "" for delta in seen[0]))
    assert good_arguments(first)


def test_a_call_that_is_cut_off_says_so(client: openai.OpenAI) -> None:
    answer = chat(client, tools=[TOOL], tool_choice="required", max_tokens=14)
    assert answer.choices[0].finish_reason == "length"
    message = answer.choices[0].message.to_dict()
    assert message["tool_problems"]


# --- several at once, and clients that leave --------------------------------------------------------------------------


def test_eight_at_once_answer_as_each_alone(service: Service) -> None:
    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:

            async def one(number: int) -> str:
                text = ""
                asked = ask(messages=[{"role": "user", "content": QUESTION * (number + 1)}], temperature=0)
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    text += chunk.choices[0].delta.content or ""
                return text

            return list(await asyncio.gather(*(one(number) for number in range(8))))

    together = asyncio.run(all_of_them())
    with openai.OpenAI(base_url=f"{service.address}/v1", api_key="none", max_retries=0) as client:
        for number, text in enumerate(together):
            alone = chat(client, messages=[{"role": "user", "content": QUESTION * (number + 1)}], temperature=0)
            assert alone.choices[0].message.content == text


def test_a_stream_that_is_closed_is_aborted(client: openai.OpenAI, service: Service) -> None:
    before = service.total("vllm:request_success", finished_reason="abort")
    stream = chat(client, max_tokens=3000, stream=True, extra_body={"ignore_eos": True})
    next(iter(stream))
    stream.close()
    deadline = time.monotonic() + 20
    while service.total("vllm:request_success", finished_reason="abort") != before + 1:
        assert time.monotonic() < deadline, "the request still runs"
        time.sleep(0.1)
    while service.get("/progress").json()["progress"]["running"]:
        assert time.monotonic() < deadline, "the engine still computes it"
        time.sleep(0.1)
