"""Run a command as a process of its own and report wall seconds, CPU seconds and peak RSS of it and its children."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """seconds of wall and CPU, peak_bytes of the largest process among the command and its children."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    code: int
    out: str

    def text(self) -> str:
        peak = self.peak_bytes / 2**20
        return f"{self.seconds:6.2f} s wall  {self.cpu_seconds:6.2f} s CPU  {peak:7.0f} MiB peak  exit {self.code}"


_CHILD = """
import json, os, resource, subprocess, sys, time
began = time.perf_counter()
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
seconds = time.perf_counter() - began
used = resource.getrusage(resource.RUSAGE_CHILDREN)
cpu = used.ru_utime + used.ru_stime
print(json.dumps([seconds, cpu, used.ru_maxrss * 1024, done.returncode, done.stdout, done.stderr]))
"""


@functools.cache
def _compiled() -> str:
    """A folder for compiled modules, gone at exit: an installed package has them, a checkout need not."""
    folder = tempfile.mkdtemp(prefix="dayzero-compiled-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def measure(*command: str) -> Measured:
    """Run ``command``; rusage is read in a process that has no other child. The first run of a kind compiles."""
    import json

    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = _compiled()
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, *command], capture_output=True, text=True, check=True, env=environment
    )
    seconds, cpu, peak, code, out, err = json.loads(done.stdout)
    if code not in (0, 1):
        sys.stderr.write(err)
    return Measured(seconds, cpu, peak, code, out)


def dayzero(*arguments: str) -> Measured:
    return measure(sys.executable, "-m", "dayzero", *arguments)


def load_text() -> str:
    """How busy the machine is: numbers taken beside other work are not comparable."""
    one, five, _ = os.getloadavg()
    return f"load {one:.1f} (1 min), {five:.1f} (5 min), {os.cpu_count()} CPUs, {time.strftime('%Y-%m-%d %H:%M')}"
