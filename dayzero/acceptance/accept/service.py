"""Servers for the stages of one acceptance: one that all share, private ones, or a foreign one by its address."""

from __future__ import annotations

import contextlib
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dayzero.acceptance.accept.cards import names_of
from dayzero.acceptance.accept.http import Client, NoAnswer
from dayzero.acceptance.accept.stage import RunningServer, Subject
from dayzero.acceptance.load.target import refusal_of
from dayzero.acceptance.server_process import NotServing, ServerProcess
from dayzero.console import ProgressFactory, clean, no_progress
from dayzero.errors import EngineDead, MachineError, UserError

START_SECONDS = 2 * 3600.0  # large checkpoints over a network take most of an hour
POLL_SECONDS = 0.25
ASK_SECONDS = 30.0


class OwnServer:
    """A server of this package, started here. Implements RunningServer."""

    def __init__(self, process: ServerProcess, address: str, headers: Mapping[str, str]) -> None:
        self.process, self.address, self.headers = process, address, headers
        self.model = str(process.told["served"][0])

    @property
    def told(self) -> Mapping[str, Any]:
        return self.process.told.get("info", {})

    @property
    def process_ids(self) -> tuple[int, ...]:
        return self.process.pids()

    def stop(self, seconds: float = 60.0) -> int:
        """As RunningServer has it; minus 9 when it had not ended after ``seconds`` and was killed."""
        return self.process.stop(seconds)


class ForeignServer:
    """A server that runs already. Implements RunningServer."""

    def __init__(self, address: str, model: str, headers: Mapping[str, str]) -> None:
        self.address, self.model, self.headers = address, model, headers

    @property
    def told(self) -> Mapping[str, Any]:
        return {}

    @property
    def process_ids(self) -> tuple[int, ...]:
        return ()

    def stop(self, seconds: float = 60.0) -> int:
        raise RuntimeError(f"{self.address} was not started here, so it is not ended here")


class Servers:
    """Implements Services; a context that ends whatever it started, also when this process is asked to end: within it
    SIGTERM interrupts as Ctrl-C does, unless somebody handles it already.

    folder: gets the servers' logs. A shared server that has died is told of once, by EngineDead, and started anew for
    the stage behind it.
    """

    def __init__(
        self,
        subject: Subject,
        folder: Path,
        progress: ProgressFactory = no_progress,
        start_seconds: float = START_SECONDS,
    ) -> None:
        self._subject, self._folder, self._progress, self._start_seconds = subject, folder, progress, start_seconds
        self._shared: OwnServer | ForeignServer | None = None
        self._running: list[ServerProcess] = []
        # Its own servers always want a key: nobody else on this machine is to disturb what is measured, and a key of
        # the environment, which they would otherwise take, may be for other servers.
        self._key = subject.api_key or ("" if subject.url is not None else secrets.token_hex(16))

    @property
    def own(self) -> bool:
        return self._subject.url is None

    def __enter__(self) -> Servers:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _interrupted)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._shared = None
        with contextlib.ExitStack() as stack:  # one that fails to end does not keep the others
            while self._running:
                stack.callback(self._running.pop().end)
        if signal.getsignal(signal.SIGTERM) is _interrupted:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def shared(self) -> RunningServer:
        """Errors: EngineDead with the last words of one that ended while it was tested; what one that did not become
        ready ended of, MachineError where it does not say; MachineError with what a foreign one answered."""
        found = self._shared
        if isinstance(found, OwnServer) and found.process.exit_code is not None:
            self._shared = None
            self._end(found.process)
            raise EngineDead(
                f"the server ended with {found.process.exit_code} while it was tested: {found.process.last_words()}; "
                f"its log is {found.process.log}."
            )
        if found is None:
            self._shared = found = self._foreign() if self._subject.url is not None else self._start(())
        return found

    @contextlib.contextmanager
    def private(self, *options: str) -> Iterator[RunningServer]:
        """As Services has it. Errors: those of ``shared``; RuntimeError where servers are not started here."""
        if not self.own:
            raise RuntimeError("a foreign server cannot be started with other options")
        if isinstance(self._shared, OwnServer):
            process, self._shared = self._shared.process, None
            self._end(process)
        server = self._start(options)
        try:
            yield server
        finally:
            self._end(server.process)

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    def _start(self, options: tuple[str, ...]) -> OwnServer:
        subject = self._subject
        if subject.source is None:
            raise MachineError("there is neither a checkpoint to serve nor the address of a server; give one of them.")
        arguments = [subject.source]
        arguments += ["--served-model-name", subject.model] if subject.model else []
        arguments += ["--recipe", subject.recipe] if subject.recipe else []
        self._folder.mkdir(parents=True, exist_ok=True)
        log = next(path for n in range(1, 10_000) if not (path := self._folder / f"server-{n}.log").exists())
        process = ServerProcess([*arguments, *subject.serve, *options], log, key=self._key)
        self._running.append(process)
        try:
            address = self._ready(process)
        except NotServing as error:
            why = refusal_of(error)
            kind = type(why) if isinstance(why, UserError) else MachineError
            raise kind(f"{error}; the server's log is {log}.") from error
        finally:
            if not process.told:
                self._end(process)
        return OwnServer(process, address, self._headers())

    def _end(self, process: ServerProcess) -> None:
        process.end()
        if process in self._running:
            self._running.remove(process)

    def _ready(self, process: ServerProcess) -> str:
        deadline = time.monotonic() + self._start_seconds
        with self._progress(f"starting a server for {self._subject.source}") as bar:
            while (address := process.address(POLL_SECONDS)) is None:
                bar.note(clean(process.last_line()))
                if time.monotonic() > deadline:
                    raise MachineError(
                        f"the server was not ready after {self._start_seconds:g} seconds: {process.last_words()}; "
                        f"its log is {process.log}."
                    )
        return address

    def _foreign(self) -> ForeignServer:
        url = self._subject.url
        assert url is not None
        client = Client(url, self._headers(), ASK_SECONDS)
        where = client.address.text
        try:
            answer = client.get("/v1/models")
        except NoAnswer as error:
            raise MachineError(f"no server answers at {where}; start it, or mend the address. ({error})") from error
        if not answer.ok:
            raise MachineError(f"{where}/v1/models answered {answer.said}; check the address and the key.")
        model = self._subject.model or next(iter(names_of(answer.json)), None)
        if model is None:
            raise MachineError(
                f"{where}/v1/models lists no model; it is no OpenAI-compatible server, or it serves none."
            )
        return ForeignServer(where, model, self._headers())


def _interrupted(number: int, frame: object) -> None:
    raise KeyboardInterrupt
