"""A command that is told to stop: nothing of it stays, no folder, no half-written trace, no child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stopped_alignment_leaves_nothing(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folder, scratch, out = write_dense(tmp_path / "m"), tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    out.mkdir()
    mark, oracle = tmp_path / "child", tmp_path / "sleeper.py"
    oracle.write_text(SLEEPER.format(mark=str(mark)))
    command = [sys.executable, "-m", "dayzero", "align", str(folder), "--oracle", str(oracle)]
    command += ["--record", str(out / "trace")]
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 120
        while not (mark.exists() and mark.read_text()) and running.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        child = int(mark.read_text())
        assert alive(child) and list(scratch.iterdir()), "there is something to clean up"
        running.send_signal(number)
        said = running.communicate(timeout=60)[1]
    finally:
        running.kill()
        running.wait()
    assert running.returncode == code and "Traceback" not in said
    assert not alive(child)
    assert not list(scratch.iterdir()) and not list(out.iterdir())
