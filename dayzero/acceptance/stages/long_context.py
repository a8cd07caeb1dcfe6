"""Stage 5: long prompts. Needles by depth and length; equal answers around thresholds; the limit and its memory."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from dayzero.acceptance.accept.stage import Context, Figure, Profile, Stage, StageResult
from dayzero.acceptance.stages import long_exact, long_grid, long_limit
from dayzero.acceptance.stages.long_known import Known, limit_of, look, thresholds
from dayzero.acceptance.stages.long_needle import Haystack, read_form
from dayzero.acceptance.stages.long_pace import Pace, Speed, speed_of
from dayzero.checkpoint.source import open_source
from dayzero.finding import Finding

SECONDS: dict[Profile, float] = {"quick": 60.0, "release-day": 1200.0, "long": 5400.0}
SHORT_TOKENS, LONG_TOKENS = 4, 100  # of prompts that measure the speed
CPU = "this CPU"  # what planner.detect calls it
EXACT_SHARE, LIMIT_SHARE = 0.6, 0.4  # of what is left when they begin; the rest is the grid's
REQUEST_SECONDS: dict[Profile, float] = {"quick": 60.0, "release-day": 600.0, "long": 1800.0}


def run(context: Context) -> StageResult:
    """Errors: those of starting a server; UsageError for a needle form that is none."""
    server = context.services.shared()
    known = look(context, server, REQUEST_SECONDS[context.profile])
    pace, at = (
        Pace(SECONDS[context.profile], _speed(known, context.seed)),
        thresholds(known, 2 * long_exact.ANSWER_TOKENS),
    )
    with context.progress("long prompts") as bar:
        exact = long_exact.try_all(known, at, pace.part(EXACT_SHARE), context.seed, bar.note)
        found = long_exact.findings(known, exact)
        bar.note("the longest prompt")
        limits = pace.part(LIMIT_SHARE)
        more, taken = long_limit.limits(known, limits, context.seed, server.process_ids)
        found += [*more, long_limit.rows(known)]
        found += long_limit.memory(known, taken, _on_device(server.told))
        form = read_form(None if context.subject.source is None else open_source(context.subject.source))
        figures, items = list[Figure](), long_exact.samples(exact)
        if known.own and not known.tokenizer:
            found.append(_no_tokenizer())
        else:
            hay = Haystack(known, form, context.seed)
            grid = long_grid.run(known, hay, context.profile, at, pace, bar.note)
            found += long_grid.findings(grid, hay)
            figures += [drawn] if (drawn := long_grid.figure(grid)) is not None else []
            items["needle found"] = dict(long_grid.samples(grid))
    return StageResult(tuple(found), tuple(figures), _facts(known, exact), items)


def _speed(known: Known, seed: int) -> Speed:
    """Of prompts and of answers, once what is compiled or allocated at the first request is there."""
    rng, limit = random.Random(f"{seed} speed"), limit_of(known) or 1 << 30
    sizes = [min(size, max(2, limit // 3)) for size in (SHORT_TOKENS, LONG_TOKENS)]

    def ask(tokens: int, answer: int) -> float:
        return known.asker.complete(known.prompt(rng, tokens), answer).seconds

    for size in sizes:
        ask(size, 2)
    return speed_of(ask, sizes[0], sizes[1], 4)


def _facts(known: Known, exact: long_exact.Exact) -> dict[str, Any]:
    return {
        "thresholds": {one.name: one.tokens for one in (*exact.trials, *exact.skipped)},
        "limit_tokens": limit_of(known),
        "page_tokens": known.page,
        "chunk_tokens": known.chunk,
        "noise_of_a_logprob": exact.noise,
        "token_ids": known.ids,
    }


def _no_tokenizer() -> Finding:
    return Finding(
        "long.needle", "tokenizer+template", "not applicable", "needles are found",
        measured="the checkpoint has no tokenizer, so there is no text to hide a needle in",
    )  # fmt: skip


def _on_device(told: Mapping[str, Any]) -> bool:
    """By the start table of a server that was started here; without such a row it runs on the CPU."""
    return dict(told.get("table") or ()).get("device", CPU) != CPU


STAGE = Stage("long_context", "Long context", frozenset({"service"}), run)
