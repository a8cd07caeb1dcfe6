"""The end of a server: by one signal, by two, and with clients that neither send nor read."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SERVER = """
import sys
from pathlib import Path
from dayzero.engine.client import AsyncEngine
from dayzero.server.app import create_app
from dayzero.server.config import ServerConfig
from dayzero.server.run import bind, run_loop, serve
from tests.paper.fake_engine import WORKER, Habits, fake_launch
from tests.paper.server_support import full_chat

engine = AsyncEngine(fake_launch(Path(sys.argv[1]), Habits(step_seconds=0.02)), worker=WORKER)
app = create_app(engine, full_chat(), ServerConfig(served_names=("m",)))
with bind("127.0.0.1", 0) as listening:
    ready = lambda info: print(listening.getsockname()[1], flush=True)
    run_loop(serve(app, engine, listening, drain_seconds=30.0, on_ready=ready))
"""
BODY = b'{"prompt": [5], "max_tokens": 3000, "ignore_eos": true, "stream": true}'
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)


@pytest.mark.parametrize(
    ("sent", "signals"),
    [(HEAD[:20], 1), (HEAD + BODY[:10], 2), (HEAD + BODY, 2)],  # for half a head nobody waits
    ids=["head", "half a body", "a stream"],
)
def test_a_second_signal_ends_at_once_and_quietly(tmp_path: Path, sent: bytes, signals: int) -> None:
    """Whatever a client is doing: exit code 0, no traceback, and long before the 30 seconds of the drain are over."""
    command = [sys.executable, "-c", SERVER, str(tmp_path / "m")]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    ) as server:
        assert server.stdout is not None
        with socket.create_connection(("127.0.0.1", int(server.stdout.readline()))) as client:
            client.sendall(sent)
            for _ in range(signals):
                time.sleep(0.3)
                begun = time.monotonic()
                server.send_signal(signal.SIGINT)
            _, errors = server.communicate(timeout=25)
        assert time.monotonic() - begun < 10, "it waited for its client"
    assert server.returncode == 0 and "Traceback" not in errors, errors
