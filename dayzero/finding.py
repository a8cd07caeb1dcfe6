"""A finding: one claim, what was measured, the bound it was held to, and what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

Verdict = Literal["pass", "note", "fail", "not applicable"]
VERDICTS: tuple[str, ...] = get_args(Verdict)

LAYERS = (
    "weights", "config", "tokenizer+template", "operator", "compiler",
    "cache", "scheduler", "parallel", "server", "hardware",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Finding:
    """One checked claim.

    kind: dotted word of what was checked, e.g. ``tensors.missing``. layer: which part of the product is at fault,
    one of LAYERS. measured and bound are what was seen and what it was held to, in words or numbers.
    evidence: file, tensor or key names. remedy: what to do next; empty on a pass. What cannot be checked here is
    ``not applicable``, and measured says why.
    """

    kind: str
    layer: str
    verdict: Verdict
    claim: str
    measured: Any = None
    bound: Any = None
    evidence: tuple[str, ...] = ()
    remedy: str = ""

    def __post_init__(self) -> None:
        assert self.layer in LAYERS, self.layer
        assert self.verdict in VERDICTS, self.verdict

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"evidence": list(self.evidence)}


def worst(findings: Iterable[Finding]) -> Verdict:
    """fail if any fails, else note if any notes, else pass; what is not applicable does not count."""
    seen = {f.verdict for f in findings}
    return "fail" if "fail" in seen else "note" if "note" in seen else "pass"
