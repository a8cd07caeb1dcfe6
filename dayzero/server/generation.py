"""The one way from requests to answers: all endpoints that generate read their chunks from here.

A request becomes one or more *choices*, each a sequence of its own in the engine. Their outputs come back as lists of
``Chunk``: what a stream writes at once, and what an answer that is not streamed adds up. So the two cannot differ.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from dayzero.chat.detokenize import Detokenizer
from dayzero.chat.pieces import Content, OutputParser, Piece, Reasoning, ToolArguments, ToolProblem
from dayzero.engine.api import Engine
from dayzero.engine.events import Logprobs, Output
from dayzero.engine.request import FinishReason, NewRequest
from dayzero.errors import EngineDead
from dayzero.server.errors import ApiError, engine_error, unavailable
from dayzero.server.protocol.shared import CompletionTokensDetails, PromptTokensDetails, Usage


@dataclass(slots=True)
class Chunk:
    """What is new of one choice. first: nothing of it came before. tokens: new ids; the stop id that ended the answer
    is ``stop_id`` and has no logprobs. finish: set exactly once, in the last one. stop_reason: the stop string, or the
    id of a stop token that is not one of the model's own."""

    index: int
    first: bool
    pieces: list[Piece] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    stop_id: int | None = None
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: list[Logprobs] | None = None


class Reader(Protocol):
    """Ids of one answer to pieces."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer."""

    @property
    def reasoning_tokens(self) -> int: ...

    def push(self, ids: Sequence[int]) -> tuple[list[Piece], int]:
        """Pieces that are certain now, and how many of ``ids`` belong to the answer."""

    def finish(self, stop_id: int | None) -> list[Piece]:
        """The rest."""


class TextReader:
    """Plain text. stop_text: whether a stop token's own text belongs to the answer."""

    reasoning_tokens = 0

    def __init__(self, detokenizer: Detokenizer, stop_text: bool = False) -> None:
        self._detokenizer, self._stop_text = detokenizer, stop_text

    @property
    def stopped(self) -> str | None:
        return self._detokenizer.stopped

    def push(self, ids: Sequence[int]) -> tuple[list[Piece], int]:
        text = self._detokenizer.push(ids)
        return ([Content(text.text)] if text.text else []), text.tokens_used

    def finish(self, stop_id: int | None) -> list[Piece]:
        text = self._detokenizer.push([stop_id]).text if stop_id is not None and self._stop_text else ""
        text += self._detokenizer.flush().text
        return [Content(text)] if text else []


class ParsedReader:
    """A chat answer: reasoning, content and tool calls."""

    def __init__(self, detokenizer: Detokenizer, parser: OutputParser, stop_text: bool = False) -> None:
        self._detokenizer, self._parser, self._stop_text = detokenizer, parser, stop_text

    @property
    def stopped(self) -> str | None:
        return self._detokenizer.stopped

    @property
    def reasoning_tokens(self) -> int:
        return self._parser.reasoning_tokens

    def push(self, ids: Sequence[int]) -> tuple[list[Piece], int]:
        text = self._detokenizer.push(ids)
        return self._parser.push(text.text, ids[: text.tokens_used]), text.tokens_used

    def finish(self, stop_id: int | None) -> list[Piece]:
        pieces: list[Piece] = []
        # A marker may also be what ends the answer; its text is the parser's then, and never the client's.
        if stop_id is not None and (self._stop_text or stop_id in self._parser.keep):
            pieces += self._parser.push(self._detokenizer.push([stop_id]).text, [stop_id])
        pieces += self._parser.push(self._detokenizer.flush().text, [])
        return pieces + self._parser.finish()


class IdReader:
    """No tokenizer: an answer is its ids."""

    reasoning_tokens = 0
    stopped = None

    def push(self, ids: Sequence[int]) -> tuple[list[Piece], int]:
        return [], len(ids)

    def finish(self, stop_id: int | None) -> list[Piece]:
        return []


class Choice:
    """One sequence of a request and what has come of it. prompt_index: which of the request's prompts it answers."""

    def __init__(self, index: int, request: NewRequest, reader: Reader, prompt_index: int = 0) -> None:
        self.index, self.request, self.prompt_index = index, request, prompt_index
        self.reader = reader
        self.num_tokens = 0  # generated, a stop token included
        self.cached = 0
        self.finish: FinishReason | None = None
        self.times: dict[str, float] = {}
        self.problems = 0
        self.error: ApiError | None = None  # what ended it, when that was no ordinary end
        self.last_output: float | None = None  # by time.monotonic
        self._taken = asyncio.Event()
        self._begun = False

    @property
    def leads(self) -> bool:
        """Whether it stands for its prompt in sums over prompts."""
        return self.request.leader is None

    def take(self, output: Output) -> Chunk:
        """One output of the engine as a chunk. ``error`` is set when it ended with one; what came before is in the
        chunk all the same."""
        chunk = Chunk(self.index, not self._begun, prompt_logprobs=output.prompt_logprobs)
        self._begun = True
        self.times |= output.times
        self.cached = output.cached if output.cached is not None else self.cached
        chunk.pieces, used = self.reader.push(output.tokens)
        chunk.tokens, chunk.logprobs = output.tokens[:used], output.logprobs[:used]
        self.num_tokens += used
        stopped = self.reader.stopped
        if stopped is not None:
            chunk.finish, chunk.stop_reason = "stop", stopped
        elif output.finish in ("error", "abort"):
            self.finish = output.finish
            self.error = _error(output, begun=self.num_tokens > 0)
        elif output.finish is not None:
            chunk.finish, chunk.stop_id = output.finish, output.stop_id
            if output.stop_id in self.request.params.stop_token_ids:
                chunk.stop_reason = output.stop_id
        if chunk.finish is not None:
            self._end(chunk)
        self.problems += sum(isinstance(piece, ToolProblem) for piece in chunk.pieces)
        return chunk

    def _end(self, chunk: Chunk) -> None:
        self.num_tokens += chunk.stop_id is not None
        chunk.pieces += self.reader.finish(chunk.stop_id)
        late = self.reader.stopped
        if late is not None and chunk.stop_reason is None:  # completed by what was held back
            chunk.finish, chunk.stop_reason = "stop", late
        self.finish = chunk.finish


