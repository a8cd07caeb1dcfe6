"""What the HTTP process holds of each request: the outputs that have come and have not been read yet. Paper."""

from __future__ import annotations

import asyncio

from dayzero.engine.events import Logprobs, Output

# What may lie unread of one answer: tokens, and each alternative reported with them. A reader that is further behind
# has gone to sleep; its answer is ended, so that it costs neither memory nor the engine's time.
MAX_UNREAD = 1 << 18


class Stream:
    """Outputs of one request, merged while nobody reads them: a slow reader gets larger pieces, not more of them.

    ``finished``: the engine's last output has come. ``left``: the reader has gone, what comes is dropped.
    """

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.finished = False
        self.left = False
        self.unread = 0  # tokens and alternatives
        self._parts: list[Output] = []
        self._arrived = asyncio.Event()

    def push(self, output: Output) -> None:
        """The next output. After the last one: AssertionError."""
        assert not self.finished, f"{self.id} ended twice: an output came after the last one"
        self.finished = output.finish is not None
        if self.left:
            return
        self._parts.append(output)
        self.unread += _weight(output)
        if len(self._parts) > 64:
            self._parts = [merged(self._parts)]
        self._arrived.set()

    def cut(self, last: Output) -> None:
        """Drop what is unread; the reader gets ``last`` instead, and what still comes is dropped."""
        if not self.left:
            self.left = True
            self._parts, self.unread = [last], 0
            self._arrived.set()

    async def next(self) -> Output:
        """What has come since the last call, as one output; waits for it."""
        await self._arrived.wait()
        self._arrived.clear()
        parts, self._parts, self.unread = self._parts, [], 0
        return merged(parts)

    def leave(self) -> None:
        """Nobody reads any more."""
        self.left = True
        self._parts.clear()
        self.unread = 0


def _weight(output: Output) -> int:
    return len(output.tokens) + sum(1 + len(item.top) for item in output.logprobs)


def merged(parts: list[Output]) -> Output:
    """Outputs of one request, in order, as one."""
    if len(parts) == 1:
        return parts[0]
    tokens: list[int] = []
    logprobs: list[Logprobs] = []
    times: dict[str, float] = {}
    for part in parts:
        tokens += part.tokens
        logprobs += part.logprobs
        times |= part.times
    first, last = parts[0], parts[-1]
    return Output(
        id=first.id,
        tokens=tokens,
        logprobs=logprobs,
        finish=last.finish,
        stop_id=last.stop_id,
        cached=next((part.cached for part in parts if part.cached is not None), None),
        prompt_logprobs=next((part.prompt_logprobs for part in parts if part.prompt_logprobs is not None), None),
        error=last.error,
        times=times,
    )
