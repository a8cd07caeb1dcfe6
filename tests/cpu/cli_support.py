"""The command line, run as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any


def run_json(*arguments: str, timeout: float = 300) -> tuple[int, dict[str, Any]]:
    """(exit code, the object on stdout) of ``dayzero ARGUMENTS --json``; never a traceback."""
    command = [sys.executable, "-m", "dayzero", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout)
