"""A server that keeps every promise but one: a proxy before a good one, with one fault in it.

A fault changes requests, whole answers, or the events of a stream. What it leaves alone passes through as it comes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx

from dayzero.acceptance.accept.stage import RunningServer, Subject
from dayzero.acceptance.stages.asking import Ask, Check, Checks, judge_basics, run_checks
from dayzero.console import no_progress
from dayzero.finding import Finding
from tests.paper.server_support import serving

DONE = "[DONE]"
OF_A_HOP = ("host", "content-length", "transfer-encoding", "connection", "date", "server")  # headers not passed on


@dataclass
class Call:
    """One request as it was sent. memory: of the fault, for this request alone. busy: requests under way, this one
    included."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    body: Any
    busy: int = 1
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def chat(self) -> bool:
        return self.path == "/v1/chat/completions"


Head = dict[str, str]


@dataclass(frozen=True)
class Fault:
    """request: changes call.body or call.headers. answer: (call, status, parsed body) -> (status, body), of answers
    that are no stream; a body of bytes is sent as it is, None leaves it. event: (call, event) -> events in its place;
    an event is parsed JSON or DONE. frame: bytes of a whole stream -> other bytes. head: changes the answer's headers.
    hold: the stream is sent at its end. stays: a client that leaves does not take its request along."""

    request: Callable[[Call], None] | None = None
    answer: Callable[[Call, int, Any], tuple[int, Any]] | None = None
    event: Callable[[Call, Any], list[Any]] | None = None
    frame: Callable[[bytes], bytes] | None = None
    head: Callable[[Call, Head], None] | None = None
    hold: bool = False
    stays: bool = False


class BadServer:
    """The ASGI app. address: of the good server."""

    def __init__(self, address: str, fault: Fault) -> None:
        self._address, self._fault, self._busy = address, fault, 0
        self._left: set[asyncio.Future[None]] = set()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while True:
            message = await receive()
            raw += message.get("body", b"")
            if not message.get("more_body"):
                break
        headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self._busy += 1
        call = Call(scope["method"], scope["path"], headers, raw, _json(raw), self._busy)
        answering, leaving = asyncio.ensure_future(self._answer(call, send)), asyncio.ensure_future(receive())
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:  # a client that leaves takes its request along
            self._busy -= 1
            leaving.cancel()
            if self._fault.stays and not answering.done():
                self._left.add(answering)
            else:
                answering.cancel()

    async def _answer(self, call: Call, send: Any) -> None:
        fault = self._fault
        if fault.request is not None:
            before = json.dumps(call.body)
            fault.request(call)
            if json.dumps(call.body) != before:
                call.raw = json.dumps(call.body).encode()
        sent = {name: value for name, value in call.headers.items() if name not in OF_A_HOP}
        async with httpx.AsyncClient(base_url=self._address, timeout=120) as web:
            asked = web.build_request(call.method, call.path, content=call.raw, headers=sent)
            answer = await web.send(asked, stream=True)
            try:
                await self._pass_on(call, answer, send)
            finally:
                await answer.aclose()

    async def _pass_on(self, call: Call, answer: httpx.Response, send: Any) -> None:
        fault = self._fault
        head = {name: value for name, value in answer.headers.items() if name not in OF_A_HOP}
        streams = head.get("content-type", "").startswith("text/event-stream")
        status, whole = answer.status_code, b""
        if not streams or fault.hold or fault.frame is not None:
            whole = await answer.aread()
        if not streams and fault.answer is not None:
            status, new = fault.answer(call, status, _json(whole))
            whole = new if isinstance(new, bytes) else whole if new is None else json.dumps(new).encode()
        if streams and fault.frame is not None:
            whole = fault.frame(whole)
        if fault.head is not None:
            fault.head(call, head)
        lines = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in head.items()]
        await send({"type": "http.response.start", "status": status, "headers": lines})
        if streams and not (fault.hold or fault.frame is not None):
            async for part in self._parts(call, answer):
                await send({"type": "http.response.body", "body": part, "more_body": True})
        body = b"" if call.method == "HEAD" else whole
        await send({"type": "http.response.body", "body": body})

    async def _parts(self, call: Call, answer: httpx.Response) -> AsyncIterator[bytes]:
        if self._fault.event is None:
            async for part in answer.aiter_raw():
                yield part
            return
        name = ""
        async for line in answer.aiter_lines():
            if line.startswith("event:"):
                name = line
            elif line.startswith("data:"):
                data = line[5:].strip()
                for new in self._fault.event(call, DONE if data == DONE else json.loads(data)):
                    kind = f"event: {new['type']}\n" if name and new != DONE else ""
                    yield f"{kind}data: {new if new == DONE else json.dumps(new)}\n\n".encode()
                name = ""


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


