"""Stage 4: what a service answers, judged by itself alone: greedy, sampled, stopped, called, structured, looked at."""

from __future__ import annotations

from dayzero.acceptance.accept.stage import Context, Stage, StageResult
from dayzero.acceptance.stages import greedy, looking, prompts, sampling, scores, stops, structured, tools
from dayzero.acceptance.stages.asking import Ask, Check, Checks, judge_basics, run_checks

NAME = "functional"


def checks() -> tuple[Check, ...]:
    """All of them, in the order in which a person would try them."""
    rooms = (greedy, stops, prompts, scores, sampling, structured, tools, looking)
    return tuple(check for room in rooms for check in room.checks())


def run(context: Context) -> StageResult:
    """Errors: those of starting a server. What a server answers is a finding."""
    ask = Ask(context.services.shared(), context.subject, context.profile, context.seed)
    out = Checks(NAME)
    judge_basics(ask, out)
    run_checks(ask, out, checks(), context.progress)
    return StageResult(tuple(out.findings), facts=ask.facts(), samples=out.samples)


STAGE = Stage(NAME, "Functional: answers as they must be", frozenset({"service"}), run)
