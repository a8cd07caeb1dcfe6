"""Images by http(s): only from hosts that the operator allows, never from inside the operator's network by accident.

A host's address is looked up once and connected to as it was found, so that a name cannot turn into another address
between the check and the connection. Where any host is allowed, addresses that are not of the public internet are
refused; a host that is named by the operator may lie anywhere.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import time
from dataclasses import dataclass
from urllib.parse import SplitResult, urljoin, urlsplit

from dayzero.errors import UsageError

ANY = "*"
MAX_REDIRECTS = 3
READ_BYTES = 1 << 16
SCHEMES = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class FetchRules:
    """hosts: those allowed, lower case; ``*`` is any public one. max_bytes: of one file. seconds: until the whole file
    must be there, redirects included."""

    hosts: tuple[str, ...]
    max_bytes: int
    seconds: float = 20.0


def fetch(url: str, rules: FetchRules) -> bytes:
    """The file at an address. UsageError, one sentence, for what is not allowed, not there, too large or too slow.
    Blocks: not for the event loop."""
    deadline = time.monotonic() + rules.seconds
    try:
        for _ in range(MAX_REDIRECTS + 1):
            found = _get(url, rules, deadline)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"an image cannot be fetched from {_shown(url)} ({type(error).__name__}).") from error
    raise UsageError(f"an image cannot be fetched from {_shown(url)}: it redirects more than {MAX_REDIRECTS} times.")


def _get(url: str, rules: FetchRules, deadline: float) -> bytes | str:
    """The body, or where a redirect points to."""
    parts = urlsplit(url)
    host = (parts.hostname or "").lower().rstrip(".")
    if parts.scheme not in SCHEMES or not host:
        raise UsageError(f"an image's address must be http, https or a data: URI, not {_shown(url)}.")
    if host not in rules.hosts and ANY not in rules.hosts:
        raise UsageError(f"images are not fetched from {host[:100]}; send the image as a data: URI.")
    connection = _connect(parts, host, host in rules.hosts, deadline)
    try:
        target = f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}"
        connection.request("GET", target, headers={"user-agent": "dayzero", "accept": "image/*"})
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308) and answer.headers.get("location"):
            return str(answer.headers["location"])
        if answer.status != 200:
            raise UsageError(f"an image cannot be fetched from {_shown(url)}: the answer is {answer.status}.")
        return _body(answer, connection, rules, url, deadline)
    finally:
        connection.close()


def _connect(parts: SplitResult, host: str, named: bool, deadline: float) -> http.client.HTTPConnection:
    port = parts.port or SCHEMES[parts.scheme]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    address = str(found[0][4][0])
    if not named and not ipaddress.ip_address(address.partition("%")[0]).is_global:
        raise UsageError(f"images are not fetched from {host[:100]}, which is no public address.")
    raw = socket.create_connection((address, port), timeout=_left(deadline))
    if parts.scheme == "https":
        raw = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
    connection = http.client.HTTPConnection(host, port, timeout=_left(deadline))
    connection.sock = raw
    return connection


def _body(
    answer: http.client.HTTPResponse,
    connection: http.client.HTTPConnection,
    rules: FetchRules,
    url: str,
    deadline: float,
) -> bytes:
    body = bytearray()
    while True:
        if connection.sock is not None:
            connection.sock.settimeout(_left(deadline))
        piece = answer.read1(READ_BYTES)
        if not piece:
            return bytes(body)
        body += piece
        if len(body) > rules.max_bytes:
            raise UsageError(f"the image at {_shown(url)} is larger than {rules.max_bytes} bytes.")


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _shown(url: str) -> str:
    """Without what may be a secret: user, password, query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an address that is none"
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"[:200] if parts.scheme else "a text without a scheme"
