"""Runs an app and its engine until it is told to end: HTTP from the first second, the model as soon as it is loaded.

SIGTERM and SIGINT drain: /ready turns 503, requests that are being served get their answers, then everything ends. A
second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
import uvicorn
import uvloop
from starlette.applications import Starlette
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from dayzero.engine.api import EngineInfo
from dayzero.engine.client import AsyncEngine
from dayzero.errors import EngineDead, MachineError, UsageError
from dayzero.server.errors import ApiError

POLL_SECONDS = 0.2
MAX_HEAD_BYTES = 1 << 18  # request line and headers
HEAD_SECONDS = 30.0  # from a connection's or a request's first byte to the end of its headers
GRACE_SECONDS = 5.0  # for connections that are still open when all answers have been given


class _Server(uvicorn.Server):
    """Signals are ours: uvicorn's own handling would close connections before the answers are given."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Http(HttpToolsProtocol):
    """Bounds what comes before a body: the parser joins pieces of a header one by one, and a single long header would
    hold up all other clients. What is no HTTP is answered in the API's words too."""

    _head_bytes: int | None = 0  # of the head that is being read; None: a body is
    _head_timer: asyncio.TimerHandle | None = None
    head_seconds = HEAD_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_came()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._head_bytes = 0
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._head_bytes = None
        self._head_came()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._head_came()
        self._head_timer = self.loop.call_later(self.head_seconds, self._head_late)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_late(self) -> None:
        """Between requests a connection may rest: how long is the server's ``timeout_keep_alive``."""
        if self.cycle is not None and not self.cycle.response_complete:  # the answer to the request before goes on
            self._await_head()
        elif not self.transport.is_closing():
            self._refuse(408, b"Request Timeout", "the request's headers did not come in time.")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._head_bytes is not None and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, b"Request Header Fields Too Large", "the request's headers are too long.")

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, b"Bad Request", "this is not a valid HTTP request.")

    def _refuse(self, status: int, reason: bytes, sentence: str) -> None:
        body = msgspec.json.encode(ApiError(status, sentence).body("openai"))
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, reason, len(body)) + body)
        self.transport.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. port 0 takes a free one. UsageError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
        made.listen(1024)
    except OSError as error:
        made.close()
        raise UsageError(f"--host {host} --port {port}: {error.strerror}; give another address or port.") from error
    made.setblocking(False)
    return made


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run ``main`` on uvloop, which costs half the processor time of the standard loop for each chunk sent."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


async def serve(
    app: Starlette,
    engine: AsyncEngine,
    listening: socket.socket,
    *,
    drain_seconds: float,
    on_loading: Callable[[float, float], None] = lambda loaded, total: None,
    on_ready: Callable[[EngineInfo], None] = lambda info: None,
) -> None:
    """Serve until a signal comes, then drain. Errors: those of loading the model; EngineDead when the engine ended for
    good while serving. on_loading: bytes read so far and in all."""
    server = _Server(
        uvicorn.Config(app, http=Http, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=75)
    )
    asked = _signals()
    http, forced = asyncio.create_task(server.serve(sockets=[listening])), False
    try:
        await engine.start()
        info = await _loaded(engine, asked, on_loading)
        if info is not None:
            on_ready(info)
            await _until_asked(engine, asked, http)
            forced = await _drain(app, engine, asked, drain_seconds)
    finally:
        await engine.close()
        server.should_exit = True
        await _ended(server, http, asked, 0.0 if forced else GRACE_SECONDS)


def _signals() -> asyncio.Semaphore:
    """A semaphore that every SIGTERM and SIGINT raises by one."""
    asked, loop = asyncio.Semaphore(0), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.release)
    return asked


async def _loaded(
    engine: AsyncEngine, asked: asyncio.Semaphore, on_loading: Callable[[float, float], None]
) -> EngineInfo | None:
    """What is known of the loaded model; None when a signal came first."""
    ready, stopped = asyncio.create_task(engine.wait_ready()), asyncio.create_task(asked.acquire())
    try:
        while not ready.done() and not stopped.done():
            await asyncio.wait({ready, stopped}, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            progress = engine.status().progress
            if progress is not None and progress.to_load:
                on_loading(progress.loaded, progress.to_load)
        return ready.result() if ready.done() else None
    finally:
        for task in (ready, stopped):
            task.cancel()


async def _until_asked(engine: AsyncEngine, asked: asyncio.Semaphore, http: asyncio.Task[None]) -> None:
    stopped = asyncio.create_task(asked.acquire())
    try:
        while not stopped.done():
            await asyncio.wait({stopped, http}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
            status = engine.status()
            if status.state == "dead":
                raise EngineDead(f"the engine has ended and will not be started again: {status.why}")
            if http.done():
                raise MachineError("the HTTP server ended unasked; see the lines above.")
    finally:
        stopped.cancel()


async def _ended(server: uvicorn.Server, http: asyncio.Task[None], asked: asyncio.Semaphore, seconds: float) -> None:
    """Wait ``seconds``, or until a signal comes, for connections that are still open, then cut them off: to their tasks
    that is a client that leaves, and they end as then. Cancelled by force they would be logged as faults of ours."""
    for patience in (seconds, GRACE_SECONDS):
        again = asyncio.create_task(asked.acquire())
        await asyncio.wait({http, again}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if http.done():
            break
        for connection in list(server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
    server.force_exit = True
    await http


async def _drain(app: Starlette, engine: AsyncEngine, asked: asyncio.Semaphore, seconds: float) -> bool:
    """Let answers be given, for at most ``seconds``, or until a second signal comes. Returns whether one came."""
    drained, again = asyncio.create_task(app.state.server.drain(seconds)), asyncio.create_task(asked.acquire())
    await asyncio.wait({drained, again}, return_when=asyncio.FIRST_COMPLETED)
    forced = again.done()
    for task in (drained, again):
        task.cancel()
    await engine.close()
    return forced
