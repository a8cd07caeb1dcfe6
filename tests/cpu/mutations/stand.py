"""The test stand: base records made once and found green, a mutation planted, the acceptance run, its record read."""

from __future__ import annotations

import os
import resource
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from dayzero.acceptance.accept.protocol import protocol_of
from dayzero.acceptance.accept.run import Asked, accept
from dayzero.acceptance.accept.service import Servers
from dayzero.acceptance.accept.stage import Subject
from dayzero.acceptance.doctor.record import diagnosis_of
from tests.cpu.mutations.bases import SERVE, Bases
from tests.cpu.mutations.hook.sitecustomize import NAME, PROCESS
from tests.cpu.mutations.mutation import Mutation, Part, Patches, found
from tests.cpu.mutations.narrow import merged, narrowed

ROOT = Path(__file__).parents[3]
PATHS = (Path(__file__).parent / "hook", ROOT, ROOT / "tests" / "cpu")


@dataclass(frozen=True)
class Failed:
    """A failing finding of a record."""

    stage: str
    kind: str
    layer: str
    measured: str


@dataclass(frozen=True)
class Outcome:
    """failed: what the record says. named: the layer that ``doctor`` finds at fault in it. seconds: wall clock, and of
    processors, children included."""

    mutation: Mutation
    failed: tuple[Failed, ...]
    named: str | None
    seconds: float
    cpu_seconds: float

    @property
    def caught(self) -> bool:
        return bool(self.failed)

    @property
    def right(self) -> bool:
        return self.named == self.mutation.layer


class Stand:
    """root: a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.bases = Bases(root)
        self._root, self._runs = root, 0
        self.red: dict[str, str] = {}  # bases that fail without a mutation, and by what
        self.kinds: dict[str, str] = {}  # of everything that a base record checks -> its stage

    def verify(self, mutations: Iterable[Mutation]) -> Iterator[tuple[str, list[Failed]]]:
        """Of each base that they are made in, what fails in its record over all that they touch, without any of them. A
        mutation counts only where that is nothing."""
        parts: dict[str, list[Part]] = {}
        for mutation in mutations:
            parts.setdefault(mutation.base, []).extend(mutation.parts)
        for base, of_base in parts.items():
            record = self._record(self.bases.source(base), base, merged(of_base))
            self.kinds |= {f["kind"]: stage["name"] for stage in record["stages"] for f in stage["findings"]}
            yield base, failed_of(record)

    def judge(self, mutation: Mutation) -> Outcome:
        """Plant it, run what it can touch, and read the record as ``doctor`` does."""
        source = self.bases.source(mutation.base)
        began, cpu = time.monotonic(), _cpu_seconds()
        if mutation.edit:
            folder = Path(shutil.copytree(source, self._root / "planted" / str(self._runs), symlinks=True))
            _edit(mutation, folder)
            record = self._record(folder, mutation.base, mutation.parts)
            shutil.rmtree(folder)
        else:
            with planted(mutation):
                record = self._record(source, mutation.base, mutation.parts)
        return Outcome(
            mutation, tuple(failed_of(record)), diagnosis_of(record, mutation.name).layer,
            time.monotonic() - began, _cpu_seconds() - cpu,
        )  # fmt: skip

    def _record(self, source: Path, base: str, parts: Iterable[Part]) -> dict[str, Any]:
        """The record of an acceptance of ``source``."""
        self._runs += 1
        out = self._root / "records" / str(self._runs)
        out.parent.mkdir(exist_ok=True, parents=True)
        trace = self._root / "traces" / f"{base}.trace"
        subject = Subject(str(source), serve=SERVE)
        stages = [narrowed(part, trace) for part in parts]
        asked = Asked(subject, stages, out, _protocol(subject, tuple(stage.name for stage in stages)))
        record = accept(asked, partial(Servers, subject), lambda record, folder: folder)
        shutil.rmtree(out)
        return record


def _protocol(subject: Subject, stages: tuple[str, ...]) -> Mapping[str, Any]:
    """Of a source that may be damaged, so that its hashes are left to the stages."""
    named = {"source": subject.source, "url": None, "model": None, "recipe": None, "serve": list(subject.serve)}
    return {**_machine(), "stages": list(stages), "subject": named}


@cache
def _machine() -> Mapping[str, Any]:
    return protocol_of(Subject(None), (), "quick", 0, None)


def failed_of(record: Mapping[str, Any]) -> list[Failed]:
    return [
        Failed(stage["name"], f["kind"], f["layer"], str(f["measured"])[:300])
        for stage in record["stages"]
        for f in stage["findings"]
        if f["verdict"] == "fail"
    ]


@contextmanager
def planted(mutation: Mutation) -> Iterator[None]:
    """In this process, and in those of the product that are started meanwhile."""
    from tests.cpu.mutations.lifted import FAULT, plant_fault

    patches, plant = Patches(), mutation.plant
    with ExitStack() as stack:
        stack.callback(patches.stack.close)
        if isinstance(plant, str) and plant.startswith(FAULT):
            plant_fault(plant.removeprefix(FAULT), patches)
        elif isinstance(plant, str):
            found(plant)(patches)
        else:
            plant(patches)
            stack.enter_context(_environment(mutation))
        yield


@contextmanager
def _environment(mutation: Mutation) -> Iterator[None]:
    more = {
        NAME: mutation.name, PROCESS: mutation.process,
        "PYTHONPATH": os.pathsep.join([*map(str, PATHS), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    }  # fmt: skip
    before = {name: os.environ.get(name) for name in more}
    os.environ.update(more)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _edit(mutation: Mutation, folder: Path) -> None:
    from tests.cpu.mutations.lifted import edit_of

    (edit_of(mutation.edit) if isinstance(mutation.edit, str) else mutation.edit)(folder)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


for _path in PATHS[1:]:  # as the processes that are started have it: faults of tests are looked up by their modules
    if str(_path) not in sys.path:
        sys.path.append(str(_path))
