"""Stage 4: what a service answers, judged by itself alone: greedy, sampled, stopped, called, structured, looked at."""

from __future__ import annotations

from dayzero.acceptance.accept.stage import Context, Stage, StageResult
from dayzero.acceptance.stages import greedy, looking, prompts, sampling, scores, stops, structured, tools
from dayzero.acceptance.stages.asking import Check, ask_all

NAME = "functional"


def checks() -> tuple[Check, ...]:
    """All of them, in the order in which a person would try them."""
    rooms = (greedy, stops, prompts, scores, sampling, structured, tools, looking)
    return tuple(check for room in rooms for check in room.checks())


def run(context: Context) -> StageResult:
    """Errors: those of starting a server. What a server answers is a finding."""
    return ask_all(NAME, checks(), context)


STAGE = Stage(NAME, "Functional: answers as they must be", frozenset({"service"}), run)
