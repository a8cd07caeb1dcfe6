"""What an engine process is told once, before anything else: which checkpoint, and how it is to be run. Paper."""

from __future__ import annotations

from typing import Any, Literal, Protocol, cast, get_args, runtime_checkable

import msgspec

from dayzero.checkpoint.seeded_source import SEEDED
from dayzero.engine.api import EngineInfo
from dayzero.engine.config import EngineConfig
from dayzero.engine.executor import Executor
from dayzero.errors import UsageError
from dayzero.planner.detect import Kind

MAX_THREADS = 1024  # more than any machine has cores; a number beyond is a slip

ExecutorKind = Literal["local", "upstream"]
DEVICES: tuple[str, ...] = get_args(Kind)


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Everything that the engine process needs to build its executor and its scheduler; it reads no flag of its own.

    source: folder, ``s3://…``, hub id or ``seeded:…``. recipe: path or module of a recipe; None: the built-in one.
    config: limits, precision, cache and bindings. executor: ``local`` runs a recipe; ``upstream`` the publisher's code.
    remote_code: whether code that comes with the checkpoint may be run (upstream only). threads: of operators; None:
    chosen from the machine. stop_ids: ids that end an answer, of every source (``ChatService.stop_ids``); empty: those
    that config.json, generation_config.json and tokenizer_config.json state. defaults: sampling defaults that replace
    those of generation_config.json, by name. device: ``cpu``, ``cuda``, or ``auto``: the first accelerator
    that torch sees, else the CPU.
    """

    source: str
    config: EngineConfig
    recipe: str | None = None
    executor: ExecutorKind = "local"
    remote_code: bool = False
    threads: int | None = None
    stop_ids: tuple[int, ...] = ()
    defaults: dict[str, Any] = {}
    device: str = "auto"

    def __post_init__(self) -> None:
        """UsageError for a number of threads that is none, a device that is none, and made weights for other code."""
        if self.device not in DEVICES:
            raise UsageError(f"device is {self.device!r}; it must be one of {', '.join(DEVICES)}")
        if self.executor == "upstream" and self.source.startswith(SEEDED):
            raise UsageError(f"{self.source}: the publisher's code reads files of weights; leave --upstream out.")
        if self.threads is not None and (type(self.threads) is not int or not 1 <= self.threads <= MAX_THREADS):
            raise UsageError(f"threads is {self.threads!r}; it must be a whole number from 1 to {MAX_THREADS}")


def kind_of(device: str) -> Kind:
    """The device of a LaunchSpec, as what a machine is asked for."""
    assert device in DEVICES, device
    return cast(Kind, device)


class LoadProgress(Protocol):
    """Called while weights are read, from the thread that reads them."""

    def __call__(self, loaded_bytes: float, total_bytes: float) -> None: ...


@runtime_checkable
class RecordProgress(Protocol):
    """A LoadProgress that also wants to know how far the recording of steps is."""

    def recording(self, made: int, wanted: int) -> None: ...


class LoadedExecutor(Executor, Protocol):
    """What the engine process builds from a LaunchSpec: ``LocalRunner(launch, progress)``."""

    @property
    def info(self) -> EngineInfo:
        """Known after ``load``."""
