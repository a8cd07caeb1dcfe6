"""What is put under load: a server that runs, found by its URL, or one that is started for the run."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec

from dayzero.acceptance.load.streamed import Served, refusal_text
from dayzero.acceptance.load.wire import Address, Pool
from dayzero.errors import CheckpointError, MachineError, ModelError, UsageError, UserError

STOP_SECONDS = 15.0
POLL_SECONDS = 0.1
LOG_TAIL = 2000
MAX_LINE = 1 << 24
KINDS: dict[int, type[UserError]] = {1: ModelError, 2: UsageError, 3: MachineError}


def is_url(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def check_loopback(address: Address) -> None:
    """UsageError unless every address the host has is this machine's own: a load test can take a service down."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)}
    except OSError as error:
        raise UsageError(f"{address.text}: {address.host} has no address: {error.strerror or error}.") from error
    outside = sorted(str(one) for one in found if not ipaddress.ip_address(str(one).partition("%")[0]).is_loopback)
    if outside:
        raise UsageError(
            f"{address.text} is {outside[0]}, not this machine; a load test of another one needs --allow-remote."
        )


async def look(pool: Pool) -> Served:
    """What the server at ``pool`` says of itself. UsageError when it is no such server or not ready."""
    where = pool.address.text
    try:
        status, body = await pool.get("/v1/models")
        if status != 200:
            raise UsageError(f"{where}/v1/models answered {status}: {refusal_text(body)}")
        cards = msgspec.json.decode(body)["data"]
        model, own = str(cards[0]["id"]), cards[0].get("owned_by") == "dayzero"
        vocab, special = await _vocabulary(pool) if own else (None, frozenset[int]())
    except OSError as error:
        raise UsageError(f"{where}: no server answers there: {error}") from error
    except (msgspec.DecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise UsageError(f"{where}/v1/models is not the list of models of an OpenAI-compatible server.") from error
    return Served(model, own, vocab, special)


async def _vocabulary(pool: Pool) -> tuple[int | None, frozenset[int]]:
    """Of a dayzero server; (None, ) of one without a tokenizer."""
    status, body = await pool.get("/tokenizer_info")
    if status != 200:
        return None, frozenset()
    found = msgspec.json.decode(body)
    return int(found["vocab_size"]), frozenset(int(token) for token in found["special_tokens"])


@dataclass(frozen=True)
class Started:
    """A server of our own. start_seconds: from starting the process to ready. began: by time.perf_counter."""

    address: Address
    began: float
    start_seconds: float
    pid: int


@asynccontextmanager
async def served(
    arguments: Sequence[str], environment: Mapping[str, str], on_wait: Callable[[], None] = lambda: None
) -> AsyncIterator[Started]:
    """Run ``dayzero serve ARGUMENTS`` on a free loopback port until the context ends. environment: of the process.

    Errors: what the server said when it ended before it was ready.
    """
    command = [sys.executable, "-m", "dayzero", "serve", *arguments, "--host", "127.0.0.1", "--port", "0", "--json"]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as log:
        # A session of its own, so that an interrupt at the terminal is this process's to pass on, once.
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=log, stdin=asyncio.subprocess.DEVNULL,
            env=dict(environment), start_new_session=True, limit=MAX_LINE,
        )  # fmt: skip
        try:
            line = await _first_line(process, on_wait)
            said = _object(line)
            if "address" not in said:
                await process.wait()
                raise _refusal(said, process.returncode, _tail(log))
            yield Started(Address.parse(said["address"]), began, time.perf_counter() - began, process.pid)
        finally:
            await _stop(process)


async def _first_line(process: asyncio.subprocess.Process, on_wait: Callable[[], None]) -> bytes:
    assert process.stdout is not None
    reading = asyncio.create_task(process.stdout.readline())
    try:
        while not reading.done():
            await asyncio.wait({reading}, timeout=POLL_SECONDS)
            on_wait()
        return reading.result()
    finally:
        reading.cancel()


def _object(line: bytes) -> dict[str, Any]:
    try:
        found = json.loads(line or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _refusal(said: Mapping[str, Any], code: int | None, log: str) -> Exception:
    error = said.get("error")
    if isinstance(error, Mapping) and error.get("exit_code") in KINDS:
        kind = CheckpointError if error.get("kind") in ("CheckpointError", "ConfigError") else KINDS[error["exit_code"]]
        return kind(str(error["message"]))
    return RuntimeError(f"dayzero serve ended with {code} before it was ready: {error or log}")


def _tail(log: Any) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - LOG_TAIL))
    return str(log.read().decode("utf-8", "replace").strip())


async def _stop(process: asyncio.subprocess.Process) -> None:
    """SIGTERM, and SIGKILL for all of its session when that does not end it."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            pass  # it is ended below
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
