"""``dayzero serve`` as a child process: started on a free loopback port, seen to become ready, always ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

LAST_BYTES = 4000  # of a log, where it is searched for why its process ended
LAST_LINES = 6
ENGINE_WORKER = "dayzero.engine.worker"


class NotServing(RuntimeError):
    """The process ended before it was ready. said: the error object of its stdout, empty when there is none."""

    def __init__(self, sentence: str, said: Mapping[str, Any]) -> None:
        super().__init__(sentence)
        self.said = said


class ServerProcess:
    """One ``dayzero serve ARGUMENTS``, in a session of its own, so that an interrupt typed at the terminal is its
    starter's to pass on, once. Whoever makes one must call ``end``.

    log: file that its stderr goes to. environment: None for that of this process. key: that clients must send, passed
    through a pipe, since command lines are there for every user of a machine to read. began: by time.perf_counter.
    """

    def __init__(
        self, arguments: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, key: str = ""
    ) -> None:
        command = [sys.executable, "-m", "dayzero", "serve", *arguments, "--host", "127.0.0.1", "--port", "0", "--json"]
        self.log = log
        self.told: dict[str, Any] = {}  # what it printed when it was ready: address, served, info
        self.began = time.perf_counter()
        self._line = b""
        with log.open("wb") as errors, _pipe_with(key) as given:
            if given is not None:
                command += ["--api-key-fd", str(given)]
            self._child = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=errors, stdin=subprocess.DEVNULL, env=environment,
                start_new_session=True, bufsize=0, pass_fds=() if given is None else (given,),
            )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the number of the signal that ended it."""
        return self._child.poll()

    def address(self, seconds: float) -> str | None:
        """Its root, ``http://127.0.0.1:PORT``, once it is ready; None when it is not within ``seconds``.

        Errors: NotServing when it ended.
        """
        deadline = time.monotonic() + seconds
        while not self.told:
            readable, _, _ = select.select([self._stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not readable:
                return None
            part = os.read(self._stdout, 1 << 16)
            self._line += part
            if not part or part.endswith(b"\n"):
                self._read(ended=not part)
        return str(self.told["address"])

    @property
    def _stdout(self) -> int:
        assert self._child.stdout is not None
        return self._child.stdout.fileno()

    def _read(self, ended: bool) -> None:
        try:
            found = json.loads(self._line)
        except ValueError:
            found = {}
        said = found if isinstance(found, dict) else {}
        if "address" in said:
            self.told = said
        elif ended or "error" in said:
            code = self._child.wait()
            error = said.get("error")
            error = error if isinstance(error, dict) else {}
            why = error.get("message") or self.last_words()
            raise NotServing(f"dayzero serve ended with {code} before it was ready: {why}", error)

    def last_words(self) -> str:
        """The end of its log: the last error it names, else the last lines."""
        lines = [line.strip() for line in self._tail().splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("error: ")]
        return errors[-1].removeprefix("error: ") if errors else " | ".join(lines[-LAST_LINES:]) or "it said nothing"

    def last_line(self) -> str:
        lines = self._tail().splitlines()
        return lines[-1].strip() if lines else ""

    def _tail(self) -> str:
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_BYTES))
            return file.read().decode("utf-8", "replace")

    def pids(self) -> tuple[int, ...]:
        """Of those that live: the HTTP process, the engine process, then whatever else there is below them. Where
        there is no /proc, the first alone."""
        if self.exit_code is not None:
            return ()
        below = [pid for pid in _descendants(self.pid) if pid != self.pid]
        return (self.pid, *sorted(below, key=lambda pid: (ENGINE_WORKER not in _command_line(pid), pid)))

    def rss(self) -> list[int]:
        """Resident bytes of each of ``pids``, in that order."""
        out = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                out.append(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        return out

    def stop(self, seconds: float = 60.0) -> int:
        """Send SIGTERM and wait. Returns the exit code; that of SIGKILL when it had not ended after ``seconds``."""
        below = self.pids()[1:]
        try:
            if self.exit_code is None:
                self._child.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._child.wait(seconds)
        finally:
            self._kill(below)
        return self._child.wait()

    def end(self, seconds: float = 15.0) -> None:
        """``stop``, for one whose end nobody judges: frozen processes are woken first."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self.stop(seconds)

    def _kill(self, below: Sequence[int]) -> None:
        """All of its session, and what started sessions of its own below it and is still there."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        self._child.wait()
        for pid in below:
            if ENGINE_WORKER in _command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if self._child.stdout is not None:
            self._child.stdout.close()


@contextlib.contextmanager
def _pipe_with(key: str) -> Iterator[int | None]:
    """The reading end of a pipe that holds ``key``, closed here when the context is left; None for no key."""
    if not key:
        yield None
        return
    read, write = os.pipe()
    try:
        with os.fdopen(write, "wb") as end:
            end.write(key.encode())  # far below what a pipe holds, so nobody waits
        yield read
    finally:
        os.close(read)


def _descendants(root: int) -> list[int]:
    waiting, seen = [root], list[int]()
    while waiting:
        pid = waiting.pop()
        seen.append(pid)
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
    return seen


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""
