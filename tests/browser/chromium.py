"""Debian's chromium, driven over its own protocol on two pipes: no port is opened and no driver is needed.

The protocol is Chrome's DevTools: JSON messages, each ended by a zero byte; commands are answered by their id.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new", "--remote-debugging-pipe", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--mute-audio", "--password-store=basic",
)  # fmt: skip
SECONDS = 60.0  # for one command, on a machine whose cores are busy


def find_chromium() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. problems: what its console, its scripts or its loader complained of since it was opened."""

    def __init__(self, send: int, receive: int) -> None:
        self._send, self._receive = send, receive
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self._events: list[dict[str, Any]] = []
        self.problems: list[str] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Result of a command; RuntimeError when the browser refuses it or does not answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._send, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + SECONDS
        while True:
            answer = self._next(until, method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error'].get('message')}")
                return dict(answer["result"])

    def _next(self, until: float, what: str) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._receive], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise RuntimeError(f"{what}: no answer from chromium within {SECONDS:.0f} s")
            more = os.read(self._receive, 1 << 20)
            if not more:
                raise RuntimeError(f"{what}: chromium has ended")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message = dict(json.loads(text))
        if "method" in message:
            self._events.append(message)
            self._note(message["method"], message["params"])
        return message

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(told["exceptionDetails"].get("text")))
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
            self.problems.append(f"console.{told['type']}: {told['args']}")
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith(("file:", "about:")):
            self.problems.append(f"asks for {told['request']['url'][:100]}")

    def open(
        self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, scripts: bool = True
    ) -> None:
        """Load a file in a window of that size. width below 600 is a phone's, with its two pixels for one."""
        phone = width < 600
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=height, mobile=phone,
                 deviceScaleFactor=2 if phone else 1)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])
        self.ask("Emulation.setScriptExecutionDisabled", value=not scripts)
        self._events.clear()
        self.problems.clear()
        self.ask("Page.navigate", url=path.resolve().as_uri())
        until = time.monotonic() + SECONDS
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next(until, f"loading {path.name}")

    def value(self, expression: str) -> Any:
        """A JavaScript expression's value; runs where the page's own scripts are off too."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def picture(self, *, whole: bool = True) -> Image.Image:
        """What is seen, of the whole page or of the window."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return Image.open(io.BytesIO(base64.b64decode(answer["data"]))).convert("RGB")

    def printed(self) -> bytes:
        """The page as a PDF, as it is printed."""
        return base64.b64decode(self.ask("Page.printToPDF", printBackground=False)["data"])


@contextmanager
def chromium(program: str, folder: Path) -> Iterator[Page]:
    """A browser with its profile in ``folder``; ended with the context."""
    in_read, in_write = os.pipe()
    out_read, out_write = os.pipe()
    # Moved out of the way first: one of them may be 3 or 4 itself.
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, 20) for number in (in_read, out_write)]

    def hand_over() -> None:
        os.dup2(high[0], 3)
        os.dup2(high[1], 4)

    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []  # its sandbox refuses to run as root
    command = [program, *FLAGS, *sandbox, f"--user-data-dir={folder}", "about:blank"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, close_fds=False,
                                   preexec_fn=hand_over, start_new_session=True)  # fmt: skip
    for number in (in_read, out_write, *high):
        os.close(number)
    try:
        yield Page(in_write, out_read)
    finally:
        os.close(in_write)  # it ends when its pipe does
        os.close(out_read)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
