"""Our side of an alignment: one walk over the layers, each loaded once, run four ways and dropped.

Teacher-forced: the layer reads the oracle's stream, so that errors do not add up and the first bad module is the bad
one. Free: it reads our own stream, which gives logits. Chunked: the forced run again in chunks of 7 tokens, which shows
how much our own result moves with the shape of a step. Shaken: only where a discrete choice differs, with inputs moved
by as much as rounding may move them; a choice that turns over by that is a tie and no fault.

Where cache records are quantised, ``rounding`` predicts beside the walk what that costs at every site behind them, and
the bound grows by it.

Images are encoded by our own tower, site by site, and the free run reads its rows; all else reads the oracle's.

T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from dayzero.acceptance.compare import Bound, Choice, Distance, bound_at, compare_choices, distance
from dayzero.acceptance.pictures import pictures_of, where
from dayzero.acceptance.rounding import ALLOWANCE, DRAWS, Predicted, RecordResult, Rounding
from dayzero.acceptance.trace import Trace
from dayzero.arch.mixers import MLA
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.residual import Carry, open_carry
from dayzero.blocks.site import Bind, reference
from dayzero.blocks.stack import Stack
from dayzero.view import Inserted, StepView

CHUNK_TOKENS = 7
NUM_SHAKES = 8
SEED = 7
CHOICES = ("index", "experts")
FORWARD = ("index", "mixer", "experts", "channel", "")  # in order; the last one is the stream after the layer

Load = Callable[[str], dict[str, Tensor]]
Sites = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class SiteResult:
    """One module output. floor: relative L2 between our whole and our chunked run."""

    site: str
    distance: Distance
    bound: Bound
    floor: float

    @property
    def passed(self) -> bool:
        return self.distance.within(self.bound.value)


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """Discrete choices of one layer, teacher-forced. ties: tokens that differ and turn over when shaken. allowed: ids
    that may differ besides, because rounding of cache records turns so many over."""

    site: str
    choice: Choice
    ties: tuple[int, ...]
    allowed: int = 0

    @property
    def passed(self) -> bool:
        return set(self.choice.differing) == set(self.ties) or self.choice.missed <= self.allowed


@dataclass(slots=True)
class Ladder:
    """Everything the walk found, in the order of the forward. exact_tokens: leading tokens before which no discrete
    choice of the free run differed from the oracle's, or would by rounding of records. unseen: sites of ours that the
    oracle does not give. records: rows of quantised records. rounding, rounding_kl: error over spread of the
    logits, and mean KL in nats, as they are predicted from them."""

    sites: list[SiteResult] = field(default_factory=list)
    choices: list[ChoiceResult] = field(default_factory=list)
    logits_TV: Tensor | None = None
    exact_tokens: int = 0
    unseen: list[str] = field(default_factory=list)
    records: list[RecordResult] = field(default_factory=list)
    rounding: float = 0.0
    rounding_kl: float = 0.0


class KeepOne:
    """Parameters of the prefix asked for last: three runs of a layer read it once, the next layer frees it."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._prefix: str | None = None
        self._held: dict[str, Tensor] = {}

    def __call__(self, prefix: str) -> dict[str, Tensor]:
        if prefix != self._prefix:
            self._held, self._prefix = {}, None
            self._held, self._prefix = self._load(prefix), prefix
        return self._held


