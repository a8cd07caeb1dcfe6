"""Servers for the stages that measure a service: scripted ones in this process, and a real one over a fake engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from dayzero.acceptance.accept.service import Servers
from dayzero.acceptance.accept.stage import Context, Profile, RunningServer, StageResult, Subject
from dayzero.finding import Finding
from tests.paper.server_support import ScriptedEngine, World, serving

ROOT = Path(__file__).parents[2]
# As in a service of ours, but that nothing is computed: the engine is a process of its own.
SERVER = """
import sys
from pathlib import Path
from dayzero.engine.client import AsyncEngine
from dayzero.server.app import create_app
from dayzero.server.config import ServerConfig
from dayzero.server.run import bind, run_loop, serve
from tests.paper.fake_engine import WORKER, Habits, fake_launch
from tests.paper.server_support import full_chat

folder, stall, drain, running, waiting = sys.argv[1], *(float(one) for one in sys.argv[2:])
habits = Habits(step_seconds=0.003, max_model_len=600)
launch = fake_launch(Path(folder), habits, max_running=int(running), max_waiting=int(waiting))
engine = AsyncEngine(launch, worker=WORKER, stall_seconds=stall)
app = create_app(engine, full_chat(), ServerConfig(served_names=("m",)))
with bind("127.0.0.1", 0) as listening:
    ready = lambda info: print(listening.getsockname()[1], flush=True)
    run_loop(serve(app, engine, listening, drain_seconds=drain, on_ready=ready))
