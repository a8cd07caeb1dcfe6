"""Much in a few minutes on a machine with GPUs: checks side by side first, then timings with a GPU to themselves.

    python benchmarks/window.py FOLDER CHECK_SECONDS TIME_SECONDS [--gpus N] [--out DIR]

FOLDER holds a folder for each job, with ``check.sh``, ``time.sh`` or both. All checks run at once, dealt out over the
GPUs, and may compile what the timings use; whatever still runs after CHECK_SECONDS is stopped. Then each GPU takes the
timings that were dealt to it, one after the other, TIME_SECONDS each. A job whose check failed is not timed. DIR gets
NAME.check.log and NAME.time.log; what ended how is printed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Job:
    name: str
    folder: Path
    gpu: int

    def script(self, kind: str) -> Path:
        return self.folder / f"{kind}.sh"


def run(job: Job, kind: str, seconds: float, out: Path) -> str:
    """Run a script of a job in a session of its own, and stop all of it when its time is over; how it ended."""
    began = time.monotonic()
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": str(job.gpu), "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    with open(out / f"{job.name}.{kind}.log", "wb") as log:
        child = subprocess.Popen(
            ["bash", str(job.script(kind))], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            env=environment, start_new_session=True,
        )  # fmt: skip
        try:
            code: int | str = child.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()
            code = "stopped"
    return f"{job.name:<24} {kind:<6} gpu {job.gpu}  {time.monotonic() - began:6.1f} s  {code}"


def check_all(jobs: list[Job], seconds: float, out: Path) -> set[str]:
    """Names of the jobs whose checks passed, or that have none."""
    passed, lock = {job.name for job in jobs if not job.script("check").exists()}, threading.Lock()

    def one(job: Job) -> None:
        line = run(job, "check", seconds, out)
        with lock:
            print(line, flush=True)
            if line.endswith(" 0"):
                passed.add(job.name)

    _all([threading.Thread(target=one, args=(job,)) for job in jobs if job.script("check").exists()])
    return passed


def time_all(jobs: list[Job], seconds: float, gpus: int, out: Path) -> None:
    def one(gpu: int) -> None:
        for job in jobs:
            if job.gpu == gpu and job.script("time").exists():
                print(run(job, "time", seconds, out), flush=True)

    _all([threading.Thread(target=one, args=(gpu,)) for gpu in range(gpus)])


def _all(threads: list[threading.Thread]) -> None:
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("check_seconds", type=float)
    parser.add_argument("time_seconds", type=float)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("window"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    folders = sorted(path for path in given.folder.iterdir() if path.is_dir())
    jobs = [Job(path.name, path, number % given.gpus) for number, path in enumerate(folders)]
    passed = check_all(jobs, given.check_seconds, given.out)
    time_all([job for job in jobs if job.name in passed], given.time_seconds, given.gpus, given.out)
    return 0 if len(passed) == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
