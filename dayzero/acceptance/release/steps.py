"""The steps of release day, each a command of this package with a gate: its exit code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Setting:
    """source: what was asked for. checkpoint: where it is read, once it is mirrored. out: the pipeline's folder. serve:
    options for servers that are started."""

    source: str
    checkpoint: str
    out: Path
    hardware: str = "here"
    profile: str = "release-day"
    recipe: str | None = None
    real_align: bool = True
    serve: tuple[str, ...] = ()

    @property
    def twin(self) -> Path:
        return self.out / "twin"

    @property
    def given_recipe(self) -> tuple[str, ...]:
        return () if self.recipe is None else ("--recipe", self.recipe)


@dataclass(frozen=True, slots=True)
class Step:
    """title: what passing it shows. call: the arguments of ``dayzero`` without ``--json``, or None where there is
    nothing to do. makes: a folder that the command refuses to find; an earlier run's half of it is removed first."""

    name: str
    title: str
    call: Callable[[Setting], tuple[str, ...] | None]
    makes: Callable[[Setting], Path] | None = None


def _plan(s: Setting) -> tuple[str, ...]:
    return ("plan", s.checkpoint, "--hardware", s.hardware, *s.given_recipe)


def _real(s: Setting) -> tuple[str, ...] | None:
    return ("align", s.checkpoint, *s.given_recipe) if s.real_align else None


def _bench(s: Setting) -> tuple[str, ...]:
    load = ("--concurrency", "1,4", "--requests", "8", "--prompt-tokens", "64", "--output-tokens", "32")
    return ("bench", s.checkpoint, *load, *s.given_recipe, *s.serve)


def _accept(s: Setting) -> tuple[str, ...]:
    options = ("--profile", s.profile, "--out", str(s.out / "accept"))
    return ("accept", s.checkpoint, *options, *s.given_recipe, *(("--", *s.serve) if s.serve else ()))


STEPS: tuple[Step, ...] = (
    Step("inspect", "nothing missing, unread or contradicting", lambda s: ("inspect", s.checkpoint, *s.given_recipe)),
    Step("plan", "a layout fits, every byte is placed once", _plan),
    Step(
        "twin", "a small twin with every trait",
        lambda s: ("twin", s.checkpoint, str(s.twin), *s.given_recipe), lambda s: s.twin,
    ),
    Step("align-twin", "the port computes what the oracle does", lambda s: ("align", str(s.twin), *s.given_recipe)),
    Step("align", "the real weights too, layer by layer", _real),
    Step("serve-and-bench", "it answers, and how fast", _bench),
    Step("accept", "the acceptance record", _accept),
)  # fmt: skip
