"""Templates of a rule held against each other: what a tensor's and a parameter's name may carry in braces."""

from __future__ import annotations

import re
from collections.abc import Sequence

from dayzero.errors import ModelError

_PLACE = re.compile(r"\{[^}]*\}")


def check_names(tensors: Sequence[str], params: Sequence[str], fused: bool) -> None:
    """A name's number must come from somewhere: both sides carry ``{i}`` or neither, ``{e}`` likewise."""
    said = f"{', '.join(tensors)} -> {', '.join(params)}"
    for name in (*tensors, *params):
        strange = [mark for mark in _PLACE.findall(name) if mark not in ("{i}", "{e}")]
        if strange or any(name.count(mark) > 1 for mark in ("{i}", "{e}")):
            raise ModelError(f"the rule {said}: {name} may hold {{i}} and {{e}}, each once, and no other braces.")
    for mark, what in (("{i}", "a layer"), ("{e}", "an expert")):
        if len({mark in name for name in (*tensors, *params)}) > 1:
            raise ModelError(f"the rule {said} numbers {what} on one side only; write {mark} in every name or in none.")
    if any("{e}" in param and not param.endswith("[{e}]") for param in params):
        raise ModelError(f"the rule {said}: an expert's slice is written at the end of the parameter, as [{{e}}].")
    if fused and "{e}" in params[0]:
        raise ModelError(f"the rule {said}: tensors of single experts cannot be fused; give each part a parameter.")
