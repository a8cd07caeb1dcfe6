"""What rounding to a quantised cache record costs, predicted from the format alone: beside a walk, never in it.

A format's numbers lie a known step apart, and rounding to the nearest moves a value evenly within half a step. So the
error of a row is predicted from its values (``step_of``), and the error behind it by running the layer with rows that
are moved at random by as much. Nothing here encodes or decodes a record: a wrong scale, or a record that is not used,
cannot agree with itself.

T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dayzero.acceptance.compare import WORST_TOKEN, compare_choices, distance
from dayzero.arch.index import Index
from dayzero.arch.mixers import MLA, Attention
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.residual import Carry
from dayzero.blocks.stack import Load, Stack
from dayzero.decl import CacheNeed, PackedRow
from dayzero.view import Paged, Span, StepView, TokenStore, Write

DRAWS = 3
ALLOWANCE = 3.0  # two draws of one size over hundreds of numbers differ by less; one token may be 8 times as far out
RECORD_FACTOR = 1.5  # measured over predicted error of a record's rows, and its inverse
LEAST_ROWS = 64  # numbers of a need below which their statistics say nothing
E4M3_LARGEST, E4M3_LEAST_EXPONENT, E4M3_BITS = 448.0, -6, 3
BF16_BITS = 7
SEED = 23
Sites = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class RecordResult:
    """Rows of one need as they were kept, against the same rows kept in float32. measured, predicted: root mean square
    error over that of the values; predicted from the format's step at each value."""

    name: str
    record: str
    measured: float
    predicted: float
    num_values: int

    @property
    def ratio(self) -> float:
        return self.measured / self.predicted if self.predicted else math.inf if self.measured else 1.0

    @property
    def passed(self) -> bool:
        """Too small an error is as wrong as too large a one: the record was not used."""
        return self.num_values < LEAST_ROWS or 1 / RECORD_FACTOR <= self.ratio <= RECORD_FACTOR


@dataclass(slots=True)
class Predicted:
    """Of one layer. sites: relative L2 error by site, or an eighth of that of the worst token, whichever is larger
    (``Distance.within``); missed: ids that one side alone chose, by choice."""

    sites: dict[str, float] = field(default_factory=dict)
    missed: dict[str, float] = field(default_factory=dict)


def plain_spec(spec: ModelSpec) -> ModelSpec:
    """The spec with tokens' rows kept as plain elements. Layers of other packages stay as they are."""
    layers = []
    for layer in spec.layers:
        mixer = layer.mixer
        if isinstance(mixer, Attention):
            layer = replace(layer, mixer=replace(mixer, record="kv_bf16"))
        elif isinstance(mixer, MLA):
            index = replace(mixer.index, record="idx_bf16") if isinstance(mixer.index, Index) else mixer.index
            layer = replace(layer, mixer=replace(mixer, record="mla_bf16", index=index))
        layers.append(layer)
    return replace(spec, layers=type(spec.layers)(layers))


def step_of(values: Tensor, row: PackedRow) -> Tensor:
    """Distance of the format's neighbouring numbers at each value of [..., *row.shape], float64; 0 where none is lost.

    e4m3 has 3 bits behind the point down to 2^-6 and the step 2^-9 below; it is multiplied by its tile's scale, which
    is the tile's largest magnitude over 448, for ``pow2`` and ``e8m0`` rounded up to a power of two. Elements that stay
    bf16 have 7 bits.
    """
    x = values.flatten(-len(row.shape)).double()
    codes, plain = x[..., : row.num_codes], x[..., row.num_codes :]
    steps = []
    for at in range(0, row.num_codes, row.tile):
        tile = codes[..., at : at + row.tile]
        largest = tile.abs().amax(-1, keepdim=True)
        scale = largest.clamp_min(1e-4) / E4M3_LARGEST
        if row.scale != "f32":
            scale = torch.exp2(scale.log2().ceil())
        step = scale * _step(tile / scale, E4M3_BITS, E4M3_LEAST_EXPONENT)
        exact = (tile.abs() == largest) & (row.scale == "f32")
        steps.append(torch.where(exact, 0.0, step))
    return torch.cat([*steps, _step(plain, BF16_BITS, -126)], dim=-1).unflatten(-1, row.shape)


def _step(x: Tensor, bits: int, least_exponent: int) -> Tensor:
    """Of numbers with so many bits behind the point; a zero stays one."""
    exponent = torch.frexp(x)[1].double() - 1
    return torch.where(x == 0, 0.0, torch.exp2(exponent.clamp_min(least_exponent) - bits))


def predicted_rms(values: Tensor, row: PackedRow) -> float:
    """Root mean square of rounding over that of the values: a step evenly filled has the variance step^2 / 12."""
    size = float(values.double().norm())
    return float(step_of(values, row).norm()) / math.sqrt(12) / size if size else 0.0


class _Moved:
    """A store of plain rows whose values are moved, when they are written, by as much as rounding moves them."""

    def __init__(self, store: TokenStore, row: PackedRow, draw: torch.Generator) -> None:
        self._store, self._row, self._draw = store, row, draw

    def append(self, view: StepView, values: Tensor, write: Write | None = None) -> None:
        noise = torch.rand(values.shape, generator=self._draw, dtype=torch.float64) - 0.5
        self._store.append(view, (values.double() + noise * step_of(values, self._row)).to(values.dtype), write)

    def pages(self, view: StepView) -> Paged:
        return self._store.pages(view)

    def history(self, view: StepView, span: Span) -> tuple[Tensor, int]:
        return self._store.history(view, span)


