"""Servers of an acceptance: started, found dead, ended whatever happens; and foreign ones."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from dayzero.acceptance.accept import service
from dayzero.acceptance.accept.http import Client, NoAnswer
from dayzero.acceptance.accept.registry import NAMES, parse_stages, stage_named
from dayzero.acceptance.accept.run import Asked, accept, failed_to_run
from dayzero.acceptance.accept.service import Servers
from dayzero.acceptance.accept.stage import Context, Stage, StageResult, Subject
from dayzero.acceptance.server_process import NotServing, ServerProcess
from dayzero.acceptance.stages import functional
from dayzero.cli import main
from dayzero.commands.serve import ServeArguments, config_of
from dayzero.errors import EngineDead, MachineError, ModelError, UsageError
from dayzero.finding import Finding
from tests.clients.small_model import write_model
from tests.cpu.mutations.mutation import Part
from tests.cpu.mutations.narrow import narrowed
from tests.paper.server_support import make, serving

OPTIONS = ("--dtype", "float32", "--threads", "1", "--pool-bytes", "8MiB")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "small"
    write_model(folder)
    return folder


@pytest.fixture
def servers(model: Path, tmp_path: Path) -> Iterator[Servers]:
    with Servers(Subject(str(model), serve=OPTIONS), tmp_path / "servers") as made:
        yield made


def gone(pid: int, seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_one_server_is_shared_private_ones_are_not_and_none_stays(model: Path, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with Servers(Subject(str(model), serve=OPTIONS), tmp_path) as servers:
        assert servers.own
        shared = servers.shared()
        assert servers.shared() is shared and shared.model == "small"
        http, engine = shared.process_ids
        assert "dayzero.engine.worker" in " ".join(psutil.Process(engine).cmdline())
        assert psutil.Process(engine).ppid() == http and psutil.Process(http).ppid() == os.getpid()
        assert Client(shared.address, shared.headers).get("/v1/models").ok
        key = shared.headers["Authorization"].removeprefix("Bearer ")
        assert len(key) == 32 and not any(key in " ".join(psutil.Process(pid).cmdline()) for pid in (http, engine)), (
            "command lines are there for everybody to read"
        )
        assert Client(shared.address).get("/v1/models").status == 401, "everybody on this machine may disturb it"
        with servers.private("--max-model-len", "64") as private:
            assert private.address != shared.address
            listed = Client(private.address, private.headers).get("/v1/models").json
            assert listed["data"][0]["max_model_len"] == 64
            pids = private.process_ids
            assert all(gone(pid) for pid in (http, engine)), "a device may have room for one copy of a model"
        assert pids and all(gone(pid) for pid in pids)
        again = servers.shared()
        assert again is not shared and Client(again.address, again.headers).get("/v1/models").ok
        http, engine = again.process_ids
        assert len(list(tmp_path.glob("server-*.log"))) == 3
    assert all(gone(pid) for pid in (http, engine))
    assert set(psutil.Process().children(recursive=True)) <= before


# --- how often a model is loaded


@dataclass
class Loaded:
    """Stands for a ServerProcess: ready at once. log: one for each that was started."""

    arguments: Sequence[str]
    log: Path
    key: str = ""
    exit_code: int | None = None
    told: dict[str, Any] = field(default_factory=lambda: {"served": ["small"], "info": {}})

    def __post_init__(self) -> None:
        self.log.touch()

    def address(self, seconds: float) -> str:
        return "http://127.0.0.1:9"

    def end(self) -> None:
        self.exit_code = 0


def _served(stage: Stage) -> Stage:
    """A stage that finds nothing, and asks for the servers that it needs as the real one does."""

    def run(context: Context) -> StageResult:
        if stage.ends_shared:
            for _ in range(2):  # to be hurt, and started again
                with context.services.private("--max-running", "4"):
                    pass
        elif stage.needs & {"service", "own service"}:
            context.services.shared()
        return StageResult((Finding(f"{stage.name}.x", "server", "pass", "it holds"),))

    return replace(stage, run=run)


@pytest.mark.parametrize("names", [None, "performance,robustness,contract", "robustness,contract", "contract"])
def test_a_model_is_loaded_once_for_all_stages_that_share_a_server(
    names: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "ServerProcess", Loaded)
    given, out = parse_stages(names), tmp_path / "out"
    subject = Subject("models/small")
    protocol = {"subject": {}, "left_out": [], "profile": "quick", "seed": 0}
    asked = Asked(subject, [_served(stage_named(name)) for name in given], out, protocol)
    record = accept(asked, lambda folder: Servers(subject, folder), lambda record, folder: folder)
    assert [stage["name"] for stage in record["stages"]] == list(given)
    started = len(list((out / "servers").glob("server-*.log")))
    assert started == 1 + 2 * ("robustness" in given)


def test_stages_that_ask_for_a_server_of_their_own_say_that_they_end_the_shared_one() -> None:
    folder = Path(functional.__file__).parent
    own = {path.stem for path in folder.glob("*.py") if "services.private(" in path.read_text("utf-8")}
    assert own == {name for name in NAMES if stage_named(name).ends_shared}


def test_real_stages_start_one_server_to_share_and_one_to_hurt(model: Path, tmp_path: Path) -> None:
    parts = (Part("performance"), Part("robustness", ("hurt",)), Part("contract", ("alive",)))  # no second start
    subject, out = Subject(str(model), serve=OPTIONS), tmp_path / "out"
    protocol = {"subject": {}, "left_out": [], "profile": "quick", "seed": 0}
    asked = Asked(subject, [narrowed(part, None) for part in parts], out, protocol)
    record = accept(asked, lambda folder: Servers(subject, folder), lambda record, folder: folder)
    assert [stage["name"] for stage in record["stages"]] == [part.stage for part in parts]
    assert len(list((out / "servers").glob("server-*.log"))) == 2


def test_a_server_ends_by_itself_when_it_is_asked(servers: Servers) -> None:
    with servers.private() as private:
        assert private.stop() == 0 and private.process_ids == ()
        with pytest.raises(NoAnswer, match="was not answered"):
            Client(private.address, private.headers).get("/health")


def test_one_that_does_not_end_is_killed_with_its_engine(servers: Servers) -> None:
    with servers.private() as private:
        http, engine = private.process_ids
        os.kill(http, signal.SIGSTOP)
        assert private.stop(0.3) == -signal.SIGKILL
        assert gone(engine)


def test_frozen_processes_are_ended_too(servers: Servers) -> None:
    with servers.private() as private:
        pids = private.process_ids
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
    assert all(gone(pid) for pid in pids)


def test_a_server_that_died_is_told_of_once_and_replaced(servers: Servers) -> None:
    first = servers.shared()
    os.kill(first.process_ids[0], signal.SIGKILL)
    assert first.stop() == -signal.SIGKILL
    with pytest.raises(EngineDead, match=r"ended with -9 while it was tested.*server-1\.log") as raised:
        servers.shared()
    # what ended is the server, and nothing that this machine lacks
    assert failed_to_run(functional.STAGE, raised.value).layer == "server"
    second = servers.shared()
    assert Client(second.address, second.headers).get("/ready").ok


def test_an_error_in_a_stage_leaves_nothing(model: Path, tmp_path: Path) -> None:
    pids: list[int] = []

    def stage() -> None:
        with Servers(Subject(str(model), serve=OPTIONS), tmp_path) as servers:
            pids.extend(servers.shared().process_ids)
            with servers.private() as private:
                pids.extend(private.process_ids)
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stage()
    assert len(pids) == 4 and all(gone(pid) for pid in pids)


def test_a_process_that_is_asked_to_end_takes_its_servers_along(tmp_path: Path) -> None:
    """As CI's time limit does, by SIGTERM."""
    python = tmp_path / "python"
    told = json.dumps({"address": "http://127.0.0.1:9", "served": ["x"]})
    python.write_text(f"#!/bin/sh\necho '{told}'\nexec sleep 600\n")
    python.chmod(0o755)
    code = f"""
import sys, time
from pathlib import Path
from dayzero.acceptance.accept import service
from dayzero.acceptance.accept.http import Client, NoAnswer
from dayzero.acceptance.accept.registry import NAMES, parse_stages, stage_named
from dayzero.acceptance.accept.run import Asked, accept, failed_to_run
from dayzero.acceptance.accept.service import Servers
from dayzero.acceptance.accept.stage import Context, Stage, StageResult, Subject
with Servers(Subject("model"), Path({str(tmp_path / "logs")!r})) as servers:
    sys.executable = {str(python)!r}
    print(servers.shared().process_ids[0], flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    assert psutil.pid_exists(pid)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in errors and gone(pid)


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NobodyKnowsForCausalLM"]}')
    before = set(psutil.Process().children(recursive=True))
    with Servers(Subject(str(tmp_path)), tmp_path / "logs") as servers:
        with pytest.raises(ModelError, match=r"NobodyKnows.*server-1\.log") as raised:
            servers.shared()
    assert failed_to_run(functional.STAGE, raised.value).layer == "operator"  # a recipe is lacking
    assert set(psutil.Process().children(recursive=True)) <= before


def test_one_that_never_becomes_ready_is_given_up(model: Path, tmp_path: Path) -> None:
    before = set(psutil.Process().children(recursive=True))
    with Servers(Subject(str(model), serve=OPTIONS), tmp_path, start_seconds=0.0) as servers:
        with pytest.raises(MachineError, match="not ready after 0 seconds"):
            servers.shared()
    assert set(psutil.Process().children(recursive=True)) <= before


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo loading >&2; echo boom >&2; exit 5", r"ended with 5 before it was ready: loading \| boom"),
        ("echo error: no space >&2; echo bye >&2; exit 3", "ended with 3 before it was ready: no space"),
        ('echo \'{"error": {"message": "no recipe"}}\'; exit 1', "ended with 1 before it was ready: no recipe"),
        ("kill -9 $$", "ended with -9 before it was ready: it said nothing"),
    ],
)
def test_last_words_are_the_error_or_the_end_of_the_log(
    script: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    process = ServerProcess(("model",), tmp_path / "log")
    try:
        with pytest.raises(NotServing, match=why):
            process.address(30)
    finally:
        process.end()


def test_a_foreign_server_is_asked_and_left_alone() -> None:
    with serving(make(api_keys=("sesame",))) as url:
        with Servers(Subject(None, url=f"{url}/v1", api_key="sesame"), Path("nowhere")) as servers:
            found = servers.shared()
            assert not servers.own and found.model == "tiny" and found.address == url and found.process_ids == ()
            assert Client(found.address, found.headers).get("/v1/models/tiny").ok
            with pytest.raises(RuntimeError, match="not started here"):
                found.stop()
            with pytest.raises(RuntimeError, match="other options"), servers.private():
                pass
        assert Client(url).get("/health").ok
        with Servers(Subject(None, url=url, model="also-tiny", api_key="sesame"), Path("nowhere")) as servers:
            assert servers.shared().model == "also-tiny"
        with Servers(Subject(None, url=url), Path("nowhere")) as servers:
            with pytest.raises(MachineError, match="answered 401.*key"):
                servers.shared()
    assert not Path("nowhere").exists()
    with Servers(Subject(None, url=url), Path("nowhere")) as servers:
        with pytest.raises(MachineError, match="no server answers"):
            servers.shared()


def test_what_is_no_openai_server_is_named() -> None:
    class Silent:
        async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'{"data": []}'})

    world = make()
    world.app = Silent()  # type: ignore[assignment]
    with serving(world) as url, Servers(Subject(None, url=url), Path("nowhere")) as servers:
        with pytest.raises(MachineError, match="lists no model"):
            servers.shared()


def test_a_descriptor_that_no_machine_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "x", "--api-key-fd", str(2**31)]) == 2
    assert "--api-key-fd" in capsys.readouterr().err


def test_keys_come_through_a_descriptor(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("one\ntwo\n")
    arguments = ServeArguments(source="x", api_key=["zero"], api_key_fd=os.open(path, os.O_RDONLY))
    assert config_of(arguments).api_keys == ("zero", "one", "two")
    path.write_text("")
    for number, said in ((os.open(path, os.O_RDONLY), "no key in it"), (9999, "cannot|no keys can be read")):
        with pytest.raises(UsageError, match=rf"--api-key-fd {number}: .*({said})"):
            config_of(ServeArguments(source="x", api_key_fd=number))
