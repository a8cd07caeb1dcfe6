"""Mutation score of ``dayzero accept``: plant every mutation of ``tests/cpu/mutations``, and read what the record says.

    python benchmarks/accept_mutations.py [--only WORDS] [--out FILE]

Each is planted alone; the stages that it can touch are run, on traces recorded with the sound product; caught means
that a finding fails, right that ``doctor`` names the layer that is at fault. --only: mutations whose name, kind, base
or stage is one of WORDS, by commas. --out: append the dated section to this file, such as docs/log.md. Exit 1 when
fewer than 95 % are caught or fewer than 85 % by the right layer, when a base fails without any mutation, and when no
mutation was tried.
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
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dayzero.checkpoint.files import write_whole  # noqa: E402
from dayzero.console import Console, clean  # noqa: E402
from tests.cpu.mutations.catalogue import all_mutations  # noqa: E402
from tests.cpu.mutations.checks import tried, untried  # noqa: E402
from tests.cpu.mutations.mutation import KINDS, NOT_HERE, Mutation  # noqa: E402
from tests.cpu.mutations.stand import Outcome, Stand  # noqa: E402

LEAST_CAUGHT, LEAST_RIGHT = 0.95, 0.85
MOST_SECONDS = 20.0
CRASHES = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError)
COLUMNS = ("kind", "mutations", "caught", "right layer", "slowest, s of CPU")
EACH = ("mutation", "kind", "base", "stages", "caught", "layer at fault", "named", "s", "s of CPU")


def run(console: Console, mutations: Sequence[Mutation]) -> tuple[list[Outcome], Stand]:
    """Base records first; then each mutation alone."""
    with tempfile.TemporaryDirectory(prefix="dayzero-mutations-") as folder:
        stand, outcomes = Stand(Path(folder)), []
        red: dict[str, str] = {}
        for base, bad in stand.verify(mutations):
            console.line(f"{base}: {'fails' if bad else 'green'} without a mutation")
            red |= {base: f"{bad[0].kind}: {clean(bad[0].measured)[:100]}"} if bad else {}
        stand.red = red
        mutations = [mutation for mutation in mutations if mutation.base not in red]
        with console.progress("mutations", len(mutations), "mutations") as bar:
            for mutation in mutations:
                bar.note(mutation.name)
                outcome = judged(stand, mutation)
                outcomes.append(outcome)
                if not outcome.caught or not outcome.right:
                    console.line(told(outcome))
                bar.advance()
    return outcomes, stand


def judged(stand: Stand, mutation: Mutation) -> Outcome:
    """An acceptance that breaks off without a record has caught nothing."""
    began = time.monotonic()
    try:
        return stand.judge(mutation)
    except CRASHES as error:
        said = f"{type(error).__name__}: {error}"
        print(f"crashed: {mutation.name}: {said[:300]}", file=sys.stderr)
        return Outcome(mutation, (), None, time.monotonic() - began, 0.0)


def told(outcome: Outcome) -> str:
    mutation = outcome.mutation
    if not outcome.caught:
        return f"survived: {mutation.name} ({mutation.kind}, {', '.join(mutation.stages)})"
    first, layers = outcome.failed[0], f"{outcome.named} for {mutation.layer}"
    return f"other layer: {mutation.name}: {layers}, by {first.kind}: {clean(first.measured)[:100]}"


def rows(outcomes: Sequence[Outcome]) -> list[tuple[str, ...]]:
    """By kind, and all."""
    out = []
    for kind, words in [*KINDS.items(), ("all", "")]:
        some = [o for o in outcomes if kind in (o.mutation.kind, "all")]
        if some:
            counts = (len(some), sum(o.caught for o in some), sum(o.right for o in some))
            out.append((f"{kind} {words}".strip(), *map(str, counts), f"{max(o.cpu_seconds for o in some):.1f}"))
    return out


def share(outcomes: Sequence[Outcome], good: Sequence[bool]) -> str:
    return f"{sum(good)} of {len(outcomes)} ({sum(good) / max(1, len(outcomes)):.1%})"


def section(outcomes: Sequence[Outcome], stand: Stand, seconds: float) -> str:
    """For the log, in Markdown."""
    versions = ", ".join(f"{p} {importlib.metadata.version(p)}" for p in ("torch", "transformers"))
    slow = [o for o in outcomes if o.seconds > MOST_SECONDS]
    caught, right = [o.caught for o in outcomes], [o.right for o in outcomes]
    lines = [
        f"## {datetime.date.today().isoformat()} · mutation score of the acceptance",
        "",
        f"Command: `python benchmarks/accept_mutations.py`. {platform.machine()} CPU, {os.cpu_count()} cores, Python "
        f"{platform.python_version()}, {versions}; {seconds:.0f} s in all, at a load average of "
        f"{os.getloadavg()[0]:.1f}.",
        "",
        f"Caught: {share(outcomes, caught)}. Right layer: {share(outcomes, right)}. Each mutation runs only the stages "
        "it can touch, on a source whose record without it was green; the layer is the first cause that `doctor` finds "
        f"in the record. {len(slow)} took more than {MOST_SECONDS:.0f} s of wall clock on this machine, "
        f"{sum(o.cpu_seconds > MOST_SECONDS for o in outcomes)} more of CPU.",
        "",
        *_table(COLUMNS, rows(outcomes)),
        "",
        "Not tried here, since nothing of an acceptance on a CPU computes it: "
        + "; ".join(f"{kind} {words}" for kind, words in NOT_HERE.items())
        + ".",
        "",
        *_table(EACH, [_each(o) for o in outcomes]),
        "",
        *(f"Not counted, since {base} fails without any mutation: {why}" for base, why in stand.red.items()),
        "",
        "Survived:" if not all(caught) else "None survived.",
        *(f"- {told(o)}" for o in outcomes if not o.caught),
        "",
        "Another layer than the one at fault:",
        *(f"- {told(o)}" for o in outcomes if o.caught and not o.right),
        "",
        "Checks that no mutation of this table fails:",
        *(f"- {line}" for line in untried(stand.kinds, outcomes)),
        "",
        "Checks, and the mutations that fail each:",
        *(f"- {line}" for line in tried(outcomes)),
    ]
    return "\n".join(lines) + "\n"


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", "| --- " * len(head) + "|"]
    return lines + [f"| {' | '.join(row)} |" for row in body]


def _each(outcome: Outcome) -> tuple[str, ...]:
    mutation = outcome.mutation
    by = outcome.failed[0].kind if outcome.failed else "no"
    named = outcome.named or "none"
    return (
        mutation.name + (f" ({mutation.report})" if mutation.report else ""), mutation.kind, mutation.base,
        ", ".join(mutation.stages), by, mutation.layer, named if outcome.right else f"**{named}**",
        f"{outcome.seconds:.1f}", f"{outcome.cpu_seconds:.1f}",
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="names, kinds, bases or stages, by commas")
    parser.add_argument("--out", type=Path, help="append the section to this file")
    given = parser.parse_args()
    words = {word.strip() for word in given.only.split(",") if word.strip()}
    chosen = [m for m in all_mutations() if not words or words & {m.name, m.kind, m.base, *m.stages}]
    console = Console()
    began = time.monotonic()
    outcomes, stand = run(console, chosen)
    console.table("mutations", COLUMNS, rows(outcomes))
    if given.out is not None:
        before = given.out.read_text(encoding="utf-8") if given.out.exists() else "# Log\n"
        text = before.rstrip("\n") + "\n\n" + section(outcomes, stand, time.monotonic() - began)
        write_whole(given.out, text.encode())
    good = bool(outcomes) and not stand.red and sum(o.caught for o in outcomes) >= LEAST_CAUGHT * len(outcomes)
    return 0 if good and sum(o.right for o in outcomes) >= LEAST_RIGHT * len(outcomes) else 1


if __name__ == "__main__":
    raise SystemExit(main())
