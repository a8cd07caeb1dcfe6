"""The openai client and the other endpoints: completions, responses, models, and every class of error it knows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.asks import CITIES, PARAMETERS, QUESTION, TOOL, USER, ask, good_arguments
from tests.clients.service import NAME, Service, serving

MAX_LEN = 4096  # of the twin


# --- completions --------------------------------------------------------------------------------------------------


def complete(client: openai.OpenAI, **more: Any) -> Any:
    return client.completions.create(**{"model": NAME, "prompt": QUESTION, "max_tokens": 8, "temperature": 0} | more)


def test_completions_of_texts_and_ids(client: openai.OpenAI, service: Service) -> None:
    """A text and its token ids are one prompt, alone or in a list; answers stand in the order of the prompts."""
    other = "北京 is 🙂"
    first, second = service.ids(QUESTION), service.ids(other)
    text = complete(client).choices[0].text
    assert complete(client, prompt=first).choices[0].text == text
    for prompt in ([QUESTION, other], [first, second]):
        answer = complete(client, prompt=prompt)
        assert [choice.index for choice in answer.choices] == [0, 1]
        assert answer.choices[0].text == text
        assert answer.usage.prompt_tokens == len(first) + len(second)
        assert answer.usage.completion_tokens <= 16


def test_echo_gives_the_prompts_logprobs(client: openai.OpenAI, service: Service) -> None:
    """What evaluators read: the prompt's tokens before the answer's, no number for the first, offsets into the text;
    and with max_tokens 0 the prompt alone."""
    ids = service.ids(QUESTION)
    for count in (0, 1, 5):
        answer = complete(client, prompt=ids, echo=True, logprobs=2, max_tokens=count, extra_body={"ignore_eos": True})
        (choice,) = answer.choices
        told = choice.logprobs
        assert choice.text.startswith(QUESTION)
        assert len(told.tokens) == len(told.token_logprobs) == len(told.text_offset) == len(ids) + count
        assert told.token_logprobs[0] is None and all(number <= 0 for number in told.token_logprobs[1:])
        assert "".join(told.tokens[: len(ids)]) == QUESTION
        assert [QUESTION.index(token, at) for token, at in zip(told.tokens[: len(ids)], told.text_offset)] == (
            told.text_offset[: len(ids)]
        )
        assert answer.usage.completion_tokens == count
    own = complete(client, logprobs=0, max_tokens=5, extra_body={"ignore_eos": True}).choices[0].logprobs
    assert own.token_logprobs == pytest.approx(told.token_logprobs[len(ids) :], abs=1e-4)


def test_completions_streamed(client: openai.OpenAI) -> None:
    asked = {"prompt": [QUESTION, "one and"], "n": 2, "seed": 3, "temperature": 1}
    whole = complete(client, **asked)
    chunks = list(complete(client, **asked, stream=True, stream_options={"include_usage": True}))
    for choice in whole.choices:
        own = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in own) == choice.text
        assert own[-1].finish_reason == choice.finish_reason
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    assert len(whole.choices) == 4


def test_guided_texts(client: openai.OpenAI) -> None:
    """The extras of other servers, as clients send them."""
    choice = complete(client, max_tokens=40, extra_body={"guided_choice": list(CITIES)}).choices[0].text
    assert choice in CITIES
    number = complete(client, max_tokens=40, extra_body={"structured_outputs": {"regex": "[1-9][0-9]{2}"}})
    assert 100 <= int(number.choices[0].text) <= 999


# --- responses ----------------------------------------------------------------------------------------------------

FLAT: Any = {"type": "function", **TOOL["function"]}
TEXT_EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    "response.output_text.delta", "response.output_text.done", "response.content_part.done",
    "response.output_item.done", "response.incomplete",
]  # fmt: skip
CALL_EVENTS = [
    "response.created", "response.in_progress", "response.output_item.added", "response.function_call_arguments.delta",
    "response.function_call_arguments.done", "response.output_item.done", "response.completed",
]  # fmt: skip


def respond(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**{"model": NAME, "input": QUESTION, "max_output_tokens": 12} | more)


def kinds(events: list[Any]) -> list[str]:
    """Types of events, runs of one type once."""
    return [event.type for i, event in enumerate(events) if i == 0 or events[i - 1].type != event.type]


def test_a_response_and_its_events(client: openai.OpenAI) -> None:
    asked = {"extra_body": {"seed": 4, "ignore_eos": True}}
    whole, events = respond(client, **asked), list(respond(client, **asked, stream=True))
    assert (whole.object, whole.status, whole.incomplete_details.reason) == (
        "response",
        "incomplete",
        "max_output_tokens",
    )
    assert kinds(events) == TEXT_EVENTS
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    final = events[-1].response
    assert deltas == final.output_text == whole.output_text != ""
    assert len({event.response.id for event in events if hasattr(event, "response")}) == 1
    assert {event.item_id for event in events if hasattr(event, "item_id")} == {final.output[0].id}
    assert {event.item.id for event in events if hasattr(event, "item")} == {final.output[0].id}
    assert final.usage.output_tokens == whole.usage.output_tokens == 12
    assert final.usage.input_tokens == whole.usage.input_tokens


def test_a_function_call_goes_round(client: openai.OpenAI) -> None:
    items: list[Any] = [{"role": "user", "content": [{"type": "input_text", "text": QUESTION}]}]
    asked = {"tools": [FLAT], "tool_choice": "required", "parallel_tool_calls": False, "max_output_tokens": 300}
    grown = 0
    for stream in (False, True):
        if stream:
            events = list(respond(client, input=items, **asked, stream=True))
            assert kinds(events) == CALL_EVENTS
            answer = events[-1].response
            pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
            assert "".join(pieces) == answer.output[0].arguments
        else:
            answer = respond(client, input=items, **asked)
        assert answer.status == "completed"
        (call,) = answer.output
        assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
        assert good_arguments(json.loads(call.arguments))
        assert answer.usage.input_tokens > grown
        grown = answer.usage.input_tokens
        items += [call.to_dict(), {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}]
    last = respond(client, input=items, tools=[FLAT], tool_choice="none", instructions="Be brief.")
    assert last.output and "function_call" not in [item.type for item in last.output]


def test_a_response_in_a_schema(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "place", "schema": PARAMETERS, "strict": True}}
    answer = respond(client, text=form, max_output_tokens=300)
    assert answer.status == "completed" and good_arguments(json.loads(answer.output_text))


# --- models and errors --------------------------------------------------------------------------------------------


def test_models(client: openai.OpenAI) -> None:
    (card,) = client.models.list().data
    assert (card.id, card.object, card.owned_by) == (NAME, "model", "dayzero")
    told = client.models.retrieve(NAME).to_dict()
    assert told == card.to_dict()
    assert told["max_model_len"] == MAX_LEN
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("another")


BAD = [
    ({"temperature": -1}, "temperature"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user", "content": QUESTION * 1000}]}, "messages"),
    ({"tool_choice": "required"}, None),
    ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
    ({"n": 0}, "n"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"448": 1}}, "logit_bias"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}]}, None),
]


@pytest.mark.parametrize("more, param", BAD, ids=[next(iter(more)) + str(i) for i, (more, _) in enumerate(BAD)])
def test_bad_requests(client: openai.OpenAI, more: dict[str, Any], param: str | None) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as bad:
            client.chat.completions.create(**ask(**more), stream=stream)
        assert bad.value.type == "invalid_request_error"
        assert param is None or bad.value.param == param
        assert isinstance(bad.value.body, dict) and bad.value.body["message"]


def test_a_prompt_that_is_too_long_is_named(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(**ask(messages=[{"role": "user", "content": QUESTION * 1000}]))
    assert bad.value.code == "context_length_exceeded"


def test_an_unknown_model(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(**ask(model="another"))
    assert error.value.code == "model_not_found"


@pytest.fixture(scope="module")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """One request at a time, none that waits, and a key."""
    log = tmp_path_factory.mktemp("guarded") / "log"
    with serving(model, log, "--api-key", "sesame", "--max-running", "1", "--max-waiting", "1") as service:
        yield service


def test_keys(guarded: Service) -> None:
    def of(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{guarded.address}/v1", api_key=key, max_retries=0)

    assert of("sesame").chat.completions.create(**ask()).choices
    with pytest.raises(openai.AuthenticationError):
        of("wrong").models.list()
    with pytest.raises(openai.AuthenticationError) as error:
        of("wrong").chat.completions.create(**ask())
    assert error.value.code == "invalid_api_key"


def test_overload(guarded: Service) -> None:
    """Of several requests at once some are refused: the client knows the class, and what to wait. The ones that were
    taken get their answers, and so does the next one."""

    async def all_of_them() -> list[Any]:
        async with openai.AsyncOpenAI(base_url=f"{guarded.address}/v1", api_key="sesame", max_retries=0) as client:
            asked = ask(max_tokens=100, extra_body={"ignore_eos": True})
            return await asyncio.gather(
                *(client.chat.completions.create(**asked) for _ in range(6)), return_exceptions=True
            )

    answers = asyncio.run(all_of_them())
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    taken = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(refused) + len(taken) == 6 and refused and taken, answers
    assert {error.code for error in refused} == {"rate_limit_exceeded"}
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in refused)
    assert {answer.usage.completion_tokens for answer in taken} == {100}
    client = openai.OpenAI(base_url=f"{guarded.address}/v1", api_key="sesame", max_retries=0)
    assert client.chat.completions.create(messages=[USER], model=NAME, max_tokens=2).choices
