"""One endpoint as an ASGI app: key, body, handler, answer; what went wrong, in its API's words; one line in the log.

A client that leaves is noticed whatever the handler is doing, and its work is cancelled: that is what aborts requests
and frees their blocks.
"""

from __future__ import annotations

import asyncio
import hmac
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from dayzero.errors import UserError
from dayzero.server.body import parse, read_body
from dayzero.server.errors import ApiError, Style, as_api_error, error_headers
from dayzero.server.state import ServerState

CLIENT_GONE = 499  # never sent: how the log and the metrics name an answer nobody waited for
MAX_HEADER = 2000
JSON = {"content-type": "application/json"}
_PRINTABLE = re.compile(r"[^\x20-\x7e]")

Prepare = Callable[[Any], list[str]]


@dataclass(slots=True)
class Call:
    """One request on its way.

    raw: the JSON of its body, as it came. size: of it, in bytes. record: what its log line will hold. ignored: fields
    that nothing read. headers: further headers of the answer. status: 0 until an answer starts. complete: its last byte
    has been handed over.
    """

    state: ServerState
    request: Request
    route: Route
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    arrival: float = field(default_factory=time.time)
    body: Any = None
    raw: Any = None
    size: int = 0
    ignored: list[str] = field(default_factory=list)
    record: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    status: int = 0
    complete: bool = False

    def ignore(self, *what: str) -> None:
        """Say in header and log that these had no effect."""
        self.ignored += [name for name in what if name not in self.ignored]


Handler = Callable[[Call], Awaitable[Response]]


@dataclass(frozen=True)
class Route:
    """path: as Starlette matches it. body: what the request's JSON must be, None: it has none. answer: struct of
    the 200 answer. guarded: needs the API key. logged: its end is one line in the log. prepare: mends the raw JSON
    before it is checked and returns what it took out. turns: the field that holds the conversation. stream: an
    answer may come as server-sent events. statuses: what it may answer besides 200 and what its kind implies.
    summary: for /openapi.json."""

    path: str
    handler: Handler
    method: str = "GET"
    body: type | None = None
    answer: type | None = None
    style: Style = "openai"
    guarded: bool = False
    logged: bool = False
    prepare: Prepare | None = None
    turns: str = "messages"
    stream: bool = False
    statuses: tuple[int, ...] = ()
    summary: str = ""


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, {**JSON, **(headers or {})})


def error_response(error: ApiError, style: Style, retry_after_s: int) -> Response:
    return json_response(error.body(style), error.status, error_headers(error.status, retry_after_s))


class Endpoint:
    """The ASGI app behind one route."""

    def __init__(self, state: ServerState, route: Route) -> None:
        self._state, self._route = state, route

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(self._state, Request(scope, receive), self._route)
        try:
            await self._run(call, scope, receive, send)
        except ClientDisconnect:
            call.status = CLIENT_GONE
        finally:
            self._close(call)

    async def _run(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        async def answering(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = message["status"]
                message["headers"] = [*message["headers"], *_headers(call)]
            else:
                call.complete = not message.get("more_body", False)
            await send(message)

        try:
            await self._read(call)
        except UserError as error:
            await self._refused(call, error)(scope, receive, answering)
            return
        self._state.enter()  # not before: draining does not wait for a body that never comes
        work = asyncio.create_task(self._answer(call, scope, receive, answering))
        gone = asyncio.create_task(_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not call.complete:
                raise ClientDisconnect
            await work  # raises what the handler raised: a fault of ours, for the edge of the app
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
            self._state.leave()

    async def _read(self, call: Call) -> None:
        """Check the key, read and check the body."""
        config, route = self._state.config, self._route
        if route.guarded and config.api_keys:
            _check_key(call.request, config.api_keys)
        if route.body is not None:
            data = await read_body(call.request, config.max_body_bytes, config.body_seconds, config.body_rate)
            call.size = len(data)
            call.body, ignored, call.raw = await parse(data, route.body, config.max_json_depth, route.prepare)
            call.ignore(*ignored)

    async def _answer(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._route.handler(call)
        except UserError as error:
            response = self._refused(call, error)
        await response(scope, receive, send)

    def _refused(self, call: Call, error: UserError) -> Response:
        answer = as_api_error(error)
        note_error(call, answer)
        return error_response(answer, self._route.style, self._state.config.retry_after_s)

    def _close(self, call: Call) -> None:
        if call.status == CLIENT_GONE:
            self._state.metrics.client_gone.inc()
        if call.ignored:
            self._state.metrics.ignored_fields.inc()
        if self._route.logged:
            self._state.log.event(
                "request",
                id=call.id,
                endpoint=self._route.path,
                status=call.status or 500,
                client_gone=True if call.status == CLIENT_GONE else None,
                seconds=round(time.time() - call.arrival, 4),
                ignored=call.ignored or None,
                **call.record,
            )


def note_error(call: Call, error: ApiError) -> None:
    """Keep an error for the log. The sentence of a refused request may hold words of its client, and stays out."""
    call.record |= {"error": error.code or "invalid_request", "param": error.param}
    if error.status >= 500:
        call.record["why"] = error.message
    if error.status == 429:
        call.state.metrics.admission_rejections.inc()
    if error.code == "nan_logits":
        call.state.metrics.corrupted_requests.inc()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _check_key(request: Request, keys: tuple[str, ...]) -> None:
    """``Authorization: Bearer KEY`` or ``x-api-key: KEY``, compared in constant time."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        given = request.headers.get("x-api-key", "")
    # Headers are bytes, and read as Latin-1; clients send a key beyond ASCII in that or in UTF-8.
    forms = [given.strip().encode(form) for form in ("latin-1", "utf-8")]
    right = [hmac.compare_digest(sent, key.encode()) for key in keys for sent in forms]
    if not any(right):
        raise ApiError(
            401, "the API key is missing or wrong; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
            code="invalid_api_key",
        )  # fmt: skip


def _headers(call: Call) -> list[tuple[bytes, bytes]]:
    out = {"x-request-id": call.id, **call.headers}
    if call.ignored:
        out["x-dayzero-ignored"] = ", ".join(call.ignored)
    return [(name.encode(), _PRINTABLE.sub("?", value)[:MAX_HEADER].encode()) for name, value in out.items()]
