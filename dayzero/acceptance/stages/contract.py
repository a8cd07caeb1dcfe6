"""Stage 8: the OpenAI and Anthropic surface as a black box."""

from __future__ import annotations

from dayzero.acceptance.accept.stage import Context, Stage, StageResult
from dayzero.acceptance.stages import framing, other_apis, probes, refusals, shapes
from dayzero.acceptance.stages.asking import Check, ask_all

NAME = "contract"


def checks() -> tuple[Check, ...]:
    """All of them; what may harm a weak server comes last."""
    return tuple(check for room in (shapes, framing, other_apis, refusals, probes) for check in room.checks())


def run(context: Context) -> StageResult:
    """Errors: those of starting a server. What a server answers is a finding."""
    return ask_all(NAME, checks(), context)


STAGE = Stage(NAME, "Contract: the API as a black box", frozenset({"service"}), run)
