"""What a stage of an acceptance is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from dayzero.console import ProgressFactory, no_progress
from dayzero.finding import Finding

Profile = Literal["quick", "release-day", "long"]
PROFILES: tuple[str, ...] = get_args(Profile)
Need = Literal["source", "service", "own service"]
FigureKind = Literal["ladder", "histogram", "heat", "curves", "bars"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What is judged. source: a checkpoint (folder, ``s3://…``, hub id, ``seeded:CONFIG``), or None when a server's
    address is all that is known. url: root of a running server, without ``/v1``; None: stages that need one share a
    server of this package, started for the run. model: its name there; None: the first that ``/v1/models`` lists.
    serve: options for servers that are started, as on the command line of ``dayzero serve``."""

    source: str | None
    url: str | None = None
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    recipe: str | None = None
    serve: tuple[str, ...] = ()


class RunningServer(Protocol):
    """A server that answers. address: its root, without ``/v1``. model: a name it serves."""

    @property
    def address(self) -> str: ...

    @property
    def model(self) -> str: ...

    @property
    def headers(self) -> Mapping[str, str]:
        """To be sent with every request: the key, where one is needed."""

    @property
    def told(self) -> Mapping[str, Any]:
        """What it said when it was ready (``engine.api.EngineInfo``); empty for a server that was not started here."""

    @property
    def process_ids(self) -> tuple[int, ...]:
        """HTTP process first, engine process second; empty for a server that was not started here."""

    def stop(self, seconds: float = 60.0) -> int:
        """Ask it to end (SIGTERM) and wait; its exit code. RuntimeError for a server that was not started here."""


class Services(Protocol):
    """Servers for stages to ask."""

    @property
    def own(self) -> bool:
        """Whether servers are started here, so that they may be frozen, killed and given other options."""

    def shared(self) -> RunningServer:
        """The one that all stages share; started at the first call. Do no lasting harm to it.

        Errors: EngineDead with its last words when it has ended while it was tested; what it ended of when it does not
        become ready.
        """

    def private(self, *options: str) -> AbstractContextManager[RunningServer]:
        """One of the caller's own, with more options of ``dayzero serve``; ended when the context is left. The shared
        one is ended before, and starts anew when it is asked for: a device may have room for one copy of a model."""


@dataclass(frozen=True, slots=True)
class Context:
    """profile: how much is tried. folder: the stage's own, empty at first, kept for a resumed run. seed: of everything
    that is drawn. baseline: content of an earlier record (``record.json``) that speeds are held against."""

    subject: Subject
    services: Services
    folder: Path
    profile: Profile = "quick"
    seed: int = 0
    progress: ProgressFactory = no_progress
    baseline: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Figure:
    """Data of one picture; the page draws it. ``data`` by kind, all of it JSON:

    ladder: {"rows": [{"name", "value", "bound", "verdict"}]}, drawn on a logarithmic scale;
    histogram: {"edges": [n + 1 numbers], "counts": [n], "marks": {label: x}};
    heat: {"rows": [labels], "columns": [labels], "values": [[0..1 or null]]};
    curves: {"x": [numbers], "series": {label: [number or null]}, "bounds": {label: y}};
    bars: {"rows": [{"name", "value", "bound"}]}.
    """

    kind: FigureKind
    title: str
    data: Mapping[str, Any]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, slots=True)
class StageResult:
    """facts: what the protocol should tell of how it was measured (versions, bindings, layout, hardware), JSON.

    samples: results of single items, for paired statistics over two records: what was measured -> {item: value}. An
    item's id stays the same from run to run (``depth 0.5, 1024 tokens``); values are all bool (right or wrong) or all
    numbers.
    """

    findings: tuple[Finding, ...]
    figures: tuple[Figure, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    samples: Mapping[str, Mapping[str, float | bool]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """needs: what the subject must have; without it the stage is one finding, not applicable. run: UserError becomes
    a failed finding of the stage; whatever else it raises is a bug of this package, and ends the run. ends_shared: it
    asks for servers of its own (``Services.private``); it is run behind all others, whatever its place in the record,
    so that no other stage has the shared server started anew."""

    name: str
    title: str
    needs: frozenset[Need]
    run: Callable[[Context], StageResult]
    ends_shared: bool = False
