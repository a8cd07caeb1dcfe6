"""Requests to an OpenAI-compatible server, streamed, with a clock on every chunk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from dayzero.acceptance.load.outcome import Outcome, check_counts
from dayzero.acceptance.load.wire import Pool
from dayzero.acceptance.load.workload import Api, LoadRequest

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
MAX_SAID = 400  # characters of a server's error that are kept


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    token_ids: list[int] | None = None
    finish_reason: Any = None


class _Event(msgspec.Struct):
    """What is read of a chunk; the rest of it is skipped unparsed."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_DECODE = msgspec.json.Decoder(_Event).decode


@dataclass(frozen=True)
class Served:
    """What a server says of itself. model: its first. own: it is a dayzero server. vocab: highest token id + 1, None
    when it does not say; special: ids that prompts should leave out."""

    model: str
    own: bool
    vocab: int | None = None
    special: frozenset[int] = frozenset()
    version: str = ""


@dataclass(frozen=True)
class Body:
    """How a request is written down. token_ids: ask for the ids of every chunk, so that tokens without text are seen.
    usual: how an answer is made as long as is asked; empty for a server that refuses it. extra: fields added to each
    body."""

    api: Api
    model: str
    token_ids: bool
    extra: dict[str, Any] = field(default_factory=dict)
    usual: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})

    def encode(self, request: LoadRequest) -> bytes:
        prompt: dict[str, Any] = {"prompt": request.prompt}
        if self.api == "chat":
            prompt = {"messages": [{"role": "user", "content": request.prompt}]}
        body = {
            "model": self.model,
            **prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            **self.usual,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.token_ids:
            body["return_token_ids"] = True
        return msgspec.json.encode(body | self.extra)


class Reader:
    """The events of one answer as they come. ``outcome`` is filled in."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.complete = False
        self._rest = b""
        self._refusal = b""

    def feed(self, status: int, data: bytes, now: float) -> None:
        """Part of the body of an answer with ``status``, come at ``now``. Never raises."""
        if status != 200:
            self._refusal += data[: 4 * MAX_SAID]
            return
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        out = self.outcome
        if data == b"[DONE]":
            self.complete = True
            return
        try:
            event = _DECODE(data)
        except msgspec.DecodeError as error:
            self.fail("stream", f"a chunk is no JSON object of this API: {error}")
            return
        if event.error is not None:
            self.fail("stream", f"the answer ended with an error: {_sentence(event.error)}")
        if event.usage is not None:
            out.prompt_tokens, out.output_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            if event.usage.prompt_tokens_details is not None:
                out.cached_tokens = event.usage.prompt_tokens_details.cached_tokens
        for choice in event.choices:
            delta = choice.delta
            if choice.token_ids is not None:
                out.token_ids = (out.token_ids or 0) + len(choice.token_ids)
            if choice.finish_reason is not None:
                out.finish = str(choice.finish_reason)
            if choice.token_ids or choice.text or (delta is not None and _carries(delta)):
                out.times.append(now)

    def fail(self, kind: str, why: str) -> None:
        """The first thing that went wrong is kept."""
        if self.outcome.error is None:
            self.outcome.error = (kind, why[:MAX_SAID])

    def end(self, status: int) -> None:
        """The answer has ended."""
        if status != 200:
            kind = "refused" if 400 <= status < 500 and status != 429 else f"http {status}"
            self.fail(kind, f"the server answered {status}: {refusal_text(self._refusal)}")
        elif not self.complete:
            self.fail("stream", "the answer ended without [DONE]")


def _carries(delta: _Delta) -> bool:
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


def refusal_text(body: bytes) -> str:
    """The sentence in an error body, or the body itself."""
    try:
        return _sentence(msgspec.json.decode(body))
    except msgspec.DecodeError:
        return body.decode("utf-8", "replace")[:MAX_SAID]


def _sentence(error: Any) -> str:
    while isinstance(error, dict):
        error = error.get("message") or error.get("error") or str(error)
    return str(error)[:MAX_SAID]


class HttpDriver:
    """Implements ``Driver`` over HTTP. timeout: seconds for one request. held: see ``check_counts``."""

    def __init__(self, pool: Pool, body: Body, timeout: float, held: bool = True) -> None:
        self._pool, self._body, self._timeout, self._held = pool, body, timeout, held

    async def ask(self, request: LoadRequest, due: float | None = None) -> Outcome:
        body = self._body.encode(request)
        out = Outcome(request, time.perf_counter() if due is None else due)
        reader = Reader(out)

        def sent(now: float) -> None:
            if due is None:
                out.sent = now

        try:
            async with asyncio.timeout(self._timeout):
                reader.end(await self._pool.post(PATHS[self._body.api], body, reader.feed, sent))
        except TimeoutError:
            reader.fail("timeout", f"no complete answer within {self._timeout:g} seconds")
        except OSError as error:
            reader.fail("connection", str(error) or type(error).__name__)
        out.ended = time.perf_counter()
        check_counts(out, self._held)
        return out

    async def close(self) -> None:
        self._pool.close()
