"""/v1/chat/completions field by field, over a scripted engine."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dayzero.engine.request import NewRequest
from tests.paper.server_support import (
    MAX_LEN,
    ScriptedEngine,
    ask,
    client,
    events,
    ids,
    make,
    no_chat,
)

URL = "/v1/chat/completions"
CALL = '<tool_call>{"name": "look", "arguments": {"at": "sea"}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "x-order": 1}}}
SCHEMA_OF = {"type": "json_schema"}
THOUGHT = "<think>so, hm</think>It is a wörld 🙂."


def reply(text: str, **more: Any) -> ScriptedEngine:
    return ScriptedEngine(reply=lambda request: ids(text), **more)


def gathered(text: str) -> dict[int, dict[str, Any]]:
    """What a client gathers from a stream, by choice: the fields of the answer that is not streamed."""
    out: dict[int, dict[str, Any]] = {}
    for event in events(text):
        for choice in [] if event == "[DONE]" else event["choices"]:
            got = out.setdefault(
                choice["index"], {"content": "", "reasoning": "", "calls": {}, "logprobs": [], "ids": [], "finish": []}
            )
            delta = choice["delta"]
            got["content"] += delta.get("content") or ""
            got["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for part in delta.get("tool_calls", ()):
                call = got["calls"].setdefault(part["index"], {"name": "", "arguments": "", "id": ""})
                call["id"] += part.get("id", "")
                call["name"] += part["function"].get("name", "")
                call["arguments"] += part["function"].get("arguments", "")
            got["logprobs"] += (choice["logprobs"] or {}).get("content") or []
            got["ids"] += choice.get("token_ids", [])
            if choice["finish_reason"]:
                got["finish"].append((choice["finish_reason"], choice.get("stop_reason")))
    return out


def whole(answer: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """The same of an answer that was not streamed."""
    out = {}
    for choice in answer["choices"]:
        message = choice["message"]
        calls = [c["function"] | {"id": c["id"]} for c in message.get("tool_calls", ())]
        out[choice["index"]] = {
            "content": message["content"] or "",
            "reasoning": message.get("reasoning", ""),
            "calls": dict(enumerate(calls)),
            "logprobs": (choice["logprobs"] or {}).get("content") or [],
            "ids": choice.get("token_ids", []),
            "finish": [(choice["finish_reason"], choice["stop_reason"])],
        }
    return out


def unnamed(answers: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Without the ids of calls, which are drawn anew for each answer."""
    for answer in answers.values():
        for call in answer["calls"].values():
            assert call.pop("id")
    return answers


@pytest.mark.parametrize("pieces", [1, 3, 1000])
@pytest.mark.parametrize(
    "text, more",
    [
        ("Hello, wörld! 🙂", {}),
        (THOUGHT, {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}),
        (f"{THOUGHT}{CALL}", {"tools": [TOOL], "logprobs": True}),
        (f"{CALL}\n{CALL}", {"tools": [TOOL], "n": 3}),
        ("one two three STOP four", {"stop": ["STOP", "four"], "logprobs": True, "return_token_ids": True}),
        ("one two three", {"max_tokens": 5}),
        ("half \ufffd", {"max_tokens": 7}),
        ("", {}),
    ],
)
def test_streamed_equals_not_streamed(text: str, more: dict[str, Any], pieces: int) -> None:
    """Same text, calls, log-probabilities, ids, finish and usage, whatever the engine puts into one output."""
    plain = client(make(reply(text))).post(URL, json=ask(**more))
    assert plain.status_code == 200, plain.text
    world = make(reply(text, pieces=pieces))
    streamed = client(world).post(URL, json=ask(**more, stream=True, stream_options={"include_usage": True}))
    assert streamed.status_code == 200, streamed.text
    assert unnamed(gathered(streamed.text)) == unnamed(whole(plain.json()))
    *chunks, last, done = events(streamed.text)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == plain.json()["usage"]
    assert all(chunk["usage"] is None for chunk in chunks)


