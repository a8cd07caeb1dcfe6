"""Statistics of the values of all parameters, as a server would load them: finite, not constant, norms as declared."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dayzero.acceptance.accept.stage import Context, Figure, StageResult
from dayzero.acceptance.prompt import is_paper
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.checkpoint.lazy import ExpertStack
from dayzero.errors import UserError
from dayzero.finding import Finding
from dayzero.planner.inspect import InspectReport
from dayzero.units import GIB, bytes_text

QUICK_BYTES = 4 * GIB  # stored bytes that ``quick`` reads for statistics; the other profiles read all
CLAIMS = {
    "weights.not_finite": "every value is finite in the type it is loaded in",
    "weights.constant": "no matrix, and no expert of a stack, is all zero or constant",
    "weights.norm_mean": "norm weights lie about the center that the recipe declares",
}
LAYER = re.compile(r"layers\.(\d+)\.(mixer|channel)\.")
NUMBERED = re.compile(r"(?:[a-z_]+\.)+?\d+(?=\.)")


def read_values(where: str, report: InspectReport, context: Context) -> StageResult:
    """Findings, a figure of root mean squares by layer, and what was read. A checkpoint that cannot be opened is told
    by the inspection's findings already; where there are none it is a fail here."""
    if not report.files:
        return StageResult(_skipped("the source holds no weights"))
    try:
        model = open_model(where, recipe=context.subject.recipe, dtype=None)
        if is_paper(model):
            return StageResult(_skipped("the files of a paper twin are holes: they have no values"))
        read = _Values(model, 1.0 if context.profile != "quick" else min(1.0, QUICK_BYTES / max(1, report.total_bytes)))
        read.all(context)
    except UserError as error:
        if report.verdict == "fail":
            return StageResult(_skipped(f"the checkpoint cannot be loaded, for what stands above: {error}"))
        claim = "every parameter can be read and decoded"
        return StageResult(
            (Finding("weights.loaded", "weights", "fail", claim, str(error), remedy="see the sentence"),)
        )
    size = model.loader.bytes_read
    facts = {"values": {"parameters": len(read.seen), "bytes": size, "share": read.share}}
    return StageResult(tuple(read.findings(size, report.total_bytes)), read.figures(), facts)


def _skipped(why: str) -> tuple[Finding, ...]:
    return tuple(Finding(kind, "weights", "not applicable", claim, measured=why) for kind, claim in CLAIMS.items())


@dataclass
class _Values:
    """share: of the layers, and of the experts of a stack, that are read, spread evenly. seen: parameters that were
    read, whole or in part. squares: (layer, part) -> (sum of squares, number of values) of matrices."""

    model: LoadedModel
    share: float
    seen: list[str] = field(default_factory=list)
    squares: dict[tuple[int, str], tuple[float, int]] = field(default_factory=dict)

    def all(self, context: Context) -> None:
        """Errors: CheckpointError for bytes that cannot be read or decoded, or a tied copy that differs."""
        loader = self.model.loader
        groups = _spread(list(_groups(loader.names())), self.share)
        total = sum(loader.stored_bytes([n for n in names if n in _stored(loader)]) for _, names in groups)
        with context.progress("values of all parameters", total, "B") as bar:
            for prefix, names in groups:
                bar.note(prefix)
                self._group(prefix, names)
                bar.reach(loader.bytes_read)

    def _group(self, prefix: str, names: Sequence[str]) -> None:
        loader = self.model.loader
        stacks = {name for name in names if loader.by_expert(name)}
        values: dict[str, Any] = loader.load(prefix, lazy=stacks)
        for name, value in values.items():
            self.seen.append(name)
            if isinstance(value, Tensor):
                self._count(name, value)
        kept = {name: value for name, value in values.items() if isinstance(value, ExpertStack)}
        for number in _spread(range(max(map(len, kept.values()), default=0)), self.share):
            for name, stack in kept.items():  # those that share a stored tensor one after another: it is read once
                if number < len(stack):
                    self._count(name, stack[number])

    def _count(self, name: str, value: Tensor) -> None:
        place = LAYER.match(name)
        if place is None or value.dim() < 2:
            return
        key = (int(place[1]), place[2])
        total, number = self.squares.get(key, (0.0, 0))
        self.squares[key] = (total + float(value.float().square().sum(dtype=torch.float64)), number + value.numel())

    def findings(self, size: int, total: int) -> Iterator[Finding]:
        found = self.model.loader.findings
        read = f"{len(self.seen):,} parameters, {bytes_text(size)} of {bytes_text(total)}"
        for kind, claim in CLAIMS.items():
            against = [f for f in found if f.kind == kind]
            yield from against
            if not against:
                yield Finding(kind, "weights", "pass", claim, measured=read, bound=0 if "not" in kind else None)
        yield from (f for f in found if f.kind not in CLAIMS)
        if self.share < 1:
            claim = "the values of all parameters were read"
            remedy = "run with --profile release-day, which reads all"
            yield Finding("weights.read", "weights", "note", claim, read, bytes_text(total), remedy=remedy)

    def figures(self) -> tuple[Figure, ...]:
        layers = sorted({layer for layer, _ in self.squares})
        if len(layers) < 2:
            return ()
        series: dict[str, list[float | None]] = {}
        for part in ("mixer", "channel"):
            sums = [self.squares.get((layer, part)) for layer in layers]
            if any(sums):
                roots = [math.sqrt(s[0] / s[1]) if s else None for s in sums]
                series[part] = [root if root is not None and math.isfinite(root) else None for root in roots]
        data = {"x": layers, "series": series, "bounds": {}}
        title = "Root mean square of each layer's matrices"
        return (Figure("curves", title, data, x_label="layer", y_label="root mean square"),)


def _stored(loader: Any) -> set[str]:
    """Parameters that tensors fill; the others are filled by the recipe."""
    filled = {decl.name for decl in loader.coverage.filled}
    return {name for name in loader.names() if name not in filled}


def _groups(names: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """(prefix, parameters at or below it): a layer or a tower's block at once, everything else by itself."""
    out: dict[str, list[str]] = {}
    for name in names:
        place = NUMBERED.match(name)
        out.setdefault(place.group() if place else name, []).append(name)
    yield from out.items()


def _spread(items: Sequence[Any], share: float) -> list[Any]:
    """So many of the items, spread evenly, the first and last among them; at least two of several."""
    count = min(len(items), max(2, math.floor(share * len(items))))
    if count < 2:
        return list(items)
    return [items[round(at * (len(items) - 1) / (count - 1))] for at in range(count)]
