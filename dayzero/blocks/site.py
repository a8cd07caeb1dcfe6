"""What a block is given beside its spec: its parameters, the operators bound to its site, and where taps go.

A site is a name such as ``layers.3.mixer``; its operators are bound once, when the block is built.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dayzero.arch.norms import Activation, Norm
from dayzero.arch.rope import Rope
from dayzero.ops.bind import bind, prepack_of
from dayzero.ops.bindings import chosen
from dayzero.ops.catalog import CATALOG, Catalog
from dayzero.ops.fp8_blocks import joined
from dayzero.ops.latent_write import Turn
from dayzero.ops.linear import Weight, matmul
from dayzero.ops.linear_rounded import matmul_fp8_128

Bind = Callable[[str, str], Callable[..., Any]]  # (contract, site) -> function
Prepack = Callable[[str, str], Callable[[Any], Any] | None]  # (contract, site) -> what lays its weight out, if any
Tap = Callable[[str, Tensor], None]  # (site, value); must not change the value
Unary = Callable[[Tensor], Tensor]


def reference(contract: str, site: str) -> Callable[..., Any]:
    """The body of a contract."""
    return bind(contract, site)


def binder(bindings: Mapping[str, str], catalog: Catalog = CATALOG) -> Bind:
    """A Bind that takes the named variants (``contract`` or ``contract@site`` -> variant) and else references."""
    return lambda contract, site: bind(contract, site, bindings, catalog=catalog)


def as_stored(contract: str, site: str) -> None:
    """The prepack of references: none."""


def prepacker(bindings: Mapping[str, str], catalog: Catalog = CATALOG) -> Prepack:
    """The Prepack that goes with ``binder`` of the same bindings."""
    return lambda contract, site: prepack_of(chosen(contract, site, bindings, catalog))


class Params(Mapping[str, Tensor]):
    """Parameters by short name, which remember what was taken: a block must use every one it is given."""

    def __init__(self, tensors: Mapping[str, Tensor], prefix: str = "", taken: set[str] | None = None) -> None:
        self._tensors, self._prefix = tensors, prefix
        self._taken: set[str] = set() if taken is None else taken

    def __getitem__(self, name: str) -> Tensor:
        value = self._tensors[self._prefix + name]
        self._taken.add(self._prefix + name)
        return value

    def __iter__(self) -> Iterator[str]:
        return (name[len(self._prefix) :] for name in self._tensors if name.startswith(self._prefix))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def below(self, word: str) -> Params:
        """The parameters ``word.…``, by the rest of their names; what is taken there counts here."""
        return Params(self._tensors, f"{self._prefix}{word}.", self._taken)

    def left_over(self) -> list[str]:
        """Names that nothing took."""
        return [name for name in self if self._prefix + name not in self._taken]


@dataclass(frozen=True, slots=True)
class Site:
    """name: ``layers.3.mixer``, also the prefix of this block's cache stores. tap sees values by site name. rounded:
    sites of linear layers that round their inputs (``arch.spec.ModelSpec``)."""

    name: str
    bind: Bind = reference
    tap: Tap | None = None
    prepack: Prepack = as_stored
    rounded: Container[str] = frozenset()

    def below(self, word: str) -> Site:
        return replace(self, name=self.part(word))

    def part(self, word: str) -> str:
        return f"{self.name}.{word}" if self.name else word

    def op(self, contract: str, part: str) -> Callable[..., Any]:
        return self.bind(contract, self.part(part))

    def show(self, site: str, value: Tensor) -> None:
        if self.tap is not None:
            self.tap(site, value)

    def show_layer(self, word: str, value: Tensor) -> None:
        """A value of the whole layer, e.g. ``layers.3.experts`` from the site ``layers.3.channel``."""
        self.show(f"{self.name.rpartition('.')[0]}.{word}", value)

    def linear(self, params: Params, name: str, *, bias: bool = False, f32: bool = False) -> Unary:
        """x [..., K] -> [..., N] with weight ``name`` [N, K] and bias ``name_bias`` [N]; f32: the result is float32."""
        contract = "linear.matmul_f32" if f32 else self.product(name)
        op, bias_N = self.op(contract, name), params[f"{name}_bias"] if bias else None
        weight = self.laid_out(contract, name, params[name])
        return lambda x: op(x, weight, bias_N)

    def linears(
        self, params: Params, names: Sequence[str], *, bias: bool = False
    ) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """x [..., K] -> one [..., N] for each name, as ``linear`` of each would give it.

        Weights that one variant lays out anyway are laid out as one, so that x is read and the operator called once;
        results are then slices along N. Variants' products do not depend on the other rows of a weight. Those that
        cannot be one (``ops/fp8_blocks.joined``) stay apart.
        """
        contract, *others = {self.product(name) for name in names}
        packs = {self.prepack(contract, self.part(name)) for name in names}
        alone = bool(others) or len(packs) > 1 or None in packs or len(names) < 2
        together = None if alone else joined([params[name] for name in names])
        if together is None:
            each = [self.linear(params, name, bias=bias) for name in names]
            return lambda x: tuple(one(x) for one in each)
        sizes = [params[name].shape[0] for name in names]
        weight = self.laid_out(contract, names[0], together)
        bias_N = torch.cat([params[f"{name}_bias"] for name in names]) if bias else None
        op = self.op(contract, names[0])
        return lambda x: op(x, weight, bias_N).split(sizes, dim=-1)

    def product(self, name: str) -> str:
        """The contract of the product with weight ``name``."""
        return matmul_fp8_128.name if self.rounds(name) else matmul.name

    def rounds(self, name: str) -> bool:
        """Whether inputs of the product with weight ``name`` are rounded."""
        return self.part(name) in self.rounded

    def laid_out(self, contract: str, part: str, weight_NK: Weight) -> Any:
        """The weight as the variant bound to this site takes it; the caller lets go of the original."""
        pack = self.prepack(contract, self.part(part))
        return weight_NK if pack is None else pack(weight_NK)

    def norm(self, spec: Norm, params: Params, name: str) -> Unary:
        """x [..., D] -> the same shape, normed over D as ``spec`` says, with weight ``name`` [D]."""
        weight_D = params[name]
        if spec.kind == "layer":
            layer, bias_D = self.op("norm.layer", name), params[f"{name}_bias"] if spec.bias else None
            return lambda x: layer(x, weight_D, bias_D, eps=spec.eps)
        assert not spec.bias, f"{self.part(name)}: an RMS norm has no bias"
        rms = self.op("norm.rms", name)
        return lambda x: rms(x, weight_D, eps=spec.eps, offset=spec.offset, scale_in=spec.scale_in)

    def rope(self, spec: Rope | None) -> Callable[[Tensor, Tensor], Tensor]:
        """(x [T, H, D], positions [T] or [3, T]) -> x turned; the identity without a spec."""
        if spec is None:
            return lambda x, positions: x
        op, turn_of = self.op("rope.apply", "rope"), turns(spec)

        def turned(x_THD: Tensor, positions: Tensor) -> Tensor:
            turn = turn_of(positions)
            assert turn is not None
            return op(
                x_THD, positions, turn.inv_freq_F, style=turn.style, part=turn.part, factor=turn.factor,
                sections=turn.sections,
            )  # fmt: skip

        return turned


def turns(rope: Rope | None) -> Callable[[Tensor], Turn | None]:
    """positions -> the turn that ``rope`` makes of them; None without a rope."""
    if rope is None:
        return lambda positions: None
    known, freq_F = rope, torch.tensor(rope.inv_freq(), dtype=torch.float64).float()
    placed = {freq_F.device: freq_F}  # copied once: a step that is captured may copy nothing from the host

    def turn(positions: Tensor) -> Turn:
        if positions.device not in placed:
            placed[positions.device] = freq_F.to(positions.device)
        return Turn(positions, placed[positions.device], known.style, known.place, known.magnitude(), known.sections)

    return turn


_CONSTANTS = {"silu": (), "clamped": ("limit", "alpha"), "silu_clamped": ("limit",), "situ": ("beta", "linear_beta")}


def activation_args(act: Activation) -> dict[str, Any]:
    """``act`` as keyword arguments of the contract ``activation.glu``: its kind's own constants and no others."""
    return {"kind": act.kind, **{name: getattr(act, name) for name in _CONSTANTS[act.kind]}}