def test_the_order_of_a_stream() -> None:
    answer = client(make(reply(f"{THOUGHT}{CALL}"))).post(URL, json=ask(tools=[TOOL], stream=True, n=2))
    for index in (0, 1):
        mine = [e["choices"][0] for e in events(answer.text)[:-1] if e["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["tool_calls"]
        assert mine[-1]["finish_reason"] == "tool_calls"
        calls = [c["delta"]["tool_calls"][0] for c in mine if "tool_calls" in c["delta"]]
        assert calls[0]["function"] == {"name": "look", "arguments": ""}
        assert calls[0]["type"] == "function"
        assert json.loads("".join(c["function"]["arguments"] for c in calls)) == {"at": "sea"}
    assert "usage" not in events(answer.text)[0]


def test_usage_counts_every_token_once() -> None:
    text = THOUGHT
    answer = client(make(reply(text))).post(URL, json=ask(n=2)).json()
    usage = answer["usage"]
    prompt = len(ids("<|start|>user\nhi<|end|><|start|>assistant\n"))
    assert usage["prompt_tokens"] == prompt  # once, though n is 2
    assert usage["completion_tokens"] == 2 * (len(ids(text)) + 1)  # with the token that ended it
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 2 * len("so, hm")}


def test_reasoning_goes_in_under_both_names() -> None:
    prompts = []
    for field in ("reasoning", "reasoning_content"):
        world = make()
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", field: "because"},
                 {"role": "user", "content": "c"}]  # fmt: skip
        assert client(world).post(URL, json=ask(messages=turns)).status_code == 200
        prompts.append(world.engine.seen[0].prompt)
    assert prompts[0] == prompts[1]
    assert ids("<think>because</think>")[0] in prompts[0]


def test_every_role_and_form_of_content() -> None:
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "developer", "content": "d"},
        {"role": "user", "content": [{"type": "text", "text": "u"}, {"type": "text", "text": "v"}], "name": "ann"},
        {"role": "assistant", "content": None,
         "tool_calls": [{"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": 1}'}},
                        {"id": "2", "type": "function", "function": {"name": "look", "arguments": {"at": 2}}}]},
        {"role": "tool", "tool_call_id": "1", "content": "t"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "w"},
    ]  # fmt: skip
    world = make()
    assert client(world).post(URL, json=ask(messages=messages)).status_code == 200
    text = bytes(i for i in world.engine.seen[0].prompt if i < 256).decode()
    assert (
        text
        == 'system\nssystem\nduser\nu\nvassistant\nlook{"at": 1}look{"at": 2}tool\ntassistant\nnouser\nwassistant\n'
    )


def test_parameters_reach_the_engine() -> None:
    world = make(ScriptedEngine(defaults={"temperature": 0.6, "top_k": 20, "max_new_tokens": 100, "typical_p": 0.5}))
    more = {"top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": -1,
            "repetition_penalty": 1.1, "logit_bias": {"7": -100}, "seed": 5, "n": 3, "max_tokens": 40,
            "max_completion_tokens": 30, "min_tokens": 2, "stop_token_ids": [9], "ignore_eos": True,
            "include_stop_str_in_output": True, "skip_special_tokens": False, "logprobs": True, "priority": -3,
            "cache_salt": "mine", "stop": None, "temperature": None}  # fmt: skip
    answer = client(world).post(URL, json=ask(**more))
    assert answer.status_code == 200, answer.text
    first, second, third = world.engine.seen
    params = first.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.6, 0.9, 0, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (1, -1, 1.1)
    assert (params.logit_bias, params.max_tokens, params.min_tokens) == ({7: -100.0}, 30, 2)
    assert (params.stop_token_ids, params.ignore_eos, params.include_stop) == ((9,), True, True)
    assert (params.skip_special_tokens, params.logprobs, params.stop) == (False, 0, ())
    assert [r.params.seed for r in (first, second, third)] == [5, 6, 7]
    assert [r.leader for r in (first, second, third)] == [None, first.id, first.id]
    assert {(r.priority, r.salt) for r in world.engine.seen} == {(-3, "mine")}
    assert "temperature=0.6" in answer.headers["x-dayzero-sampling"]
    assert world.log[-1]["sampling"]["top_p"] == 0.9
    defaults = client(world).get("/v1/models").json()["data"][0]["defaults"]
    assert (defaults["temperature"], defaults["top_k"], defaults["max_tokens"]) == (0.6, 20, 100)
    assert list(defaults["unused"]) == ["typical_p"]


