"""``dayzero serve`` as a child process, and the environments of clients that do not share ours."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
VENVS = ROOT / ".venvs"
NAME = "small"
START_SECONDS = 120.0
END_SECONDS = 30.0
# No client may look for a hub, or tell anyone of its run.
QUIET = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "DO_NOT_TRACK": "1"}


@dataclass(frozen=True)
class Service:
    """address: as ``http://127.0.0.1:1234``. folder: of the model. told: what the command printed with --json. log:
    file of its stderr, one JSON object a line once it serves."""

    address: str
    folder: Path
    told: Mapping[str, Any]
    log: Path

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.address + path, timeout=60)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.address + path, json=body, timeout=120)

    def total(self, name: str, **labels: str) -> float:
        """Sum of a counter's samples in /metrics. name: without ``_total``."""
        wanted, out = set(labels.items()), 0.0
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"{name}_total" and wanted <= set(sample.labels.items()):
                    out += sample.value
        return out

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, by the service."""
        answer = self.post("/tokenize", {"prompt": text})
        assert answer.status_code == 200, answer.text
        tokens: list[int] = answer.json()["tokens"]
        return tokens


@contextlib.contextmanager
def serving(folder: Path, log: Path, *options: str) -> Iterator[Service]:
    """The command on a free port, ready. At the end it gets SIGTERM and must leave with 0."""
    command = [sys.executable, "-m", "dayzero", "serve", str(folder), "--port", "0", "--json"]
    command += ["--served-model-name", NAME, "--threads", "1", "--pool-bytes", "64MiB", *options]
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT)
    try:
        told = _told(process, log)
        yield Service(told["address"], folder, told, log)
        assert process.poll() is None, f"the service ended by itself: {_end_of(log)}"
        process.send_signal(signal.SIGTERM)
        assert process.wait(END_SECONDS) == 0, _end_of(log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _told(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    """The one line of stdout, which comes when the model is loaded."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_SECONDS)
    line = process.stdout.readline() if ready else ""
    assert line, f"not ready after {START_SECONDS:.0f} s: {_end_of(log)}"
    told: dict[str, Any] = json.loads(line)
    assert "address" in told, told
    return told


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8")[-3000:]


# --- clients in environments of their own -------------------------------------------------------------------------


def program(venv: str, name: str) -> str:
    """A program of a client's environment. AssertionError, not a skip, where it is missing: a client that nobody runs
    proves nothing."""
    found = VENVS / venv / "bin" / name
    assert found.exists(), f"{found.relative_to(ROOT)} is missing; run `python tests/make_venvs.py {venv}`"
    return str(found)


def run(command: Sequence[str], folder: Path, seconds: float, **environment: str | None) -> str:
    """stdout and stderr of a client that has to end with 0. environment: None takes a variable away."""
    code, out, took = run_any(command, folder, seconds, **environment)
    assert code == 0, f"{command[0]} left with {code} after {took:.0f} s:\n{out[-6000:]}"
    return out


def run_any(command: Sequence[str], folder: Path, seconds: float, **environment: str | None) -> tuple[int, str, float]:
    """(exit code, stdout and stderr, seconds)."""
    variables = {**os.environ, **QUIET, **environment}
    kept = {name: value for name, value in variables.items() if value is not None}
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=folder, env=kept, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=seconds,
        errors="replace", stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, time.monotonic() - began
