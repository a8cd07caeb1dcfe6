"""How a rank keeps its experts: as they are stored where their operator takes that, all of them or what a budget holds,
and the ring in which they are converted. Decided once, when the model is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dayzero.arch.channels import MoE
from dayzero.blocks.moe import MATRICES, expert_sites
from dayzero.blocks.open import LoadedModel
from dayzero.blocks.site import Bind, Prepack, binder
from dayzero.checkpoint.stream import Loader
from dayzero.decl import MXFP4_PACK, Form, Mxfp4, Packed
from dayzero.engine.residency import LEAST_EXPERTS, Expert, FetchedStack, Residency
from dayzero.errors import UsageError
from dayzero.ops import experts_fp8
from dayzero.ops.bind import prepack_of
from dayzero.ops.bindings import chosen
from dayzero.ops.catalog import Catalog, Line
from dayzero.ops.experts_fp8 import Ring
from dayzero.ops.experts_mxfp4 import groups_outside
from dayzero.ops.experts_sizes import e4m3_expert_bytes
from dayzero.ops.moe import summed_by_expert
from dayzero.parallel.mesh import Mesh
from dayzero.planner.experts import rank_ring_bytes
from dayzero.planner.kept import gated_alike, kept_as
from dayzero.units import bytes_text, counted

MOST_THREADS = 8  # that read experts

Operator = Callable[..., Any]
LayOut = Callable[[Any], Any]


class StoredTier:
    """A layer's experts in the checkpoint's files, from where one is read as a whole, to the device that the loader
    makes parameters on. See ``residency.Tier``.

    lay_out: gives a stack of one expert as its operator takes it; None: matrices are kept as they are read.
    expert_bytes: of one expert as it is kept; None where that is not known yet. stored_bytes: of all in the files.
    """

    def __init__(
        self, loader: Loader, site: str, num_experts: int, packed: Mapping[str, Form], lay_out: LayOut | None = None,
        expert_bytes: int | None = None,
    ) -> None:  # fmt: skip
        self.num_experts = num_experts
        self.names = [f"{site}.{matrix}" for matrix in MATRICES]
        self._loader, self._packed, self._lay_out = loader, packed, lay_out
        self.stored_bytes = loader.stored_bytes(self.names)
        if expert_bytes is not None:
            self.expert_bytes = expert_bytes
        elif lay_out is None:
            self.expert_bytes = sum(loader.expert_bytes(name, packed.get(name)) for name in self.names)
        else:  # only its operator knows what a layout takes
            self.expert_bytes = sum(value.nbytes for value in self.fetch(0).values())

    def fetch(self, expert: int) -> Expert:
        values = self._loader.expert(self.names, expert, self._packed)
        kept = {name.rpartition(".")[2]: value for name, value in values.items()}
        return kept if self._lay_out is None else {name: self._lay_out(_of_one(value)) for name, value in kept.items()}


def _of_one(matrix: Tensor | Packed) -> Tensor | Packed:
    """A stack of this matrix alone."""
    return matrix[None] if isinstance(matrix, Tensor) else type(matrix)(matrix.codes[None], matrix.scales[None])


def one_by_one(operator: Operator) -> Operator:
    """An operator over whole stacks as one over experts that are fetched when they are asked for, each as a stack of
    one. Sums run in ascending order of experts, in f32."""

    def experts(
        x_TD: Tensor, ids_TN: Tensor, weights_TN: Tensor, gate: Any, up: Any, down: Any, activation: Mapping[str, Any],
        biases: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        def one(x_RD: Tensor, expert: int) -> Tensor:
            own = None if biases is None else tuple(bias[expert : expert + 1] for bias in biases)
            first_R1 = x_RD.new_zeros(x_RD.shape[0], 1, dtype=ids_TN.dtype)  # ids may lie on the host
            matrices = gate[expert], up[expert], down[expert]
            out: Tensor = operator(x_RD, first_R1, torch.ones_like(first_R1).float(), *matrices, activation, biases=own)
            return out

        return summed_by_expert(x_TD, ids_TN, weights_TN, one)

    return experts


@dataclass(slots=True)
class KeptExperts:
    """bind: the operators, those that convert experts with the rank's ring. packed: form, by name, of
    parameters that stay as they are stored. apart: sites whose operator takes whole stacks, though experts are fetched:
    it is called for one after another.

    residency: None where all experts are held. reach: of what was loaded so far for the ring, [groups, groups outside,
    matrices with one].
    """

    loader: Loader
    bind: Bind
    sites: Mapping[str, MoE]
    packed: Mapping[str, Form]
    tiers: Mapping[int, StoredTier] = field(default_factory=dict)
    residency: Residency | None = None
    ring: Ring | None = None
    reach: list[int] = field(default_factory=lambda: [0, 0, 0])
    held_bytes: int = 0
    apart: frozenset[str] = frozenset()

    def prepack(self, inner: Prepack) -> Prepack:
        """``inner``, but for experts that are laid out when they are fetched."""
        return lambda contract, site: None if site in self.apart else inner(contract, site)

    def load(self, prefix: str) -> dict[str, Tensor]:
        """``Loader.load``, with experts as they are kept in place of tensors."""
        left = {name: layer for layer, tier in self.tiers.items() for name in tier.names}
        values: dict[str, Any] = dict(self.loader.load(prefix, lazy=left.keys(), packed=self.packed))
        for name, value in values.items():
            if name in left and self.residency is not None:
                values[name] = FetchedStack(self.residency, left[name], name.rpartition(".")[2], value.shape)
            elif name.rpartition(".")[0] in self.sites and name.rpartition(".")[2] in MATRICES:
                self.held_bytes += value.nbytes
                if self.ring is not None and isinstance(value, Mxfp4):
                    self._count_reach(value)
        return values

    def _count_reach(self, stack: Mxfp4) -> None:
        outside = [groups_outside(stack[expert]) for expert in range(len(stack))]
        self.reach[0] += stack.scales.numel()
        self.reach[1] += sum(outside)
        self.reach[2] += sum(map(bool, outside))

    def bytes_to_load(self, total: int) -> int:
        """Of ``total`` stored bytes, those that are read before the first step."""
        return total - sum(tier.stored_bytes for tier in self.tiers.values())

    @property
    def bytes_to_come(self) -> int:
        """What experts may still take beside what is held now."""
        if self.residency is None:
            return 0
        whole = sum(tier.expert_bytes * tier.num_experts for tier in self.tiers.values())
        return min(self.residency.capacity_bytes, whole) - self.residency.held_bytes

    def take_counts(self) -> dict[str, float]:
        return {} if self.residency is None else self.residency.take_counts()

    def rows(self) -> list[tuple[str, str]]:
        """Of the start table."""
        if not self.sites:
            return []
        inputs = next(iter(self.sites.values())).inputs
        number = counted(sum(moe.router.experts for moe in self.sites.values()), "expert")
        rows = [("experts", f"{number} {self._kept_as()}, inputs {inputs}")]
        if self.residency is None:
            rows[0] = ("experts", f"{rows[0][1]}, {bytes_text(self.held_bytes)}")
        else:
            rows.append(("expert memory", self._memory_row(self.residency)))
        if self.ring is not None:
            largest = max(e4m3_expert_bytes(moe.inner, moe.width) for moe in self.sites.values())
            two = bytes_text(2 * largest)
            rows.append(("expert ring", f"{bytes_text(self.ring.nbytes)}, two experts in e4m3 have {two}"))
            groups, outside, matrices = self.reach
            told = f"{outside:,} of {counted(groups, 'group')}; matrices that go to the widening form: {matrices:,}"
            if self.residency is not None:
                told = "not counted, as experts are read when they are chosen; such matrices go to the widening form"
            rows.append(("beyond e4m3's reach", told))
        return rows

    def _kept_as(self) -> str:
        """Of each form that some layers' experts are kept in."""
        names = [f"{site}.{MATRICES[0]}" for site in self.sites]
        return ", ".join(dict.fromkeys(kept_as(self.packed.get(name)) for name in names))

    def _memory_row(self, residency: Residency) -> str:
        whole = sum(tier.expert_bytes * tier.num_experts for tier in self.tiers.values())
        number = sum(tier.num_experts for tier in self.tiers.values())
        largest = max(tier.expert_bytes for tier in self.tiers.values())
        at_once = min(number, residency.capacity_bytes // largest)
        return (
            f"{bytes_text(residency.capacity_bytes)} of {bytes_text(whole)}: {at_once:,} of {number:,} experts at "
            f"once, the others are read from {self.loader.source.name} when they are chosen"
        )


def keep_experts(
    model: LoadedModel, bindings: Mapping[str, str], catalog: Catalog, expert_bytes: int | None
) -> KeptExperts:
    """expert_bytes: memory for experts; None: all are held. UsageError when that is too little, when the model has no
    experts or they cannot be read one by one, or when a variant that converts 4-bit experts meets others."""
    loader, sites = model.loader, expert_sites(model.spec)
    lines = {site: chosen(moe.contract, site, bindings, catalog) for site, moe in sites.items()}
    by_name = {f"{site}.{matrix}": lines[site] for site in sites for matrix in MATRICES}
    packed = gated_alike(stored_forms(loader, by_name))
    single = [f"{site}.{matrix}" for site, line in lines.items() if line.packed for matrix in MATRICES]
    ring = _ring(model, lines, packed)
    bind = binder(bindings, catalog)
    kept = KeptExperts(loader, bind if ring is None else _with_ring(bind, ring), sites, packed, ring=ring)
    if expert_bytes is not None:
        _refuse(model, lines, single)
        # Operators that are made for a device take whole stacks; the others ask for an expert by its number.
        kept.apart = frozenset(site for site, line in lines.items() if line.target not in ("any", "cpu"))
        kept.bind = _apart(kept.bind, kept.apart)
        kept.tiers = _tiers(loader, sites, lines, packed, kept.apart)
        kept.residency = _residency(kept.tiers, expert_bytes, model.source.parallel_reads)
    return kept


def _tiers(
    loader: Loader,
    sites: Mapping[str, MoE],
    lines: Mapping[str, Line],
    packed: Mapping[str, Form],
    apart: frozenset[str],
) -> dict[int, StoredTier]:
    """By layer. One expert is read to learn what a layout takes, for all layers whose experts are alike."""
    tiers: dict[int, StoredTier] = {}
    known: dict[tuple[object, ...], int] = {}
    for site, moe in sites.items():
        lay_out = prepack_of(lines[site]) or _as_it_is if site in apart else None
        forms = tuple(packed.get(f"{site}.{matrix}") for matrix in MATRICES)
        alike = (moe.inner, moe.width, forms, lines[site].contract, lines[site].variant)
        tier = StoredTier(loader, site, moe.router.experts, packed, lay_out, known.get(alike))
        tiers[int(site.split(".")[1])] = tier
        known[alike] = tier.expert_bytes
    return tiers


def stored_forms(loader: Loader, lines: Mapping[str, Line]) -> dict[str, Form]:
    """Form, by name, of the parameters that can be kept as they are stored, as the operator that takes them does too.
    lines: by name of a parameter, the variant that its operator runs."""
    found = {name: loader.packs(name) for name, line in lines.items() if line.packed}
    return {name: form for name, form in found.items() if form is not None and form in lines[name].packed}


def _ring(model: LoadedModel, lines: Mapping[str, Line], packed: Mapping[str, Form]) -> Ring | None:
    bound = [site for site, line in lines.items() if line.ring]
    for site in bound:
        others = [name for name in (f"{site}.{matrix}" for matrix in MATRICES) if name not in packed]
        if others:
            raise UsageError(f"{site}: variant 'ring' converts experts in MXFP4, but {others[0]} is stored otherwise.")
    if not bound:
        return None
    in_4_bits = {name: MXFP4_PACK for name, form in packed.items() if form == "mxfp4"}
    return Ring(rank_ring_bytes(model.spec, in_4_bits, Mesh()))


def _with_ring(bind: Bind, ring: Ring) -> Bind:
    """``bind`` with the rank's ring in the place of one that would be made for each call."""

    def bound(contract: str, site: str) -> Any:
        found = bind(contract, site)
        return ring.experts if found is experts_fp8.ring else found

    return bound


def _apart(bind: Bind, sites: frozenset[str]) -> Bind:
    """``bind`` with operators of these sites called for one expert after another."""
    return lambda contract, site: one_by_one(bind(contract, site)) if site in sites else bind(contract, site)


def _as_it_is(stack: Any) -> Any:
    return stack


def _refuse(model: LoadedModel, lines: Mapping[str, Line], single: Sequence[str]) -> None:
    if not lines:
        raise UsageError(f"--expert-memory: {model.spec.family} has no experts; leave the option out.")
    for site, line in lines.items():
        if not line.packed:
            raise UsageError(f"--expert-memory: variant {line.variant!r} at {site} needs all experts in memory.")
    together = next((name for name in single if not model.loader.by_expert(name)), None)
    if together is not None:
        raise UsageError(f"--expert-memory: the experts of {together} do not lie apart in the files.")


def _residency(tiers: Mapping[int, StoredTier], expert_bytes: int, parallel_reads: int) -> Residency:
    largest = max(tier.expert_bytes for tier in tiers.values())
    if expert_bytes < LEAST_EXPERTS * largest:
        least = f"{LEAST_EXPERTS * largest:,} B ({bytes_text(LEAST_EXPERTS * largest)})"
        raise UsageError(f"--expert-memory {expert_bytes} is too little: two experts of this model take {least}.")
    return Residency(tiers, expert_bytes, min(MOST_THREADS, max(2, parallel_reads)))
