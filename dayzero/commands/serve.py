"""``dayzero serve``: an OpenAI-compatible service over one model."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dayzero.commands.engine_options import EngineArguments, chat_of, launch_of, size_of
from dayzero.console import Bar, Console
from dayzero.errors import UsageError

if TYPE_CHECKING:
    from dayzero.chat.service import ChatService
    from dayzero.engine.api import EngineInfo
    from dayzero.server.config import ServerConfig

API_KEY = "DAYZERO_API_KEY"


@dataclass(frozen=True, slots=True)
class ServeArguments(EngineArguments):
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0 for every interface.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000
    served_model_name: Annotated[
        list[str] | None,
        typer.Option("--served-model-name", metavar="NAME", help="What requests call the model; may be repeated."),
    ] = None
    api_key: Annotated[
        list[str] | None,
        typer.Option("--api-key", metavar="KEY", help=f"Needed of clients; may be repeated. Else ${API_KEY}."),
    ] = None
    api_key_fd: Annotated[
        int | None,
        typer.Option(
            "--api-key-fd",
            min=3,
            max=2**31 - 1,
            metavar="N",
            help="Read keys from this open file descriptor, one a line.",
        ),
    ] = None
    max_body: Annotated[str, typer.Option("--max-body", metavar="SIZE", help="Longest request body.")] = "32MiB"
    max_images: Annotated[int, typer.Option(min=0, help="Images in one request.")] = 16
    max_image_bytes: Annotated[str, typer.Option(metavar="SIZE", help="Bytes of one image.")] = "20MiB"
    max_image_pixels: Annotated[int, typer.Option(min=1, metavar="N", help="Width x height of one image.")] = 64_000_000
    allow_image_urls: Annotated[
        bool, typer.Option("--allow-image-urls", help="Fetch images by http(s) from any public host.")
    ] = False
    image_host: Annotated[
        list[str] | None,
        typer.Option("--image-host", metavar="HOST", help="Fetch images from this host; may be repeated."),
    ] = None
    stall_seconds: Annotated[
        float, typer.Option(min=0.1, help="Unhealthy when work is queued and no step has ended for this long.")
    ] = 10.0
    drain_seconds: Annotated[float, typer.Option(min=0, help="Time for answers to end after SIGTERM.")] = 60.0


def run(arguments: ServeArguments, console: Console) -> int:
    """Serve a model over HTTP: OpenAI's chat, completions and responses, Anthropic's messages, metrics, probes.

    Listens at once; /ready turns 200 when the model is loaded. SIGTERM lets running answers end.
    """
    from dayzero.server.app import create_app
    from dayzero.server.run import bind, run_loop, serve

    chat, config = chat_of(arguments), config_of(arguments)
    launch = launch_of(arguments, chat.stop_ids)
    with bind(arguments.host, arguments.port) as listening:
        address = listening.getsockname()
        from dayzero.engine.client import AsyncEngine

        engine = AsyncEngine(launch, stall_seconds=arguments.stall_seconds)
        app = create_app(engine, chat, config)
        shown = _Shown(console, chat, config, arguments.source, f"http://{_host(address[0])}:{address[1]}")
        with shown:
            run_loop(
                serve(
                    app, engine, listening, drain_seconds=arguments.drain_seconds, on_loading=shown.loading,
                    on_ready=shown.ready,
                )
            )  # fmt: skip
    return 0


def config_of(arguments: ServeArguments) -> ServerConfig:
    """What the HTTP side is told. UsageError for a value that cannot be."""
    from dayzero.server.config import ServerConfig

    keys = [*(arguments.api_key or ()), *_keys_from(arguments.api_key_fd)]
    if not keys and os.environ.get(API_KEY):
        keys = [os.environ[API_KEY]]
    names = arguments.served_model_name or [_name_of(arguments.source)]
    return ServerConfig(
        served_names=tuple(dict.fromkeys(names)),
        api_keys=tuple(keys),
        max_body_bytes=size_of("--max-body", arguments.max_body),
        # more could never be admitted: that is no 429, which says to come back later
        max_choices=min(ServerConfig.max_choices, arguments.max_running + arguments.max_waiting),
        max_images=arguments.max_images,
        max_image_bytes=size_of("--max-image-bytes", arguments.max_image_bytes),
        max_image_pixels=arguments.max_image_pixels,
        image_hosts=_hosts(arguments),
    )


def _keys_from(number: int | None) -> list[str]:
    """Keys that a parent passes on without a command line that others may read. UsageError when nothing can be read."""
    if number is None:
        return []
    try:
        with os.fdopen(number, "r", encoding="utf-8") as file:
            keys = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--api-key-fd {number}: no keys can be read from it: {error}; pass it on open.") from error
    if not keys:
        raise UsageError(f"--api-key-fd {number}: there is no key in it; write one a line.")
    return keys


def _hosts(arguments: ServeArguments) -> tuple[str, ...]:
    named = tuple(host.strip().lower() for host in arguments.image_host or ())
    return (*named, *(["*"] if arguments.allow_image_urls else []))


def _name_of(source: str) -> str:
    """What requests call the model unless told otherwise: the folder's name, or the hub id."""
    from dayzero.checkpoint.seeded_source import SEEDED, served_name

    if source.startswith(SEEDED):
        return served_name(source)
    if Path(source).exists():
        return Path(source).resolve().name or "model"
    return source.split("://", 1)[-1].rstrip("/") or "model"


def _host(address: str) -> str:
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(address, address)
    return f"[{shown}]" if ":" in shown and not shown.startswith("[") else shown


class _Shown:
    """What a person, or a program with --json, sees of the start."""

    def __init__(self, console: Console, chat: ChatService, config: ServerConfig, source: str, address: str) -> None:
        self._console, self._chat, self._config, self._source, self._address = console, chat, config, source, address
        self._open = ExitStack()
        self._bar: Bar | None = None

    def __enter__(self) -> _Shown:
        self._console.line(f"{self._address} (loading {self._source})")
        made: AbstractContextManager[Bar] = self._console.progress("reading weights", None, "B")
        self._bar = self._open.enter_context(made)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def loading(self, loaded: float, total: float) -> None:
        if self._bar is not None:
            self._bar.reach(loaded, total)

    def ready(self, info: EngineInfo) -> None:
        self._open.close()
        rows = dict(info.table) | dict(self._chat.table())
        self._console.table("", ("", ""), list(rows.items()))
        self._console.line(f"ready: {self._address}/v1 serves {', '.join(self._config.served_names)}")
        self._console.emit_json({"address": self._address, "served": self._config.served_names, "info": info})
