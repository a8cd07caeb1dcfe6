"""What inputs of linear layers are rounded to: a plan's choice for those whose weights are stored in blocks of FP8.
Paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast, get_args

from dayzero.arch.spec import LinearInputs, ModelSpec
from dayzero.decl import Form
from dayzero.errors import UsageError


def linear_inputs_of(text: str) -> LinearInputs:
    """The format of linear layers' inputs by its name; UsageError for one that there is not."""
    known = get_args(LinearInputs)
    if text not in known:
        raise UsageError(f"--linear-inputs {text}: it must be one of {', '.join(known)}.")
    return cast(LinearInputs, text)


def with_linear_inputs(spec: ModelSpec, inputs: LinearInputs, forms: Mapping[str, Form]) -> ModelSpec:
    """The spec with the inputs of linear layers rounded to this format where their weights can stay in blocks of FP8,
    for all token counts. forms: by parameter, in which it can stay as it is stored. UsageError where none can."""
    plain = replace(spec, rounded=frozenset())
    if inputs == "bf16":
        return plain
    sites = (use.site for use in plain.contracts() if use.contract == "linear.matmul")
    rounded = frozenset(site for site in sites if forms.get(site) == "fp8_block")
    if not rounded:
        raise UsageError(
            f"--linear-inputs {inputs}: no linear layer of {spec.family} is stored in blocks of FP8; leave it out."
        )
    return replace(spec, rounded=rounded)
