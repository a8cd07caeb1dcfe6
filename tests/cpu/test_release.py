"""The pipeline of release day: gates in order, stopped at the first that does not hold, taken up again."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dayzero.acceptance.release import run as module
from dayzero.acceptance.release.run import release
from dayzero.acceptance.release.steps import STEPS, Setting, Step
from dayzero.errors import UsageError
from dayzero.rehearse.twin import write_twin
from tests.paper.store import s3_server, upload

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"


def checkpoint(folder: Path) -> str:
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_bytes((CONFIGS / "smollm2_135m.json").read_bytes())
    write_twin(str(folder / "config"), str(folder / "new"))
    return str(folder / "new")


def statuses(report: Any) -> list[str]:
    return [step.status for step in report.steps]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Commands are noted and not run; one called ``fails`` has a finding that fails."""
    made: list[tuple[str, ...]] = []

    def fake(command: list[str]) -> tuple[int, bytes, bytes]:
        call = tuple(command[3:])
        made.append(call)
        bad = call[0] == "fails"
        finding = {"verdict": "fail", "layer": "config", "claim": "a key is unread", "remedy": "read it"}
        report = {"findings": [finding] if bad else []}
        return int(bad), json.dumps(report).encode(), b""

    monkeypatch.setattr(module, "run_command", fake)
    return made


def step(name: str) -> Step:
    return Step(name, f"what {name} shows", lambda s: (name, s.checkpoint))


def test_gates_in_order_until_one_does_not_hold(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    source, out = checkpoint(tmp_path), tmp_path / "out"
    steps = [step("one"), Step("none", "nothing to do", lambda s: None), step("fails"), step("never")]
    report = release(Setting(source, source, out), steps=steps)
    assert statuses(report) == ["passed", "left out", "failed"] and report.verdict == "fail"
    assert calls == [("one", "--json", source), ("fails", "--json", source)]
    assert report.steps[-1].said == ("config: a key is unread; read it",)
    assert json.loads((out / "release.json").read_text())["steps"][2]["status"] == "failed"


def test_what_passed_is_taken_until_something_changes(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    source, out = checkpoint(tmp_path), tmp_path / "out"
    setting, steps = Setting(source, source, out), [step("one"), step("two"), step("three")]
    assert statuses(release(setting, steps=steps)) == ["passed"] * 3
    assert statuses(release(setting, steps=steps)) == ["taken"] * 3 and len(calls) == 3
    (out / "steps" / "two.json").write_text("{")  # damaged: run again, what is behind it still holds
    assert statuses(release(setting, steps=steps)) == ["taken", "passed", "taken"]
    steps[1] = Step("two", "asked otherwise", lambda s: ("two", s.checkpoint, "--more"))
    assert statuses(release(setting, steps=steps)) == ["taken", "passed", "passed"]
    config = Path(source) / "config.json"
    config.write_text(config.read_text() + "\n")
    assert statuses(release(setting, steps=steps)) == ["passed"] * 3


def test_half_a_twin_is_made_again(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    source, out = checkpoint(tmp_path), tmp_path / "out"
    made = Step("twin", "a twin", lambda s: ("twin", s.checkpoint), lambda s: s.twin)
    assert statuses(release(Setting(source, source, out), steps=[step("one")])) == ["passed"]
    (out / "twin").mkdir()
    assert statuses(release(Setting(source, source, out), steps=[made])) == ["passed"] and not (out / "twin").exists()
    assert statuses(release(Setting(source, source, out), steps=[made])) == ["passed"], "what it made is gone"
    (out / "twin").mkdir()
    assert statuses(release(Setting(source, source, out), steps=[made])) == ["taken"]


def test_a_folder_that_is_not_its_own_is_left_alone(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    source, out = checkpoint(tmp_path), tmp_path / "out"
    (out / "twin").mkdir(parents=True)
    with pytest.raises(UsageError, match="it holds other things"):
        release(Setting(source, source, out), steps=STEPS)
    assert (out / "twin").exists() and not calls
    shutil.rmtree(out)
    release(Setting(source, source, out), steps=[step("one")])
    shutil.copytree(source, tmp_path / "other")
    other = str(tmp_path / "other")
    with pytest.raises(UsageError, match="is a run of"):
        release(Setting(other, other, out), steps=[step("one")])


def test_another_recipe_is_another_run(tmp_path: Path, calls: list[tuple[str, ...]]) -> None:
    source, out, recipe = checkpoint(tmp_path), tmp_path / "out", tmp_path / "r.py"
    recipe.write_text("A = 1")
    setting = Setting(source, source, out, recipe=str(recipe))
    assert statuses(release(setting, steps=[step("one")])) == ["passed"]
    assert statuses(release(setting, steps=[step("one")])) == ["taken"]
    recipe.write_text("A = 2")
    assert statuses(release(setting, steps=[step("one")])) == ["passed"]


def test_an_interrupt_waits_for_what_the_command_ends(tmp_path: Path) -> None:
    """A command that takes a moment to end its own server is not killed before."""
    program = (
        "import signal, sys, time\n"
        "def end(*a):\n time.sleep(0.5); open(sys.argv[1], 'w').write('ended'); sys.exit(130)\n"
        "signal.signal(signal.SIGINT, end); open(sys.argv[1] + '.up', 'w').close(); time.sleep(60)"
    )
    mark = tmp_path / "mark"

    def interrupt() -> None:
        while not (tmp_path / "mark.up").exists():
            time.sleep(0.02)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]

    threading.Timer(0.0, interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        module.run_command([sys.executable, "-c", program, str(mark)])
    assert mark.read_text() == "ended"


def test_the_steps_are_commands_that_exist(tmp_path: Path) -> None:
    """Their options are parsed by the real command line, which is asked for help and does nothing."""
    setting = Setting("s", "s", tmp_path, recipe="r.py", serve=("--device", "cpu"))
    for one in STEPS:
        call = one.call(setting)
        assert call is not None
        asked = [*call[: call.index("--")], "--help"] if "--" in call else [*call, "--help"]
        done = subprocess.run([sys.executable, "-m", "dayzero", *asked], capture_output=True, text=True, check=False)
        assert done.returncode == 0 and "Usage" in done.stdout, (one.name, done.stderr)
    assert STEPS[4].call(Setting("s", "s", tmp_path, real_align=False)) is None


@pytest.mark.slow
def test_from_an_object_store_to_a_served_model(tmp_path: Path) -> None:
    """Real commands up to the served twin; the acceptance has its own tests."""
    pytest.importorskip("transformers")
    with s3_server():
        where = upload(Path(checkpoint(tmp_path)), "lab/new")
        out = tmp_path / "out"
        setting = Setting(where, where, out, hardware="cpu", serve=("--dtype", "float32"))
        report = release(setting, steps=STEPS[:-1])
        assert statuses(report) == ["passed"] * 6, report.steps
        assert report.mirrored is not None and report.checkpoint == str(out / "mirror")
        assert statuses(release(setting, steps=STEPS[:-1])) == ["taken"] * 6
    shard = next((out / "mirror").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1])
    local = Setting(str(out / "mirror"), str(out / "mirror"), tmp_path / "other", hardware="cpu")
    report = release(local, steps=STEPS[:-1])
    assert statuses(report) == ["failed"] and "weights:" in report.steps[0].said[0]
