"""The plan as a person reads it: verdict, the chosen layout rank by rank, and why the others were not taken."""

from __future__ import annotations

from dayzero.console import Console
from dayzero.planner.budget import CHUNK_TOKENS
from dayzero.planner.experts import HOST_LINK, HOST_LINK_WHY
from dayzero.planner.plan_report import Layout, PlanReport, said_refusal
from dayzero.units import bytes_text, count_text, counted

MOST_LAYOUTS, MOST_REFUSALS = 8, 12


def show_plan(report: PlanReport, console: Console) -> None:
    """Print ``report``; nothing is computed here."""
    total, active = report.parameters
    devices = f"{report.num_devices} × {report.hardware.name}"
    console.headline(report.verdict, f"{report.source} on {devices}", report.findings)
    console.line(
        f"{report.family}: {count_text(total)} parameters ({count_text(active)} active), "
        f"{bytes_text(report.weight_bytes)} of weights; {bytes_text(report.hardware.memory_bytes)} of memory a device"
    )
    console.line(
        f"cache: {report.cache.per_token:,} B a token, {bytes_text(report.cache.per_sequence + report.cache.window)} "
        f"a sequence, kept in {report.cache.records}"
    )
    parts = ", ".join(f"{name} {size:,}" for name, size in report.carry.items())
    console.line(
        f"carry: {sum(report.carry.values()):,} B a token of a chunk ({parts}), for chunks of {CHUNK_TOKENS:,} tokens"
    )
    if report.drafts is not None:
        how = "counted on the last stage" if report.drafts["counted"] else "not counted; --drafts counts them"
        console.line(
            f"draft layers: {count_text(report.drafts['parameters'])} parameters, "
            f"{bytes_text(report.drafts['bytes'])}; nothing uses them yet, so they are {how}"
        )
    _show_layouts(report, console)
    _show_ranks(report, console)
    _show_experts(report, console)
    _show_operators(report, console)
    refused = [layout for layout in report.layouts if layout.refusal is not None]
    shown = refused if console.show_all else refused[:MOST_REFUSALS]
    if refused:
        title = f"layouts not taken ({len(refused)})" + _more(len(refused) - len(shown))
        console.table(title, ("layout", "why"), ((r.mesh.text(), _why(r)) for r in shown))
    console.findings(report.findings, report.verdict)


def _more(num_left: int) -> str:
    return f" (+{num_left} more, --all shows them)" if num_left else ""


def _why(layout: Layout) -> str:
    return said_refusal(layout).removeprefix(f"{layout.mesh.text()}: ")


_COLUMNS = ("layout", "weights a rank", "cache left a rank", "context ≤", "sequences ≤", "TTFT ≥ ms", "TPOT ≥ ms")


def _show_layouts(report: PlanReport, console: Console) -> None:
    usable = [layout for layout in report.layouts if layout.refusal is None]
    if not usable:
        return
    shown = usable if console.show_all else usable[:MOST_LAYOUTS]
    title = "layouts that fit, best first" + _more(len(usable) - len(shown))
    console.table(title, _COLUMNS, (_row(layout) for layout in shown))
    console.line(
        f"  context ≤: tokens, {counted(report.concurrency, 'sequence')} at once; sequences ≤: of {report.context:,} "
        "tokens each"
    )
    console.line(
        f"  TTFT ≥: first token of a prompt of {report.context:,} tokens; TPOT ≥: each token after it; "
        "lower bounds, not predictions"
    )


def _row(layout: Layout) -> tuple[object, ...]:
    tight = min(layout.ranks, key=lambda r: r.cache_bytes)
    assert layout.floors is not None
    return (
        layout.mesh.text(), bytes_text(tight.weights), bytes_text(tight.cache_bytes), f"{layout.max_context:,}",
        f"{layout.max_concurrency:,}", f"{1e3 * layout.floors.ttft:,.1f}", f"{1e3 * layout.floors.tpot:,.3f}",
    )  # fmt: skip


def _show_ranks(report: PlanReport, console: Console) -> None:
    """Ranks that hold equally much share a row; with ``--all`` each has its own."""
    chosen = report.chosen
    if chosen is None:
        return
    ranks: dict[tuple[object, ...], list[int]] = {}
    for budget, plan in zip(chosen.ranks, report.weight_plans, strict=True):
        layers = f"{budget.layers[0]}–{budget.layers[1] - 1}"
        row = (
            layers, f"{len(plan):,}", bytes_text(budget.weights), bytes_text(budget.workspace),
            bytes_text(budget.carry), bytes_text(budget.headroom), bytes_text(budget.cache_bytes),
        )  # fmt: skip
        ranks.setdefault((budget.rank, *row) if console.show_all else row, []).append(budget.rank)
    columns = ("rank", "layers", "reads", "weights", "workspace", "carry", "headroom", "left for cache")
    rows = ((_span(held), *row[-7:]) for row, held in ranks.items())
    console.table(f"what each rank of {chosen.mesh.text()} holds", columns, rows)
    if report.proof is not None and report.proof.holds:
        console.line(
            f"weights: {report.proof.params:,} parameters, {report.proof.elements:,} elements, each placed exactly once"
        )


def _show_experts(report: PlanReport, console: Console) -> None:
    """Of the rank with most of them; their step time is that of one sequence."""
    if report.chosen is None or not (most := max(report.chosen.ranks, key=lambda r: r.experts)).experts:
        return
    ring = f" + a ring of {bytes_text(most.ring)}, where chosen ones become FP8" if most.ring else ""
    console.line(f"experts: {bytes_text(most.experts)} a rank, {report.expert_form}{ring}")
    swap = most.swapping
    if swap is None:
        return
    console.line(
        f"held: {bytes_text(swap.held)}, {swap.num_held:,} of {counted(swap.num_experts, 'expert')} a rank; a step of "
        f"one token chooses {swap.chosen:,.0f} and brings up {swap.least_misses:,.0f} at best "
        f"(≥ {1e3 * swap.seconds(swap.least_misses):,.1f} ms), {swap.usual_misses:,.0f} where all are chosen alike "
        f"(≥ {1e3 * swap.seconds(swap.usual_misses):,.1f} ms), at {HOST_LINK / 1e9:,.0f} GB/s: {HOST_LINK_WHY}"
    )


def _show_operators(report: PlanReport, console: Console) -> None:
    """Weights that stay as they are stored; contracts by the variant that they run; then what is decided by what was
    measured."""
    if report.linear_form:
        console.line(f"linear layers: {report.linear_form}")
    said: dict[str, list[str]] = {}
    for contract, variants in report.operators.items():
        said.setdefault(" + ".join(sorted(variants)), []).append(contract)
    for variant, contracts in sorted(said.items()):
        console.words(f"operators, {variant}", contracts)
    for name, text in report.measured:
        console.line(f"{name}: {text}")


def _span(ranks: list[int]) -> str:
    if ranks == list(range(ranks[0], ranks[-1] + 1)):
        return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks))
