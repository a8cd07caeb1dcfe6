"""The engine process as its parent sees it: started over a socket, spoken to in frames, seen to end. Paper."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

from dayzero.engine.events import FromEngine
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.wire import Frames, WireError, encode

WORKER = (sys.executable, "-m", "dayzero.engine.worker")
STDERR = 2
REAP_SECONDS = 1.0  # between the end of the connection and the end of the process, either way round


class EngineProcess(asyncio.Protocol):
    """One engine process. ``heard`` is called with each message, in order, on the event loop's thread.

    Make it with ``spawn``. Its stdout and stderr are the parent's stderr.
    """

    def __init__(self, child: subprocess.Popen[bytes], heard: Callable[[FromEngine], None]) -> None:
        self._child, self._heard = child, heard
        self._loop = asyncio.get_running_loop()
        self._frames: Frames[FromEngine] = Frames(FromEngine)
        self._transport: asyncio.Transport | None = None
        self._closed: asyncio.Future[None] = self._loop.create_future()
        self._exited: asyncio.Future[int] = self._loop.create_future()
        self._broken: str | None = None
        # Not an asyncio child watcher: those differ between event loops, and all of them want the main thread.
        threading.Thread(target=self._reap, name="engine-reaper", daemon=True).start()

    @classmethod
    async def spawn(
        cls, launch: LaunchSpec, heard: Callable[[FromEngine], None], worker: Sequence[str] = WORKER
    ) -> EngineProcess:
        """Start ``worker`` with the connection's file number as its last argument and tell it ``launch``.

        The process dies with the thread that started it, so this must not run on a passing one. Errors: OSError when
        it cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                child = subprocess.Popen(
                    [*worker, str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stdin=subprocess.DEVNULL,
                    stdout=STDERR,
                    stderr=STDERR,
                    start_new_session=True,  # an interrupt typed at the terminal is the parent's to handle
                )
            except OSError:
                ours.close()
                raise
        process = cls(child, heard)
        await process._loop.create_unix_connection(lambda: process, sock=ours)
        process.send(launch)
        return process

    @property
    def pid(self) -> int:
        return self._child.pid

    def send(self, message: Any) -> None:
        """Never waits; to a process that has ended it says nothing."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(encode(message))

    def kill(self) -> None:
        if not self._exited.done():
            self._child.kill()

    async def ended(self) -> str | None:
        """Wait until the process has ended and all that it said has been heard. Returns how it ended as the end of a
        sentence, None for an exit with code 0."""
        both: set[asyncio.Future[Any]] = {self._closed, self._exited}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(both, timeout=REAP_SECONDS)
        self.kill()
        code = await self._exited
        if self._transport is not None:
            self._transport.abort()
        if self._broken is not None:
            return f"was ended because it sent what is no message: {self._broken}"
        if code < 0:
            with suppress(ValueError):
                return f"was ended by {signal.Signals(-code).name}"
            return f"was ended by signal {-code}"
        return f"ended with exit code {code}" if code else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._broken is not None:
            return
        try:
            for message in self._frames.feed(data):
                self._heard(message)
        except WireError as error:
            self._broken = str(error)
            self.kill()

    def connection_lost(self, error: Exception | None) -> None:
        if not self._closed.done():
            self._closed.set_result(None)

    def _reap(self) -> None:
        code = self._child.wait()
        with suppress(RuntimeError):  # the event loop has ended before the process
            self._loop.call_soon_threadsafe(self._set_exited, code)

    def _set_exited(self, code: int) -> None:
        if not self._exited.done():
            self._exited.set_result(code)
