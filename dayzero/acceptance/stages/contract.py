"""Stage 8: the OpenAI and Anthropic surface as a black box."""

from __future__ import annotations

from dayzero.acceptance.accept.stage import Context, Stage, StageResult
from dayzero.acceptance.stages import framing, other_apis, probes, refusals, shapes
from dayzero.acceptance.stages.asking import Ask, Check, Checks, judge_basics, run_checks

NAME = "contract"


def checks() -> tuple[Check, ...]:
    """All of them; what may harm a weak server comes last."""
    return tuple(check for room in (shapes, framing, other_apis, refusals, probes) for check in room.checks())


def run(context: Context) -> StageResult:
    """Errors: those of starting a server. What a server answers is a finding."""
    ask = Ask(context.services.shared(), context.subject, context.profile, context.seed)
    out = Checks(NAME)
    judge_basics(ask, out)
    run_checks(ask, out, checks(), context.progress)
    return StageResult(tuple(out.findings), facts=ask.facts(), samples=out.samples)


STAGE = Stage(NAME, "Contract: the API as a black box", frozenset({"service"}), run)
