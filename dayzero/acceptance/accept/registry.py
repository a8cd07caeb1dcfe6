"""The stages of an acceptance, in the order of its record; ``run.run_order`` says in which they run. A stage's file is
imported when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from dayzero.acceptance.accept.stage import Stage
from dayzero.errors import UsageError

NAMES = (
    "weights", "numerics", "equalities", "functional", "long_context", "performance", "robustness", "contract",
)  # fmt: skip
# Stages that hold what they measure against --baseline: only they are run anew when another one is given.
READ_BASELINE = frozenset({"performance"})


def stage_named(name: str) -> Stage:
    """The stage of that name, one of NAMES."""
    stage = import_module(f"dayzero.acceptance.stages.{name}").STAGE
    assert isinstance(stage, Stage) and stage.name == name, name
    return stage


def parse_stages(text: str | None) -> tuple[str, ...]:
    """``weights,contract`` -> the names in the order of NAMES; all of them for None. UsageError for other names."""
    if text is None:
        return NAMES
    given = [part.strip() for part in text.split(",")]
    for name in given:
        if name not in NAMES:
            raise UsageError(f"--stages {text}: there is no stage {name!r}; give some of {', '.join(NAMES)}.")
    return tuple(name for name in NAMES if name in given)


def left_out(names: Sequence[str]) -> list[str]:
    """Stages that are not among ``names``."""
    return [name for name in NAMES if name not in names]
