"""An app over a scripted engine: real HTTP side, real tokenizer and parser, answers that a test writes down."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from dayzero.chat.service import ChatService
from dayzero.chat.tokenizer import Tokenizer
from dayzero.checkpoint.source import open_source
from dayzero.engine.api import EngineInfo, EngineState, EngineStatus
from dayzero.engine.events import Logprobs, Output, Progress
from dayzero.engine.request import NewRequest
from dayzero.errors import EngineDead, Overloaded
from dayzero.server.app import create_app
from dayzero.server.config import ServerConfig

SPECIALS = ("<|begin|>", "<|start|>", "<|end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
MAX_LEN = 2000
VOCAB = 256 + len(SPECIALS)


TEMPLATE = """\
{%- for tool in tools or [] %}<|tool|>{{ tool.function | tojson }}{% endfor %}
{%- for m in messages %}<|start|>{{ m.role }}
{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}
{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function.arguments }}</tool_call>{% endfor %}
{%- if not loop.last or add_generation_prompt %}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% if enable_thinking %}<think>{% endif %}{% endif %}"""


def write_folder(folder: Path) -> None:
    """The files of a tokenizer with one token a byte, the special ones above them, and a chat template in the hermes
    format. ``<|begin|>`` goes before every prompt that no template made."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [b for b in range(256) if b not in itself]
    letters = {b: chr(b) for b in itself} | {b: chr(0x100 + n) for n, b in enumerate(rest)}
    added = [
        {"id": 256 + n, "content": text, "special": n < 3, "normalized": False, "single_word": False,
         "lstrip": False, "rstrip": False}
        for n, text in enumerate(SPECIALS)
    ]  # fmt: skip
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False, "trim_offsets": True}
    model = {"type": "BPE", "vocab": {letters[b]: b for b in range(256)}, "merges": []}
    tokenizer = {"version": "1.0", "added_tokens": added, "pre_tokenizer": level, "decoder": level, "model": model}
    config = {"add_bos_token": True, "bos_token": "<|begin|>", "chat_template": TEMPLATE}
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


@cache
def full_chat() -> ChatService:
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        return ChatService(open_source(folder))


def chat_with(template: str) -> ChatService:
    """The same tokenizer with another chat template."""
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder))
        return ChatService(open_source(folder), template=template)


