"""What the server and other callers see of an engine, wherever it runs. Paper."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any, Literal, Protocol

import msgspec

from dayzero.engine.events import Output, Progress
from dayzero.engine.media import ImageInfo
from dayzero.engine.request import NewRequest

EngineState = Literal["loading", "ready", "draining", "restarting", "dead"]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What is known once a model is loaded.

    max_model_len: longest prompt + answer in tokens that the engine takes (trained context, limited by the plan).
    stop_ids: from every source. vocab: rows of the head. defaults: sampling defaults of generation_config.json.
    table: rows of the start-up table (label, value): layout, cache groups, bindings, longest context, concurrency,
    smallest reusable prefix, dtype, weights. images: what it takes, None: none.
    """

    source: str
    family: str
    dtype: str
    max_model_len: int
    vocab: int
    stop_ids: list[int]
    defaults: dict[str, Any]
    table: list[tuple[str, str]]
    page_tokens: int
    pool_tokens: int
    max_running: int
    facts: dict[str, Any] = {}
    images: ImageInfo | None = None


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """state: as a prober should see it. stalled: work is queued but no step has ended for ``since_step`` seconds,
    longer than max(stall_seconds, 5 x the slowest of the last 100 steps). died: how often the engine process ended
    unasked."""

    state: EngineState
    progress: Progress | None
    stalled: bool = False
    since_step: float = 0.0
    died: int = 0
    why: str = ""


class Engine(Protocol):
    """An engine as coroutines see it. No call blocks the event loop."""

    @property
    def info(self) -> EngineInfo:
        """Known once the state is ``ready``; AssertionError before."""

    def status(self) -> EngineStatus:
        """The newest that is known, without asking the engine."""

    def generate(self, request: NewRequest) -> AsyncIterator[Output]:
        """Outputs of one request until one with ``finish``. Leaving the iterator early aborts the request. Raises
        Overloaded when the waiting queue is full, EngineDead when there is no engine (or it dies before the end)."""

    def on_step(self, told: Callable[[int], None]) -> None:
        """Call ``told`` with the number of tokens of every step that ends from now on."""

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish ``abort``. Unknown ids are ignored."""
