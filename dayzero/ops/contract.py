"""An operator is its reference body; variants must match it within the contract's bound.

A contract names a function of tensors whose body is the reference: slow, obvious, float32 or float64 inside, one
rounding at the end. ``cases`` produce hostile inputs, ``bound`` says how far a variant may be and why. A block calls
an operator through a binding (``bind``); the default binding is the body itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rel:
    """Allowed error: ||got - want|| <= value * ||want|| over a whole output, and ``why`` it is that large."""

    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Case:
    """One set of inputs for a contract. ``make(seed)`` returns the keyword arguments of the body."""

    name: str
    make: Callable[[int], dict[str, Any]]


# (inputs, a device variant's results, the reference's) -> what is wrong, or nothing. For a discrete choice by sums: the
# bound then holds for the sums, and the rule says which choices that allows. Variants that sum as the reference does,
# which are those for any device and for the CPU, are held to the bound alone.
Compare = Callable[[Mapping[str, Any], "list[Tensor]", "list[Tensor]"], str]


@dataclass(frozen=True)
class Contract:
    """name: ``family.word``; body: the reference; bound: element type -> Rel; traits: option -> values the body has;
    mutates: the arguments that are written to, all others are left as they are. compare: see ``Compare``. composed: the
    body is other contracts in turn; a block that finds it bound runs those instead, as they are bound."""

    name: str
    body: Callable[..., Any]
    bound: Mapping[str, Rel]
    traits: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    mutates: tuple[str, ...] = ()
    compare: Compare | None = None
    composed: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(*args, **kwargs)


CONTRACTS: dict[str, Contract] = {}


def contract(
    name: str,
    *,
    bound: Mapping[str, Rel],
    traits: Mapping[str, Iterable[object]] | None = None,
    mutates: tuple[str, ...] = (),
    compare: Compare | None = None,
    composed: bool = False,
) -> Callable[[Callable[..., Any]], Contract]:
    """Register the decorated function as the reference body of contract ``name``."""

    def register(body: Callable[..., Any]) -> Contract:
        assert name not in CONTRACTS, f"contract {name} is declared twice"
        has = {option: tuple(values) for option, values in (traits or {}).items()}
        made = Contract(name, body, dict(bound), has, mutates, compare, composed)
        CONTRACTS[name] = made
        return made

    return register


def relative_l2(got: Tensor, want: Tensor) -> float:
    """||got - want||_2 / ||want||_2 in float64; inf when shapes differ or anything is not finite."""
    import torch

    if got.shape != want.shape or not torch.isfinite(got).all():
        return float("inf")
    want64 = want.double()
    norm = float(want64.norm())
    diff = float((got.double() - want64).norm())
    return diff / norm if norm > 0 else (0.0 if diff == 0 else float("inf"))
