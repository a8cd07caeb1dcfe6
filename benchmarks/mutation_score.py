"""The mutation score: plant every fault of ``tests/cpu/faults`` and count which are caught, and by name.

    python benchmarks/mutation_score.py [--log]

``--log`` appends the result as a dated section to docs/log.md. Exit 1 when a fault that should be caught is not, or
one that is listed as missed is caught.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dayzero.checkpoint.files import write_whole  # noqa: E402
from dayzero.console import Console  # noqa: E402
from tests.cpu.faults.catalogue import KINDS, all_faults  # noqa: E402
from tests.cpu.faults.stand import Outcome, Stand  # noqa: E402

LOG = ROOT / "docs" / "log.md"
HEADING = "# Log\n\nDated experiments with their numbers, failures included. Newest last.\n"


def run(console: Console) -> list[Outcome]:
    """Judge every fault on fresh twins."""
    faults = all_faults()
    with tempfile.TemporaryDirectory(prefix="dayzero-faults-") as folder:
        stand = Stand(Path(folder))
        console.line("recording the oracle's traces")
        stand.record()
        with console.progress("faults", len(faults), "faults") as bar:
            outcomes = []
            for fault in faults:
                outcomes.append(stand.judge(fault))
                bar.advance()
                bar.note(fault.name)
    return outcomes


def rows(outcomes: list[Outcome]) -> list[tuple[str, ...]]:
    """(kind, faults, caught, right name, by command) of each kind and in all."""
    out = []
    for kind, words in [*KINDS.items(), ("all", "")]:
        some = [o for o in outcomes if kind in (o.fault.kind, "all")]
        by: dict[str, int] = {}
        for o in some:
            if o.caught:
                by[o.fault.run] = by.get(o.fault.run, 0) + 1
        counts = (len(some), sum(o.caught for o in some), sum(o.caught and o.named for o in some))
        out.append((f"{kind} {words}".strip(), *map(str, counts), ", ".join(f"{c} {n}" for c, n in sorted(by.items()))))
    return out


COLUMNS = ("kind", "faults", "caught", "by the right name", "by command")


def surprises(outcomes: Iterable[Outcome]) -> list[str]:
    return [
        f"{o.fault.name}: {'caught though listed as missed' if o.fault.missed else 'not caught by name'}"
        for o in outcomes
        if (o.caught if o.fault.missed else not o.named)
    ]


def section(outcomes: list[Outcome], seconds: float) -> str:
    """The dated section for the log, in Markdown."""
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers"))
    table = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    table += ["| " + " | ".join(row) + " |" for row in rows(outcomes)]
    missed = [o.fault for o in outcomes if not o.caught]
    lines = [
        f"## {datetime.date.today().isoformat()} · mutation score",
        "",
        f"Command: `python benchmarks/mutation_score.py --log`. {platform.machine()} CPU, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}, {versions}; {seconds:.0f} s in all "
        f"at a load average of {os.getloadavg()[0]:.1f}.",
        "",
        "Each fault is planted alone in a twin's files or in our own port; caught means a finding of the wanted "
        "verdict (or a refusal), by the right name means that it names the module, tensor, key or file changed. "
        "`load` is the loading half of `align`. Notes count where the product is meant to go on: "
        f"{sum(o.fault.verdict == 'note' for o in outcomes)} of these faults.",
        "",
        *table,
        "",
        "Not caught:" if missed else "Nothing was missed.",
        *(f"- {f.kind}, {f.name}: {f.missed or 'UNEXPECTED'}" for f in missed),
        "",
        "All of them, by the command that catches each:",
        "",
    ]
    for o in outcomes:
        f = o.fault
        source = f" ({f.report})" if f.report else ""
        lines.append(f"- {f.kind} · {f.name}{source} · {f.caught_by or 'nothing'} · twin `{f.twin}`")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--log", action="store_true", help="append the result to docs/log.md")
    given = parser.parse_args()
    console = Console()
    began = time.monotonic()
    outcomes = run(console)
    console.table("mutation score", COLUMNS, rows(outcomes))
    for o in outcomes:
        if not o.caught:
            console.line(f"not caught: {o.fault.name}: {o.fault.missed or 'UNEXPECTED'}")
    wrong = surprises(outcomes)
    for line in wrong:
        console.line(f"UNEXPECTED {line}")
    if given.log:
        before = LOG.read_text() if LOG.exists() else HEADING
        after = before.rstrip("\n") + "\n\n" + section(outcomes, time.monotonic() - began)
        write_whole(LOG, after.encode())
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
