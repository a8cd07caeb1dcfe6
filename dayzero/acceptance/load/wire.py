"""HTTP/1.1 for a load generator: asyncio streams of bytes over httptools, the parser that the server side runs on too.

A general client spends more on a chunk than a server does; on a machine that both share this would be measured as the
server's. Connections are kept and reused. One that the server has closed meanwhile is replaced without a word.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools

from dayzero.errors import UsageError

Sink = Callable[[int, bytes, float], None]  # status, part of the body, when it came (time.perf_counter)


class Closed(ConnectionError):
    """The connection ended before the answer did. fresh: before its first byte."""

    def __init__(self, why: str, fresh: bool) -> None:
        super().__init__(why)
        self.fresh = fresh


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    secure: bool
    path: str  # before every path, without a slash at its end

    @staticmethod
    def parse(url: str) -> Address:
        """``http://127.0.0.1:8000`` or ``…/v1``: a last ``/v1`` is taken off. UsageError for what is no such URL."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"{url} is no URL: {error}.") from error
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
            raise UsageError(f"{url}: give the address of a server such as http://127.0.0.1:8000.")
        secure = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
        return Address(parts.hostname, port or (443 if secure else 80), secure, path)

    @property
    def text(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' * self.secure}://{host}:{self.port}{self.path}"


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self.alive = True
        self.used = False
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None
        self._sink: Sink | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._status = self._received = 0
        self._measured = False  # the body's end is told by its length or its last chunk
        self._now = 0.0

    async def exchange(self, request: bytes, sink: Sink) -> int:
        """Send ``request``; returns the status when the answer is complete. Errors: Closed."""
        assert self._done is None, "the connection is in use"
        self._done, self._sink = asyncio.get_running_loop().create_future(), sink
        self._parser = httptools.HttpResponseParser(self)
        self._status, self._received, self._measured = 0, 0, False
        if not self.alive or self._transport is None:
            raise Closed("the server closed the connection", fresh=True)
        try:
            self._transport.write(request)
            return await self._done
        finally:
            if not self._done.done() or self._done.cancelled():
                self.close()
            self._done, self.used = None, True

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    # --- asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own is no subclass

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done() or self._parser is None:
            self.close()  # an answer that nobody asked for
            return
        self._received += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server's answer is no HTTP: {error}")

    def connection_lost(self, error: Exception | None) -> None:
        self.alive = False
        if self._done is None or self._done.done():
            return
        if self._status and not self._measured and error is None:
            self._done.set_result(self._status)
            return
        how = f": {error}" if error else ""
        self._done.set_exception(Closed(f"the server closed the connection{how}", fresh=not self._received))

    def _fail(self, why: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(Closed(why, fresh=False))
        self.close()

    # --- the parser's calls

    def on_header(self, name: bytes, value: bytes) -> None:
        self._measured |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._sink is not None
        self._sink(self._status, body, self._now)

    def on_message_complete(self) -> None:
        assert self._parser is not None and self._done is not None
        if self._status < 200:  # 100 Continue and its like come before the answer
            return
        if not self._parser.should_keep_alive():
            self.alive = False
        if not self._done.done():
            self._done.set_result(self._status)


class Pool:
    """Connections to one address. headers: sent with every request."""

    def __init__(self, address: Address, headers: dict[str, str] | None = None) -> None:
        self.address = address
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()
        self._ssl = ssl.create_default_context() if address.secure else None
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = {"Host": f"{host}:{address.port}", **(headers or {})}
        self._lines = "".join(f"{name}: {value}\r\n" for name, value in lines.items())

    async def post(self, path: str, body: bytes, sink: Sink, on_sent: Callable[[float], None] | None = None) -> int:
        """Send ``body`` as JSON; parts of the answer go to ``sink``. Returns the status.

        on_sent: told the time at which the request goes out, again when it goes out again because the server had closed
        a kept connection. Errors: OSError, of which Closed is one.
        """
        head = f"POST {self.address.path}{path} HTTP/1.1\r\n{self._lines}Content-Type: application/json\r\n"
        return await self._exchange(
            f"{head}Content-Length: {len(body)}\r\n\r\n".encode("latin-1") + body, sink, on_sent
        )

    async def get(self, path: str) -> tuple[int, bytes]:
        """(status, body). Errors: as ``post``."""
        parts: list[bytes] = []
        head = f"GET {self.address.path}{path} HTTP/1.1\r\n{self._lines}\r\n"
        status = await self._exchange(head.encode("latin-1"), lambda _, part, __: parts.append(part), None)
        return status, b"".join(parts)

    async def _exchange(self, request: bytes, sink: Sink, on_sent: Callable[[float], None] | None) -> int:
        while True:
            one = await self._connection()
            kept = one.used
            if on_sent is not None:
                on_sent(time.perf_counter())
            try:
                status = await one.exchange(request, sink)
            except Closed as error:
                if not (kept and error.fresh):  # else it was closed while nobody used it, and nothing was lost
                    raise
                continue
            finally:
                if not one.alive:
                    self._drop(one)
            if one.alive:
                self._idle.append(one)
            return status

    async def _connection(self) -> _Connection:
        while self._idle:
            one = self._idle.pop()
            if one.alive:
                return one
            self._drop(one)
        address, loop = self.address, asyncio.get_running_loop()
        _, made = await loop.create_connection(_Connection, address.host, address.port, ssl=self._ssl)
        self._open.add(made)
        return made

    def _drop(self, one: _Connection) -> None:
        one.close()
        self._open.discard(one)

    def close(self) -> None:
        for one in list(self._open):
            self._drop(one)
        self._idle.clear()
