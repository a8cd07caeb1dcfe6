"""What stands around the endpoints: keys, limits, unknown names, an engine that is not there, probes, the log."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from dayzero.errors import UsageError
from dayzero.server.config import ServerConfig
from tests.paper.server_support import ScriptedEngine, ask, byte_tokenizer, client, events, ids, make

CHAT = "/v1/chat/completions"
GENERATING = [
    (CHAT, ask()),
    ("/v1/completions", {"prompt": "a"}),
    ("/v1/responses", {"input": "a"}),
    ("/v1/messages", {"max_tokens": 9, "messages": [{"role": "user", "content": "a"}]}),
]
OPEN = ["/health", "/ready", "/health/ready", "/ping", "/progress", "/metrics", "/version", "/openapi.json"]


@pytest.mark.parametrize("path, body", GENERATING)
def test_overload_and_missing_engines(path: str, body: dict[str, Any]) -> None:
    for stream in (False, True):
        answer = client(make(ScriptedEngine(overloaded=True))).post(path, json=body | {"stream": stream})
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
        assert "waiting" in answer.text
        for state in ("loading", "draining", "restarting", "dead"):
            answer = client(make(ScriptedEngine(state=state))).post(path, json=body | {"stream": stream})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "2"), state


@pytest.mark.parametrize("path, body", GENERATING)
@pytest.mark.parametrize(
    "error, status",
    [
        (("engine_died", "it died."), 503),
        (("nan_logits", "no numbers."), 500),
        (("grammar", "no such schema."), 400),
        (("grammar_too_complex", "too complex."), 400),
        (("too_long", "too long."), 400),
        (("overloaded", "too many."), 429),
        (("internal", "a bug."), 500),
    ],
)
def test_an_answer_that_fails_at_once(path: str, body: dict[str, Any], error: tuple[str, str], status: int) -> None:
    """Before anything has been answered, a stream too has an HTTP status; one line of the log says why."""
    for stream in (False, True):
        world = make(ScriptedEngine(dies_after=0, fails=error))
        answer = client(world).post(path, json=body | {"stream": stream})
        assert answer.status_code == status
        assert error[1] in answer.text
        (line,) = world.log
        assert (line["status"], line["finish"]) == (status, ["error"])
        assert line["error"] in (error[0], "context_length_exceeded", "rate_limit_exceeded")


@pytest.mark.parametrize("path, body", GENERATING)
def test_an_answer_that_fails_later(path: str, body: dict[str, Any]) -> None:
    """Not streamed, it is an error; streamed, an error object within the stream, which then ends."""
    plain = client(make(ScriptedEngine(dies_after=3))).post(path, json=body)
    assert plain.status_code == 503
    world = make(ScriptedEngine(dies_after=3))
    streamed = client(world).post(path, json=body | {"stream": True})
    assert streamed.status_code == 200
    assert "the process ended." in streamed.text
    if path in (CHAT, "/v1/completions"):
        *_, problem, done = events(streamed.text)
        assert (done, problem["error"]["code"], problem["error"]["type"]) == ("[DONE]", "engine_died", "server_error")
    assert world.log[0]["error"] == "engine_died"
    taken = ("grammar", "left its grammar.")
    assert client(make(ScriptedEngine(dies_after=3, fails=taken))).post(path, json=body).status_code == 500
    unknown = ("grammar_too_complex", "too complex.")
    assert client(make(ScriptedEngine(dies_after=3, fails=unknown))).post(path, json=body).status_code == 400


def test_tokens_that_come_together_with_an_error_are_told_first() -> None:
    """As when nobody reads while an engine dies: its last output holds tokens and the error."""
    hello = {"reply": lambda request: ids("Hello, world"), "pieces": 3, "dies_after": 2, "merged_end": True}
    got = events(client(make(ScriptedEngine(**hello))).post(CHAT, json=ask(stream=True)).text)
    assert "".join(e["choices"][0]["delta"].get("content") or "" for e in got[:-2]) == "Hello, wo"
    assert (got[-2]["error"]["code"], got[-1]) == ("engine_died", "[DONE]")
    world = make(ScriptedEngine(**hello | {"dies_after": 0}))
    answer = client(world).post(CHAT, json=ask(stream=True))
    assert answer.status_code == 200 and "Hel" in answer.text and "engine_died" in answer.text
    assert world.log[0]["finish"] == ["error"] and world.log[0]["completion_tokens"] == 3
    plain = client(make(ScriptedEngine(**hello))).post(CHAT, json=ask())
    assert plain.status_code == 503


def test_a_bug_is_a_500_that_gives_nothing_away(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Any) -> list[int]:
        raise KeyError("a secret")

    def late(request: Any) -> Any:
        return [*ids("ab"), "c"]

    world = make(ScriptedEngine(reply=broken))
    web = client(world, quiet=True)
    for stream in (False, True):
        answer = web.post(CHAT, json=ask(stream=stream))
        assert answer.status_code == 500
        assert answer.json()["error"]["type"] == "server_error"
        assert "secret" not in answer.text
    assert world.log[-1]["status"] == 500
    assert 'status="5xx"} 2.0' in web.get("/metrics").text
    web = client(make(ScriptedEngine(reply=late)), quiet=True)
    *_, problem, done = events(web.post(CHAT, json=ask(stream=True)).text)
    assert (done, problem["error"]["code"]) == ("[DONE]", "internal")


def test_keys() -> None:
    web = client(make(api_keys=("one", "two")))
    for path, body in GENERATING:
        for headers in ({}, {"authorization": "Bearer three"}, {"authorization": "one"}, {"x-api-key": "öne"}):
            answer = web.post(path, json=body, headers={k: v.encode() for k, v in headers.items()})
            assert answer.status_code == 401
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "authentication_error" in answer.text
        for headers in ({"authorization": "Bearer two"}, {"x-api-key": "one"}, {"authorization": "bearer one"}):
            assert web.post(path, json=body, headers=headers).status_code == 200
    assert web.get("/v1/models").status_code == 401
    assert web.post("/tokenize", json={"prompt": "a"}).status_code == 401
    for path in OPEN:
        assert web.get(path).status_code == 200


def test_unknown_models_paths_and_methods() -> None:
    web = client(make())
    for path, body in GENERATING:
        answer = web.post(path, json=body | {"model": "gpt"})
        assert answer.status_code == 404
        assert "tiny, also-tiny" in answer.text
        assert web.post(path, json=body | {"model": "also-tiny"}).json()["model"] == "also-tiny"
        assert web.get(path).status_code == 405
    assert web.post(CHAT, json=ask(model="gpt")).json()["error"]["code"] == "model_not_found"
    missing = web.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["type"]) == (404, "invalid_request_error")
    assert web.post("/v1/messages/nothing").json()["type"] == "error"
    allowed = {path: web.request("DELETE", path).headers["allow"] for path in ("/health", "/ping", CHAT)}
    assert allowed == {"/health": "GET, HEAD", "/ping": "GET, HEAD, POST", CHAT: "POST"}


def test_models() -> None:
    web = client(make())
    cards = web.get("/v1/models").json()
    assert [(c["id"], c["parent"]) for c in cards["data"]] == [("tiny", None), ("also-tiny", "tiny")]
    card = web.get("/v1/models/tiny").json()
    assert card == cards["data"][0]
    assert (card["max_model_len"], card["owned_by"], card["root"]) == (2000, "dayzero", "models/test")
    assert card["capabilities"]["encoding"] == "hermes"
    assert web.get("/v1/models/other/name").status_code == 404
    assert client(make(ScriptedEngine(state="loading"))).get("/v1/models").status_code == 503


@pytest.mark.parametrize(
    "body, status",
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b"NaN", 400),
        (b"\xff\xfe", 400),
        (b'{"prompt": "\xff"}', 400),
        (b'{"prompt": "\\ud800"}', 400),
        (b'{"prompt": "a", "temperature": 1e999}', 400),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400),
        (b'{"prompt": "a", "guided_json": ' + b"[" * 70 + b"]" * 70 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"a":' * 3000 + b"1" + b"}" * 3000, 400),
        (b'{"prompt": "' + b"x" * 100_001 + b'"}', 413),
        (b'{"prompt": "a", "guided_json": ' + b'{"a":' * 60 + b"1" + b"}" * 60 + b"}", 200),
    ],
)
def test_bodies(body: bytes, status: int) -> None:
    web = client(make(max_body_bytes=100_000))
    for path in ("/v1/completions", "/v1/messages"):
        answer = web.post(path, content=body)
        assert answer.status_code == (status if path == "/v1/completions" else status if status == 413 else 400)
        if status != 200:
            assert answer.json()["error"]["message"]


def test_a_body_of_unknown_length_is_cut_off_too() -> None:
    async def parts() -> Any:
        for _ in range(100):
            yield b"x" * 10_000

    assert client(make(max_body_bytes=100_000)).post(CHAT, content=parts()).status_code == 413


def test_a_body_that_does_not_come_is_408() -> None:
    """A client that stalls, and one that sends a byte now and then; one that is only slow is served."""

    async def ask_with(parts: Any, **config: Any) -> int:
        world = make(body_seconds=0.2, **config)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url="http://test") as web:
            answer = await web.post(CHAT, content=parts)
        if answer.status_code == 408:
            assert answer.headers["connection"] == "close" and "did not come" in answer.json()["error"]["message"]
            assert world.log[-1]["status"] == 408
        return answer.status_code

    async def stalls() -> Any:
        yield b"{"
        await asyncio.sleep(9)

    async def trickles() -> Any:
        for letter in json.dumps(ask()).encode():
            yield bytes([letter])
            await asyncio.sleep(0.02)

    async def slow() -> Any:
        body = json.dumps(ask(metadata={"x": "y" * 200_000})).encode()
        for at in range(0, len(body), 20_000):
            yield body[at : at + 20_000]
            await asyncio.sleep(0.03)

    assert asyncio.run(ask_with(stalls())) == 408
    assert asyncio.run(ask_with(trickles())) == 408
    assert asyncio.run(ask_with(slow())) == 200


def test_probes() -> None:
    def statuses(engine: ScriptedEngine) -> list[int]:
        web = client(make(engine))
        return [web.get(path).status_code for path in ("/health", "/ping", "/ready", "/health/ready", "/progress")]

    assert statuses(ScriptedEngine()) == [200, 200, 200, 200, 200]
    assert statuses(ScriptedEngine(state="loading")) == [200, 200, 503, 503, 200]
    assert statuses(ScriptedEngine(state="draining")) == [200, 200, 503, 503, 200]
    assert statuses(ScriptedEngine(state="restarting")) == [503, 503, 503, 503, 200]
    assert statuses(ScriptedEngine(state="dead")) == [503, 503, 503, 503, 200]
    assert statuses(ScriptedEngine(stalled=True)) == [503, 503, 503, 503, 200]
    web = client(make())
    assert web.post("/ping").status_code == 200
    assert web.get("/progress").json()["progress"]["step"] == 7
    assert web.get("/version").json()["version"]


def test_drain_waits_for_answers_and_takes_no_more() -> None:
    import httpx

    async def story() -> None:
        world = make(ScriptedEngine(delay=0.02))
        server = world.app.state.server
        transport = httpx.ASGITransport(world.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as web:
            first = asyncio.create_task(web.post(CHAT, json=ask()))
            while not world.engine.live:
                await asyncio.sleep(0.005)
            drained = asyncio.create_task(server.drain(20))
            await asyncio.sleep(0.01)
            assert not drained.done()
            assert (await web.get("/ready")).status_code == 503
            assert (await web.get("/health")).status_code == 200
            refused = await web.post(CHAT, json=ask())
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
            assert await drained
            assert (await first).status_code == 200
            slow = make(ScriptedEngine(delay=0.2))
            transport = httpx.ASGITransport(slow.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as web:
            task = asyncio.create_task(web.post(CHAT, json=ask()))
            while not slow.engine.live:
                await asyncio.sleep(0.005)
            assert not await slow.app.state.server.drain(0.05)
            task.cancel()

    asyncio.run(story())


def test_the_log_has_one_line_a_request_and_no_prompt() -> None:
    world = make()
    web = client(world)
    secret = "a very private question"
    for path, body in GENERATING:
        text = json.dumps(body).replace('"a"', f'"{secret}"').replace('"hi"', f'"{secret}"')
        assert web.post(path, content=text).status_code == 200
        assert web.post(path, content=text.replace(secret, secret * 1000)).status_code == 400
        assert web.post(path, json={"messages": secret, "prompt": {secret: 1}}).status_code == 400
    assert len(world.log) == 3 * len(GENERATING)
    assert secret not in json.dumps(world.log)
    good = world.log[0]
    assert (good["event"], good["endpoint"], good["status"], good["finish"]) == ("request", CHAT, 200, ["stop"])
    assert {"id", "time", "seconds", "prompt_tokens", "completion_tokens", "cached_tokens", "ttft_s", "queue_s"} <= set(
        good
    )
    assert (world.log[1]["status"], world.log[1]["error"], world.log[1]["param"]) == (
        400, "context_length_exceeded", "messages",
    )  # fmt: skip
    web.get("/health")
    assert len(world.log) == 12


@pytest.mark.parametrize("path, body", GENERATING)
def test_a_text_that_is_too_long_in_any_case_is_not_tokenised(path: str, body: dict[str, Any]) -> None:
    """A token of this vocabulary holds 12 characters at most, so 2,000 of them are no 6 million."""
    world = make()
    tokenizer = byte_tokenizer()
    assert tokenizer.coverage is not None and tokenizer.coverage.chars == len("</tool_call>")
    text = json.dumps(body).replace('"a"', '"@"').replace('"hi"', '"@"').replace("@", "word " * 1_200_000)
    begun = time.process_time()
    answer = client(world).post(path, content=text)
    assert answer.status_code == 400 and "at most 2000 tokens" in answer.text and not world.engine.seen
    assert time.process_time() - begun < 1.0  # encoding it takes several seconds
    assert world.log[0]["error"] == "context_length_exceeded"
    assert world.log[0]["param"] == {CHAT: "messages", "/v1/completions": "prompt", "/v1/responses": "input"}.get(
        path, "messages"
    )


def test_long_prompts_are_tokenised_off_the_loop() -> None:
    """While one request's long prompt is tokenised, others are answered: the loop runs in between."""
    import httpx

    async def story() -> None:
        world = make(thread_chars=1000)
        beats = 0

        async def beat() -> None:
            nonlocal beats
            while True:
                await asyncio.sleep(0)
                beats += 1

        async with httpx.AsyncClient(transport=httpx.ASGITransport(world.app), base_url="http://test") as web:
            beating = asyncio.create_task(beat())
            await web.post("/tokenize", json={"prompt": "wörter " * 30_000})
            beating.cancel()
        assert beats > 5  # on the loop none could come in between; how many do is the machine's load

    asyncio.run(story())


def test_a_config_that_cannot_hold_is_refused() -> None:
    for wrong in ({"served_names": ()}, {"served_names": ("",)}, {"served_names": ("a",), "api_keys": ("",)},
                  {"served_names": ("a",), "max_body_bytes": 0}, {"served_names": ("a", "b\nc")},
                  {"served_names": ("a\x1b[31m",)}, {"served_names": ("a",), "body_seconds": 0.0}):  # fmt: skip
        with pytest.raises(UsageError):
            ServerConfig(**wrong)