def _error(output: Output, *, begun: bool) -> ApiError:
    if output.finish == "abort":
        return unavailable("the request was ended before its answer was complete.", "aborted")
    return engine_error(output.error, begun=begun)


class Observer(Protocol):
    """Who counts: called as things happen, in order."""

    def output(self, choice: Choice, num_tokens: int, now: float) -> None:
        """num_tokens more tokens came, at ``now`` by time.monotonic."""

    def ended(self, choice: Choice) -> None:
        """Once for each choice that was begun, however it ended; ``choice.finish`` None: the reader went away."""


class Generation:
    """The choices of one request, run together. ``chunks`` may be read once."""

    def __init__(self, engine: Engine, choices: Sequence[Choice], observer: Observer, keepalive_s: float) -> None:
        self.choices = tuple(choices)
        self._engine, self._observer, self._keepalive_s = engine, observer, keepalive_s
        self._ready: deque[tuple[Choice, Output | None]] = deque()
        self._arrived = asyncio.Event()

    async def chunks(self) -> AsyncGenerator[list[Chunk], None]:
        """Lists of chunks that were ready together, by index; an empty list after ``keepalive_s`` seconds of silence.

        Closing the generator aborts what still runs and frees its blocks. Errors: ApiError for an answer that ended
        with one; Overloaded and EngineDead of the engine.
        """
        tasks = {choice: asyncio.create_task(self._pump(choice)) for choice in self.choices}
        for choice, task in tasks.items():
            task.add_done_callback(partial(self._over, choice))
        running = set(self.choices)
        try:
            while running:
                outputs = await self._next()
                chunks: list[Chunk] = []
                failed: BaseException | None = None
                for choice, output in outputs:
                    if output is None:
                        failed = failed or _end_error(choice, tasks[choice], choice in running)
                    elif choice in running:
                        before = choice.num_tokens
                        chunk = choice.take(output)
                        failed = failed or choice.error
                        if choice.error is None or chunk.tokens:
                            chunks.append(chunk)
                        self._observer.output(choice, choice.num_tokens - before, time.monotonic())
                        choice._taken.set()
                        if choice.finish is not None:
                            running.discard(choice)
                            tasks[choice].cancel()
                            self._observer.ended(choice)
                if chunks or not outputs:
                    yield sorted(chunks, key=lambda chunk: chunk.index)
                if failed is not None:  # behind what came before it
                    raise failed
        finally:
            for task in tasks.values():
                task.cancel()
            await asyncio.gather(*tasks.values(), return_exceptions=True)
            for choice in running:
                self._observer.ended(choice)

    async def _pump(self, choice: Choice) -> None:
        """Outputs of one choice, one at a time: what is not taken waits in the engine's client, which merges it."""
        outputs = self._engine.generate(choice.request)
        try:
            async for output in outputs:
                self._put(choice, output)
                await choice._taken.wait()
                choice._taken.clear()
        finally:
            await _leave(outputs, self._engine, choice.request.id)

    def _over(self, choice: Choice, task: asyncio.Task[None]) -> None:
        self._put(choice, None)

    def _put(self, choice: Choice, output: Output | None) -> None:
        self._ready.append((choice, output))
        self._arrived.set()

    async def _next(self) -> list[tuple[Choice, Output | None]]:
        """What has come; nothing after ``keepalive_s`` seconds."""
        if not self._ready:
            self._arrived.clear()
            try:
                async with asyncio.timeout(self._keepalive_s):
                    await self._arrived.wait()
            except TimeoutError:
                return []
        items = list(self._ready)
        self._ready.clear()
        return items

    def usage(self) -> Usage:
        """Tokens so far. A prompt counts once, whatever its n."""
        prompt = sum(len(choice.request.prompt) for choice in self.choices if choice.leads)
        generated = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.cached for choice in self.choices if choice.leads)
        reasoning = sum(choice.reader.reasoning_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=reasoning),
        )


async def _leave(outputs: AsyncIterator[Output], engine: Engine, request_id: str) -> None:
    if isinstance(outputs, AsyncGenerator):
        await outputs.aclose()
    else:
        await engine.abort(request_id)


def _end_error(choice: Choice, task: asyncio.Task[None], running: bool) -> BaseException | None:
    """The engine has no more of this choice; an error unless it had finished."""
    if task.cancelled() or not running:
        return None
    return task.exception() or EngineDead(f"the engine gave no end to the answer {choice.index}.")


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of one kind as one piece; empty texts left out."""
    out: list[Piece] = []
    for key, run in itertools.groupby(pieces, _run):
        if key is None:
            out += run
            continue
        kind, index = key
        text = "".join(piece.text for piece in run if isinstance(piece, kind))
        if text:
            out.append(kind(text) if index is None else ToolArguments(index, text))
    return out


def _run(piece: Piece) -> tuple[Any, int | None] | None:
    """Equal for pieces whose texts go on; None: stands alone."""
    if isinstance(piece, Content | Reasoning):
        return type(piece), None
    return (ToolArguments, piece.index) if isinstance(piece, ToolArguments) else None