@contextlib.contextmanager
def bad_server(good: RunningServer, fault: Fault) -> Iterator[RunningServer]:
    """The proxy on loopback before ``good``."""
    with serving(SimpleNamespace(app=BadServer(good.address, fault))) as address:  # type: ignore[arg-type]
        yield SimpleNamespace(  # type: ignore[misc]
            address=address, model=good.model, headers=good.headers, process_ids=(), stop=lambda seconds=0: 0
        )


def judged(server: RunningServer, subject: Subject, checks: tuple[Check, ...], only: str = "") -> Checks:
    """Findings of ``checks`` about a server, or of the one that is named."""
    ask, out = Ask(server, subject), Checks("t")
    judge_basics(ask, out)
    chosen = [check for check in checks if only in ("", check.name)]
    assert chosen, only
    run_checks(ask, out, chosen, no_progress)
    return out


def kinds(out: Checks, verdict: str) -> set[str]:
    return {finding.kind.removeprefix("t.") for finding in out.findings if finding.verdict == verdict}


def found_by(
    fault: Fault, check: str, expected: set[str], good: RunningServer, subject: Subject, checks: tuple[Check, ...]
) -> list[Finding]:
    """What fails when ``check`` judges a server with this fault: the expected kinds and no others, each with what was
    measured and a remedy."""
    with bad_server(good, fault) as bad:
        out = judged(bad, subject, checks, check)
    assert kinds(out, "fail") == expected, [f for f in out.findings if f.verdict != "pass"]
    failed = [finding for finding in out.findings if finding.verdict == "fail"]
    assert all(finding.remedy and finding.measured is not None for finding in failed)
    return failed


# --- pieces that faults are made of


def setting(**fields: Any) -> Callable[[Call], None]:
    """Puts fields into every request for an answer; None takes one away."""

    def change(call: Call) -> None:
        if isinstance(call.body, dict) and ("prompt" in call.body or "messages" in call.body):
            for name, value in fields.items():
                if value is None:
                    call.body.pop(name, None)
                else:
                    call.body[name] = value

    return change


def replacing(name: str, change: Callable[[Any], Any]) -> Callable[[Call], None]:
    """Changes one field of a request where it is given."""

    def run(call: Call) -> None:
        if isinstance(call.body, dict) and call.body.get(name) is not None:
            call.body[name] = change(call.body[name])

    return run


def of_choices(change: Callable[[dict[str, Any]], None]) -> Callable[[Call, int, Any], tuple[int, Any]]:
    """Changes each choice of a whole answer in place."""

    def run(call: Call, status: int, body: Any) -> tuple[int, Any]:
        for choice in (body or {}).get("choices") or [] if isinstance(body, dict) else []:
            change(choice)
        return status, body

    return run


def of_parts(change: Callable[[Call, dict[str, Any]], None]) -> Callable[[Call, Any], list[Any]]:
    """Changes each choice of a stream's chunks in place."""

    def run(call: Call, event: Any) -> list[Any]:
        if event != DONE:
            for choice in event.get("choices") or []:
                change(call, choice)
        return [event]

    return run
