"""How many rows a recorded step has, how wide its tables are, and why a step or a plan is computed eagerly. Paper.

Recorded steps have fixed shapes: 1, 2, 4, 8 rows, then every eighth number up to ``max_running``; a step takes the next
size up, and rows that nobody needs pad it. Tables have one width, that of the longest context. The two numbers behind
that, for pages of 64 tokens and 131,072 tokens of context: a row's table is 8 KiB, so the one copy of a step has 8 KiB
at 1 row and 512 KiB at 64, 0.3 and about 15 us at 40 GB/s, below 0.3 % of such steps (3 and 8 ms and more). A second
width would halve that at best, and double what there is to record: 11 recordings at 64 rows, 35 at 256, each of them
run twice and captured before the first request. Windows have tables of a few pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from dayzero.arch.outside import OutsideChannel, OutsideMixer
from dayzero.arch.spec import ModelSpec
from dayzero.cache.layout import Group, Layout
from dayzero.decl import OpUse
from dayzero.engine.config import EngineConfig
from dayzero.engine.step import Step
from dayzero.ops.bindings import chosen
from dayzero.ops.catalog import Catalog
from dayzero.planner.variants import called
from dayzero.units import ceil_div, counted

STEP_ROWS = 8  # between two sizes, from there on
# Why a step is computed eagerly, as counters name it (``eager_steps_…``): graphs are off, for a plan or by choice; a
# row has several tokens; an image stands in it; log-probabilities of a prompt are wanted; a table is too wide.
REASONS = ("off", "chunk", "image", "logprobs", "wide")
EAGER = tuple(f"eager_steps_{reason}" for reason in REASONS)
COUNTERS = ("graph_steps", "graph_replays", "graph_forks", "padded_rows", *EAGER, "host_sampled_rows")
BEHIND = ("sample.draw", "sample.shape")  # contracts that run behind a recording, not in it
TOWERS = ("vision.", "projector.")  # sites that no step runs: images are encoded beside it


@dataclass(frozen=True, slots=True)
class RecordingPlan:
    """How steps are recorded: ``captured`` as CUDA graphs, ``again``: called again, empty: not at all. why: reasons for
    which they are not captured. hidden: whether operators can do without being told where rows stand. in_pieces: cut
    around experts that are read when they are chosen. streams: that a captured step uses, 1 or 2."""

    how: Literal["captured", "again", ""]
    why: tuple[str, ...] = ()
    hidden: bool = False
    in_pieces: bool = False
    streams: int = 2


def plan_recording(config: EngineConfig, target: str, host: Iterable[str]) -> RecordingPlan:
    """host: what needs the host, as ``host_sites`` says it."""
    why = tuple(host)
    if config.graphs == "off":
        return RecordingPlan("", ("not asked for",))
    if config.graphs == "static":
        return RecordingPlan("again", why, hidden=not why)
    if target != "cuda":
        return RecordingPlan("", ("for accelerators only",))
    if config.debug:
        why = ("the engine checks what is written where, which only the host can do", *why)
    return RecordingPlan("" if why else "captured", why, hidden=True)


def sizes(max_running: int) -> tuple[int, ...]:
    """Rows of recorded steps, ascending, up to ``max_running`` itself."""
    few = [n for n in (1, 2, 4) if n < max_running]
    return (*few, *range(STEP_ROWS, max_running, STEP_ROWS), max_running)


def bucket_of(rows: int, known: Iterable[int]) -> int:
    """The smallest of ``known`` (ascending) that holds so many rows."""
    return next(size for size in known if size >= rows)


def table_widths(layout: Layout, config: EngineConfig, longest: int) -> dict[str, int]:
    """Pages of a row's table by group, or layers of a state group. longest: tokens of the longest context.

    Behind a window lies what up to two steps in flight have not let go of yet: a chunk at most, and a token.
    """
    return {
        group.name: len(group.layers) if group.unit == "state" else _pages(group, config, longest)
        for group in layout.groups
    }


def _pages(group: Group, config: EngineConfig, longest: int) -> int:
    tokens = longest
    if group.window is not None:
        tokens = min(tokens, group.window + min(config.chunk_tokens or longest, config.max_step_tokens) + 2)
    scratch = ceil_div(config.max_running, group.page_tokens)  # of rows that pad a step
    return max(ceil_div(tokens, group.page_tokens) + (group.window is not None), scratch)


def why_eager(step: Step, widths: Mapping[str, int]) -> str:
    """Why ``step`` cannot be a recorded one, as in REASONS; empty when it can. Images are the caller's to look at."""
    if any(row.count != 1 for row in step.rows):
        return "chunk"
    if any(row.prompt_logprobs for row in step.rows):
        return "logprobs"
    if any(len(table) > widths[name] for name, placed in step.groups.items() for table in placed.tables):
        return "wide"
    return ""


def host_sites(
    spec: ModelSpec, uses: Iterable[OpUse], bindings: Mapping[str, str], catalog: Catalog, on_host: Iterable[str] = ()
) -> list[str]:
    """What keeps a plan's steps from being captured, one sentence each: variants, by name, that need the host.

    uses: of the model and of sampling. on_host: sites around which a recording is cut, so that they may.
    """
    cut = frozenset(on_host)
    found: dict[tuple[str, str, str], int] = {}
    for use in called(bindings, uses):
        if use.site in cut or use.site.startswith(TOWERS) or use.contract in BEHIND:
            continue
        line = chosen(use.contract, use.site, bindings, catalog)
        if not line.graph:
            key = use.contract, line.variant, line.eager
            found[key] = found.get(key, 0) + 1
    out = [
        f"{contract} at {counted(number, 'site')} runs {variant!r}, which {why}"
        for (contract, variant, why), number in sorted(found.items())
    ]
    outside = sorted(
        {
            type(part).__name__
            for layer in spec.layers
            for part in (layer.mixer, layer.channel)
            if isinstance(part, OutsideMixer | OutsideChannel) and not getattr(part, "graph", False)
        }
    )
    return out + [f"the block of {name} does not say that it can be captured (graph = True)" for name in outside]
