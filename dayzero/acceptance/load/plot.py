"""One picture of a report: throughput and latencies against the load."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from dayzero.acceptance.load.figures import medians, values_of
from dayzero.acceptance.load.report import LoadReport
from dayzero.errors import MachineError, UsageError

PANELS = (
    ("tokens a second", (("output_tok_s", "output"), ("total_tok_s", "output + prompt"))),
    ("time to first token, ms", (("ttft_p50_ms", "p50"), ("ttft_p90_ms", "p90"), ("ttft_p99_ms", "p99"))),
    ("time of a token, ms", (("tpot_mean_ms", "TPOT mean"), ("itl_p50_ms", "gap p50"), ("itl_p99_ms", "gap p99"))),
)  # fmt: skip


def check_plot(path: Path) -> None:
    """Before anything is measured: can ``path`` be drawn? UsageError, MachineError."""
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: give a file name that ends in .png.")
    if find_spec("matplotlib") is None:
        raise MachineError("--plot needs matplotlib: pip install 'dayzero[plot]'")


def draw(report: LoadReport, path: Path) -> None:
    """Medians as lines, all repeats as dots. Writes a PNG."""
    from matplotlib.figure import Figure  # type: ignore[import-not-found]  # an extra

    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(f"{report.model} · {report.workload.prompt} in, {report.workload.output} out · {report.how}")
    closed = all(one.level.rate is None for one in report.levels)
    places = [one.level.value for one in report.levels]
    for axes, (title, lines) in zip(figure.subplots(1, len(PANELS)), PANELS):
        for number, (name, label) in enumerate(lines):
            heights = [medians(one.runs)[name] for one in report.levels]
            if all(height is None for height in heights):
                continue
            color = f"C{number}"
            axes.plot(places, [float("nan") if h is None else h for h in heights], marker="o", color=color, label=label)
            for place, one in zip(places, report.levels):
                values = values_of(one.runs, name)
                axes.scatter([place] * len(values), values, s=8, alpha=0.5, color=color)
        axes.set_title(title)
        axes.set_xlabel("concurrency" if closed else "requests a second")
        axes.set_ylim(bottom=0)
        axes.legend()
    figure.savefig(path, dpi=110, format="png")
