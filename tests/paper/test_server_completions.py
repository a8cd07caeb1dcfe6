"""/v1/completions: forms of prompts, echo with log-probabilities, batches; /tokenize and its kin."""

from __future__ import annotations

from typing import Any

import pytest

from dayzero.engine.request import NewRequest
from tests.paper.server_support import VOCAB, ScriptedEngine, client, events, ids, logprobs, make, no_chat

URL = "/v1/completions"
BEGIN = 256  # what the tokenizer puts before a text


def body(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "ab"} | more


def echoing(request: NewRequest) -> list[int]:
    """The prompt again, so that answers tell their prompts apart."""
    return [token for token in request.prompt if token < 256]


@pytest.mark.parametrize(
    "prompt, read",
    [
        ("ab", [[BEGIN, 97, 98]]),
        (["ab", "c"], [[BEGIN, 97, 98], [BEGIN, 99]]),
        ([97, 98], [[97, 98]]),
        ([[97], [98, 99]], [[97], [98, 99]]),
        ("<|start|>x", [[BEGIN, 257, 120]]),
    ],
)
def test_the_forms_of_a_prompt(prompt: Any, read: list[list[int]]) -> None:
    world = make()
    answer = client(world).post(URL, json=body(prompt=prompt, n=2))
    assert answer.status_code == 200, answer.text
    assert [r.prompt for r in world.engine.seen] == [p for p in read for _ in range(2)]
    assert [c["index"] for c in answer.json()["choices"]] == list(range(2 * len(read)))
    assert answer.json()["usage"]["prompt_tokens"] == sum(map(len, read))
    leaders = [r.leader for r in world.engine.seen]
    assert leaders[::2] == [None] * len(read)
    assert leaders[1::2] == [r.id for r in world.engine.seen[::2]]


def test_answers_come_in_the_order_of_prompts() -> None:
    for stream in (False, True):
        prompts = [f"prompt {k}" for k in range(20)]
        answer = client(make(ScriptedEngine(reply=echoing))).post(URL, json=body(prompt=prompts, stream=stream))
        texts = [""] * 20
        for event in events(answer.text)[:-1] if stream else [answer.json()]:
            for choice in event["choices"]:
                texts[choice["index"]] += choice["text"]
        assert texts == prompts


@pytest.mark.parametrize("max_tokens", [0, 1])
@pytest.mark.parametrize("prompt", ["h\u00e9 \U0001f642", [104, 195, 169]])
def test_echo_gives_every_prompt_token_its_logprob(prompt: Any, max_tokens: int) -> None:
    """As evaluations read it: one entry a token, none for the first, the chosen token among its alternatives."""
    world = make(ScriptedEngine(reply=lambda request: ids("!")[:max_tokens]))
    answer = client(world).post(URL, json=body(prompt=prompt, echo=True, logprobs=1, max_tokens=max_tokens)).json()
    read = world.engine.seen[0].prompt
    choice, got = answer["choices"][0], answer["choices"][0]["logprobs"]
    tokens = read + ids("!")[:max_tokens]
    assert world.engine.seen[0].params.prompt_logprobs == 1
    assert [len(got[k]) for k in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [len(tokens)] * 4
    assert got["token_logprobs"] == [None, *(pytest.approx(logprobs(t, 1).logprob) for t in tokens[1:])]
    assert got["top_logprobs"][0] is None
    assert all(text in top for text, top in list(zip(got["tokens"], got["top_logprobs"]))[1:])
    text = prompt if isinstance(prompt, str) else bytes(prompt).decode()
    assert choice["text"] == text + "!" * max_tokens
    for token, piece, offset in zip(tokens, got["tokens"], got["text_offset"]):
        if token < 128:
            assert choice["text"][offset:].startswith(piece)
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert choice["finish_reason"] == "length"


def test_echo_without_logprobs_and_logprobs_without_echo() -> None:
    choice = client(make()).post(URL, json=body(echo=True, max_tokens=2)).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("abHe", None)
    choice = client(make()).post(URL, json=body(logprobs=3, max_tokens=2)).json()["choices"][0]
    assert choice["logprobs"]["tokens"] == ["H", "e"]
    assert choice["logprobs"]["text_offset"] == [0, 1]
    assert choice["logprobs"]["top_logprobs"][0] == {"H": -0.1, "I": -1.1, "J": -9999.0}


@pytest.mark.parametrize("pieces", [1, 4])
def test_streamed_equals_not_streamed(pieces: int) -> None:
    more = {"prompt": ["ab", "c"], "echo": True, "logprobs": 2, "n": 2, "return_token_ids": True, "max_tokens": 40,
            "prompt_logprobs": 1, "stop": "rld"}  # fmt: skip
    plain = client(make()).post(URL, json=body(**more)).json()
    text = (
        client(make(ScriptedEngine(pieces=pieces)))
        .post(URL, json=body(**more, stream=True, stream_options={"include_usage": True}))
        .text
    )
    *chunks, last, done = events(text)
    assert (done, last["choices"], last["usage"]) == ("[DONE]", [], plain["usage"])
    built: list[dict[str, Any]] = [{} for _ in range(4)]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        got = built[choice["index"]]
        if not got:
            got |= choice
            continue
        got["text"] += choice["text"]
        for key in got["logprobs"]:
            got["logprobs"][key] += choice["logprobs"][key]
        got["token_ids"] += choice["token_ids"]
        got |= {k: choice[k] for k in ("finish_reason", "stop_reason") if k in choice}
    assert built == plain["choices"]
    assert {(c["finish_reason"], c["stop_reason"]) for c in plain["choices"]} == {("stop", "rld")}


@pytest.mark.parametrize(
    "more, param",
    [
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, [1]]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [VOCAB]}, "prompt"),
        ({"prompt": [2**40]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": None}, "prompt"),
        ({"prompt": "", "add_special_tokens": False}, "prompt"),
        ({"prompt": "x" * 3000}, "prompt"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"prompt": ["a"] * 20, "n": 60}, "n"),
    ],
)
def test_bad_input_is_400_and_names_its_field(more: dict[str, Any], param: str) -> None:
    answer = client(make()).post(URL, json=body(**more))
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, answer.text


