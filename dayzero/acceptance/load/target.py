"""What is put under load: a server that runs, found by its URL, or one that is started for the run."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from dayzero.acceptance.accept.cards import cards_of
from dayzero.acceptance.load.streamed import Served, refusal_text
from dayzero.acceptance.load.wire import Address, Pool
from dayzero.acceptance.server_process import NotServing, ServerProcess
from dayzero.errors import CheckpointError, MachineError, ModelError, UsageError, UserError

STOP_SECONDS = 15.0
POLL_SECONDS = 0.05
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
        card = cards_of(msgspec.json.decode(body))[0]
        model, own = str(card["id"]), card.get("owned_by") == "dayzero"
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
    """A server of our own. start_seconds: from starting the process to ready. began: by time.perf_counter. facts: what
    its engine says of the model."""

    address: Address
    began: float
    start_seconds: float
    pid: int
    facts: Mapping[str, Any] = field(default_factory=dict)


@asynccontextmanager
async def served(
    arguments: Sequence[str], environment: Mapping[str, str], on_wait: Callable[[], None] = lambda: None
) -> AsyncIterator[Started]:
    """Run ``dayzero serve ARGUMENTS`` on a free loopback port until the context ends. environment: of the process.

    Errors: what the server said when it ended before it was ready.
    """
    with tempfile.TemporaryDirectory(prefix="dayzero-") as folder:
        process = ServerProcess(arguments, Path(folder) / "server.log", environment)
        try:
            while (address := process.address(0.0)) is None:
                await asyncio.sleep(POLL_SECONDS)
                on_wait()
            facts = process.told.get("info", {}).get("facts", {})
            seconds = time.perf_counter() - process.began
            yield Started(Address.parse(address), process.began, seconds, process.pid, facts)
        except NotServing as error:
            raise refusal_of(error) from None
        finally:
            process.end(STOP_SECONDS)


def refusal_of(error: NotServing) -> Exception:
    """What the server itself said that it ended of, as the error of that kind; ``error`` where it said nothing."""
    said = error.said
    if said.get("exit_code") in KINDS:
        kind = CheckpointError if said.get("kind") in ("CheckpointError", "ConfigError") else KINDS[said["exit_code"]]
        return kind(str(said["message"]))
    return error
