"""The engine process: ``python -m dayzero.engine.worker FD``. FD: its end of a socket, over which it is told all else.

The first message is a LaunchSpec; the process loads the model, says Ready and runs the engine loop until it is told to
end, or its parent has gone. Exit codes: 0 as told, else those of the command line (errors.py); 70 a bug.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress

import msgspec

from dayzero.engine.build import Build, engine_loop, executor_of
from dayzero.engine.events import Abort, Batch, Drain, Fatal, Progress, Ready, Stop, Submit, ToEngine
from dayzero.engine.heap import Heap
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.loop import EngineLoop
from dayzero.engine.wire import Channel, Closed, WireError
from dayzero.errors import MachineError, UserError

PR_SET_PDEATHSIG = 1
EXIT_BUG = 70
TELL_SECONDS = 0.05  # between two words on how far the loading is


def serve(connection: socket.socket, make: Build = executor_of) -> int:
    """Run the engine over ``connection`` until it is to end; the exit code. make: see build.py."""
    channel: Channel[LaunchSpec | ToEngine] = Channel(connection, LaunchSpec | Submit | Abort | Drain | Stop)
    try:
        return _serve(channel, make)
    except Closed:  # the parent has gone, and with it everybody who waits for an answer
        return 0
    except WireError as error:
        return _fatal(channel, EXIT_BUG, f"the engine process was sent what is no message: {error}")
    except UserError as error:
        return _fatal(channel, error.exit_code, str(error))
    except MemoryError:
        return _fatal(channel, MachineError.exit_code, "this machine ran out of memory; use a larger machine")
    except ModuleNotFoundError as error:
        return _fatal(channel, MachineError.exit_code, f"the engine needs the package {error.name}; install it")
    except Exception as error:  # noqa: BLE001 - the edge of the process: the parent is told what it ended of
        traceback.print_exc(file=sys.stderr)
        return _fatal(channel, EXIT_BUG, f"internal error: {type(error).__name__}: {error}")


def _fatal(channel: Channel[LaunchSpec | ToEngine], code: int, text: str) -> int:
    with suppress(Closed):
        channel.send(Fatal(code, text))
    return code


def _serve(channel: Channel[LaunchSpec | ToEngine], make: Build) -> int:
    launch, *early = _first(channel)
    if not isinstance(launch, LaunchSpec):
        raise WireError(f"the first message is a {type(launch).__name__}, not a LaunchSpec")
    executor = make(launch, _Teller(channel))
    executor.load()
    woken, waker = socket.socketpair()
    woken.setblocking(False)
    waker.setblocking(False)
    channel.watch(woken.fileno())
    loop = engine_loop(launch, executor, lambda: _wake(waker))
    channel.send(Ready(msgspec.to_builtins(executor.info)))
    gc.collect()
    gc.freeze()  # what is loaded stays; walking over it in the middle of an answer would only cost time
    for message in early:
        _take(loop, message)
    heap = Heap()
    while not loop.ended:
        heap.tend()
        if not loop.busy:
            channel.wait(None)
            _drained(woken)
        for message in channel.receive():
            _take(loop, message)
        batch = loop.turn()
        if batch is not None:
            channel.send(batch)
    loop.close()
    return 0


def _first(channel: Channel[LaunchSpec | ToEngine]) -> list[LaunchSpec | ToEngine]:
    while True:
        channel.wait(None)
        messages = channel.receive()
        if messages:
            return messages


def _take(loop: EngineLoop, message: LaunchSpec | ToEngine) -> None:
    if isinstance(message, LaunchSpec):
        raise WireError("a second LaunchSpec")
    loop.take(message)


def _wake(waker: socket.socket) -> None:
    with suppress(BlockingIOError):  # it has been woken often enough
        waker.send(b"\0")


def _drained(woken: socket.socket) -> None:
    with suppress(BlockingIOError):
        while woken.recv(4096):
            pass


class _Teller:
    """Tells the parent how far the loading is, now and then."""

    def __init__(self, channel: Channel[LaunchSpec | ToEngine]) -> None:
        self._channel = channel
        self._next = 0.0
        self._bytes = (0.0, 0.0)

    def __call__(self, loaded_bytes: float, total_bytes: float) -> None:
        now = time.monotonic()
        self._bytes = loaded_bytes, total_bytes
        if now >= self._next or loaded_bytes >= total_bytes:
            self._next = now + TELL_SECONDS
            progress = Progress(state="loading", loaded=loaded_bytes, to_load=total_bytes)
            self._channel.send(Batch([], progress))

    def recording(self, made: int, wanted: int) -> None:
        """Each may take a second."""
        loaded, to_load = self._bytes
        progress = Progress(state="loading", loaded=loaded, to_load=to_load, recorded=made, to_record=wanted)
        self._channel.send(Batch([], progress))


def die_with_parent() -> None:
    """Be killed when the thread that started this process ends (Linux). Elsewhere the closed socket tells, later."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(arguments: list[str], make: Build = executor_of) -> int:
    """``arguments``: the socket's file number."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent is told too, and lets answers end first
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(arguments[0])) as connection:
        return serve(connection, make)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # no library's thread or exit hook may keep a dead engine from ending