class Rounding:
    """Predicts a layer at a time, in the order of the layers. exact_tokens: leading tokens before which no discrete
    choice of the free run turned over by rounding alone; logits_over_spread: error of the logits of these; kl_mean:
    over all tokens, nats."""

    def __init__(self, spec: ModelSpec, load: Load, tokens: list[int]) -> None:
        self.needs = {n.name: n for n in spec.cache() if n.packed is not None and n.shares is None}
        self._seen: Sites = {}
        self._spec = plain_spec(spec)
        self._stack = Stack(self._spec, load, tap=self._tap, resident=False)
        self._tokens, self._draw = tokens, torch.Generator().manual_seed(SEED)
        self._plain, self._plain_free = self._view(), self._view()
        self._moved, self._moved_free = [self._view(True) for _ in range(DRAWS)], self._view(True)
        self._free: tuple[Carry, Carry] | None = None
        self.exact_tokens = len(tokens)
        self.logits_over_spread = self.kl_mean = 0.0

    def _tap(self, site: str, value: Tensor) -> None:
        self._seen[site] = value

    def _view(self, moved: bool = False) -> StepView:
        view = LocalCache(self._spec, torch.float32).view(self._tokens, 0)
        if not moved:
            return view
        stores = dict(view.stores)
        for name, need in self.needs.items():
            assert need.packed is not None
            stores[name] = _Moved(stores[name], need.packed, self._draw)  # type: ignore[arg-type]
        return replace(view, stores=stores)

    def _run(self, number: int, carry: Carry, view: StepView) -> tuple[Carry, Sites]:
        self._seen = {}
        return self._stack.layer(number, carry, view), self._seen

    def open(self, free: Carry) -> None:
        """free: what the free run has in front of the first layer."""
        self._free = free, free

    def layer(self, number: int, carry: Carry, choices: tuple[str, ...]) -> Predicted:
        """What rounding makes of layer ``number`` behind ``carry``. choices: the words of discrete choices, in order of
        the forward; behind one, tokens that chose otherwise are left out."""
        after, plain = self._run(number, carry, self._plain)
        out = Predicted()
        for view in self._moved:
            moved_after, moved = self._run(number, carry, view)
            keep_T = torch.ones(len(self._tokens), dtype=torch.bool)
            for site, value in plain.items():
                word = site.rpartition(".")[2]
                if word in choices:
                    found = compare_choices(moved[site], value, causal=word == "index")
                    out.missed[site] = out.missed.get(site, 0.0) + found.missed / DRAWS
                    keep_T[list(found.differing)] = False
                else:
                    self._note(out, site, moved[site], value, keep_T)
            for part in after.parts:
                self._note(out, f"layers.{number}.carry.{part}", moved_after[part], after[part], keep_T)
        self._step_free(number, choices)
        return out

    def _note(self, out: Predicted, site: str, moved: Tensor, plain: Tensor, keep_T: Tensor) -> None:
        found = distance(moved, plain, keep_T, math.inf)
        error = max(found.rel_l2, found.worst_token / WORST_TOKEN)
        out.sites[site] = max(out.sites.get(site, 0.0), error)

    def _step_free(self, number: int, choices: tuple[str, ...]) -> None:
        assert self._free is not None, "open comes first"
        plain, seen = self._run(number, self._free[0], self._plain_free)
        moved, other = self._run(number, self._free[1], self._moved_free)
        self._free = plain, moved
        for site, value in seen.items():
            word = site.rpartition(".")[2]
            if word in choices:
                differing = compare_choices(other[site], value, causal=word == "index").differing
                self.exact_tokens = min([self.exact_tokens, *differing])

    def close(self) -> None:
        """Compare the logits of the two free runs."""
        assert self._free is not None
        plain_TV, moved_TV = (self._stack.head(self._stack.close(carry)) for carry in self._free)
        spread = float(plain_TV.max() - plain_TV.min())
        error_TV = (moved_TV - plain_TV)[: self.exact_tokens].abs()
        self.logits_over_spread = float(error_TV.max()) / spread if error_TV.numel() and spread else 0.0
        a, b = plain_TV.double().log_softmax(-1), moved_TV.double().log_softmax(-1)
        self.kl_mean = float((a.exp() * (a - b)).sum(-1).mean())

    def records(self, number: int, view: StepView) -> list[RecordResult]:
        """Rows of layer ``number`` as ``view``, of a run from the same carry, holds them, against those of ours."""
        own = (need for name, need in self.needs.items() if name.startswith(f"layers.{number}."))
        return [self._record(need, view) for need in own]

    def _record(self, need: CacheNeed, view: StepView) -> RecordResult:
        assert need.packed is not None
        plain, kept = _rows(need.name, self._plain), _rows(need.name, view)
        size, error = float(plain.double().norm()), float((kept.double() - plain.double()).norm())
        measured = error / size if size else 0.0
        return RecordResult(need.name, need.record, measured, predicted_rms(plain, need.packed), plain.numel())


def _rows(name: str, view: StepView) -> Tensor:
    """All rows of a sequence, float32."""
    store = view.stores[name]
    return store.pages(view).history(view.spans[0])[0].float()  # type: ignore[union-attr]


def by_record(results: list[RecordResult]) -> Mapping[str, list[RecordResult]]:
    """Results by record, in the order they were made."""
    out: dict[str, list[RecordResult]] = {}
    for result in results:
        out.setdefault(result.record, []).append(result)
    return out
