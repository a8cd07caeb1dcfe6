"""The figures that are asked of the operators, with what is asked of each: the rows of ``--table``.

Entries by name, the ones that matter most first: a run that has no time left leaves out the last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Goal:
    """of: ``us``, at most so many; ``floor``, at least that share; else a peer, at least so many times as fast."""

    of: str
    value: float

    def measured(self, found: Mapping[str, Any]) -> float | None:
        """The figure it is about; None where its peer has not run."""
        if self.of == "us":
            return float(found["seconds"]) * 1e6
        if self.of == "floor":
            return float(found["share"])
        peer = found["peers"].get(self.of)
        return None if peer is None else float(peer["ratio"])

    def word(self, found: Mapping[str, Any]) -> str:
        """``met``, ``short`` by how much, or why neither can be said."""
        figure = self.measured(found)
        if figure is None:
            return f"no {self.of} here"
        short = figure / self.value - 1 if self.of == "us" else 1 - figure / self.value
        return "met" if short <= 0 else f"{short:.1%} short"

    def __str__(self) -> str:
        if self.of == "us":
            return f"{self.value:g} us"
        return f"{self.value:.0%} of floor" if self.of == "floor" else f"{self.value:.2f} x {self.of}"


def _us(value: float) -> Goal:
    return Goal("us", value)


_COPIED, _STATES, _GROUPED = Goal("floor", 0.85), Goal("floor", 0.88), "torch._grouped_mm"
_PRODUCT = "moe.experts/triton product alone, 64 experts 3584 x 6144"
_LISTED = "attention.sparse/cuda_by_load decode mla_fp8_656 H=128"

ROWS: dict[str, Goal | None] = {
    "sparse_index.tokens/cuda B=1 L=131072 idx_fp8_128": _us(27),
    "sparse_index.tokens/cuda B=16 L=131072 idx_fp8_128": _us(95),
    "sparse_index.tokens/cuda B=1 L=1048576 idx_fp8_128": _us(68),
    f"{_LISTED} B=1": _us(23.6),
    f"{_LISTED} B=16": _us(47.4),
    f"{_LISTED} B=64": _us(129),
    f"{_LISTED} B=256": _us(488),
    "attention.sparse/cuda prefill mla_bf16 H=128 T=4096": _us(5760),
    "recurrence.paged/cuda B=1 H=96": _us(5),
    "recurrence.paged/cuda B=4 H=96": None,
    "recurrence.paged/cuda B=16 H=96": _STATES,
    "recurrence.paged/cuda B=64 H=96": _STATES,
    "recurrence.paged/cuda B=256 H=96": _STATES,
    "moe.experts_fp8_128/to_e4m3 64 experts 3584 x 3072": _COPIED,
    f"{_PRODUCT}, 1 rows each": Goal(_GROUPED, 3.0),
    f"{_PRODUCT}, 16 rows each": Goal(_GROUPED, 3.0),
    f"{_PRODUCT}, 512 rows each": Goal(_GROUPED, 1 / 1.1),  # a tenth of its time for the conversion
    "recurrence.delta_chunked/cuda T=32768 H=96 bounded, gate inside": Goal("fla", 1 / 0.7),
    "norm.rms/triton T=8192 H=7168": _COPIED,
    "residual.add_norm/triton T=8192 H=7168": _COPIED,
    "rope.apply/triton T=8192 32 heads half": _COPIED,
    "rope.apply/triton T=8192 32 heads interleaved": _COPIED,
    "residual.attn_mix/triton T=8192 B=8 H=7168": _COPIED,
    "moe.matmul_route/triton 256 experts top 8 D=7168 T=1": Goal("apart", 1.0),
    "moe.matmul_route/triton 256 experts top 8 D=7168 T=256": Goal("apart", 1.0),
    "norm.rms/triton T=1 H=7168": None,
    "attention.norm_rope_write/triton 32+2x8x128 norm kv_bf16 T=1": Goal("apart", 1.0),
    "attention.paged/cuda B=16 L=8192 decode 32/8 heads of 128/128": _COPIED,
    "attention.paged/cuda B=1 L=1024 decode 32/8 heads of 128/128": None,
    "attention.paged/cuda B=16 L=1024 decode 32/8 heads of 128/128": None,
}


def table(rows: Mapping[str, Mapping[str, Any]], asked: Mapping[str, Goal | None] = ROWS) -> str:
    """In Markdown, a line for each entry that is asked for: what was found, or that it was not."""
    lines = ["| entry | us | of floor | peers | goal | |", "| --- | --- | --- | --- | --- | --- |"]
    for name, goal in asked.items():
        found, said = rows.get(name), "" if goal is None else str(goal)
        if found is None:
            lines.append(f"| {name} | | | | {said} | not run |")
        elif not found.get("right"):
            why = found.get("failed", "wrong").replace("|", "/")
            lines.append(f"| {name} | | | | {said} | {why} |")
        else:
            peers = ", ".join(f"{k} {v['seconds'] * 1e6:.1f} us (x{v['ratio']:.2f})" for k, v in found["peers"].items())
            word = "" if goal is None else goal.word(found)
            figures = f"{found['seconds'] * 1e6:.1f} | {found['share']:.1%} | {peers} | {said} | {word}"
            lines.append(f"| {name} | {figures} |")
    return "\n".join(lines)
