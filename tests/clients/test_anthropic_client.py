"""The anthropic client and /v1/messages of a running service."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from tests.clients.asks import PARAMETERS, USER, good_arguments
from tests.clients.service import NAME, Service

TOOL: Any = {"name": "get_weather", "description": "Look out of the window.", "input_schema": PARAMETERS}


GREEDY: Any = {"extra_body": {"temperature": 0}}  # this client has no parameter for it any more; the API has


def create(client: anthropic.Anthropic, **more: Any) -> Any:
    return client.messages.create(**{"model": NAME, "max_tokens": 12, "messages": [USER]} | more)


def built(client: anthropic.Anthropic, **more: Any) -> Any:
    """A streamed answer as the client's own helper builds it up."""
    with client.messages.stream(**{"model": NAME, "max_tokens": 12, "messages": [USER]} | more) as stream:
        return stream.get_final_message()


def prompt_tokens(answer: Any) -> int:
    return answer.usage.input_tokens + answer.usage.cache_read_input_tokens


def test_a_message_and_its_counts(claude: anthropic.Anthropic) -> None:
    whole, stream = create(claude, **GREEDY), built(claude, **GREEDY)
    for answer in (whole, stream):
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", NAME)
        assert [block.type for block in answer.content] == ["text"]
        assert (answer.stop_reason, answer.usage.output_tokens) == ("max_tokens", 12)
        counted = claude.messages.count_tokens(model=NAME, messages=[USER]).input_tokens
        assert prompt_tokens(answer) == counted
    assert whole.content[0].text == stream.content[0].text
    system = claude.messages.count_tokens(model=NAME, messages=[USER], system="Be brief.")
    assert system.input_tokens > counted


def test_a_stop_sequence(claude: anthropic.Anthropic) -> None:
    text = create(claude, max_tokens=30, **GREEDY).content[0].text
    found = next(text[i : i + 2] for i in range(4, len(text)) if "\ufffd" not in text[i : i + 2])
    for answer in (f(claude, max_tokens=30, **GREEDY, stop_sequences=[found]) for f in (create, built)):
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", found)
        assert answer.content[0].text == text[: text.index(found)]


def test_thinking(claude: anthropic.Anthropic) -> None:
    """Off unless asked for; then the answer begins in a block of its own, streamed or not."""
    asked: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, **GREEDY}
    whole, stream = create(claude, **asked), built(claude, **asked)
    assert [block.type for block in whole.content] == [block.type for block in stream.content] == ["thinking"]
    assert whole.content[0].thinking == stream.content[0].thinking != ""
    with claude.messages.stream(model=NAME, max_tokens=12, messages=[USER], **asked) as events:
        kinds = [event.type for event in events]
    assert kinds[0] == "message_start" and kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1


CHOICES = [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}]


@pytest.mark.parametrize("choice", CHOICES, ids=["any", "named"])
@pytest.mark.parametrize("make", [create, built], ids=["whole", "streamed"])
def test_a_tool_loop(claude: anthropic.Anthropic, choice: Any, make: Any) -> None:
    """A call, its result, a second turn: what was said goes back as it came."""
    turns: list[Any] = [USER]
    grown = 0
    for _ in range(2):
        answer = make(claude, messages=turns, tools=[TOOL], tool_choice=choice, max_tokens=300)
        assert answer.stop_reason == "tool_use"
        (call,) = answer.content
        assert (call.type, call.name) == ("tool_use", "get_weather")
        assert good_arguments(call.input), call.input
        assert prompt_tokens(answer) > grown
        grown = prompt_tokens(answer)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "blue"}]}
        turns += [{"role": "assistant", "content": [call.to_dict()]}, {"role": "user", "content": [result]}]
    last = make(claude, messages=turns, tools=[TOOL], tool_choice={"type": "none"})
    assert last.content and "tool_use" not in [block.type for block in last.content]


def test_errors(claude: anthropic.Anthropic, service: Service) -> None:
    with pytest.raises(anthropic.NotFoundError):
        create(claude, model="another")
    with pytest.raises(anthropic.BadRequestError) as bad:
        create(claude, messages=[{"role": "user", "content": "x" * 20_000}])
    assert bad.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        create(claude, extra_body={"temperature": 2})
