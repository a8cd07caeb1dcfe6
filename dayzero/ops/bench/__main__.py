"""``python -m dayzero.ops.bench [--only TEXT] [--out FILE]``: check, then time, each entry; one line each.

``--table``: the entries that have goals, and a table of them at the end.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import pkgutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import dayzero.ops.bench as package
from dayzero.ops.bench.apart import run_apart
from dayzero.ops.bench.entry import Entry
from dayzero.ops.bench.goals import ROWS, table
from dayzero.ops.bench.timing import ceilings, measured


def entries() -> Iterator[Entry]:
    """All entries of the files ``of_*.py`` beside this one, each of which has a function ``entries()``."""
    for found in pkgutil.iter_modules(package.__path__):
        if found.name.startswith("of_"):
            yield from importlib.import_module(f"{package.__name__}.{found.name}").entries()


def run(entry: Entry, ceiling: dict[str, float], alone: bool = False) -> dict[str, Any]:
    """The figures of one entry; without times when a check fails, without peers where it runs alone."""
    began = time.monotonic()
    prepared = entry.prepare()
    errors = dict(prepared.check())
    out: dict[str, Any] = {"name": entry.name, "contract": entry.contract, "variant": entry.variant}
    out["shape"] = entry.shape
    out["errors"] = {what: {"error": error, "bound": bound} for what, (error, bound) in errors.items()}
    out["right"] = bool(errors) and all(error <= bound for error, bound in errors.values())
    if out["right"]:
        times = measured({"": prepared.calls, **({} if alone else prepared.peers)})
        floor = prepared.floor(ceiling)
        own = times.pop("")
        out |= {"seconds": own.seconds, "spread": own.spread, "floor": floor, "share": floor / own.seconds}
        out["peers"] = {name: {"seconds": t.seconds, "ratio": t.seconds / own.seconds} for name, t in times.items()}
    out["took"] = time.monotonic() - began
    return out


def line_of(name: str, found: dict[str, Any]) -> str:
    """A figure a reader takes in at a glance."""
    if not found["right"]:
        wrong = ", ".join(f"{k} {e['error']:.3g} > {e['bound']:.3g}" for k, e in found["errors"].items())
        return f"WRONG  {name}: {wrong}"
    peers = "".join(f"  {k} {v['seconds'] * 1e6:.1f} us (x{v['ratio']:.2f})" for k, v in found["peers"].items())
    worst = max((e["error"] / e["bound"] if e["bound"] else 0.0) for e in found["errors"].values())
    return (
        f"{found['seconds'] * 1e6:10.1f} us ±{found['spread'] * 1e6:.1f}  {found['share']:5.1%} of floor  {name}"
        f"{peers}  [error {worst:.2f} of its bound; {found['took']:.0f} s]"
    )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dayzero.ops.bench", description=__doc__)
    parser.add_argument(
        "--only", action="append", default=[], metavar="TEXT", help="entries whose name holds it (also *)"
    )
    parser.add_argument("--named", action="append", default=[], metavar="NAME", help="this entry, in the order given")
    parser.add_argument("--table", action="store_true", help="what has goals; one that fails does not end the others")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="begin no entry after so long; 150 for a table")
    parser.add_argument("--alone", action="store_true", help="without peers")
    parser.add_argument("--list", action="store_true", help="names only")
    parser.add_argument("--out", type=Path, help="a JSON file for all figures")
    given = parser.parse_args(arguments)
    chosen = _chosen(given.only, [*given.named, *(ROWS if given.table else ())])
    if given.list or not chosen:
        print("\n".join(e.name for e in chosen) or "no entry has such a name; --list shows them")
        return 0 if chosen else 2
    if not torch.cuda.is_available():
        print("a figure needs an NVIDIA GPU, and torch sees none here", file=sys.stderr)
        return 3
    return _table(given.limit or 150.0, given.out) if given.table else _run_all(chosen, given)


def _chosen(only: list[str], named: list[str]) -> list[Entry]:
    if not named:
        return [e for e in entries() if not only or any(fnmatch.fnmatch(e.name, f"*{o}*") for o in only)]
    known = {e.name: e for e in entries()}
    return [known[name] for name in named] if known.keys() >= set(named) else []


def _run_all(chosen: list[Entry], given: argparse.Namespace) -> int:
    began, ceiling, limit, to = time.monotonic(), ceilings(), given.limit, given.out
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; " + _said(ceiling), flush=True)
    found: list[dict[str, Any]] = []
    for entry in chosen:
        if limit is not None and time.monotonic() - began > limit:
            print(f"{len(chosen) - len(found)} entries are left: {limit:.0f} s are over", flush=True)
            break
        found.append(run(entry, ceiling, given.alone))
        print(line_of(entry.name, found[-1]), flush=True)
        torch.cuda.empty_cache()
        _write(to, {"ceilings": ceiling, "entries": found, "whole": False})
    _write(to, {"ceilings": ceiling, "entries": found, "whole": True})
    return 0 if all(one["right"] for one in found) else 1


def _table(seconds: float, to: Path | None) -> int:
    found = run_apart(list(ROWS), seconds)
    print(table(found["entries"]), flush=True)
    _write(to, found)
    return 0 if all(one["right"] for one in found["entries"].values()) else 1


def _write(to: Path | None, figures: dict[str, Any]) -> None:
    if to is not None:
        to.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def _said(ceiling: dict[str, float]) -> str:
    rates = [f"{k} {v / 1e12:.0f} TFLOP/s" for k, v in ceiling.items() if k != "copy"]
    return ", ".join([f"copy {ceiling['copy'] / 1e9:,.0f} GB/s", *rates])


if __name__ == "__main__":
    sys.exit(main())
