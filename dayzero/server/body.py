"""From bytes to a struct: size and depth limits, type errors that name the field, and the fields nobody reads.

A field that no struct knows is not an error, since clients send many, but it is never dropped in silence: its path is
returned, and goes into a response header and the request's log line.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import inspect as types
from starlette.requests import Request

from dayzero.server.errors import ApiError, bad

T = TypeVar("T")

MAX_LISTED = 32  # unread fields that are named; more are counted
THREAD_BYTES = 1 << 18  # a longer body is parsed away from the event loop
_WHERE = re.compile(r"^(.*?) - at (?:`key` in )?`\$?\.?([^`]*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `([^`]*)`$")
_ODD = re.compile(r"[^\w.\[\]-]", re.ASCII)


async def read_body(request: Request, limit: int, seconds: float, rate: int) -> bytes:
    """The body, or 413 as soon as it is known to be longer than ``limit`` bytes.

    408 when it has not come within ``seconds``, to which each ``rate`` bytes that do come add one: a client that sends
    a byte now and then holds no connection for ever.
    """
    too_long = ApiError(413, f"the request body is longer than {limit} bytes.", code="request_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_long
    parts, size = [], 0
    try:
        async with asyncio.timeout(seconds) as patience:
            until = patience.when()
            assert until is not None
            async for part in request.stream():
                size += len(part)
                if size > limit:
                    raise too_long
                parts.append(part)
                patience.reschedule(until + size / rate)
    except TimeoutError:
        raise ApiError(408, f"the request's body did not come in time; {size} bytes did.", code="timeout") from None
    return b"".join(parts)


async def parse(
    body: bytes, kind: type[T], max_depth: int, prepare: Callable[[Any], list[str]] | None = None
) -> tuple[T, list[str], Any]:
    """``body`` as ``kind``, the paths of what it holds besides, and its JSON. ApiError 400 names the field at fault.

    prepare: may change the decoded JSON before it is checked; returns paths of what it took out.
    """
    if len(body) > THREAD_BYTES:
        return await asyncio.to_thread(_parse, body, kind, max_depth, prepare)
    return _parse(body, kind, max_depth, prepare)


def _parse(
    body: bytes, kind: type[T], max_depth: int, prepare: Callable[[Any], list[str]] | None
) -> tuple[T, list[str], Any]:
    if not body:
        raise bad("the request has no body; send a JSON object.")
    try:
        raw = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep(max_depth) from None
    except (msgspec.DecodeError, ValueError) as error:
        raise bad(f"the request body is not valid JSON: {str(error)[:200]}.") from None
    if depth_beyond(raw, max_depth):
        raise _too_deep(max_depth)
    taken_out = prepare(raw) if prepare is not None else []
    try:
        value = msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise _type_error(str(error)) from None
    return value, [*taken_out, *unread_fields(raw, kind)], raw


def _too_deep(max_depth: int) -> ApiError:
    return bad(f"the request body nests deeper than {max_depth} levels.", code="json_too_deep")


def depth_beyond(value: Any, limit: int) -> bool:
    """Whether lists and objects nest deeper than ``limit``. Goes level by level, so depth costs no stack."""
    level = [value]
    for _ in range(limit + 1):
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += [v for v in item.values() if isinstance(v, dict | list)]
            elif isinstance(item, list):
                inner += [v for v in item if isinstance(v, dict | list)]
        if not inner:
            return False
        level = inner
    return True


def _type_error(message: str) -> ApiError:
    found = _WHERE.match(message)
    text, param = (found[1], found[2].removesuffix("[...]")) if found else (message, "")
    missing = _MISSING.match(text)
    if missing:
        param = f"{param}.{missing[1]}" if param else missing[1]
        text = "this field is required"
    where = f"{param}: " if param else "the request body: "
    return bad(f"{where}{text[:1].lower()}{text[1:]}.", param=param or None)


def warm(kind: type | None) -> None:
    """Work out what ``parse`` needs to know of a struct, so that no client waits for it."""
    if kind is not None:
        _info(kind)
        try:
            msgspec.convert({}, kind)
        except msgspec.ValidationError:
            pass  # it only had to look at its fields


# --- fields nobody reads -----------------------------------------------------------------------------------------


def unread_fields(raw: Any, kind: type) -> list[str]:
    """Paths in ``raw`` that ``kind`` does not have, without list indices, each once, at most MAX_LISTED. Nulls do not
    count: clients send them for what they do not mean."""
    found: dict[str, None] = {}
    for path in _unread(raw, _info(kind), ""):
        found[path] = None
        if len(found) > MAX_LISTED:
            return [*list(found)[:MAX_LISTED], "..."]
    return list(found)


@cache
def _info(kind: type) -> types.Type:
    return types.type_info(kind)


@cache
def _fields(kind: type) -> dict[str, types.Type]:
    info = _info(kind)
    return {f.encode_name: f.type for f in info.fields} if isinstance(info, types.StructType) else {}


def _unread(raw: Any, info: types.Type, path: str) -> Iterator[str]:
    info = _branch(raw, info)
    if isinstance(info, types.StructType) and isinstance(raw, dict):
        fields = _fields(info.cls)
        for key, value in raw.items():
            name = f"{path}.{_safe(key)}" if path else _safe(key)
            if key in fields:
                yield from _unread(value, fields[key], name)
            elif key != info.tag_field and value is not None:
                yield name
    elif isinstance(info, types.ListType) and isinstance(raw, list) and _holds_struct(info.item_type):
        for item in raw:
            yield from _unread(item, info.item_type, f"{path}[]")


def _branch(raw: Any, info: types.Type) -> types.Type:
    """The member of a union that ``raw`` was read as."""
    if not isinstance(info, types.UnionType):
        return info
    if isinstance(raw, list):
        return next((t for t in info.types if isinstance(t, types.ListType)), info)
    structs = [t for t in info.types if isinstance(t, types.StructType)]
    if isinstance(raw, dict) and structs:
        return next((t for t in structs if t.tag_field and raw.get(t.tag_field) == t.tag), structs[0])
    return info


def _holds_struct(info: types.Type) -> bool:
    members = info.types if isinstance(info, types.UnionType) else (info,)
    return any(
        isinstance(t, types.StructType) or (isinstance(t, types.ListType) and _holds_struct(t.item_type))
        for t in members
    )


def _safe(key: str) -> str:
    """A client's own key, fit for a header."""
    return _ODD.sub("?", key[:64])
