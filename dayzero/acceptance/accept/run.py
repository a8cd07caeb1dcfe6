"""``dayzero accept``: the stages one after another, each kept when done; then the record, JUnit's file and the page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dayzero.acceptance.accept.http import NoAnswer
from dayzero.acceptance.accept.junit import junit_xml
from dayzero.acceptance.accept.record import RECORD, findings_of, record_of, verdict_of
from dayzero.acceptance.accept.registry import READ_BASELINE
from dayzero.acceptance.accept.resume import Kept
from dayzero.acceptance.accept.stage import (
    Context,
    Need,
    Profile,
    RunningServer,
    Services,
    Stage,
    StageResult,
    Subject,
)
from dayzero.acceptance.files import write_json
from dayzero.checkpoint.files import write_whole
from dayzero.console import Bar, ProgressFactory, duration_text, no_progress
from dayzero.errors import (
    CheckpointError,
    ConfigError,
    EngineDead,
    MachineError,
    ModelError,
    Overloaded,
    UsageError,
    UserError,
)
from dayzero.finding import Finding
from dayzero.units import counted

JUNIT = "junit.xml"
# Layer at fault when a stage ends with an error, the first that fits.
LAYER_OF_ERROR: tuple[tuple[type[UserError], str], ...] = (
    (NoAnswer, "server"), (ConfigError, "config"), (CheckpointError, "weights"), (ModelError, "operator"),
    (MachineError, "hardware"), (EngineDead, "server"), (Overloaded, "scheduler"), (UsageError, "config"),
)  # fmt: skip
WHY_NOT: Mapping[Need, str] = {
    "source": "it needs a checkpoint (SOURCE), and only the address of a server was given",
    "service": "it needs a server, and there is neither an address nor a checkpoint to serve",
    "own service": "it needs a server that may be frozen, killed and started anew; the one at --url is not ours",
}
Page = Callable[[Mapping[str, Any], Path], Path]


@dataclass(frozen=True)
class Asked:
    """What is to be done. protocol: see ``protocol.py``. stamps: of the source's files, by ``protocol.stamps_of``."""

    subject: Subject
    stages: Sequence[Stage]
    out: Path
    protocol: Mapping[str, Any]
    stamps: str = ""
    profile: Profile = "quick"
    seed: int = 0
    baseline: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Shown:
    """Where a run tells how far it is. tell: one line of news, such as a stage that is done."""

    progress: ProgressFactory = no_progress
    tell: Callable[[str], None] = lambda line: None


def accept(
    asked: Asked, services: Callable[[Path], AbstractContextManager[Services]], page: Page, shown: Shown = Shown()
) -> dict[str, Any]:
    """Run the stages that are not done yet, write the record and what is made of it, and return the record.

    services: makes the servers of the run, given a folder for their logs; ended before the record is written. page:
    writes index.html. An interrupt loses the stage that runs, and nothing else.
    Errors: UsageError for ``asked.out``; MachineError when another run writes there.
    """
    kept = Kept(asked.out, asked.subject)
    began, clock = _now(), time.monotonic()
    with kept.opened():
        with services(asked.out / "servers") as servers:
            seen = _Seen(servers)
            done = {s.name: _stage(asked, kept, s, at, seen, shown) for at, s in enumerate(run_order(asked.stages), 1)}
        stages = [done[stage.name] for stage in asked.stages]
        told = next((stage["service"] for stage in stages if stage.get("service")), None)
        protocol = {**asked.protocol, "service": told}
        record = record_of(protocol, stages, began, _now(), round(time.monotonic() - clock, 3))
        write_json(asked.out / RECORD, record)
        write_whole(asked.out / JUNIT, junit_xml(record))
        page(record, asked.out)
    return record


