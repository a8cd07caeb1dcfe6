"""A run of stages that is stopped, changed, damaged or repeated: what is done is taken, and only if nothing changed."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as tree
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dayzero.acceptance.accept.digest import NOT_COVERED, sha256_of, verify_digest
from dayzero.acceptance.accept.record import RECORD, read_record
from dayzero.acceptance.accept.registry import NAMES, parse_stages
from dayzero.acceptance.accept.resume import Kept, differences
from dayzero.acceptance.accept.run import JUNIT, Asked, Shown, accept
from dayzero.acceptance.accept.stage import Context, Figure, Stage, StageResult, Subject
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

GOOD = Finding("a.good", "server", "pass", "it holds", measured=(1, 2.5), bound=float("inf"), evidence=("x",))


class Server:
    address, model, headers, process_ids = "http://127.0.0.1:1", "nova", {}, ()
    told: Mapping[str, Any] = {"dtype": "float32", "facts": {"bindings": {"linear": "tiled"}}}

    def stop(self, seconds: float = 60.0) -> int:
        return 0


@dataclass
class World:
    """Fake stages and services; ``ran`` lists what ran, ``open`` how many services are open."""

    folder: Path
    subject: Subject = Subject("models/nova")
    ran: list[str] = field(default_factory=list)
    news: list[str] = field(default_factory=list)
    open: int = 0
    bodies: dict[str, Callable[[Context], StageResult]] = field(default_factory=dict)
    needs: dict[str, frozenset[Any]] = field(default_factory=dict)
    ends_shared: frozenset[str] = frozenset()

    @contextmanager
    def services(self, folder: Path) -> Iterator[Any]:
        self.open += 1
        try:
            yield self
        finally:
            self.open -= 1

    own = True

    def shared(self) -> Server:
        return Server()

    def stage(self, name: str) -> Stage:
        def run(context: Context) -> StageResult:
            assert self.open == 1
            self.ran.append(name)
            return self.bodies.get(name, lambda _: StageResult((GOOD,)))(context)

        return Stage(name, name.title(), self.needs.get(name, frozenset()), run, name in self.ends_shared)

    def accept(self, *names: str, **changes: Any) -> dict[str, Any]:
        """changes: of the protocol (``seed``, ``profile``, ``package`` …), ``stamps`` and ``subject``."""
        self.ran.clear()
        self.news.clear()
        facts = {"source": self.subject.source, "url": self.subject.url, "model": None, "recipe": None, "serve": []}
        protocol: dict[str, Any] = {
            "package": {"name": "dayzero", "version": "1", "code_sha256": "c" * 64}, "versions": {"torch": "2"},
            "extensions": {}, "machine": {"cpus": 2}, "subject": facts, "profile": "quick", "seed": 0,
            "stages": list(names), "left_out": [], "baseline": None,
        }  # fmt: skip
        protocol |= {key: value for key, value in changes.items() if key in protocol}
        asked = Asked(
            self.subject, [self.stage(name) for name in names], self.folder, protocol,
            changes.get("stamps", "s"), protocol["profile"], protocol["seed"], changes.get("record"),
        )  # fmt: skip
        return accept(asked, self.services, self.page, Shown(tell=self.news.append))

    def page(self, record: Mapping[str, Any], folder: Path) -> Path:
        (folder / "index.html").write_text(record["digest"])
        return folder / "index.html"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "out")


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    out = {key: value for key, value in record.items() if key not in NOT_COVERED}
    stages = [{k: v for k, v in stage.items() if k not in NOT_COVERED} for stage in record["stages"]]
    return out | {"stages": stages}


# --- taken, or run anew ----------------------------------------------------------------------------------------------


def test_a_run_writes_the_record_and_what_is_made_of_it(world: World) -> None:
    record = world.accept("weights", "contract")
    assert world.ran == ["weights", "contract"] and world.open == 0
    assert read_record(world.folder) == record and verify_digest(record)
    assert (world.folder / JUNIT).read_bytes().startswith(b"<?xml")
    assert (world.folder / "index.html").read_text() == record["digest"]
    assert [line.split(":")[0] for line in world.news] == ["1/2 weights", "2/2 contract"]


def test_a_second_run_takes_what_is_done_and_says_so(world: World) -> None:
    figure = Figure("bars", "t", {"rows": [{"name": "x", "value": float("nan"), "bound": 1}]})
    world.bodies["weights"] = lambda context: StageResult((GOOD,), (figure,), {"a": (1, 2)}, {"right": {"i": True}})
    first = world.accept("weights", "contract")
    second = world.accept("weights", "contract", "robustness")
    assert world.ran == ["robustness"]
    assert [stage["taken"] for stage in second["stages"]] == [True, True, False]
    assert "taken from the run of" in world.news[0] and "taken from the run of" in world.news[1]
    third = world.accept("weights", "contract")
    assert world.ran == [] and without_times(third) == without_times(first)
    assert third["digest"] == first["digest"] and third["outcome"] == first["outcome"]


def test_what_ends_the_shared_server_runs_last_and_keeps_its_place_in_the_record(world: World) -> None:
    plain = world.accept("performance", "robustness", "contract")
    other = World(world.folder.with_name("other"), ends_shared=frozenset({"robustness"}))
    record = other.accept("performance", "robustness", "contract")
    assert other.ran == ["performance", "contract", "robustness"]
    assert [line.split(":")[0] for line in other.news] == ["1/3 performance", "2/3 contract", "3/3 robustness"]
    assert [stage["name"] for stage in record["stages"]] == ["performance", "robustness", "contract"]
    assert record["digest"] == plain["digest"]
    assert [suite.get("name") for suite in tree.parse(other.folder / JUNIT).getroot()] == [
        "Performance", "Robustness", "Contract",
    ]  # fmt: skip


def test_a_run_interrupted_in_the_last_one_run_keeps_those_behind_it_in_the_record(world: World) -> None:
    world.ends_shared = frozenset({"robustness"})

    def interrupted(context: Context) -> StageResult:
        raise KeyboardInterrupt

    world.bodies["robustness"] = interrupted
    with pytest.raises(KeyboardInterrupt):
        world.accept("performance", "robustness", "contract")
    del world.bodies["robustness"]
    record = world.accept("performance", "robustness", "contract")
    assert world.ran == ["robustness"] and [stage["taken"] for stage in record["stages"]] == [True, False, True]


@pytest.mark.parametrize(
    "changes, word",
    [
        ({"seed": 3}, "seed (0 before, 3 now)"),
        ({"profile": "long"}, "profile (quick before, long now)"),
        ({"stamps": "t"}, "stamps"),
        ({"package": {"name": "dayzero", "version": "1", "code_sha256": "d" * 64}}, "package.code_sha256"),
        ({"versions": {"torch": "3"}}, "versions.torch (2 before, 3 now)"),
        ({"machine": {"cpus": 4}}, "machine.cpus"),
        ({"subject": {"source": "models/nova", "serve": ["--threads", "2"]}}, "subject.serve"),
        ({"extensions": {"acme": "1"}}, "extensions.acme"),
    ],
)
def test_what_changed_runs_anew_and_is_named(world: World, changes: dict[str, Any], word: str) -> None:
    world.accept("weights", "contract")
    record = world.accept("weights", "contract", **changes)
    assert world.ran == ["weights", "contract"]
    assert word in world.news[0] and not any(stage["taken"] for stage in record["stages"])
    world.accept("weights", "contract", **changes)
    assert world.ran == []


def test_another_baseline_runs_the_stage_that_reads_it_and_no_other(world: World) -> None:
    world.accept("weights", "performance")
    world.accept("weights", "performance", baseline="e" * 64)
    assert world.ran == ["performance"]


@pytest.mark.parametrize("damage", ["cut", "empty", "list", "edited", "renamed"])
def test_a_damaged_stage_runs_anew(world: World, damage: str) -> None:
    bad = replace(GOOD, verdict="fail")
    world.bodies["weights"] = lambda context: StageResult((bad,))
    world.accept("weights", "contract")
    path = world.folder / "stages" / "weights.json"
    text = path.read_text()
    if damage == "renamed":
        text = (world.folder / "stages" / "contract.json").read_text()
    else:
        spoil = {"cut": text[:-40], "empty": "", "list": "[1]", "edited": text.replace('"fail"', '"pass"')}
        text = spoil[damage]
    path.write_text(text)
    record = world.accept("weights", "contract")
    assert world.ran == ["weights"] and "is damaged: the stage runs anew" in world.news[0]
    assert record["verdict"] == "fail"


def test_a_stage_file_whose_finding_is_of_another_kind_is_damaged(world: World) -> None:
    world.accept("weights")
    path = world.folder / "stages" / "weights.json"
    content = json.loads(path.read_text())
    content["findings"][0]["layer"] = "nowhere"
    content["checksum"] = sha256_of({key: value for key, value in content.items() if key != "checksum"})
    path.write_text(json.dumps(content))
    world.accept("weights")
    assert world.ran == ["weights"]


# --- stopped ---------------------------------------------------------------------------------------------------------


def raises(error: BaseException) -> Callable[[Context], StageResult]:
    def run(context: Context) -> StageResult:
        (context.folder / "half").write_text("done")
        raise error

    return run


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("a bug"), OSError(28, "full")])
def test_whatever_ends_a_run_keeps_what_is_done(world: World, error: BaseException) -> None:
    world.bodies["contract"] = raises(error)
    with pytest.raises(type(error)):
        world.accept("weights", "contract", "robustness")
    assert world.open == 0 and not (world.folder / RECORD).exists()
    seen: list[bool] = []

    def again(context: Context) -> StageResult:
        seen.append((context.folder / "half").exists())
        return StageResult((GOOD,))

    world.bodies["contract"] = again
    record = world.accept("weights", "contract", "robustness")
    assert world.ran == ["contract", "robustness"] and seen == [True]  # the stage's folder was kept
    assert [stage["taken"] for stage in record["stages"]] == [True, False, False]


def test_the_folder_of_a_stage_is_empty_when_something_changed(world: World) -> None:
    world.bodies["contract"] = raises(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        world.accept("contract")
    seen: list[list[str]] = []

    def again(context: Context) -> StageResult:
        seen.append([path.name for path in context.folder.iterdir()])
        return StageResult((GOOD,))

    world.bodies["contract"] = again
    world.accept("contract", seed=1)
    assert seen == [[]]


@pytest.mark.parametrize(
    "error, layer",
    [
        (CheckpointError("a shard is cut short"), "weights"), (ConfigError("a key is missing"), "config"),
        (ModelError("no recipe"), "operator"), (MachineError("no network"), "hardware"),
        (EngineDead("it ended"), "server"), (Overloaded("too many"), "scheduler"), (UsageError("wrong"), "config"),
        (UserError("something"), "server"),
    ],
)  # fmt: skip
def test_an_error_of_the_users_is_a_finding_and_the_run_goes_on(world: World, error: UserError, layer: str) -> None:
    world.bodies["weights"] = raises(error)
    record = world.accept("weights", "contract")
    (found,) = record["stages"][0]["findings"]
    assert (found["kind"], found["verdict"], found["layer"]) == ("weights.ran", "fail", layer)
    assert found["measured"] == str(error) and found["remedy"]
    assert world.ran == ["weights", "contract"] and record["verdict"] == "fail"


def test_a_stage_without_what_it_needs_is_not_applicable(world: World) -> None:
    world.needs = {
        "weights": frozenset({"source"}), "contract": frozenset({"service"}), "robustness": frozenset({"own service"})
    }  # fmt: skip
    world.subject = Subject(None, url="http://127.0.0.1:1")
    record = world.accept("weights", "contract", "robustness")
    assert world.ran == ["contract"]
    first, _, last = (stage["findings"] for stage in record["stages"])
    for found in (*first, *last):
        assert found["verdict"] == "not applicable" and found["measured"] and found["kind"].endswith(".ran")
    assert "--url" in last[0]["measured"] and "SOURCE" in first[0]["measured"]
    world.folder, world.subject = world.folder.with_name("other"), Subject("models/nova")
    world.accept("weights", "contract", "robustness")
    assert world.ran == ["weights", "contract", "robustness"]


def test_what_a_server_said_is_in_the_protocol_also_when_its_stage_was_taken(world: World) -> None:
    def asks(context: Context) -> StageResult:
        context.services.shared()
        return StageResult((GOOD,))

    world.bodies["contract"] = asks
    first = world.accept("weights", "contract")
    assert first["protocol"]["service"] == Server.told
    assert world.accept("weights", "contract")["protocol"]["service"] == Server.told


# --- the folder ------------------------------------------------------------------------------------------------------


def test_the_record_of_another_subject_is_not_written_over(world: World) -> None:
    world.accept("weights")
    before = {path: path.read_bytes() for path in world.folder.rglob("*") if path.is_file()}
    for subject in (Subject("models/other"), Subject(None, url="http://127.0.0.1:1")):
        world.subject = subject
        with pytest.raises(UsageError, match="another subject .*give another folder"):
            world.accept("weights")
        assert world.ran == []
    assert {path: path.read_bytes() for path in world.folder.rglob("*") if path.is_file()} == before


def test_the_same_folder_by_another_path_is_the_same_subject(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nova").mkdir()
    world.subject = Subject(str(tmp_path / "nova"))
    world.accept("weights")
    monkeypatch.chdir(tmp_path)
    world.subject = Subject("nova")
    world.accept("weights")


def test_a_folder_with_something_else_is_refused(world: World) -> None:
    world.folder.mkdir()
    (world.folder / "thesis.tex").write_text("years of work")
    with pytest.raises(UsageError, match="not empty and holds no acceptance"):
        world.accept("weights")
    assert [path.name for path in world.folder.iterdir()] == ["thesis.tex"]
    world.folder = world.folder / "thesis.tex"
    with pytest.raises(UsageError, match="is a file"):
        world.accept("weights")
    world.folder = world.folder.with_name("no") / "such"
    with pytest.raises(UsageError, match="parent folder does not exist"):
        world.accept("weights")


def test_an_empty_folder_is_taken(world: World) -> None:
    world.folder.mkdir()
    world.accept("weights")
    assert (world.folder / RECORD).exists()


def test_two_runs_do_not_write_to_one_folder(world: World) -> None:
    with Kept(world.folder, world.subject).opened():
        with pytest.raises(MachineError, match="another acceptance"):
            world.accept("weights")
    assert world.accept("weights")["verdict"] == "pass"


def test_a_folder_keeps_no_key(world: World) -> None:
    world.subject = Subject(None, url="http://127.0.0.1:1", api_key="very-secret")
    world.accept("weights")
    assert all("very-secret" not in path.read_text() for path in world.folder.rglob("*") if path.is_file())


# --- names -----------------------------------------------------------------------------------------------------------


def test_differences_name_each_place() -> None:
    before = {"a": {"b": 1, "c": [1]}, "d": "x"}
    assert differences(before, copy.deepcopy(before)) == []
    assert differences(before, {"a": {"b": 1.0, "c": [2]}, "e": 1}) == [
        "a.b (1 before, 1.0 now)", "a.c ([1] before, [2] now)", "d (x before, None now)", "e (None before, 1 now)"
    ]  # fmt: skip
    assert differences({"x_sha256": "1"}, {"x_sha256": "2"}) == ["x_sha256"]


def test_stages_are_named_in_any_order_and_run_in_theirs() -> None:
    assert parse_stages(None) == NAMES and len(NAMES) == 8
    assert parse_stages("contract, weights") == ("weights", "contract")
    for text in ("", "weight", "weights,,contract"):
        with pytest.raises(UsageError, match="there is no stage"):
            parse_stages(text)
