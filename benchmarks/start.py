"""From the command to a server that is ready, from warm caches of kernels.

    python benchmarks/start.py seeded:tests/paper/configs/qwen3_8b.json --rounds 2

A first start, which is told apart, fills the caches where they are not filled; the others find what it left. What of a
start is the load itself is taken from an engine in a process of its own, from the first to the last progress of its
weights. GOAL: seconds of a warm start beyond that.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from dayzero.acceptance.server_process import ServerProcess

GOAL = 20.0
MOST_SECONDS = 600.0
LOAD = """
import json, sys, time
from dayzero.engine.build import executor_of
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
seen = []
begun = time.perf_counter()
launch = LaunchSpec(source=sys.argv[1], config=EngineConfig(**json.loads(sys.argv[2])))
executor = executor_of(launch, lambda done, total: seen.append(time.perf_counter()))
executor.load()
print(json.dumps({"load": seen[-1] - seen[0], "whole": time.perf_counter() - begun, "table": executor.info.table}))
"""


def started(source: str, options: list[str], folder: Path) -> float:
    """Seconds until a server of these options says that it is ready."""
    server = ServerProcess([source, *options], folder / "server.log")
    try:
        if server.address(MOST_SECONDS) is None:
            raise TimeoutError(f"not ready after {MOST_SECONDS:.0f} s: {server.last_words()}")
        return time.perf_counter() - server.began
    finally:
        server.end()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("--rounds", type=int, default=2, help="warm starts")
    parser.add_argument("--max-running", type=int, default=64)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--filled", action="store_true", help="the caches are filled: no first start")
    given = parser.parse_args()
    options = ["--dtype", "bfloat16"]
    options += ["--max-running", str(given.max_running), "--max-model-len", str(given.max_model_len)]
    config = {"dtype": "bfloat16", "max_running": given.max_running, "max_model_len": given.max_model_len}
    with tempfile.TemporaryDirectory(prefix="start-") as name:
        folder = Path(name)
        if not given.filled:
            print(f"first: ready in {started(given.source, options, folder):.1f} s", flush=True)
        warm = []
        for _ in range(given.rounds):
            warm.append(started(given.source, options, folder))
            print(f"warm: ready in {warm[-1]:.1f} s", flush=True)
        child = subprocess.run(
            [sys.executable, "-c", LOAD, given.source, json.dumps(config)], stdout=subprocess.PIPE,
            text=True, check=True, cwd=Path(__file__).parents[1],
        )  # fmt: skip
    found = json.loads(child.stdout.splitlines()[-1])
    for key, value in found["table"]:
        if key in ("weights", "graphs", "warm-up"):
            print(f"{key}: {value}")
    beyond = statistics.median(warm) - found["load"]
    print(
        f"warm start {statistics.median(warm):.1f} s, the load of it {found['load']:.1f} s (engine alone "
        f"{found['whole']:.1f} s): {beyond:.1f} s beyond the load (goal {GOAL:.0f})"
    )
    return 0 if beyond <= GOAL else 1


if __name__ == "__main__":
    sys.exit(main())
