"""Much in a few minutes on a machine with GPUs: checks side by side first, then timings with a GPU to themselves.

    python benchmarks/window.py FOLDER CHECK_SECONDS TIME_SECONDS [--gpus N] [--timed N] [--all SECONDS] [--out DIR]

FOLDER holds a folder for each job, with ``check.sh``, ``time.sh`` or both. All checks run at once, dealt out over the
GPUs, and may compile what the timings use; whatever still runs after CHECK_SECONDS is stopped. Then each GPU (the first
of them only with --timed, where others have other work) takes the next timing, TIME_SECONDS each, until none is left;
none begins or runs on after SECONDS of the whole. A job whose check failed is not timed. DIR gets NAME.check.log and
NAME.time.log, and NAME.files, a folder that a job finds as $JOB_OUT; what ended how is printed.
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

    def script(self, kind: str) -> Path:
        return self.folder / f"{kind}.sh"


def run(job: Job, kind: str, gpu: int, seconds: float, out: Path) -> str:
    """Run a script of a job in a session of its own, and stop all of it when its time is over; how it ended."""
    began = time.monotonic()
    files = out / f"{job.name}.files"
    files.mkdir(exist_ok=True)
    environment = {
        **os.environ, "CUDA_VISIBLE_DEVICES": str(gpu), "OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1",
        "JOB_OUT": str(files),
    }  # fmt: skip
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
    return f"{job.name:<24} {kind:<6} gpu {gpu}  {time.monotonic() - began:6.1f} s  {code}"


def check_all(jobs: list[Job], seconds: float, gpus: int, out: Path) -> set[str]:
    """Names of the jobs whose checks passed, or that have none."""
    passed, lock = {job.name for job in jobs if not job.script("check").exists()}, threading.Lock()

    def one(job: Job, gpu: int) -> None:
        line = run(job, "check", gpu, seconds, out)
        with lock:
            print(line, flush=True)
            if line.endswith(" 0"):
                passed.add(job.name)

    checked = [job for job in jobs if job.script("check").exists()]
    _all([threading.Thread(target=one, args=(job, number % gpus)) for number, job in enumerate(checked)])
    return passed


def time_all(jobs: list[Job], seconds: float, gpus: int, end: float, out: Path) -> None:
    todo, lock = [job for job in jobs if job.script("time").exists()], threading.Lock()

    def one(gpu: int) -> None:
        while True:
            with lock:
                if not todo:
                    return
                job = todo.pop(0)
            left = min(seconds, end - time.monotonic())
            line = run(job, "time", gpu, left, out) if left > 0 else f"{job.name:<24} time   not begun"
            print(line, flush=True)

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
    parser.add_argument("--timed", type=int, help="GPUs that take timings, where not all")
    parser.add_argument("--all", type=float, default=float("inf"), help="seconds of the whole")
    parser.add_argument("--out", type=Path, default=Path("window"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + given.all
    jobs = [Job(path.name, path) for path in sorted(given.folder.iterdir()) if path.is_dir()]
    passed = check_all(jobs, given.check_seconds, given.gpus, given.out)
    time_all([job for job in jobs if job.name in passed], given.time_seconds, given.timed or given.gpus, end, given.out)
    return 0 if len(passed) == len(jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
