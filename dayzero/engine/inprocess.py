"""An engine in the caller's own process: the same loop, turned by whoever waits for an answer. Paper until loaded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from dayzero.engine.api import EngineInfo
from dayzero.engine.build import Build, engine_loop, executor_of
from dayzero.engine.events import Abort, Output, Progress, Stop, Submit
from dayzero.engine.launch import LaunchSpec, LoadProgress
from dayzero.engine.request import NewRequest
from dayzero.engine.streams import merged
from dayzero.errors import EngineDead


class InProcessEngine:
    """Loads the model when it is made. Several answers may be open at once; all of them move on while one is read.

    Not for several threads. Errors of making one: those of opening a model, MachineError.
    """

    def __init__(self, launch: LaunchSpec, progress: LoadProgress | None = None, make: Build = executor_of) -> None:
        executor = make(launch, progress or (lambda loaded_bytes, total_bytes: None))
        executor.load()
        self.info: EngineInfo = executor.info
        self._loop = engine_loop(launch, executor)
        self._unread: dict[str, list[Output]] = {}
        self._closed = False

    def submit(self, requests: Sequence[NewRequest]) -> None:
        """Take requests; their outputs come from ``outputs``. EngineDead after ``close``."""
        self._check_open()
        for request in requests:
            self._unread[request.id] = []
        self._loop.take(Submit(list(requests)))

    def outputs(self, request_id: str, *, together: bool = False) -> Iterator[Output]:
        """Outputs of one request until one with ``finish``. Leaving the iterator early aborts the request. together:
        those that came while others were read are one."""
        unread = self._unread[request_id]
        try:
            while True:
                while not unread:
                    moved = self._turn()
                    assert moved or self._loop.busy, "an answer is waited for, but nothing is being computed"
                some = len(unread) if together else 1
                output = merged(unread[:some])
                del unread[:some]
                if output.finish is not None:
                    del self._unread[request_id]
                yield output
                if output.finish is not None:
                    return
        finally:
            if request_id in self._unread:
                self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request and drop what has not been read of it. Unknown ids are ignored."""
        if self._unread.pop(request_id, None) is not None and not self._closed:
            self._loop.take(Abort([request_id]))

    def progress(self) -> Progress:
        """EngineDead after ``close``."""
        self._check_open()
        return self._loop.progress()

    def close(self) -> None:
        """Abort what runs and let go of the model. May be called twice."""
        if not self._closed:
            self._loop.take(Stop())
            try:
                self._turn()
            finally:
                self._closed = True
                self._loop.close()
                del self._loop

    def _check_open(self) -> None:
        if self._closed:
            raise EngineDead("the engine was closed; make a new one")

    def _turn(self) -> bool:
        """One turn of the loop. Whether anything has come of it."""
        self._check_open()
        with _whole():
            batch = self._loop.turn(wait=True)
            for output in batch.outputs if batch is not None else ():
                if output.id in self._unread:
                    self._unread[output.id].append(output)
        return batch is not None


@contextmanager
def _whole() -> Iterator[None]:
    """Ctrl-C waits for the end: a turn that is cut off in the middle would leave the loop's books wrong, and answers
    to other requests with them. Signals reach the main thread only, so elsewhere there is nothing to do."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[0])
