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

from dayzero.engine.step import RowResult, StepResult
from dayzero.server.run import MAX_HEAD_BYTES, Http
from tests.paper.server_support import client, make
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
