"""A picture of a training log: what text costs, and how much of the numbers and pictures is right, by step.

python examples/rehearsal/plot.py --log state/log.jsonl --out curve.png
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

Lines = list[dict[str, Any]]


def read(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def draw(lines: Lines, out: Path) -> None:
    """Ends of windows, where the goals were measured on what is held out, are dots."""
    steps = [line for line in lines if "rate" in line]
    ends = [line for line in lines if "held_out" in line]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    left.plot(*points(steps, "text", "loss"), lw=0.8, label="text, in training")
    left.plot([e["step"] for e in ends], [e["held_out"]["loss"] for e in ends], "o", label="held-out text")
    left.set(xlabel="step", ylabel="loss, nat a token")
    for number, name in enumerate(("number", "picture")):
        right.plot(*points(steps, name, "right"), lw=0.8, color=f"C{number}", label=f"tokens of a {name}, in training")
    needles = [min(one["share"] for one in e["needles"].values()) for e in ends]
    right.plot([e["step"] for e in ends], needles, "oC0", label="needles, worst length")
    right.plot([e["step"] for e in ends], [e["pictures"]["share"] for e in ends], "oC1", label="whole pictures")
    right.set(xlabel="step", ylabel="share right", ylim=(0, 1.02))
    taught = {line["step"] for line in lines if "look" in line}
    sparse = [line["step"] for line in steps if line["sparse"]][:1]
    for axes in (left, right):
        for step in taught:
            axes.axvline(step, color="grey", lw=0.8, ls=":", label="tower taught alone")
        for step in sparse:
            axes.axvline(step, color="grey", lw=0.8, ls="--", label="tokens see what the index picks")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.savefig(out, dpi=110)


def points(lines: Lines, name: str, value: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[name][value]) for line in lines if name in line]
    return [step for step, _ in found], [y for _, y in found]


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a training log.")
    parser.add_argument("--log", type=Path, required=True, help="log.jsonl beside a state")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    draw(read(asked.log), asked.out)


if __name__ == "__main__":
    main()