def test_defaults_of_this_api() -> None:
    world = make()
    assert client(world).post(URL, json={"prompt": "a", "best_of": 1}).status_code == 200
    assert world.engine.seen[0].params.max_tokens == 16


@pytest.mark.parametrize(("short", "max_tokens", "given"), [
    (20, None, 16), (16, None, 16), (1, None, 1), (1, 1, 1), (1, 0, 0), (0, 0, 0), (1, 2, None), (0, None, None),
    (0, 1, None), (-1, None, None), (-1, 0, None), (-1, 1, None),
])  # fmt: skip
def test_context_edges(short: int, max_tokens: int | None, given: int | None) -> None:
    """A prompt that is ``short`` tokens shorter than the context: what was not asked for is cut to the room."""
    world = make()
    prompt = [5] * (world.engine.info.max_model_len - short)
    answer = client(world).post(URL, json=body(prompt=prompt, max_tokens=max_tokens))
    if given is None:
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"
    else:
        assert answer.status_code == 200 and world.engine.seen[0].params.max_tokens == given


def test_without_a_tokenizer_token_ids_are_served() -> None:
    world = make(chat=no_chat())
    got = client(world).post(URL, json=body(prompt=[5, 6], echo=True, logprobs=1, max_tokens=2)).json()["choices"][0]
    assert got["token_ids"] == ids("He")
    assert got["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:72", "token_id:101"]
    assert got["text"] == ""
    for more in ({"prompt": "text"}, {"prompt": [1], "stop": "x"}):
        answer = client(world).post(URL, json=body(**more))
        assert answer.status_code == 400
        assert "holds no tokenizer" in answer.json()["error"]["message"]


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_back(prefix: str) -> None:
    web = client(make())
    answer = web.post(f"{prefix}/tokenize", json={"prompt": "hé", "return_token_strs": True}).json()
    assert answer == {"count": 4, "max_model_len": 2000, "tokens": [BEGIN, 104, 195, 169],
                      "token_strs": ["<|begin|>", "h", "\ufffd", "\ufffd"]}  # fmt: skip
    assert web.post(f"{prefix}/tokenize", json={"prompt": "a", "add_special_tokens": False}).json()["tokens"] == [97]
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    answer = web.post(f"{prefix}/tokenize", json=chat).json()
    assert answer["prompt"] == "<|start|>user\nhi<|end|><|start|>assistant\n"
    world = make()
    client(world).post("/v1/chat/completions", json=chat)
    assert world.engine.seen[0].prompt == answer["tokens"]
    assert web.post(f"{prefix}/detokenize", json={"tokens": [256, 104, 195, 169]}).json() == {"prompt": "<|begin|>hé"}
    skipped = {"tokens": [256, 104], "skip_special_tokens": True}
    assert web.post(f"{prefix}/detokenize", json=skipped).json() == {"prompt": "h"}
    info = web.get(f"{prefix}/tokenizer_info").json()
    assert (info["vocab_size"], info["special_tokens"]["258"]) == (VOCAB, "<|end|>")


@pytest.mark.parametrize(
    "path, wrong",
    [
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": ""}]}),
        ("/detokenize", {"tokens": [VOCAB]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": "a"}),
    ],
)
def test_wrong_tokenize_requests(path: str, wrong: dict[str, Any]) -> None:
    assert client(make()).post(path, json=wrong).status_code == 400
