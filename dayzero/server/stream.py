"""Server-sent events, and the choice between a streamed answer and a whole one.

A stream starts with its first chunks, so that what fails before them is an HTTP error. What fails later is an error
object within the stream. Chunks that are ready together go out in one write.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from dayzero.errors import UserError
from dayzero.server.endpoint import Call, json_response, note_error
from dayzero.server.errors import ApiError, as_api_error, internal
from dayzero.server.generation import Chunk, Generation

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
THREAD_LOGPROBS = 2000
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}

Result = TypeVar("Result")

_encode = msgspec.json.Encoder().encode


def data(value: Any) -> bytes:
    """One event without a name."""
    return b"data: %b\n\n" % _encode(value)


def named(event: str, value: Any) -> bytes:
    """One event with a name."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _encode(value))


class Writer(Protocol):
    """Chunks to an answer. Of one object, either ``whole`` is called after all ``add``, or each ``events`` is sent."""

    def add(self, chunks: list[Chunk]) -> None:
        """Keep what is new, for ``whole``."""

    def whole(self) -> Any:
        """The answer that is not streamed."""

    def events(self, chunks: list[Chunk]) -> bytes:
        """What is new, as events."""

    def end(self) -> bytes:
        """The last events."""

    def error(self, error: ApiError) -> bytes:
        """The last events when it went wrong."""


async def respond(call: Call, generation: Generation, writer: Writer, stream: bool) -> Response:
    """Run ``generation`` and answer with ``writer``'s events or whole. Errors before the answer starts are raised."""
    call.state.metrics.observe("request_params_n", generation.choices[0].request.params.n)
    call.record |= {"stream": stream}
    chunks = generation.chunks()
    if not stream:
        try:
            async for ready in chunks:
                await _off_loop(writer.add, ready)
        finally:
            await chunks.aclose()
            _note_end(call, generation)
        return json_response(writer.whole())
    begun = False
    try:
        first = await anext(chunks)
        begun = True
    finally:
        if not begun:
            _note_end(call, generation)
    return EventStream(call, generation, writer, first, chunks)


async def _off_loop(work: Callable[[list[Chunk]], Result], chunks: list[Chunk]) -> Result:
    """``work(chunks)``, on a thread when they carry the log-probabilities of long prompts."""
    if sum(len(chunk.prompt_logprobs or ()) for chunk in chunks) > THREAD_LOGPROBS:
        return await asyncio.to_thread(work, chunks)
    return work(chunks)


class EventStream(Response):
    """The rest of a generation as events."""

    def __init__(
        self,
        call: Call,
        generation: Generation,
        writer: Writer,
        first: list[Chunk],
        chunks: AsyncGenerator[list[Chunk], None],
    ) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._call, self._generation, self._writer = call, generation, writer
        self._first, self._chunks = first, chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        failed: ApiError | None = internal()  # unless it turns out otherwise, a fault of ours is under way
        gone = False
        try:
            await self._write(send, self._first)
            async for ready in self._chunks:
                await self._write(send, ready)
            failed = None
        except UserError as error:
            failed = as_api_error(error)
        except asyncio.CancelledError:
            gone = True
            raise
        finally:
            await self._chunks.aclose()
            _note_end(self._call, self._generation)
            if not gone:
                await self._close(send, failed)

    async def _close(self, send: Send, failed: ApiError | None) -> None:
        if failed is not None:
            note_error(self._call, failed)
        last = self._writer.end() if failed is None else self._writer.error(failed)
        await send({"type": "http.response.body", "body": last, "more_body": False})

    async def _write(self, send: Send, chunks: list[Chunk]) -> None:
        events = await _off_loop(self._writer.events, chunks) if chunks else KEEP_ALIVE
        if events:
            await send({"type": "http.response.body", "body": events, "more_body": True})


def _note_end(call: Call, generation: Generation) -> None:
    """Numbers and reasons for the log line."""
    usage, choices = generation.usage(), generation.choices
    times = choices[0].times
    first = times.get("first_token")
    call.record |= {
        "finish": [choice.finish or "abort" for choice in choices[:8]],
        "choices": len(choices),
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "reasoning_tokens": usage.completion_tokens_details.reasoning_tokens,
        "queue_s": _span(times, "arrival", "scheduled"),
        "ttft_s": None if first is None else round(max(first - call.arrival, 0.0), 4),
        "tool_problems": sum(choice.problems for choice in choices) or None,
    }
    call.state.metrics.observe("request_max_num_generation_tokens", max(choice.num_tokens for choice in choices))


def _span(times: dict[str, float], start: str, end: str) -> float | None:
    return round(max(times[end] - times[start], 0.0), 4) if start in times and end in times else None
