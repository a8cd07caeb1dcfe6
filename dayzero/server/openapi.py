"""GET /openapi.json: an OpenAPI 3.1 document made from the routes and their structs, with every status they answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from dayzero import __version__
from dayzero.server.endpoint import Route
from dayzero.server.errors import ErrorBody, MessagesErrorBody

STATUSES = {
    400: "The request is at fault; ``param`` names the field.",
    401: "The API key is missing or wrong.",
    404: "No such model.",
    408: "The body did not come in time.",
    413: "The body is longer than this server takes.",
    429: "Too many requests are waiting; see Retry-After.",
    500: "The engine could not finish this answer.",
    503: "There is no engine that takes requests now; see Retry-After.",
}
RETRY = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
EVENT = {
    "description": "One event of the stream.",
    "type": "object",
    "properties": {"data": {"type": "string"}, "event": {"type": "string"}},
    "required": ["data"],
}
REFS = "#/components/schemas/{name}"
_CONVERTER = re.compile(r"{(\w+):\w+}")


def document(routes: Iterable[Route], title: str, keyed: bool) -> dict[str, Any]:
    """keyed: whether guarded endpoints want an API key."""
    routes = tuple(routes)
    structs = [kind for route in routes for kind in (route.body, route.answer) if kind is not None]
    kinds = list(dict.fromkeys([*structs, ErrorBody, MessagesErrorBody]))
    schemas, components = msgspec.json.schema_components(kinds, ref_template=REFS)
    schema_of = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        path = _CONVERTER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, path, schema_of, keyed)
    schemes = {"bearer": {"type": "http", "scheme": "bearer"}}
    schemes["key"] = {"type": "apiKey", "in": "header", "name": "x-api-key"}
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": schemes},
    }


def _operation(route: Route, path: str, schema_of: dict[type, Any], keyed: bool) -> dict[str, Any]:
    name = re.sub(r"\W+", "_", f"{route.method.lower()}{path}").strip("_")
    out: dict[str, Any] = {"operationId": name, "summary": route.summary, "responses": _answers(route, schema_of)}
    parameters = re.findall(r"{(\w+)}", path)
    if parameters:
        out["parameters"] = [
            {"name": p, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            for p in parameters
        ]
    if route.body is not None:
        out["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of[route.body]}}}
    if route.guarded and keyed:
        out["security"] = [{"bearer": []}, {"key": []}]
        out["responses"]["401"] = _error(route, 401, schema_of)
    return out


def _answers(route: Route, schema_of: dict[type, Any]) -> dict[str, Any]:
    good: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if route.answer is not None:
        good = {"application/json": {"schema": schema_of[route.answer]}}
    if route.stream:
        good["text/event-stream"] = {"schema": EVENT}
    out = {"200": {"description": "The answer.", "content": good}}
    probe = not route.guarded
    for status in route.statuses:
        out[str(status)] = (
            {"description": STATUSES[status], "content": good} if probe else _error(route, status, schema_of)
        )
    return out


def _error(route: Route, status: int, schema_of: dict[type, Any]) -> dict[str, Any]:
    kind = MessagesErrorBody if route.style == "anthropic" else ErrorBody
    content = {"application/json": {"schema": schema_of[kind]}}
    out: dict[str, Any] = {"description": STATUSES[status], "content": content}
    return {**out, "headers": RETRY} if status in (429, 503) else out