def test_the_answer_may_fill_the_context_and_no_more() -> None:
    world = make()
    prompt = len(ids("<|start|>user\nhi<|end|><|start|>assistant\n"))
    assert client(world).post(URL, json=ask()).status_code == 200
    assert world.engine.seen[0].params.max_tokens == MAX_LEN - prompt
    assert client(world).post(URL, json=ask(max_tokens=MAX_LEN - prompt)).status_code == 200
    for body in (ask(max_tokens=MAX_LEN - prompt + 1), ask(messages=[{"role": "user", "content": "x" * MAX_LEN}])):
        answer = client(world).post(URL, json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "context_length_exceeded"


def test_logprobs_are_finite_and_limited() -> None:
    answer = client(make(reply("hé"))).post(URL, json=ask(logprobs=True, top_logprobs=4)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[b] for b in "hé".encode()]
    assert content[0]["token"] == "h"
    assert [len(entry["top_logprobs"]) for entry in content] == [4] * 3
    assert content[0]["top_logprobs"][2]["logprob"] == -9999.0
    assert client(make()).post(URL, json=ask(logprobs=True, top_logprobs=21)).status_code == 400
    assert client(make()).post(URL, json=ask(top_logprobs=2)).status_code == 400


def test_thinking_is_asked_for_in_three_ways() -> None:
    for more in (
        {"chat_template_kwargs": {"enable_thinking": True}},
        {"thinking": {"type": "enabled"}},
        {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
    ):
        answer = client(make(reply("so</think>yes"))).post(URL, json=ask(**more)).json()
        message = answer["choices"][0]["message"]
        assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("so", "so", "yes")
    hidden = ask(chat_template_kwargs={"enable_thinking": True}, include_reasoning=False)
    message = client(make(reply("so</think>yes"))).post(URL, json=hidden).json()["choices"][0]["message"]
    assert "reasoning" not in message
    assert message["content"] == "yes"
    off = ask(thinking={"type": "disabled"}, reasoning_effort="high")
    assert client(make(reply("yes"))).post(URL, json=off).json()["choices"][0]["message"]["content"] == "yes"


def test_grammars_reach_the_engine() -> None:
    """In the form the chat side gives them, since the answer may begin with reasoning; keys keep their order."""
    schema = {"type": "object", "properties": {"bb": {}, "aa": {}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for more, parts in [
        ({"response_format": {"type": "json_object"}}, ["object"]),
        ({"response_format": named}, ["bb", "aa"]),
        ({"guided_json": schema}, ["bb", "aa"]),
        ({"guided_json": json.dumps(schema)}, ["bb", "aa"]),
        ({"guided_regex": "x+y"}, ["x+y"]),
        ({"guided_choice": ["yes", "no"]}, ["yes", "no"]),
        ({"structured_outputs": {"regex": "x+y"}}, ["x+y"]),
        ({"structured_outputs": {"json": schema}}, ["bb", "aa"]),
        ({"tools": [TOOL], "tool_choice": "required"}, ["look"]),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look"}}}, ["look"]),
    ]:
        world = make(reply(CALL))
        answer = client(world).post(URL, json=ask(**more))
        assert answer.status_code == 200, (more, answer.text)
        grammar = world.engine.seen[0].params.grammar
        assert grammar is not None
        places = [grammar.text.find(part) for part in parts]
        assert -1 not in places
        assert places == sorted(places)
        assert world.log[-1]["sampling"]["grammar"] == grammar.kind
    world = make()
    body = {"prompt": "a", "structured_outputs": {"choice": ["b", "a"]}}
    assert client(world).post("/v1/completions", json=body).status_code == 200
    grammar = world.engine.seen[0].params.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text, grammar.after) == ("choice", '["b", "a"]', None)


@pytest.mark.parametrize(
    "more, param",
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": SCHEMA_OF | {"json_schema": {"schema": {}}}}, "response_format.json_schema.name"),
        ({"response_format": SCHEMA_OF | {"json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"guided_json": "{"}, "guided_json"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "messages[0].content[0].type"),
        ({"max_tokens": "7"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 0}, "n"),
        ({"n": 129}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["a"] * 33}, "stop"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "content": "x"}], "continue_final_message": True}, "continue_final_message"),
        ({"tools": [TOOL], "guided_grammar": 'start: "a"'}, "guided_grammar"),
    ],
)  # fmt: skip
def test_bad_input_is_400_and_names_its_field(more: dict[str, Any], param: str | None) -> None:
    world = make()
    answer = client(world).post(URL, json=ask(**more))
    error = answer.json()["error"]
    assert answer.status_code == 400, answer.text
    assert error["param"] == param, error
    assert error["type"] == "invalid_request_error"
    assert error["message"].endswith(".")
    assert not world.engine.seen


def test_images_are_refused_and_counted() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "detail": "low"}}
    answer = client(make()).post(URL, json=ask(messages=[{"role": "user", "content": [image]}]))
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "this model takes no images."
    answer = client(make(max_images=2)).post(URL, json=ask(messages=[{"role": "user", "content": [image] * 3}]))
    assert "3 images" in answer.json()["error"]["message"]
    answer = client(make(max_image_bytes=2)).post(URL, json=ask(messages=[{"role": "user", "content": [image]}]))
    assert "larger than 2 bytes" in answer.json()["error"]["message"]