@cache
def no_chat() -> ChatService:
    """Of a folder that holds no tokenizer."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text("{}", encoding="utf-8")
        return ChatService(open_source(folder))


def byte_tokenizer() -> Tokenizer:
    tokenizer = full_chat().tokenizer
    assert tokenizer is not None
    return tokenizer


def ids(text: str) -> list[int]:
    """Ids of an answer, special tokens by name."""
    return byte_tokenizer().encode(text, special=True)


@dataclass
class ScriptedEngine:
    """Answers what ``reply`` says for a request. pieces: tokens of one output. delay: seconds before each output.

    aborted: requests whose reader left. live: those being answered. state, stalled, overloaded, dies_after (outputs),
    merged_end (the error comes with the last tokens): what a test wants to go wrong.
    """

    reply: Callable[[NewRequest], Sequence[int]] = lambda request: ids("Hello, wörld! 🙂")
    pieces: int = 1
    delay: float = 0.0
    state: EngineState = "ready"
    stalled: bool = False
    overloaded: bool = False
    dies_after: int | None = None
    fails: tuple[str, str] | None = None
    merged_end: bool = False
    stop_id: int | None = 258
    cached: int = 3
    seen: list[NewRequest] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    aborted: list[str] = field(default_factory=list)
    defaults: dict[str, Any] = field(default_factory=dict)
    told: list[Callable[[int], None]] = field(default_factory=list)
    counters: dict[str, float] = field(default_factory=lambda: {"preemptions": 2.0, "prefix_hits": 64.0})

    def __post_init__(self) -> None:
        self.info = EngineInfo(
            source="models/test", family="test", dtype="bf16", max_model_len=MAX_LEN, vocab=VOCAB, stop_ids=[258],
            defaults=self.defaults, table=[], page_tokens=64, pool_tokens=6400, max_running=8,
        )  # fmt: skip

    def status(self) -> EngineStatus:
        progress = Progress(state="ready", step=7, last_step=1e9, running=len(self.live), counters=self.counters)
        return EngineStatus(state=self.state, progress=progress, stalled=self.stalled, since_step=0.5)

    def on_step(self, told: Callable[[int], None]) -> None:
        self.told.append(told)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def generate(self, request: NewRequest) -> AsyncIterator[Output]:
        if self.overloaded:
            raise Overloaded("too many requests are waiting")
        if self.state != "ready":
            raise EngineDead("there is no engine")
        assert request.id not in self.live
        self.seen.append(request)
        self.live.add(request.id)
        ended = False
        try:
            for output in self._outputs(request):
                await asyncio.sleep(self.delay)
                for told in self.told:
                    told(len(output.tokens))
                ended = output.finish is not None
                yield output
        finally:
            self.live.discard(request.id)
            if not ended:
                self.aborted.append(request.id)

    def _outputs(self, request: NewRequest) -> Iterator[Output]:
        params, now = request.params, time.time()
        answer = list(self.reply(request))
        assert params.max_tokens is not None
        cut = len(answer) >= params.max_tokens
        answer = answer[: params.max_tokens]
        runs = [answer[i : i + self.pieces] for i in range(0, len(answer), self.pieces)] or [[]]
        for number, run in enumerate(runs):
            if self.dies_after is not None and number >= self.dies_after:
                last_words = run if self.merged_end else []
                logs = [] if params.logprobs is None else [logprobs(token, params.logprobs) for token in last_words]
                error = self.fails or ("engine_died", "the process ended.")
                yield Output(id=request.id, tokens=last_words, logprobs=logs, finish="error", error=error)
                return
            first, last = number == 0, number == len(runs) - 1
            prompt = None
            if first and params.prompt_logprobs is not None:
                prompt = [logprobs(token, params.prompt_logprobs) for token in request.prompt[1:]]
            yield Output(
                id=request.id,
                tokens=run,
                logprobs=[] if params.logprobs is None else [logprobs(token, params.logprobs) for token in run],
                finish=None if not last or not cut else "length",
                cached=self.cached if first else None,
                prompt_logprobs=prompt,
                times={"arrival": request.arrival, "scheduled": now, "first_token": now, "finished": now},
            )
        if not cut:
            yield Output(id=request.id, finish="stop", stop_id=self.stop_id)


def logprobs(token: int, num_top: int) -> Logprobs:
    """Some numbers that depend on the token alone; one of them is no number."""
    top = [((token + k) % 256, -math.inf if k == 2 else -0.1 - k) for k in range(num_top)]
    return Logprobs(token, -0.1 - token / 1000, 1, top)


@dataclass
class World:
    engine: ScriptedEngine
    app: Starlette
    log: list[dict[str, Any]]
    web: Web | None = None


def make(engine: ScriptedEngine | None = None, chat: ChatService | None = None, **config: Any) -> World:
    """An app. chat: None for the usual one."""
    log: list[dict[str, Any]] = []
    engine = engine or ScriptedEngine()
    settings = {"served_names": ("tiny", "also-tiny"), "write": lambda line: log.append(json.loads(line))} | config
    return World(engine, create_app(engine, chat or full_chat(), ServerConfig(**settings)), log)


class Web:
    """In-process calls from plain functions, on an event loop of its own. quiet: a bug of the app is the 500 a client
    would see; otherwise it is raised here."""

    def __init__(self, world: World, quiet: bool = False) -> None:
        self._loop = asyncio.new_event_loop()
        transport = httpx.ASGITransport(world.app, raise_app_exceptions=not quiet)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test")

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        return self._loop.run_until_complete(self._client.request(method, path, **more))

    def get(self, path: str, **more: Any) -> httpx.Response:
        return self.request("GET", path, **more)

    def post(self, path: str, **more: Any) -> httpx.Response:
        return self.request("POST", path, **more)

    def __del__(self) -> None:
        self._loop.close()


def client(world: World, quiet: bool = False) -> Web:
    if world.web is None or quiet:
        world.web = Web(world, quiet)
    return world.web


@contextlib.contextmanager
def serving(world: World) -> Iterator[str]:
    """The app behind a real server on loopback; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = uvicorn.Server(
        uvicorn.Config(world.app, host="127.0.0.1", port=port, loop="uvloop", http="httptools", log_level="warning")
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "the server did not start"
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=10)


def eventually(holds: Callable[[], bool], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def events(text: str) -> list[Any]:
    """The data of server-sent events, in order; [DONE] as it stands."""
    out = []
    for block in text.split("\n\n"):
        for line in block.splitlines():
            if line.startswith("data: "):
                out.append("[DONE]" if line == "data: [DONE]" else json.loads(line[6:]))
    return out


def ask(**more: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]} | more