"""


@dataclass
class FakeServer:
    """Implements RunningServer."""

    address: str
    model: str = "tiny"
    headers: Mapping[str, str] = field(default_factory=dict)
    told: Mapping[str, Any] = field(default_factory=dict)
    child: subprocess.Popen[str] | None = None

    @property
    def process_ids(self) -> tuple[int, ...]:
        if self.child is None:
            return ()
        below = psutil.Process(self.child.pid).children(recursive=True)
        return (self.child.pid, *(one.pid for one in below if one.status() != psutil.STATUS_ZOMBIE))

    def stop(self, seconds: float = 60.0) -> int:
        assert self.child is not None
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(seconds)


@dataclass
class FakeServices:
    """Implements Services. fixed: what is shared; folder: where private ones are started, None: they are not."""

    fixed: FakeServer | None = None
    folder: Path | None = None
    overrule: Mapping[str, str] = field(default_factory=dict)

    @property
    def own(self) -> bool:
        return self.folder is not None

    def shared(self) -> RunningServer:
        assert self.fixed is not None
        return self.fixed

    @contextlib.contextmanager
    def private(self, *options: str) -> Iterator[RunningServer]:
        assert self.folder is not None
        given = dict(zip(options[::2], options[1::2], strict=True)) | self.overrule
        names = ("--stall-seconds", "--drain-seconds", "--max-running", "--max-waiting")
        with over_fake_engine(self.folder / f"m{time.monotonic_ns()}", *(given[name] for name in names)) as server:
            yield server


@contextlib.contextmanager
def over_fake_engine(folder: Path, *options: str) -> Iterator[FakeServer]:
    """options: seconds until it counts as stalled, of the drain; requests that run, that wait."""
    command = [sys.executable, "-c", SERVER, str(folder), *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=environment
    ) as child:
        try:
            assert child.stdout is not None
            line = child.stdout.readline()
            assert line, "the server did not start"
            yield FakeServer(f"http://127.0.0.1:{int(line)}", "m", child=child)
        finally:
            below = psutil.Process(child.pid).children(recursive=True) if child.poll() is None else []
            for one in below:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.resume()
            if child.poll() is None:
                child.kill()


@contextlib.contextmanager
def scripted(world: World, folder: Path, profile: Profile = "quick", **more: Any) -> Iterator[Context]:
    """A context whose shared server is ``world`` and not ours."""
    with serving(world) as address:
        services = FakeServices(FakeServer(address))
        yield Context(Subject(None, address), services, folder, profile, **more)


@contextlib.contextmanager
def real(family: str, folder: Path) -> Iterator[Context]:
    """Over a small random model of ``family``, served by this package."""
    from small_models import write_small

    model = folder / "model"
    model.mkdir()
    subject = Subject(str(write_small(family, model)), serve=("--dtype", "float32", "--threads", "1"))
    with Servers(subject, folder / "logs") as servers:
        yield Context(subject, servers, folder)


@dataclass
class Foreign:
    """A server of another make: text alone, no token ids, no limits, no numbers, no probes. chat: it answers chat and
    no completions, else completions and no chat. spoil: changes what it sends, parsed. seen: bodies that it was sent.
    refuses: fields that it does not take. thinks: tokens of reasoning before each answer. ends: an answer is said once,
    else as often as there is room."""

    answer: Callable[[str], str] = str.upper
    chat: bool = False
    spoil: Callable[[Any], Any] = lambda body: body
    refuses: frozenset[str] = frozenset()
    thinks: int = 0
    ends: bool = False
    seen: list[Any] = field(default_factory=list)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": "other", "object": "model", "owned_by": "someone"}]})

    async def completions(self, request: Request) -> Response:
        return await self._answered(request, chat=False)

    async def conversation(self, request: Request) -> Response:
        return await self._answered(request, chat=True)

    async def _answered(self, request: Request, chat: bool) -> Response:
        if chat != self.chat:
            return JSONResponse({"error": {"message": "not here"}}, 404)
        try:
            body = await request.json()
            self.seen.append(body)
            prompt, count = self._read(body, chat), body.get("max_tokens", 16)
            assert type(count) is int and 0 < count < 10**6 and body["model"] == "other"
            assert body.get("temperature") in (None, 0) and type(body.get("n", 1)) is int and body.get("n", 1) > 0
            assert body.get("top_p", 1) <= 1 and not isinstance(body.get("stop"), int)
            assert not self.refuses & set(body)
        except (ValueError, LookupError, TypeError, AssertionError, RecursionError):
            return JSONResponse({"error": {"message": "this cannot be served"}}, 400)
        thought = [f" t{n}" for n in range(min(self.thinks, count))]
        said = self.answer(prompt).split() * (1 if self.ends else count)
        end = "stop" if self.ends and len(thought) + len(said) <= count else "length"
        words = [f" {word}" for word in said[: count - len(thought)]]
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(thought) + len(words)}
        usage["total_tokens"] = sum(usage.values())
        if not body.get("stream"):
            choice = {"index": 0, "finish_reason": end, **_said("".join(words), "".join(thought), chat, "message")}
            return JSONResponse(self.spoil({"choices": [choice], "usage": usage}))
        parts = [_said("", one, chat, "delta") for one in thought] + [_said(one, "", chat, "delta") for one in words]
        chunks = [{"choices": [{"index": 0, **part}]} for part in parts]
        chunks += [
            {"choices": [{"index": 0, "finish_reason": end, **_said("", "", chat, "delta")}]},
            {"choices": [], "usage": usage},
        ]
        lines = [f"data: {json.dumps(self.spoil(chunk))}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    @staticmethod
    def _read(body: Any, chat: bool) -> str:
        text = body["messages"][-1]["content"] if chat else body["prompt"]
        assert isinstance(text, str)
        return text


def _said(text: str, thought: str, chat: bool, key: str) -> dict[str, Any]:
    if not chat:
        return {"text": thought + text}
    return {key: {"role": "assistant", "content": text} | ({"reasoning_content": thought} if thought else {})}


@contextlib.contextmanager
def foreign(
    folder: Path, answer: Callable[[str], str] = str.upper, make: Foreign | None = None, **more: Any
) -> Iterator[Context]:
    """As ``scripted``, of another make: ``Foreign``."""
    server = make or Foreign(answer)
    routes = [
        Route("/v1/models", server.models),
        Route("/v1/completions", server.completions, methods=["POST"]),
        Route("/v1/chat/completions", server.conversation, methods=["POST"]),
    ]
    with serving(World(ScriptedEngine(), Starlette(routes=routes), [])) as address:
        services = FakeServices(FakeServer(address, "other"))
        yield Context(Subject(None, address), services, folder, **more)


def named(result: StageResult | list[Finding], kind: str) -> list[Finding]:
    """The findings of a kind; it must be there."""
    findings = result if isinstance(result, list) else result.findings
    found = [finding for finding in findings if finding.kind == kind]
    assert found, f"no finding {kind} among {sorted({f.kind for f in findings})}"
    return found


def failed(result: StageResult | list[Finding]) -> dict[str, str]:
    """Kind -> layer of what failed."""
    findings = result if isinstance(result, list) else result.findings
    return {finding.kind: finding.layer for finding in findings if finding.verdict == "fail"}
