"""AsyncEngine: an engine in a process of its own, as coroutines see it. Paper.

The process is started, listened to and, when it ends unasked, started again. Whatever happens to it, every request gets
exactly one last output.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress

import msgspec

from dayzero.engine.api import EngineInfo, EngineState, EngineStatus
from dayzero.engine.events import Abort, Batch, Drain, Fatal, FromEngine, Output, Progress, Ready, Stop, Submit
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.process import WORKER, EngineProcess
from dayzero.engine.request import NewRequest
from dayzero.engine.streams import MAX_UNREAD, Stream
from dayzero.errors import EngineDead, MachineError, ModelError, Overloaded, UsageError

STOP_SECONDS = 5.0  # between asking an engine process to end and ending it
MAX_DEATHS = 5  # within DEATHS_SECONDS, or one after the other without a step between them: then it stays dead
DEATHS_SECONDS = 60.0
FIRST_WAIT = 0.1  # seconds before it is started again; twice as long each time
LONGEST_WAIT = 10.0
STEPS_OF_SLACK = 5  # a step may take this many times the slowest of the last 100 before the engine counts as stalled
ERRORS = {kind.exit_code: kind for kind in (ModelError, UsageError, MachineError)}


class AsyncEngine:
    """Implements ``api.Engine``. All methods are for one event loop's thread, which must outlive the engine.

    launch: what to run. stall_seconds: see ``EngineStatus``. worker: command of the engine process.
    """

    def __init__(self, launch: LaunchSpec, *, stall_seconds: float = 10.0, worker: Sequence[str] = WORKER) -> None:
        self._launch, self._stall_seconds, self._worker = launch, stall_seconds, worker
        self._state: EngineState = "loading"
        self._why = ""
        self._info: EngineInfo | None = None
        self._progress: Progress | None = None
        self._fatal: Fatal | None = None
        self._error: Exception | None = None  # of a first load that failed
        self._process: EngineProcess | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._settled = asyncio.Event()  # ready or dead
        self._closing = asyncio.Event()
        self._cut_off = 0  # requests that the end of a process left without an end of their own
        self._streams: dict[str, Stream] = {}
        self._told: list[Callable[[int], None]] = []  # of every step's tokens
        self._busy_since = self._last_step = time.monotonic()
        self._died = 0
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)
        self._fruitless = 0  # deaths since a step has ended

    @property
    def info(self) -> EngineInfo:
        """Known once the state is ``ready``; AssertionError before."""
        assert self._info is not None, "the engine has not been ready yet"
        return self._info

    @property
    def pid(self) -> int | None:
        """Of the engine process, None when there is none."""
        return self._process.pid if self._process is not None else None

    # --- starting and ending

    async def start(self) -> None:
        """Start the engine process; returns while it loads."""
        assert self._supervisor is None, "the engine was started before"
        await self._spawn()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        self._supervisor.add_done_callback(self._unsupervised)

    async def wait_ready(self) -> EngineInfo:
        """Wait for the model to be loaded. Errors: those of opening a model, as the engine process said it
        (ModelError, UsageError, MachineError); EngineDead when it ended otherwise; RuntimeError for a bug in it."""
        assert self._supervisor is not None, "start() comes first"
        await self._settled.wait()
        if self._state == "dead":
            raise self._error or EngineDead(self._why)
        return self.info

    async def drain(self, timeout: float) -> bool:
        """Take no new requests, let those accepted end, then end the engine. Returns whether all of them ended within
        ``timeout`` seconds; those that did not are aborted."""
        before = self._cut_off
        if self._state == "ready":
            self._state = "draining"
            self._closing.set()
            self._send(Drain())
            await asyncio.wait({self._supervision()}, timeout=timeout)
        in_time = not self._streams and self._cut_off == before
        await self.close()
        return in_time

    async def close(self) -> None:
        """End the engine process; what runs is aborted. May be called twice."""
        self._closing.set()
        if self._supervisor is not None:
            task = self._supervision()
            if self._state in ("ready", "draining"):
                self._send(Stop())
                await asyncio.wait({task}, timeout=STOP_SECONDS)
            if self._process is not None:
                self._process.kill()
            await asyncio.wait({task})
        self._end("the engine was closed")

    def _supervision(self) -> asyncio.Task[None]:
        assert self._supervisor is not None
        return self._supervisor

    # --- requests

    def generate(self, request: NewRequest) -> AsyncIterator[Output]:
        """Outputs of one request until one with ``finish``. Leaving the iterator early aborts the request.

        Errors, at once: Overloaded when the waiting queue is full, EngineDead when there is no engine. When it dies
        later, the last output has finish ``error`` of the kind ``engine_died``. An answer that nobody reads is ended
        with the kind ``overloaded``.
        """
        self._admit()
        return self._generate(request)

    async def _generate(self, request: NewRequest) -> AsyncIterator[Output]:
        self._admit()
        assert request.id not in self._streams, f"request id {request.id} is in use"
        if not self._streams:
            self._busy_since = time.monotonic()
        stream = self._streams[request.id] = Stream(request.id)
        self._send(Submit([request]))
        ended = False
        try:
            while not ended:
                output = await stream.next()
                ended = output.finish is not None
                yield output
        finally:
            stream.leave()
            if not ended:
                self._send(Abort([request.id]))

    def on_step(self, told: Callable[[int], None]) -> None:
        """Call ``told`` with the number of tokens of every step that ends from now on."""
        self._told.append(told)

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator ends with finish ``abort``. Unknown ids are ignored."""
        if request_id in self._streams:
            self._send(Abort([request_id]))

    def _admit(self) -> None:
        if self._state != "ready":
            raise EngineDead(_NOT_READY[self._state].format(why=self._why))
        config, progress = self._launch.config, self._progress
        # While the engine says that requests wait, only those that run count as served; else there is room for all.
        served = progress.running if progress is not None and progress.waiting else config.max_running
        waiting = len(self._streams) - served
        if waiting >= config.max_waiting:
            raise Overloaded(f"{waiting} requests are waiting, and no more than {config.max_waiting} may")

    # --- what is known

    def status(self) -> EngineStatus:
        """The newest that is known, without asking the engine."""
        since = 0.0
        if self._streams:
            since = time.monotonic() - max(self._busy_since, self._last_step)
        slowest = self._progress.slowest if self._progress is not None else 0.0
        stalled = since > max(self._stall_seconds, STEPS_OF_SLACK * slowest)
        return EngineStatus(
            state=self._state,
            progress=self._progress,
            stalled=stalled,
            since_step=since,
            died=self._died,
            why=f"work is queued, but no step has ended for {since:.0f} seconds" if stalled else self._why,
        )

    # --- what the engine process says

    def _hear(self, message: FromEngine) -> None:
        if isinstance(message, Batch):
            self._hear_batch(message)
        elif isinstance(message, Ready):
            self._info = msgspec.convert(message.info, EngineInfo)
            if not self._closing.is_set():
                self._state, self._why = "ready", ""
                self._settled.set()
        else:
            self._fatal = message

    def _hear_batch(self, batch: Batch) -> None:
        if self._progress is None or batch.progress.step > self._progress.step:
            self._last_step = time.monotonic()
            if batch.progress.step:
                self._fruitless = 0
        self._progress = batch.progress
        if batch.iteration_tokens:
            for told in self._told:
                told(batch.iteration_tokens)
        for output in batch.outputs:
            stream = self._streams.get(output.id)
            if stream is None:
                continue  # its reader was told an end that came from here
            stream.push(output)
            if stream.finished:
                del self._streams[output.id]
            elif stream.unread > MAX_UNREAD:
                stream.cut(_unread(stream))
                self._send(Abort([output.id]))

    def _send(self, message: Submit | Abort | Drain | Stop) -> None:
        if self._process is not None:
            self._process.send(message)

    # --- the process's lives

    async def _spawn(self) -> None:
        self._fatal, self._progress = None, None
        self._process = await EngineProcess.spawn(self._launch, self._hear, self._worker)

    async def _supervise(self) -> None:
        while True:
            assert self._process is not None
            how = await self._process.ended()
            self._process = None
            said = self._fatal.text if self._fatal is not None else f"the engine process {how or 'ended'}"
            self._fail_all(said)
            if not self._closing.is_set():
                self._died += 1
                if not self._may_restart():
                    break
                self._state, self._why = "restarting", said
                self._settled.clear()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._closing.wait(), min(LONGEST_WAIT, FIRST_WAIT * 2**self._fruitless))
            if self._closing.is_set():
                said = "the engine was closed"
                break
            try:
                await self._spawn()
            except OSError as error:
                said = f"the engine process could not be started again: {error}"
                break
        self._end(said)

    def _unsupervised(self, task: asyncio.Task[None]) -> None:
        """However supervision ends, nobody is left waiting."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            why = f"the engine is not supervised any more: {error or 'cancelled'}"
            if self._process is not None:
                self._process.kill()
            self._fail_all(why)
            self._end(why)

    def _may_restart(self) -> bool:
        """Counts a death. Whether the process may be started again."""
        if self._info is None:  # the first load failed; a second one would too
            if self._fatal is not None:
                self._error = ERRORS.get(self._fatal.code, RuntimeError)(self._fatal.text)
            return False
        now = time.monotonic()
        self._deaths.append(now)
        self._fruitless += 1
        often = len(self._deaths) == MAX_DEATHS and now - self._deaths[0] < DEATHS_SECONDS
        return not often and self._fruitless < MAX_DEATHS

    def _fail_all(self, why: str) -> None:
        self._cut_off += len(self._streams)
        for stream in list(self._streams.values()):
            stream.push(Output(id=stream.id, finish="error", error=("engine_died", why)))
        self._streams.clear()

    def _end(self, why: str) -> None:
        if self._state != "dead":
            self._state, self._why = "dead", why
        self._settled.set()


_NOT_READY = {
    "loading": "the engine is still loading the model",
    "draining": "the engine is being shut down and takes no new requests",
    "restarting": "the engine process is being started again: {why}",
    "dead": "there is no engine: {why}",
}


def _unread(stream: Stream) -> Output:
    why = f"more than {MAX_UNREAD} tokens and log-probabilities of the answer were not read"
    return Output(id=stream.id, finish="error", error=("overloaded", why))