class Walk:
    """Runs the walk over ``tokens`` against ``trace``. Peak memory: what ``load`` gives for one layer, and a few
    streams. Where it gives stacks that read an expert when it is asked for, each run asks for its experts anew."""

    def __init__(self, spec: ModelSpec, load: Load, trace: Trace, tokens: list[int], bind: Bind = reference) -> None:
        self.spec, self.trace, self.tokens = spec, trace, tokens
        self._seen: Sites = {}
        kept = KeepOne(load)
        self.stack = Stack(spec, kept, bind=bind, tap=self._tap, resident=False)
        packed = any(need.packed is not None for need in spec.cache())
        self._rounding = Rounding(spec, kept, tokens) if packed else None
        self._predicted = Predicted()
        self._forced = self._cache().view(tokens, 0)
        self._free = self._cache().view(tokens, 0)
        chunks = self._cache()
        starts = range(0, len(tokens), CHUNK_TOKENS)
        self._chunks = [(at, chunks.view(tokens[at : at + CHUNK_TOKENS], at)) for at in starts]
        self.ladder = Ladder(exact_tokens=len(tokens))

    def _cache(self) -> LocalCache:
        return LocalCache(self.spec, torch.float32)

    def _tap(self, site: str, value: Tensor) -> None:
        self._seen[site] = value

    def _run(self, number: int, carry: Carry, view: StepView) -> tuple[Carry, Sites]:
        self._seen = {}
        carry = self.stack.layer(number, carry, view)
        return carry, self._seen

    def steps(self) -> Iterator[str]:
        """Do the work; yields the name of each piece when it is done. ``ladder`` is complete at the end."""
        ours, oracles = self._images()
        self._seen = {}
        self.stack.open(replace(self._forced, inserted=oracles))
        self._compare("embed", self._seen["embed"], self._seen["embed"], None)
        free = self.stack.open(replace(self._free, inserted=ours))
        if self._rounding is not None:
            self._rounding.open(free)
        yield "embed"
        for number in range(len(self.spec.layers)):
            free = self._layer(number, free)
            yield f"layers.{number}"
        self._close(free)
        yield "head"

    def _images(self) -> tuple[tuple[Inserted, ...], tuple[Inserted, ...]]:
        """The rows of all images, by our tower and by the oracle's, after comparing ours site by site."""
        pictures, tower = pictures_of(self.trace), self.spec.vision
        if not pictures or tower is None:
            return (), ()
        rows: list[Tensor] = []
        parts: dict[str, list[Tensor]] = {}
        for pixels in pictures:
            self._seen = {}
            rows.append(self.stack.encode_image(pixels))
            for site, value in self._seen.items():
                parts.setdefault(site, []).append(value)
        for site, values in parts.items():
            if self._has(site):
                self._compare(site, torch.cat(values), torch.cat(values), None)
        places = where(self.tokens, tower, pictures)
        theirs = self.trace.get("vision").split([count for _, count in places])
        return _inserted(places, rows), _inserted(places, theirs)

    def _layer(self, number: int, free: Carry) -> Carry:
        carry = self._oracle_carry(number)
        after, forced = self._run(number, carry, self._forced)
        chunked = self._run_chunks(number, carry)
        if self._rounding is not None:
            self._predicted = self._rounding.layer(number, carry, CHOICES)
            self.ladder.records += self._rounding.records(number, self._forced)
        keep_T = torch.ones(len(self.tokens), dtype=torch.bool)
        name = f"layers.{number}"
        for word in FORWARD:
            site = f"{name}.{word}".rstrip(".")
            if word not in CHOICES:
                if self._has(site):
                    self._compare(site, forced[site], chunked[site], keep_T)
            elif site in forced and not self._shared(number, word) and self._has(site):
                choice = compare_choices(forced[site], self.trace.get(site), causal=word == "index")
                ties = self._ties(number, carry, site, choice) if choice.differing else ()
                self.ladder.choices.append(ChoiceResult(site, choice, ties, self._may_differ(site)))
                keep_T[list(choice.differing)] = False  # what follows a choice cannot be compared where it differs
        for part in self._other_parts(number):
            if self._has(f"{name}.carry.{part}"):
                self._compare(f"{name}.carry.{part}", after[part], after[part], keep_T)
        free, seen = self._run(number, free, self._free)
        self._note_free(name, seen)
        return free

    def _shared(self, number: int, word: str) -> bool:
        """Whether the choice was made, and compared, in an earlier layer."""
        mixer = self.spec.layers[number].mixer
        return word == "index" and isinstance(mixer, MLA) and mixer.index is not None and mixer.index.shared

    def _has(self, site: str) -> bool:
        if site in self.trace:
            return True
        self.ladder.unseen.append(site)
        return False

    def _oracle_carry(self, number: int) -> Carry:
        """What the oracle had in front of layer ``number``."""
        if number == 0:
            return open_carry(self.spec.layers[0].residual, self.trace.get("embed"))
        return self._oracle_carry_after(number - 1)

    def _run_chunks(self, number: int, carry: Carry) -> Sites:
        seen: list[Sites] = []
        for at, view in self._chunks:
            end = at + len(view.tokens)
            seen.append(self._run(number, Carry({k: v[at:end] for k, v in carry.parts.items()}), view)[1])
        return {site: torch.cat([part[site] for part in seen]) for site in seen[0] if _is_value(site)}

    def _compare(self, site: str, ours: Tensor, again: Tensor, keep_T: Tensor | None) -> None:
        bound = self._bound(site)
        oracle = self.trace.get(site)
        floor = distance(again, ours, keep_T, bound.value).rel_l2
        self.ladder.sites.append(SiteResult(site, distance(ours, oracle, keep_T, bound.value), bound, floor))

    def _bound(self, site: str) -> Bound:
        """What float32 explains, and what the records' rounding does where they are quantised."""
        bound = bound_at(self.spec, site, len(self.tokens))
        by_rounding = self._predicted.sites.get(site, 0.0)
        if not by_rounding:
            return bound
        return Bound(
            bound.value + ALLOWANCE * by_rounding,
            f"{ALLOWANCE:g} x {by_rounding:.1e}, which rows moved by their records' rounding make here; {bound.why}",
        )

    def _may_differ(self, site: str) -> int:
        """Ids that rounding of records may turn over: twice what it did in the prediction, and the scatter of a count
        of pairs. Twice, because one key serves many queries, so that what turns over comes in bunches. One pair more
        is counted than all draws of the prediction saw: that none turned over in so few says little of the next."""
        if not any(self._predicted.sites.values()):  # no rounding reaches this layer
            return 0
        missed = self._predicted.missed.get(site, 0.0) + 2 / DRAWS
        return math.ceil(2 * missed + ALLOWANCE * math.sqrt(2 * missed))

    def _ties(self, number: int, carry: Carry, site: str, choice: Choice) -> tuple[int, ...]:
        """Tokens of ``choice.differing`` whose set turns over when the input moves by what rounding may move it."""
        size = bound_at(self.spec, f"layers.{number}", len(self.tokens)).value
        draw = torch.Generator().manual_seed(SEED)
        base: Tensor | None = None
        turned: set[int] = set()
        for shake in range(NUM_SHAKES + 1):
            view = self._cache().view(self.tokens, 0)
            view.scratch.update(self._forced.scratch)
            scale = size if shake else 0.0
            parts = {k: v * (1 + scale * torch.randn(v.shape, generator=draw)) for k, v in carry.parts.items()}
            chosen = self._run(number, Carry(parts), view)[1][site]
            base = chosen if base is None else base
            turned |= set(compare_choices(chosen, base, causal=site.endswith(".index")).differing)
        return tuple(t for t in choice.differing if t in turned)

    def _note_free(self, name: str, seen: Mapping[str, Tensor]) -> None:
        for word in CHOICES:
            site = f"{name}.{word}"
            if site in seen and site in self.trace:
                differing = compare_choices(seen[site], self.trace.get(site), causal=word == "index").differing
                self.ladder.exact_tokens = min([self.ladder.exact_tokens, *differing])

    def _close(self, free: Carry) -> None:
        last = self._oracle_carry_after(len(self.spec.layers) - 1)
        self._seen = {}
        again = torch.cat([self.stack.close(_rows(last, at, view)) for at, view in self._chunks])
        hidden = self.stack.close(last)
        self._compare("final_norm", hidden, again, None)
        self.ladder.logits_TV = self.stack.head(self.stack.close(free))
        if self._rounding is not None:
            self._rounding.close()
            self.ladder.rounding, self.ladder.rounding_kl = self._rounding.logits_over_spread, self._rounding.kl_mean
            self.ladder.exact_tokens = min(self.ladder.exact_tokens, self._rounding.exact_tokens)
        forced = self.stack.head(self.trace.get("final_norm"))
        bound = bound_at(self.spec, "head", len(self.tokens))
        measured = distance(forced, self.trace.get("logits"), None, bound.value)
        self.ladder.sites.append(SiteResult("head", measured, bound, 0.0))

    def _other_parts(self, number: int) -> list[str]:
        """Parts of the carry behind the main one."""
        return [part.name for part in self.spec.layers[number].residual.carry()][1:]

    def _oracle_carry_after(self, number: int) -> Carry:
        """What the oracle had behind layer ``number``."""
        main, name = self.spec.layers[number].residual.carry()[0].name, f"layers.{number}"
        others = {part: self.trace.get(f"{name}.carry.{part}") for part in self._other_parts(number)}
        return Carry({main: self.trace.get(name)} | others)


def _inserted(places: Sequence[tuple[int, int]], rows: Sequence[Tensor]) -> tuple[Inserted, ...]:
    return tuple(Inserted(first, own) for (first, _), own in zip(places, rows, strict=True))


def _rows(carry: Carry, at: int, view: StepView) -> Carry:
    return Carry({k: v[at : at + len(view.tokens)] for k, v in carry.parts.items()})


def _is_value(site: str) -> bool:
    return site.rpartition(".")[2] not in CHOICES
