"""The structured log: one JSON line for each request's end, with its reason and numbers, never with prompt text."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import msgspec


class Log:
    """Lines of JSON to ``write``. Times are UTC."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def event(self, event: str, **fields: Any) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line = {"time": now, "event": event, **{k: v for k, v in fields.items() if v is not None}}
        self._write(msgspec.json.encode(line).decode())
