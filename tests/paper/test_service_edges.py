"""What hostile clients and bad moments do to the service: each once broke something."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import uvicorn

from dayzero.commands.serve import ServeArguments, config_of
from dayzero.engine.step import RowResult, StepResult
from dayzero.errors import UsageError
from dayzero.server.config import ServerConfig
from dayzero.server.run import MAX_HEAD_BYTES, Http
from tests.paper.server_support import ask, chat_with, client, make
from tests.paper.step_driver import Driver, layout_of, prompt, request


def test_what_a_request_aborted_in_flight_wrote_badly_is_not_reused() -> None:
    """The abort comes between the step and its result, and the result says NaN: others must not find those pages."""
    driver = Driver(layout_of("dense"), 60)
    driver.add(request("a", prompt(17), ignore_eos=True))
    step = driver.scheduler.schedule()
    assert step is not None
    driver.machine.submit(step)
    driver.abort("a")
    driver.machine.sample(step.number, driver.scheduler.dropped)
    driver.machine.result(step.number)
    driver.scheduler.commit(StepResult(step.number, (RowResult("a", bad="nan"),)))
    for slot in driver.scheduler.take_released():
        driver.machine.release(slot)
    driver.add(request("b", prompt(17), ignore_eos=True))
    driver.run()
    assert driver.outputs["b"][0].cached == 0


def test_draining_does_not_wait_for_a_body_that_never_comes() -> None:
    state = make().app.state.server
    app = make().app
    state = app.state.server

    async def run() -> None:
        async def receive() -> dict[str, object]:
            if not begun.is_set():
                begun.set()
                return {"type": "http.request", "body": b"{", "more_body": True}
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: object) -> None:
            raise AssertionError(f"answered {message}")

        begun = asyncio.Event()
        path = "/v1/completions"
        scope = {
            "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "headers": [],
            "query_string": b"", "root_path": "", "scheme": "http", "server": ("test", 80), "http_version": "1.1",
        }  # fmt: skip
        half = asyncio.create_task(app(scope, receive, send))
        await begun.wait()
        assert await state.drain(1.0)
        half.cancel()
        await asyncio.gather(half, return_exceptions=True)

    asyncio.run(run())


@pytest.mark.parametrize("form", ["utf-8", "latin-1"])
@pytest.mark.parametrize("name", [b"x-api-key", b"authorization"])
def test_keys_beyond_ascii_open_in_either_encoding(form: str, name: bytes) -> None:
    web = client(make(api_keys=("clé",)))

    def status(key: str) -> int:
        value = (b"Bearer " if name == b"authorization" else b"") + key.encode(form)
        return web.get("/v1/models", headers=[(name, value)]).status_code

    assert (status("clé"), status("cle"), status("cl?")) == (200, 401, 401)


def test_a_key_beyond_latin_1_is_not_opened_by_question_marks() -> None:
    web = client(make(api_keys=("鍵",)))
    assert web.get("/v1/models", headers={"x-api-key": "?"}).status_code == 401
    assert web.get("/v1/models", headers=[(b"x-api-key", "鍵".encode())]).status_code == 200


@pytest.mark.parametrize("key", ["", "secret\n", " secret", "sec\nret", "sec\x00ret"])
def test_a_key_that_no_client_can_send_is_refused_at_the_start(key: str) -> None:
    with pytest.raises(UsageError, match="an API key"):
        ServerConfig(served_names=("tiny",), api_keys=("good", key))


def test_what_could_never_be_admitted_is_400_and_not_try_again() -> None:
    """12 requests may run or wait, so 13 answers to one request are refused for good."""
    arguments = ServeArguments("somewhere", max_running=4, max_waiting=8)
    assert config_of(arguments).max_choices == 12
    assert config_of(ServeArguments("somewhere", max_waiting=10**6)).max_choices == ServerConfig.max_choices
    app = client(make(max_choices=12))
    for body in ({"prompt": [5], "n": 13}, {"prompt": [[5]] * 13}, {"prompt": [[5]] * 7, "n": 2}):
        answer = app.post("/v1/completions", json=body | {"max_tokens": 1})
        assert answer.status_code == 400 and "at most 12" in answer.json()["error"]["message"]
    assert app.post("/v1/completions", json={"prompt": [[5]] * 12, "max_tokens": 1}).status_code == 200


def test_tools_that_no_call_can_come_of_are_named() -> None:
    plain = chat_with("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")
    tool = {"type": "function", "function": {"name": "look"}}
    for tool_choice, named in (("auto", "tools"), ("none", None)):
        world = make(chat=plain)
        answer = client(world).post("/v1/chat/completions", json=ask(tools=[tool], tool_choice=tool_choice))
        assert answer.status_code == 200
        assert answer.headers.get("x-dayzero-ignored") == named


def test_a_token_biased_twice_is_refused() -> None:
    """Which of the two is meant nobody can say."""
    answer = client(make()).post("/v1/completions", json={"prompt": "a", "logit_bias": {"5": 100, "05": -100}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logit_bias")


def test_a_slash_too_many_is_a_404_with_an_error_object() -> None:
    """Not a redirect to whatever the client said this host is called."""
    answer = client(make()).post("/v1/completions/", json={"prompt": "a"}, headers={"host": "elsewhere"})
    assert answer.status_code == 404 and answer.json()["error"]["type"] == "invalid_request_error"
    assert "location" not in answer.headers


@pytest.mark.parametrize(
    "sent, status",
    [
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (4 * MAX_HEAD_BYTES), 431),
        (b"GET /" + b"a" * (4 * MAX_HEAD_BYTES), 431),
        (b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES, 431),
        (b"\0\1\2\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n\r\n", 200),
    ],
    ids=["header", "url", "headers", "garbage", "good"],
)
def test_heads_are_bounded_and_refused_in_json(sent: bytes, status: int) -> None:
    with _listening() as address, socket.create_connection(address, timeout=10) as connection:
        answer = _exchange(connection, sent)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert ("error" in json.loads(body)) == (status != 200)


@contextlib.contextmanager
def _listening(protocol: type[Http] = Http) -> Iterator[tuple[str, int]]:
    """The app behind our own reading of HTTP; yields its address."""
    server = uvicorn.Server(uvicorn.Config(make().app, port=0, http=protocol, log_config=None, lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=lambda: server.run(sockets=[listening]), daemon=True)
        thread.start()
        try:
            yield listening.getsockname()
        finally:
            server.should_exit = True
            thread.join(timeout=10)


class _Impatient(Http):
    head_seconds = 0.3


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nHo"], ids=["nothing", "half a head"])
def test_a_head_that_does_not_come_is_408(sent: bytes) -> None:
    with _listening(_Impatient) as address, socket.create_connection(address, timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n" if sent else b"")
        good = _exchange(connection, b"") if sent else b"HTTP/1.1 200 "
        connection.sendall(sent)
        head, _, body = _exchange(connection, b"").partition(b"\r\n\r\n")
        assert connection.recv(1) == b""  # closed
    assert good.startswith(b"HTTP/1.1 200 ")
    assert head.startswith(b"HTTP/1.1 408 ") and "in time" in json.loads(body)["error"]["message"]


def test_a_connection_may_rest_between_requests() -> None:
    with _listening(_Impatient) as address, socket.create_connection(address, timeout=10) as connection:
        for _ in range(2):
            answer = _exchange(connection, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")
            time.sleep(0.5)


def _exchange(connection: socket.socket, sent: bytes) -> bytes:
    def push() -> None:
        try:
            connection.sendall(sent)
        except OSError:
            pass  # refused while it was being sent

    pushing = threading.Thread(target=push, daemon=True)
    pushing.start()
    answer = b""
    try:
        while b"}" not in answer and (data := connection.recv(65536)):
            answer += data
    except ConnectionResetError:
        pass  # what was sent and never read; the answer came before
    return answer
