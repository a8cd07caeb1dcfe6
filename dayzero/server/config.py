"""What the HTTP side is told once, before it starts. Nothing here is changed afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

from dayzero.chat.images import MAX_PIXELS
from dayzero.errors import UsageError

MIB = 1 << 20


def write_stderr(line: str) -> None:
    """One line of the structured log, written whole."""
    sys.stderr.write(line + "\n")
    sys.stderr.flush()


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """served_names: names a request may give as ``model``; the first is the one answers carry.

    api_keys: any of them opens the API; none: it is open. max_body_bytes: a longer body is 413. max_json_depth: deeper
    JSON is 400. body_seconds: a body that has not come by then is 408; each ``body_rate`` bytes that do come add one
    second. max_choices: sequences that one request may start (prompts times ``n``). max_images: image parts in
    one request, max_image_bytes: of the file of one, max_image_pixels: width x height of one. image_hosts: where images
    may be fetched from, ``*`` is any public host; none: they come as data: URIs only. thread_chars: texts longer than
    this are rendered and tokenised away from the event loop. keepalive_s: a stream that is silent for so long gets a
    comment line. retry_after_s: what a refused client is told to wait. engine: value of the label of the same name.
    write: takes one line of the log.
    """

    served_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * MIB
    max_json_depth: int = 64
    body_seconds: float = 30.0
    body_rate: int = 64 << 10
    max_choices: int = 1024
    max_images: int = 16
    max_image_bytes: int = 20 * MIB
    max_image_pixels: int = MAX_PIXELS
    image_hosts: tuple[str, ...] = ()
    thread_chars: int = 16_000
    keepalive_s: float = 15.0
    retry_after_s: int = 2
    engine: str = "0"
    write: Callable[[str], None] = write_stderr

    def __post_init__(self) -> None:
        if not self.served_names or not all(self.served_names):
            raise UsageError("a server needs at least one model name that is not empty; give --served-model-name.")
        for name in self.served_names:
            if not name.isprintable():  # it stands in answers, headers, log lines and labels of metrics
                raise UsageError(
                    f"the model name {name!r:.100} holds a line break or another control character; give "
                    "--served-model-name without it."
                )
        if not all(self.api_keys):
            raise UsageError("an API key must not be empty; give --api-key a text or leave it out.")
        if any(key != key.strip() or not key.isprintable() for key in self.api_keys):
            # a line break at the end comes easily from a file or a secret, and no header can carry it
            raise UsageError("an API key begins or ends with a blank, or holds a line break; clients cannot send such.")
        for name in (
            "max_body_bytes",
            "max_json_depth",
            "max_choices",
            "max_image_bytes",
            "max_image_pixels",
            "keepalive_s",
            "body_seconds",
            "body_rate",
        ):
            if getattr(self, name) <= 0:
                raise UsageError(f"{name} must be above zero, got {getattr(self, name)}.")
