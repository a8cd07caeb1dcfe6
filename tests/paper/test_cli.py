"""The command line's frame: import cost, wrong calls, errors as sentences and exit codes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import pytest
import typer

from dayzero import __version__
from dayzero.cli import COMMANDS, build_app, main
from dayzero.commands.frame import EXIT_BROKEN_PIPE, EXIT_BUG, EXIT_INTERRUPTED, guarded, register
from dayzero.commands.twin import parse_changes
from dayzero.console import Console
from dayzero.errors import CheckpointError, MachineError, UsageError

REPOSITORY = Path(__file__).resolve().parents[2]
IMPORT_LIMIT_SECONDS = 0.3


def test_importing_the_command_line_is_quick_and_brings_no_torch() -> None:
    """CPU seconds, best of five: the limit is on the work, not on what else a shared machine does meanwhile."""
    program = (
        "import sys, time; start = time.process_time(); import dayzero.cli; print(time.process_time() - start)\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy', 'rich')))"
    )
    seconds = []
    for _ in range(5):
        done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False, stdout=subprocess.PIPE)
        assert done.returncode == 0
        seconds.append(float(done.stdout))
    assert min(seconds) <= IMPORT_LIMIT_SECONDS, seconds


def test_a_command_imports_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    program = (
        "import sys; from dayzero.cli import main; main(['inspect', '--help'])\n"
        "found = [n for n in sys.modules if n.startswith('dayzero.commands.')]\n"
        "sys.exit(sorted(found) != ['dayzero.commands.frame', 'dayzero.commands.inspect'] or 'asyncio' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=False, stdout=subprocess.DEVNULL)
    assert done.returncode == 0


def test_every_command_file_is_in_the_table() -> None:
    """A file of ``commands`` is a command or holds what several of them share."""
    folder = REPOSITORY / "dayzero" / "commands"
    commands = {path.stem for path in folder.glob("*.py") if "\ndef run(" in path.read_text(encoding="utf-8")}
    assert set(COMMANDS) == commands


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_every_command_has_the_shared_flags(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    text = capsys.readouterr().out
    assert all(flag in text for flag in ("--json", "-q", "--quiet", "--all", "--debug"))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_no_command_shows_help_and_is_a_wrong_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: dayzero" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["nope"], "nope"),
        (["inspect"], "SOURCE"),
        (["inspect", "x", "--nope"], "--nope"),
        (["plan", "x"], "--hardware"),
        (["plan", "x", "--hardware", "cpu", "--tp", "0"], "--tp"),
        (["plan", "x", "--hardware", "cpu", "--context", "many"], "--context"),
        (["twin", "x"], "OUT"),
        (["align", "x", "y"], "y"),
    ],
)
def test_a_wrong_call_is_one_sentence_and_exit_code_2(
    arguments: list[str], names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert names in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""
    assert main([*arguments, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 2


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (CheckpointError("config.json: damaged"), 1, "config.json: damaged"),
        (UsageError("wrong"), 2, "wrong"),
        (MachineError("no network"), 3, "no network"),
        (ModuleNotFoundError("No module named 'gguf'", name="gguf"), 3, "dayzero[demo]"),
        (ModuleNotFoundError("x", name="transformers.models"), 3, "dayzero[oracle]"),
        (ModuleNotFoundError("x", name="dayzero.nope"), EXIT_BUG, "internal error"),
        (MemoryError(), 3, "memory"),
        (PermissionError(errno.EACCES, "Permission denied", "a/config.json"), 2, "a/config.json: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), 3, "out/x: No space left"),
        (ZeroDivisionError("division by zero"), EXIT_BUG, "ZeroDivisionError"),
        (KeyboardInterrupt(), EXIT_INTERRUPTED, "interrupted"),
    ],
)
def test_every_exception_becomes_a_sentence(
    error: BaseException, code: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(console: Console) -> int:
        raise error

    assert guarded(work, Console(json_mode=True)) == code
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert says in captured.err
    assert "Traceback" not in captured.err
    assert json.loads(captured.out)["error"]["exit_code"] == code


def test_a_reader_that_goes_away_is_no_verdict(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Nothing"], "num_hidden_layers": 2}')
    command = [sys.executable, "-m", "dayzero", "inspect", str(tmp_path / "config.json")]
    child = subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == ""
    child.stderr.close()
    assert child.wait() == EXIT_BROKEN_PIPE


def test_debug_adds_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def work(console: Console) -> int:
        raise ZeroDivisionError("division by zero")

    assert guarded(work, Console(), debug=True) == EXIT_BUG
    assert "Traceback" in capsys.readouterr().err


def test_options_reach_the_command_as_one_frozen_value() -> None:
    @dataclass(frozen=True)
    class Options:
        name: Annotated[str, typer.Argument()]
        count: Annotated[int, typer.Option()] = 3
        file: Annotated[Path | None, typer.Option()] = None

    seen: list[tuple[Options, Console]] = []

    def run(options: Options, console: Console) -> int:
        """Do it."""
        seen.append((options, console))
        return 1

    app = build_app()
    register(app, "extra", Options, run)
    code = app(["extra", "a", "--file", "b", "-q", "--json", "--all"], prog_name="dayzero", standalone_mode=False)
    assert code == 1
    options, console = seen[0]
    assert options == Options("a", 3, Path("b"))
    assert (console.quiet, console.json_mode, console.show_all) == (True, True, True)


def test_a_reader_that_stops_reading_causes_no_traceback() -> None:
    """`dayzero --help | true`: the pipe is closed before the first write."""
    program = "import sys, time; time.sleep(0.5); from dayzero.cli import main; sys.exit(main(['--help']))"
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=REPOSITORY
    )
    assert child.stdout is not None
    assert child.stderr is not None
    child.stdout.close()
    said = child.stderr.read().decode()
    child.stderr.close()
    child.wait(timeout=30)
    assert "Traceback" not in said
    assert "Exception ignored" not in said


def test_changes_of_a_twin_are_json() -> None:
    assert parse_changes(["hidden_size=256", 'layer_types=["a=b"]']) == {"hidden_size": 256, "layer_types": ["a=b"]}
    for wrong in ("hidden_size", "hidden_size=", "hidden_size=big", "=3"):
        with pytest.raises(UsageError, match="KEY=JSON"):
            parse_changes([wrong])