def test_a_folder_without_a_tokenizer_cannot_chat_and_says_why() -> None:
    answer = client(make(chat=no_chat())).post(URL, json=ask())
    assert answer.status_code == 400
    assert "holds no tokenizer" in answer.json()["error"]["message"]


def test_fields_nobody_reads_are_named() -> None:
    world = make()
    messages = [{"role": "user", "content": [{"type": "text", "text": "x", "shade": 1}], "mood": "good"}]
    body = ask(messages=messages, user="u", store=None, stream_options={"x": 1}, tools=[TOOL], **{"odd\nkey": 1})
    answer = client(world).post(URL, json=body)
    assert answer.status_code == 200
    named = set(answer.headers["x-dayzero-ignored"].split(", "))
    assert named == {"messages[].content[].shade", "messages[].mood", "user", "stream_options.x", "odd?key"}
    assert set(world.log[-1]["ignored"]) == named
    assert "x-order" in "".join(map(chr, world.engine.seen[0].prompt))  # printed by the template, so not ignored


def test_a_broken_call_is_flagged_and_never_passed_on_as_json() -> None:
    text = '<tool_call>{"name": "look", "arguments": {"at": </tool_call>'
    world = make(reply(text))
    message = client(world).post(URL, json=ask(tools=[TOOL])).json()["choices"][0]["message"]
    assert message["tool_problems"][0]["message"]
    assert world.log[-1]["tool_problems"] >= 1
    streamed = client(make(reply(text))).post(URL, json=ask(tools=[TOOL], stream=True)).text
    found = [e["choices"][0]["delta"].get("tool_problems") for e in events(streamed)[:-1]]
    assert [p for p in found if p] == [[p] for p in message["tool_problems"]]


def test_n_answers_differ_and_keep_their_index() -> None:
    def numbered(request: NewRequest) -> list[int]:
        return ids(f"answer {request.id.rpartition('-')[2]}")

    answer = client(make(ScriptedEngine(reply=numbered))).post(URL, json=ask(n=5)).json()
    assert [c["message"]["content"] for c in answer["choices"]] == [f"answer {k}" for k in range(5)]
    streamed = client(make(ScriptedEngine(reply=numbered))).post(URL, json=ask(n=5, stream=True)).text
    assert [gathered(streamed)[k]["content"] for k in range(5)] == [f"answer {k}" for k in range(5)]


