"""/health, /ready, /ping, /progress, /version: what probes ask. They answer from what is known and never wait.

Alive, ready and moving are three questions. /health is 503 when the engine is dead, being restarted or frozen; /ready
also while it loads or drains; /progress shows the numbers behind both.
"""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from dayzero import __version__
from dayzero.engine.api import EngineStatus
from dayzero.engine.events import Progress
from dayzero.server.endpoint import Call, json_response
from dayzero.server.state import ServerState


class Health(msgspec.Struct, kw_only=True):
    """state: of the engine, ``stalled`` when work is queued and no step ends. why: a sentence when it is not ok."""

    status: str
    state: str
    why: str = ""


class ProgressAnswer(msgspec.Struct, kw_only=True):
    """state, stalled, died, why: of the engine. draining: of the HTTP side. loaded_share: of the weights, while they
    load."""

    state: str
    stalled: bool
    draining: bool
    since_step_seconds: float
    died: int
    why: str
    progress: Progress | None
    loaded_share: float | None


class Version(msgspec.Struct, kw_only=True):
    version: str


def _state(status: EngineStatus) -> str:
    return "stalled" if status.stalled else status.state


def _alive(state: ServerState) -> Health:
    status = state.engine.status()
    good = _state(status) in ("loading", "ready", "draining")
    return Health(status="ok" if good else "unhealthy", state=_state(status), why=status.why)


def _ready(state: ServerState) -> Health:
    health = _alive(state)
    if state.draining and health.state == "ready":
        return Health(status="not ready", state="draining", why="the server takes no new requests.")
    if health.status == "ok" and health.state != "ready":
        return Health(status="not ready", state=health.state, why=health.why)
    return health


async def health(call: Call) -> Response:
    found = _alive(call.state)
    return json_response(found, 200 if found.status == "ok" else 503)


async def ready(call: Call) -> Response:
    found = _ready(call.state)
    return json_response(found, 200 if found.status == "ok" else 503)


async def progress(call: Call) -> Response:
    status = call.state.engine.status()
    numbers = status.progress
    loading = numbers is not None and numbers.to_load > 0
    answer = ProgressAnswer(
        state=status.state,
        stalled=status.stalled,
        draining=call.state.draining,
        since_step_seconds=status.since_step,
        died=status.died,
        why=status.why,
        progress=numbers,
        loaded_share=min(1.0, numbers.loaded / numbers.to_load) if numbers is not None and loading else None,
    )
    return json_response(answer)


async def version(call: Call) -> Response:
    return json_response(Version(version=__version__))


async def metrics(call: Call) -> Response:
    return Response(call.state.metrics.text(), headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"})
