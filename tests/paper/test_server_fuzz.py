"""No body gives a 5xx: bodies that are nearly right, bodies that are anything, and what /openapi.json allows."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.server.routes import ROUTES
from tests.paper.server_support import World, client, make

TEXT = st.text(max_size=12)
NUMBER = st.one_of(
    st.integers(-3, 300), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 1e308, 0.5, -0.0]),
)  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=8,
)
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}, "strict": True}}
FULL: dict[str, Any] = {
    "/v1/chat/completions": {
        "model": "tiny",
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "s"}]},
            {"role": "user", "content": "hi", "name": "ann"},
            {"role": "assistant", "content": None, "reasoning": "r",
             "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "t"},
        ],
        "max_tokens": 20, "n": 2, "stop": ["x"], "stream": False, "stream_options": {"include_usage": True},
        "logprobs": True, "top_logprobs": 1, "tools": [TOOL], "tool_choice": "auto", "parallel_tool_calls": True,
        "response_format": {"type": "text"}, "reasoning_effort": "low", "thinking": {"type": "enabled"},
        "chat_template_kwargs": {"enable_thinking": True}, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "seed": 1,
        "logit_bias": {"3": 1}, "min_tokens": 0, "stop_token_ids": [4], "prompt_logprobs": 1, "priority": 1,
        "cache_salt": "s", "return_token_ids": True, "guided_regex": None, "structured_outputs": None,
        "add_generation_prompt": True, "continue_final_message": False, "include_reasoning": True,
    },
    "/v1/completions": {
        "model": "tiny", "prompt": ["a", "b"], "max_tokens": 3, "n": 1, "best_of": 1, "stop": "x", "echo": True,
        "logprobs": 2, "suffix": None, "add_special_tokens": True, "prompt_logprobs": 1, "stream": True,
        "guided_choice": ["a"],
    },
    "/v1/responses": {
        "model": "tiny",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "x"},
        ],
        "instructions": "i", "max_output_tokens": 9, "stream": True, "tools": [{"type": "function", "name": "look"}],
        "tool_choice": "auto", "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "include": ["x"],
        "truncation": "auto", "metadata": {"a": "b"}, "store": True,
    },
    "/v1/messages": {
        "model": "tiny", "max_tokens": 9, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "t", "signature": ""},
                                              {"type": "tool_use", "id": "1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]},
        ],
        "tools": [{"name": "look", "input_schema": {}}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"}, "stop_sequences": ["x"], "temperature": 0.5, "stream": True,
        "output_config": {"effort": "low"},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "x"}], "tool_choice": {"type": "none"}},
    "/tokenize": {"prompt": "a", "return_token_strs": True, "messages": None},
    "/detokenize": {"tokens": [1, 258], "skip_special_tokens": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def world() -> World:
    return make()


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a body."""
    out = [at] if at else []
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return out + [path for key, item in inner for path in paths(item, (*at, key))]


@st.composite
def nearly_right(draw: st.DrawFn) -> tuple[str, Any]:
    """A full body with one to three places changed, removed, or doubled in kind."""
    path = draw(st.sampled_from(sorted(FULL)))
    body = json.loads(json.dumps(FULL[path]))
    for _ in range(draw(st.integers(1, 3))):
        places = paths(body)
        if not places:
            break
        *above, last = draw(st.sampled_from(places))
        holder = body
        for key in above:
            holder = holder[key]
        match draw(st.integers(0, 3)):
            case 0:
                del holder[last]
            case 1:
                holder[last] = [holder[last]]
            case _:
                holder[last] = draw(ANYTHING)
    return path, body


def send(world: World, path: str, body: bytes) -> None:
    answer = client(world).post(path, content=body)
    assert answer.status_code in (200, 400, 404, 413), (answer.status_code, answer.text)
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@settings(max_examples=250)
@given(case=nearly_right())
def test_nearly_right_bodies(case: tuple[str, Any], world: World) -> None:
    path, body = case
    send(world, path, json.dumps(body).encode())


@settings(max_examples=60)
@given(
    path=st.sampled_from(sorted(FULL)),
    body=st.one_of(st.binary(max_size=60), ANYTHING.map(lambda v: json.dumps(v).encode())),
)
def test_any_body(path: str, body: bytes, world: World) -> None:
    send(world, path, body)


@pytest.mark.parametrize("path", sorted(FULL))
def test_full_bodies_are_taken(path: str, world: World) -> None:
    """Or the tests above would try little."""
    answer = client(world).post(path, json=FULL[path])
    assert answer.status_code == 200, answer.text
    assert client(world).post(path, json=FULL[path] | {"stream": False}).status_code == 200


def test_openapi_is_complete(world: World) -> None:
    document = client(world).get("/openapi.json").json()
    assert len(document["paths"]) == len({route.path for route in ROUTES})
    assert document["openapi"] == "3.1.0"
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(answers) == {"200", "400", "404", "408", "413", "429", "500", "503"}
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    keyed = client(make(api_keys=("k",))).get("/openapi.json").json()
    assert "401" in keyed["paths"]["/v1/models"]["get"]["responses"]
    assert "security" not in keyed["paths"]["/health"]["get"]
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


@pytest.mark.slow
def test_openapi_is_valid(world: World) -> None:
    from openapi_spec_validator import validate

    validate(client(world).get("/openapi.json").json())


@pytest.mark.parametrize("path", sorted(FULL))
def test_answers_are_what_openapi_says(path: str, world: World) -> None:
    document = client(world).get("/openapi.json").json()
    answers = document["paths"][path]["post"]["responses"]
    for body, status in (
        (FULL[path] | {"stream": False}, "200"),
        ({}, "400"),
        ({"model": "x"} | FULL[path] | {"model": "x"}, "404"),
    ):
        answer = client(world).post(path, json=body)
        assert str(answer.status_code) == status, answer.text
        schema = answers[status]["content"]["application/json"]["schema"]
        jsonschema.validate(answer.json(), {**schema, "components": document["components"]})