def test_prompt_logprobs_and_ids_on_request() -> None:
    body = ask(prompt_logprobs=1, return_token_ids=True)
    world = make(reply("ok"))
    answer = client(world).post(URL, json=body).json()
    prompt = world.engine.seen[0].prompt
    assert answer["prompt_token_ids"] == prompt
    assert answer["choices"][0]["token_ids"] == [*ids("ok"), 258]
    assert answer["prompt_logprobs"][0] is None
    assert [str(t) in entry for t, entry in zip(prompt[1:], answer["prompt_logprobs"][1:])] == [True] * (
        len(prompt) - 1
    )
    first = events(client(make(reply("ok"))).post(URL, json=body | {"stream": True}).text)[0]
    assert (first["prompt_token_ids"], first["prompt_logprobs"]) == (prompt, answer["prompt_logprobs"])


@given(
    text=st.text(max_size=40), pieces=st.integers(1, 9), cut=st.integers(1, 60), stop=st.text(min_size=1, max_size=3)
)
def test_any_text_streams_to_the_same_answer(text: str, pieces: int, cut: int, stop: str) -> None:
    more = {
        "max_tokens": cut,
        "stop": [stop],
        "return_token_ids": True,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    plain = client(make(reply(text))).post(URL, json=ask(**more)).json()
    streamed = client(make(reply(text, pieces=pieces))).post(
        URL, json=ask(**more, stream=True, stream_options={"include_usage": True})
    )
    assert gathered(streamed.text) == whole(plain)
    assert events(streamed.text)[-2]["usage"] == plain["usage"]


@pytest.mark.parametrize("more", [{}, {"tools": [TOOL], "tool_choice": "none"}], ids=["no tools", "none"])
def test_a_call_nobody_offered_is_kept_out_of_the_answer(more: dict[str, Any]) -> None:
    """The model wrote a call all the same: no call, no marker in the content, an ordinary end; but it is flagged."""
    text = f"Well.{CALL}Done."
    world = make(reply(text))
    (choice,) = client(world).post(URL, json=ask(**more)).json()["choices"]
    message = choice["message"]
    assert (message["content"], choice["finish_reason"]) == ("Well.Done.", "stop")
    assert "tool_calls" not in message
    (problem,) = message["tool_problems"]
    assert "offers no tools" in problem["message"] and problem["index"] is None and "sea" in problem["text"]
    assert world.log[-1]["tool_problems"] == 1
    assert 'dayzero:tool_problems_total{engine="0",model_name="tiny"} 1.0' in client(world).get("/metrics").text
    streamed = client(make(reply(text))).post(URL, json=ask(**more, stream=True)).text
    assert gathered(streamed) == whole({"choices": [choice]})
    for raw in ("<tool_call>", "<function=look>", CALL[:20]):  # cut off, or of another format
        (choice,) = client(make(reply(f"Well.{raw}"))).post(URL, json=ask(**more)).json()["choices"]
        assert choice["finish_reason"] == "stop" and "<tool_call>" not in choice["message"]["content"]


def test_a_format_beside_tools_allows_either() -> None:
    world = make(reply(CALL))
    body = ask(tools=[TOOL], response_format={"type": "json_object"})
    (choice,) = client(world).post(URL, json=body).json()["choices"]
    assert choice["finish_reason"] == "tool_calls"
    grammar = world.engine.seen[0].params.grammar
    assert grammar is not None and grammar.kind == "lark" and "look" in grammar.text
    client(world).post(URL, json=body | {"tool_choice": "required"})
    forced = world.engine.seen[1].params.grammar
    client(world).post(URL, json=ask(tools=[TOOL], tool_choice="required"))
    assert forced == world.engine.seen[2].params.grammar  # an answer that must be a call has no format
    client(world).post(URL, json=body | {"tool_choice": "none"})
    alone = world.engine.seen[3].params.grammar
    client(world).post(URL, json=ask(response_format={"type": "json_object"}))
    assert alone == world.engine.seen[4].params.grammar


def test_stop_strings_wait_for_min_tokens() -> None:
    """One token a byte: the fourth completes the first "ab", which is one of the four that min_tokens asks for."""
    for stream in (False, True):
        got: Any = client(make(reply("xxabyyabz"))).post(URL, json=ask(stop=["ab"], min_tokens=4, stream=stream))
        ((found, *_),) = [gathered(got.text).values() if stream else whole(got.json()).values()]
        assert found["content"] == "xxabyy"
        assert found["finish"] == [("stop", "ab")]
