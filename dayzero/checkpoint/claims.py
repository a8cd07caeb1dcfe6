"""Which format each logical tensor should have: the quantisation config's claim, and what a recipe knows better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from dayzero.checkpoint.formats import StoredPart, parts, why_not
from dayzero.checkpoint.found import Scheme
from dayzero.checkpoint.quant_config import QuantTable
from dayzero.checkpoint.rules import Expansion, Group, glob_match
from dayzero.decl import F32, Format


class NoScheme:
    def scheme(self, module: str, role: str = "linear") -> Format | None:
        del module, role
        return None


def expected_parts(
    expansion: Expansion, quant: Scheme | None, plain: Format
) -> Iterator[tuple[str, StoredPart, tuple[int, ...]]]:
    """Every physical tensor a complete checkpoint holds, from the config alone: (logical name, part, file shape).

    plain: the format of what is not quantised. Parameters that must be stored in float32 are.
    """
    scheme = quant or NoScheme()
    for group in expansion.groups:
        whole_group = same_claim(group, group.name, scheme, expansion)
        made: dict[Format, tuple[StoredPart, ...]] = {}
        for number, logical in zip(group.numbers, group.names(), strict=True):
            claim = whole_group or claim_of(group, logical, scheme, expansion)
            fmt = claim.expect or plain_format(group, plain)
            if fmt not in made:
                made[fmt] = parts_of(group, fmt)
            for part in made[fmt]:
                name = numbered(part.name, number)
                yield logical, StoredPart(part.role, name, part.dtype, part.shape, part.optional), part.shape


def stored_format(group: Group, name: str, expansion: Expansion, quant: Scheme | None, plain: Format) -> Format:
    """The format in which a complete checkpoint holds logical tensor ``name`` of ``group``; see ``expected_parts``."""
    return claim_of(group, name, quant or NoScheme(), expansion).expect or plain_format(group, plain)


def unstorable(expansion: Expansion, quant: Scheme | None, plain: Format) -> list[str]:
    """Sentences on tensors whose shape the claimed format cannot hold, such as a width that cuts a scale group."""
    out = []
    for group in expansion.groups:
        fmt = stored_format(group, group.name.replace("{e}", "0"), expansion, quant, plain)
        reason = why_not(fmt, group.shape) if fmt.quantized else None
        if reason:
            out.append(f"{group.name}: {reason}")
    return out


def plain_format(group: Group, plain: Format) -> Format:
    return F32 if group.targets[0].decl.stored == "f32" else plain


def module_of(tensor: str) -> str:
    """The module a tensor belongs to: its name without a trailing ``.weight``."""
    return tensor.removesuffix(".weight")


@dataclass(frozen=True, slots=True)
class Claim:
    """expect: the format to look for. claimed: what the config says. why: the recipe's reason when they may differ."""

    expect: Format | None
    claimed: Format | None
    why: str | None


def claim_of(group: Group, name: str, quant: Scheme, expansion: Expansion) -> Claim:
    # Asked for every role, so that entries which name norms or routers count as hit.
    claimed = quant.scheme(module_of(name), group.role)
    if group.role != "linear" or len(group.shape) < 2:
        claimed = None
    for stored in expansion.stored:
        if glob_match(stored.pattern, name):
            return Claim(stored.format, claimed, stored.why)
    return Claim(claimed, claimed, None)


def same_claim(group: Group, template: str, quant: Scheme, expansion: Expansion) -> Claim | None:
    """The claim that holds for all experts of a group, None when they must be asked one by one.

    Rules without digits can tell experts apart only by how long their numbers are, so one of each length is asked.
    """
    count = group.count
    apart = not isinstance(quant, QuantTable | NoScheme) or (isinstance(quant, QuantTable) and quant.numbered)
    if count is None or apart or any(c.isdigit() for s in expansion.stored for c in s.pattern):
        return None
    sample = {e for e in (0, 1, 10, 100, 1000, count - 1) if e < count}
    claims = {claim_of(group, template.replace("{e}", str(e)), quant, expansion) for e in sample}
    return claims.pop() if len(claims) == 1 else None


def parts_of(group: Group, fmt: Format) -> tuple[StoredPart, ...]:
    shape = group.shape if fmt.quantized else group.plain_shapes[0]
    return parts(fmt, group.name, shape)


def numbered(name: str, number: int | None) -> str:
    return name if number is None else name.replace("{e}", str(number))
