"""How near a server comes to what its work must take at least: floors from the plan against measured times.

A floor is the larger of FLOPs over the rate and bytes over the bandwidth of the device. An accelerator's rates are its
data sheet's. A CPU has none that would hold for every machine, so they are measured here, in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dayzero.acceptance.accept.stage import Figure
from dayzero.acceptance.load.figures import medians
from dayzero.acceptance.load.report import LoadReport
from dayzero.acceptance.stages.long_known import Known
from dayzero.acceptance.stages.perf_load import Plan
from dayzero.arch.cost import cache_cost
from dayzero.arch.spec import ModelSpec
from dayzero.finding import Finding
from dayzero.hardware import Hardware
from dayzero.parallel.mesh import Mesh
from dayzero.planner.floors import Floors, floors, work_of
from dayzero.planner.placement import PaperModel, weight_bytes

# How much more than float32 units a processor's units for bf16 do, by what it has: AMX tiles, twice as wide lanes.
BF16_FASTER = (("amx_bf16", 16.0), ("avx512_bf16", 2.0))
COPY_BYTES, MATRIX, TRIES = 64 << 20, 768, 4
TRUE_SHARE = 1.2  # above, the server was faster than its work allows: rates and clocks are not that far off


@dataclass(frozen=True, slots=True)
class Share:
    """name: what was measured. seconds: measured; floor: least. share: floor over measured."""

    name: str
    seconds: float
    floor: float

    @property
    def share(self) -> float:
        return self.floor / self.seconds


def measured_cpu(stated: Hardware) -> Hardware:
    """``stated`` with the bandwidth of a copy and the rate of a product of matrices on this machine."""
    source, target = np.ones(COPY_BYTES, np.uint8), np.empty(COPY_BYTES, np.uint8)
    bandwidth = 2 * COPY_BYTES / _best(lambda: np.copyto(target, source))
    matrix = np.ones((MATRIX, MATRIX), np.float32)
    rate = 2 * MATRIX**3 / _best(lambda: matrix @ matrix)
    faster = next((times for word, times in BF16_FASTER if word in stated.features), 1.0)
    return replace(stated, bandwidth=bandwidth, flops={"bf16": faster * rate, "f32": rate})


def _best(work: Callable[[], object]) -> float:
    times = []
    for _ in range(TRIES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return max(min(times), 1e-9)


def floors_of(paper: PaperModel, hardware: Hardware, known: Known, tokens: int, batch: int) -> Floors:
    """For prompts of so many tokens, and for steps of ``batch`` sequences behind them, on one device."""
    spec: ModelSpec = paper.paper.spec
    narrow = any(fmt.element == "e4m3" for fmt in paper.formats)
    element = "f32" if known.dtype in ("f32", "float32") else "e4m3" if narrow else "bf16"
    cost = cache_cost(spec, "bf16")
    return floors(spec, hardware, Mesh(), weight_bytes(paper), cost, element, work_of(spec, tokens), batch)


def shares(report: LoadReport, plan: Plan, paper: PaperModel, hardware: Hardware, known: Known) -> list[Share]:
    """TTFT of single prompts, and TPOT of every level."""
    out = []
    for one in report.levels:
        number, middle = one.level.concurrency or 1, medians(one.runs)
        if number == 1 and middle["ttft_p50_ms"]:
            least = floors_of(paper, hardware, known, plan.prompt, 1).ttft
            out.append(Share(f"TTFT of {plan.prompt} tokens", middle["ttft_p50_ms"] / 1e3, least))
        if middle["tpot_mean_ms"]:
            least = floors_of(paper, hardware, known, plan.prompt + plan.output // 2, number).tpot
            out.append(Share(f"TPOT at {one.level.name}", middle["tpot_mean_ms"] / 1e3, least))
    return out


def findings(found: list[Share], hardware: Hardware, measured: bool) -> list[Finding]:
    rates = f"{hardware.bandwidth / 1e9:,.1f} GB/s, {hardware.rate('bf16') / 1e12:,.2f} TFLOP/s"
    rates += " measured here" if measured else f" of {hardware.name}'s data sheet"
    return [
        Finding(
            "performance.roofline", "hardware", "note" if one.share > TRUE_SHARE else "pass",
            f"{one.name} is no less than its floor",
            measured=f"{1e3 * one.seconds:.4g} ms, floor {1e3 * one.floor:.4g} ms: {one.share:.1%} of the roofline",
            bound=f"{TRUE_SHARE:.0%} ({rates})",
            remedy="Faster than the work allows: is it all done, and are these the device's rates?"
            if one.share > TRUE_SHARE
            else "",
        )
        for one in found
    ]  # fmt: skip


def not_applicable(why: str) -> Finding:
    return Finding(
        "performance.roofline", "hardware", "not applicable", "times are no less than their floors", measured=why
    )


def figure(found: list[Share]) -> Figure:
    rows = [{"name": one.name, "value": 1e3 * one.seconds, "bound": 1e3 * one.floor} for one in found]
    return Figure("bars", "Measured times and their floors", {"rows": rows}, x_label="ms", log_x=True)
