"""The paper half's measures: inspect and plan on a release of 497,220 tensors, inspect on a small model, CLI import.

Medians of runs after a first one that is not counted.

    python benchmarks/paper.py [--repeat N]

Prints one line a measure with its goal. Needs about 200 MB of disk for headers.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import Measured, dayzero, load_text, measure

CONFIG = Path(__file__).parents[1] / "tests" / "paper" / "configs" / "kimi_k3.json"


def show(name: str, goal: str, repeat: int, run: Callable[[], Measured]) -> None:
    run()  # compiles modules, and reads files into the kernel's cache
    runs = [run() for _ in range(repeat)]
    middle = statistics.median(r.seconds for r in runs)
    peak = max(r.peak_bytes for r in runs) / 2**20
    cpu = statistics.median(r.cpu_seconds for r in runs)
    spread = f"{min(r.seconds for r in runs):.2f}–{max(r.seconds for r in runs):.2f}"
    codes = sorted({r.code for r in runs})
    print(f"{name:34} median {middle:6.2f} s ({spread}), CPU {cpu:6.2f} s, peak {peak:6.0f} MiB, exit {codes}; {goal}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=3)
    repeat = parser.parse_args().repeat
    print(load_text())
    folder = Path(tempfile.mkdtemp(prefix="dayzero-paper-"))
    try:
        shutil.copy(CONFIG, folder / "config.json")
        paper = str(folder / "paper")
        print("paper twin:", dayzero("twin", str(folder / "config.json"), paper, "--paper").text())
        show("inspect, 497,220 tensors", "≤ 20 s, ≤ 1 GiB", repeat, lambda: dayzero("inspect", paper, "--json"))
        plan = ("plan", paper, "--hardware", "h200x16", "--json")
        show("plan, 16 ranks", "≤ 30 s", repeat, lambda: dayzero(*plan))
        many = ("plan", str(folder / "config.json"), "--hardware", "h200x64", "--json")
        show("plan, 64 ranks, config alone", "≤ 10 s", repeat, lambda: dayzero(*many))
        small = dayzero("demo", "--where").out.strip()
        show("inspect, small real model", "≤ 1 s", repeat, lambda: dayzero("inspect", small, "--json"))
        show("import dayzero.cli", "≤ 0.3 s", repeat, lambda: measure(sys.executable, "-c", "import dayzero.cli"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
