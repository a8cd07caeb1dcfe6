"""A command that is told to stop: nothing of it stays, no folder, no half-written trace, no child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from align_support import write_dense

REPOSITORY = Path(__file__).resolve().parents[2]
SLEEPER = """
import os, pathlib, time
def forward(reader, config, tokens, emit):
    pathlib.Path({mark!r}).write_text(str(os.getpid()))
    time.sleep(300)
"""

BUSY = """
import os, pathlib, torch
def forward(reader, config, tokens, emit):
    assert not os.read(0, 1), "nothing that it runs may wait for input"
    pathlib.Path({mark!r}).write_text(str(os.getpid()))
    x = torch.ones(512, 512)
    while True:
        x = x @ x / 512
"""


def alive(process_id: int) -> bool:
    """Whether the process runs; one that ended and that nobody has waited for does not."""
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    status = Path(f"/proc/{process_id}/stat")
    return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"


def started(folder: Path, oracle: str, tmp_path: Path, *more: str) -> tuple[subprocess.Popen[str], int]:
    """A running alignment whose temporary files lie in ``tmp_path/scratch``, and its oracle's process id."""
    mark, file = tmp_path / "child", tmp_path / "sleeper.py"
    file.write_text(oracle.format(mark=str(mark)))
    (tmp_path / "scratch").mkdir()
    command = [sys.executable, "-m", "dayzero", "align", str(folder), "--oracle", str(file), *more]
    environment = os.environ | {
        "TMPDIR": str(tmp_path / "scratch"), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Tests that run in a shell's background have SIGINT ignored, and a child would inherit that.
    listening = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    running = subprocess.Popen(command, env=environment, text=True, preexec_fn=listening, **pipes)
    until = time.monotonic() + 120
    while not (mark.exists() and mark.read_text()) and running.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    return running, int(mark.read_text())


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_alignment_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folder, out = write_dense(tmp_path / "m"), tmp_path / "out"
    out.mkdir()
    running, child = started(folder, SLEEPER, tmp_path, "--record", str(out / "trace"))
    scratch = tmp_path / "scratch"
    try:
        assert alive(child) and list(scratch.iterdir()), "there is something to clean up"
        running.send_signal(number)
        said = running.communicate(timeout=60)[1]
    finally:
        running.kill()
        running.wait()
    assert running.returncode == code and "Traceback" not in said
    assert not alive(child)
    assert not list(scratch.iterdir()) and not list(out.iterdir())


@pytest.mark.parametrize("oracle", [SLEEPER, BUSY])
def test_an_oracle_ends_with_a_parent_that_is_killed(oracle: str, tmp_path: Path) -> None:
    running, child = started(write_dense(tmp_path / "m"), oracle, tmp_path)
    try:
        assert alive(child)
        running.kill()
        running.communicate(timeout=60)
        until = time.monotonic() + 60
        while alive(child) and time.monotonic() < until:
            time.sleep(0.05)
        assert not alive(child)
    finally:
        if alive(child):
            os.kill(child, signal.SIGKILL)