def run_order(stages: Iterable[Stage]) -> list[Stage]:
    """The stages as they are run: as they stand in the record, but those that end the shared server behind the others.
    A model is loaded for every server that is started."""
    return sorted(stages, key=lambda stage: stage.ends_shared)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _stage(asked: Asked, kept: Kept, stage: Stage, number: int, servers: _Seen, shown: Shown) -> dict[str, Any]:
    """One stage, taken from an earlier run or run now and kept."""
    name, made_of = f"{number}/{len(asked.stages)} {stage.name}", _made_of(asked, stage)
    before = kept.look(stage.name, made_of)
    if before.why:
        shown.tell(f"{name}: {before.why}")
    if before.content is not None and not (asked.subject.url and "service" in stage.needs and _fails(before.content)):
        return before.content | {"taken": True}  # who runs a foreign server may have mended what failed there
    began, clock = _now(), time.monotonic()
    why = next((WHY_NOT[need] for need in sorted(stage.needs) if not _has(asked.subject, need)), None)
    ended = True
    if why is not None:
        result = StageResult((not_run(stage, why),))
    else:
        folder = kept.work_folder(stage.name, made_of)
        context = Context(
            asked.subject, servers, folder, asked.profile, asked.seed, _named(shown.progress, name), asked.baseline
        )
        result, ended = _ran(stage, context)
    seconds = round(time.monotonic() - clock, 3)
    content = {
        "title": stage.title,
        "began": began,
        "seconds": seconds,
        "findings": result.findings,
        "figures": result.figures,
        "facts": result.facts,
        "samples": result.samples,
        "service": servers.told,
    }
    # What was hindered is not done: it is run again, and is in this run's record alone.
    whole = kept.keep(stage.name, made_of, content, done=ended)
    listed = findings_of(whole["findings"])
    shown.tell(f"{name}: {verdict_of(listed)}, {counted(len(listed), 'finding')}, {duration_text(seconds)}")
    return whole | {"taken": False}


def _ran(stage: Stage, context: Context) -> tuple[StageResult, bool]:
    """What a stage found, and whether it came to its end."""
    try:
        result = stage.run(context)
    except UserError as error:
        return StageResult((failed_to_run(stage, error),)), False
    assert result.findings, f"the stage {stage.name} found nothing at all"
    return result, True


def _fails(content: Mapping[str, Any]) -> bool:
    return any(finding["verdict"] == "fail" for finding in content["findings"])


def _has(subject: Subject, need: Need) -> bool:
    if need == "source":
        return subject.source is not None
    if need == "own service":
        return subject.url is None and subject.source is not None
    return subject.url is not None or subject.source is not None


def not_run(stage: Stage, why: str) -> Finding:
    """The one finding of a stage that this subject gives nothing to check for."""
    return Finding(f"{stage.name}.ran", "server", "not applicable", f"{stage.title}: checked", measured=why)


def failed_to_run(stage: Stage, error: UserError) -> Finding:
    """The one finding of a stage that ended with an error: what the error says, at the layer of its kind."""
    layer = next((layer for kind, layer in LAYER_OF_ERROR if isinstance(error, kind)), "server")
    return Finding(
        f"{stage.name}.ran", layer, "fail", f"{stage.title}: all of the stage's checks could be made",
        measured=str(error), bound="no error", evidence=(type(error).__name__,),
        remedy="do what the sentence says, and run again: stages that are done are kept",
    )  # fmt: skip


def _made_of(asked: Asked, stage: Stage) -> dict[str, Any]:
    """Everything that a stage's findings may depend on."""
    keys = ("package", "versions", "extensions", "machine", "subject", "profile", "seed")
    made_of = {key: asked.protocol.get(key) for key in keys} | {"stamps": asked.stamps}
    return made_of | ({"baseline": asked.protocol.get("baseline")} if stage.name in READ_BASELINE else {})


def _named(progress: ProgressFactory, name: str) -> ProgressFactory:
    """The same, with the stage's name before each label."""

    def made(label: str, total: float | None = None, unit: str = "", /) -> AbstractContextManager[Bar]:
        return progress(f"{name}: {label}", total, unit)

    return made


class _Seen:
    """Services that remember what a server that was started here said when it was ready."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.told: Mapping[str, Any] | None = None

    @property
    def own(self) -> bool:
        return self._services.own

    def shared(self) -> RunningServer:
        server = self._services.shared()
        self.told = server.told or self.told
        return server

    def private(self, *options: str) -> AbstractContextManager[RunningServer]:
        return self._services.private(*options)
