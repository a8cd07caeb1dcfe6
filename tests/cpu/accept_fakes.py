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


@contextlib.contextmanager
def foreign(folder: Path, answer: Callable[[str], str] = str.upper, **more: Any) -> Iterator[Context]:
    """As ``scripted``, of another make: text alone, no token ids, no limits, no numbers, no probes."""

    async def models(request: Request) -> Response:
        return JSONResponse({"data": [{"id": "other", "object": "model", "owned_by": "someone"}]})

    async def completions(request: Request) -> Response:
        try:
            body = await request.json()
            prompt, count = body["prompt"], body.get("max_tokens", 16)
            assert isinstance(prompt, str) and type(count) is int and 0 < count < 10**6 and body["model"] == "other"
            assert body.get("temperature") in (None, 0) and type(body.get("n", 1)) is int and body.get("n", 1) > 0
            assert body.get("top_p", 1) <= 1 and not isinstance(body.get("stop"), int)
        except (ValueError, KeyError, TypeError, AssertionError, RecursionError):
            return JSONResponse({"error": {"message": "this cannot be served"}}, 400)
        words = [f" {word}" for word in (answer(prompt).split() * count)[:count]]
        usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(words)}
        if not body.get("stream"):
            choice = {"index": 0, "text": "".join(words), "finish_reason": "length"}
            return JSONResponse({"choices": [choice], "usage": usage})
        chunks = [{"choices": [{"index": 0, "text": word}]} for word in words] + [{"choices": [], "usage": usage}]
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks] + ["data: [DONE]\n\n"]
        return StreamingResponse(iter(lines), media_type="text/event-stream")

    async def chat(request: Request) -> Response:
        return JSONResponse({"error": {"message": "no conversations here"}}, 400)

    routes = [
        Route("/v1/models", models),
        Route("/v1/completions", completions, methods=["POST"]),
        Route("/v1/chat/completions", chat, methods=["POST"]),
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
