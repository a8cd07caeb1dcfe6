"""Equal forms of one computation: recurrent = chunked, absorbed = expanded, gathered = masked; on the reference path.

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from dayzero.acceptance.compare import FREE_LOGITS
from dayzero.acceptance.walk import KeepOne
from dayzero.arch.mixers import MLA, Delta
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import stacked_experts
from dayzero.blocks.open import LoadedModel
from dayzero.blocks.site import Bind, binder, reference
from dayzero.blocks.stack import Forms, Stack, vocabulary_matrices
from dayzero.finding import Finding

FORM_BOUND = 1e-5  # of the logits' spread: both forms sum in float64 and round once (design, section 6)
REMEDY = "One form of the operator is wrong: run its cases, `pytest tests/cpu/test_blocks_equalities.py`, then align."


@dataclass(frozen=True, slots=True)
class Form:
    """claim: of the finding. forms and bindings are those that are compared with the reference's own."""

    kind: str
    claim: str
    why_not: str
    bound: float
    forms: Forms = Forms()
    bindings: Mapping[str, str] | None = None


RECURRENT = Form(
    "recurrent_chunked", "the recurrence token by token = in chunks of 64", "no layer has a recurrence", FORM_BOUND,
    Forms(recurrence="chunked"),
)  # fmt: skip
ABSORBED = Form(
    "absorbed_expanded", "latent attention absorbed = expanded", "no layer has latent attention", FORM_BOUND,
    Forms(latent="expanded"),
)  # fmt: skip
GATHERED = Form(
    "gather_masked", "attention to listed rows gathered = masked-dense", "no layer has a sparse index", FREE_LOGITS,
    bindings={"attention.sparse": "masked"},
)  # fmt: skip


def _present(spec: ModelSpec, form: Form) -> bool:
    mixers = [layer.mixer for layer in spec.layers]
    if form is RECURRENT:
        return any(isinstance(mixer, Delta) for mixer in mixers)
    return any(isinstance(mixer, MLA) and (form is ABSORBED or mixer.index is not None) for mixer in mixers)


@dataclass(frozen=True, slots=True)
class FormLogits:
    """base [T, V] of the reference; others by kind of form."""

    base_TV: Tensor
    others: Mapping[str, Tensor]

    @property
    def spread(self) -> float:
        return float(self.base_TV.max() - self.base_TV.min())

    @property
    def deviation(self) -> float:
        return float(self.base_TV.std())


def form_logits(model: LoadedModel, tokens: Sequence[int], expert_bytes: int) -> FormLogits:
    """In float32, layers loaded once for all forms, used and dropped."""
    lazy = stacked_experts(model.spec) | vocabulary_matrices(model.spec)
    kept = KeepOne(partial(model.loader.load, lazy=lazy, keep_bytes=expert_bytes))
    made: list[tuple[str, Forms, Bind]] = [("", Forms(), reference)]
    made += [
        (form.kind, form.forms, binder(form.bindings or {}))
        for form in (RECURRENT, ABSORBED, GATHERED)
        if _present(model.spec, form)
    ]
    stacks = [Stack(model.spec, kept, bind=bind, forms=forms, resident=False) for _, forms, bind in made]
    views = [LocalCache(model.spec, torch.float32).view(list(tokens)) for _ in stacks]
    carries = [stack.open(view) for stack, view in zip(stacks, views, strict=True)]
    for number in range(len(model.spec.layers)):
        carries = [s.layer(number, carry, view) for s, carry, view in zip(stacks, carries, views, strict=True)]
    logits = [stack.head(stack.close(carry)) for stack, carry in zip(stacks, carries, strict=True)]
    return FormLogits(logits[0], {kind: own for (kind, _, _), own in zip(made[1:], logits[1:], strict=True)})


def form_findings(found: FormLogits) -> Iterator[Finding]:
    for form in (RECURRENT, ABSORBED, GATHERED):
        kind = f"equal.{form.kind}"
        if form.kind not in found.others:
            yield Finding(kind, "operator", "not applicable", form.claim, form.why_not)
            continue
        error_T = (found.others[form.kind] - found.base_TV).abs().amax(-1)
        measured = float(error_T.max()) / found.spread
        good = measured <= form.bound
        yield Finding(
            kind, "operator", "pass" if good else "fail", form.claim,
            f"largest error {measured:.1e} of the logits' spread over {len(error_T)} tokens",
            f"{form.bound:g} of the spread: " + (
                "both round once" if form.bound == FORM_BOUND else "float32 sums over tiles"
            ),
            tuple(f"token {t}" for t in (error_T > form.bound * found.spread).nonzero()[:3, 0].tolist()),
            "" if good else REMEDY,
        )  # fmt: skip
