"""A client for judging servers: any method, any bytes, all headers, and server-sent events as they stand on the wire.

A general client mends what it is given; here everything is kept as it came. One connection a request, so that what one
leaves behind cannot change the next.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dayzero.acceptance.load.streamed import refusal_text
from dayzero.acceptance.load.wire import Address
from dayzero.errors import MachineError

TIMEOUT = 120.0
READ_BYTES = 1 << 16
JSON_TYPE = "application/json"


class NoAnswer(MachineError):
    """The server gave no HTTP answer: refused, reset, or silent beyond the time it was given."""


@dataclass(frozen=True)
class Event:
    """One server-sent event. name: of its ``event:`` line. data: of its ``data:`` lines, bytes as they came."""

    name: str
    data: bytes

    @cached_property
    def json(self) -> Any:
        """The data parsed; None when it is no JSON in UTF-8."""
        return parsed(self.data)

    @property
    def done(self) -> bool:
        return self.data == b"[DONE]"


@dataclass(frozen=True)
class Answer:
    """headers: names in lower case; of repeated ones, all values joined by a comma. Seconds are from the start of the
    request: to its head, to its end. arrivals: (bytes of the body that had come, seconds), one a part."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    seconds: float
    head_seconds: float = 0.0
    arrivals: tuple[tuple[int, float], ...] = ()

    @property
    def ok(self) -> bool:
        return self.status == 200

    @cached_property
    def json(self) -> Any:
        """The body parsed; None when it is no JSON in UTF-8."""
        return parsed(self.body)

    @cached_property
    def events(self) -> list[Event]:
        return events_of(self.body)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """Of a stream: the events that are JSON objects."""
        return [event.json for event in self.events if isinstance(event.json, dict)]

    @property
    def said(self) -> str:
        """What it says, for a finding: the sentence of an error, or the start of the body."""
        text = refusal_text(self.body) if self.body else "an empty body"
        return f"{self.status}: {text[:200]}"


class Client:
    """headers: sent with every request. timeout: seconds for one answer, from the connection to its last byte."""

    def __init__(self, address: str, headers: Mapping[str, str] | None = None, timeout: float = TIMEOUT) -> None:
        self.address, self.headers, self.timeout = Address.parse(address), dict(headers or {}), timeout

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str | None] | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """body: bytes as they are; anything else but None as JSON. headers: replace those of the client, None takes
        one away. Errors: NoAnswer."""
        began = time.monotonic()
        with self._opened(method, path, body, headers, timeout) as (response, deadline):
            head = time.monotonic() - began
            parts, arrivals, size = [], list[tuple[int, float]](), 0
            for part in _parts(response, deadline):
                parts.append(part)
                size += len(part)
                arrivals.append((size, time.monotonic() - began))
            seconds = time.monotonic() - began
            return Answer(response.status, _headers(response), b"".join(parts), seconds, head, tuple(arrivals))

    def get(self, path: str, **more: Any) -> Answer:
        return self.request("GET", path, **more)

    def post(self, path: str, body: Any, **more: Any) -> Answer:
        return self.request("POST", path, body, **more)

    def status_of(self, path: str, body: Any) -> int:
        """Post, and go away once the head of the answer has come: its status. Errors: NoAnswer."""
        with self._opened("POST", path, body, None, None) as (response, _):
            return response.status

    def leave(self, path: str, body: Any, num_bytes: int, timeout: float | None = None) -> bytes:
        """Post, and go away once ``num_bytes`` of the body have come, or all of it. Returns what has."""
        data = b""
        with self._opened("POST", path, body, None, timeout) as (response, deadline):
            for part in _parts(response, deadline):
                data += part
                if len(data) >= num_bytes:
                    break
        return data

    @contextlib.contextmanager
    def _opened(
        self, method: str, path: str, body: Any, headers: Mapping[str, str | None] | None, timeout: float | None
    ) -> Iterator[tuple[http.client.HTTPResponse, float]]:
        where, seconds = self.address, timeout or self.timeout
        kind = http.client.HTTPSConnection if where.secure else http.client.HTTPConnection
        connection = kind(where.host, where.port, timeout=seconds)
        given: dict[str, str | None] = {"Content-Type": JSON_TYPE} if body is not None else {}
        given |= {**self.headers, **(headers or {})}
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        try:
            with contextlib.closing(connection):
                deadline = time.monotonic() + seconds
                sent = {name: value for name, value in given.items() if value is not None}
                # an early refusal closes the connection while the body is still being sent; the answer is there
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.request(method, f"{where.path}{path}", data, sent)
                yield connection.getresponse(), deadline
        except (OSError, http.client.HTTPException) as error:
            why = "no whole answer in time" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            raise NoAnswer(
                f"{method} {where.text}{path} was not answered ({why}, limit {seconds:g} s); see the server's log."
            ) from error


def _parts(response: http.client.HTTPResponse, deadline: float) -> Iterator[bytes]:
    while part := response.read1(READ_BYTES):
        yield part
        if time.monotonic() > deadline:
            raise TimeoutError


def _headers(response: http.client.HTTPResponse) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in response.getheaders():
        low = name.lower()
        found[low] = f"{found[low]}, {value}" if low in found else value
    return found


def parsed(data: bytes) -> Any:
    """JSON in UTF-8, or None."""
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        return None


def events_of(body: bytes) -> list[Event]:
    """Server-sent events by the WHATWG grammar, except that a byte order mark is not taken away: clients stumble."""
    lines = body.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
    out: list[Event] = []
    name, data = "", list[bytes]()
    for line in lines:
        if not line:
            if data:
                out.append(Event(name, b"\n".join(data)))
            name, data = "", []
            continue
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data.append(value)
        elif field == b"event":
            name = value.decode("utf-8", "replace")
    return out
