"""create_app: one engine behind HTTP. The app holds everything it needs; there are no globals.

``app.state.server`` is its ServerState: ``await app.state.server.drain(timeout)`` stops taking requests (/ready turns
503) and waits for those being served. Wrapping apps (a router, Ray Serve) need nothing else.
"""

from __future__ import annotations

import asyncio
import re
import time
from functools import cache

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dayzero.chat.service import ChatService
from dayzero.engine.api import Engine
from dayzero.server.body import warm
from dayzero.server.config import ServerConfig
from dayzero.server.endpoint import CLIENT_GONE, JSON, Call, Endpoint, Route, error_response
from dayzero.server.errors import ApiError, Style, internal
from dayzero.server.openapi import document
from dayzero.server.routes import ROUTES
from dayzero.server.state import ServerState

METHODS = frozenset({"GET", "POST", "HEAD", "OPTIONS", "PUT", "PATCH", "DELETE"})
OTHER = "other"  # handler of paths, and name of methods, that are not ours: labels must not grow with what clients send


def create_app(engine: Engine, chat: ChatService | None, config: ServerConfig) -> Starlette:
    """The app. It starts and ends nothing: the engine's life is the caller's.

    engine: may still be loading. chat: tokenizer and encoding of the served folder; None: token ids only.
    """
    state = ServerState(engine, chat, config)
    routes = [*ROUTES, _openapi_route(config)]
    for route in routes:
        warm(route.body)
    served = [HttpRoute(route.path, Endpoint(state, route), methods=[route.method]) for route in routes]
    app = Starlette(
        routes=served,
        exception_handlers={HTTPException: _http_error(config, _methods(routes)), Exception: _bug(config)},
    )
    app.state.server = state
    app.router.redirect_slashes = False  # to an address made of the client's own Host header
    app.add_middleware(_Counted, state=state, routes=routes)
    return app


def _openapi_route(config: ServerConfig) -> Route:
    @cache
    def made() -> bytes:
        return msgspec.json.encode(document(ROUTES, f"dayzero: {config.served_names[0]}", bool(config.api_keys)))

    async def openapi(call: Call) -> Response:
        return Response(await asyncio.to_thread(made), headers=JSON)  # takes tenths of a second, once

    return Route("/openapi.json", openapi)


def _style(request: Request) -> Style:
    return "anthropic" if request.url.path.startswith("/v1/messages") else "openai"


def _methods(routes: list[Route]) -> dict[str, str]:
    """Path -> the methods it takes, as the Allow header has them. A path may stand in several routes, and Starlette
    names the methods of the first one only."""
    found: dict[str, set[str]] = {}
    for route in routes:
        found.setdefault(route.path, set()).update({"GET", "HEAD"} if route.method == "GET" else {route.method})
    return {path: ", ".join(sorted(methods)) for path, methods in found.items()}


def _http_error(config: ServerConfig, methods: dict[str, str]):  # type: ignore[no-untyped-def]
    def handle(request: Request, error: HTTPException) -> Response:
        """Paths and methods that are not served."""
        path = request.url.path[:200]
        sentences = {404: f"there is no {path!r} here.", 405: f"{path!r} does not take {request.method[:20]}."}
        answer = ApiError(error.status_code, sentences.get(error.status_code, error.detail))
        response = error_response(answer, _style(request), config.retry_after_s)
        response.headers.update(error.headers or {})
        if error.status_code == 405 and request.url.path in methods:
            response.headers["allow"] = methods[request.url.path]
        return response

    return handle


def _bug(config: ServerConfig):  # type: ignore[no-untyped-def]
    def handle(request: Request, error: Exception) -> Response:
        """A fault of ours: the server process logs the traceback, the client learns that there is one."""
        return error_response(internal(), _style(request), config.retry_after_s)

    return handle


class _Counted:
    """Counts requests and their time by route, method and status."""

    def __init__(self, app: ASGIApp, state: ServerState, routes: list[Route]) -> None:
        self._app, self._state = app, state
        self._paths = frozenset(route.path for route in routes if "{" not in route.path)
        self._patterns = [
            (route.path, re.compile(re.sub(r"{\w+:path}", ".+", route.path))) for route in routes if "{" in route.path
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, returned = time.perf_counter(), 0, False

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, noting)
            returned = True
        finally:
            status = status or (CLIENT_GONE if returned else 500)  # the edge outside of this one answers with 500
            method = scope["method"] if scope["method"] in METHODS else OTHER
            seconds = time.perf_counter() - started
            self._state.metrics.http(self._handler(scope["path"]), method, status, seconds)

    def _handler(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((name for name, pattern in self._patterns if pattern.fullmatch(path)), OTHER)
