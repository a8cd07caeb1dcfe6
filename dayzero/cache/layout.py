"""Where cached records lie: needs -> groups -> blocks -> slabs -> byte offsets. Paper.

The cache is one pool of equal slabs. A slab serves one group at a time and holds ``blocks_per_slab`` of its blocks, so
block b of a group begins at byte ``(b // blocks_per_slab) * slab_bytes + (b % blocks_per_slab) * block_bytes``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Literal

from dayzero.decl import PACKED_PAGE_TOKENS, PLAIN_FORMATS, CacheNeed, PackedRow
from dayzero.errors import ModelError, UsageError
from dayzero.units import bytes_text, counted, round_up

Dtype = Literal["f32", "bf16", "f16"]

ELEMENT_BYTES: Mapping[str, int] = {f.name: f.bits // 8 for f in PLAIN_FORMATS}
PAGE_TOKENS = 64
ALIGN_BYTES = 256  # of blocks, and of each need within one: enough for any vector load or bulk copy
MAX_UNUSED = 0.05  # share of a slab that may stay behind its last block
MAX_SLAB_BLOCKS = 8  # of the largest block; larger slabs would come back too seldom


@dataclass(frozen=True, slots=True)
class Place:
    """One need's records in a block: contiguous from byte ``offset`` on, [page_tokens, *shape] for tokens, [*shape] for
    a state. offset: a multiple of 256. need: its name; for states the name within the layer (``mixer.state``). packed:
    how a token's row lies where it is not made of ``element``."""

    need: str
    offset: int
    shape: tuple[int, ...]
    element: Dtype
    packed: PackedRow | None = None

    @property
    def record_bytes(self) -> int:
        """Of one token, or of one layer's state."""
        return prod(self.shape) * ELEMENT_BYTES[self.element] if self.packed is None else self.packed.num_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """Needs whose records come and go together.

    token groups (``tokens``, ``tokens.w128``): one for each window value; a block is one page, ``page_tokens`` tokens
    of all needs of the group. layers holds one tuple: the need names in the order of places.
    state groups (``state``, ``state.1``): one for each set of equal state shapes of a layer; a block is the state of
    one layer, a sequence holds ``len(layers)`` blocks; layers[i] holds the need names of layer i in the order of
    places. page_tokens is 0.
    window: tokens that stay visible, the current one included; None: all. block_bytes: distance between blocks, a
    multiple of 256.
    """

    name: str
    unit: Literal["token", "state"]
    window: int | None
    page_tokens: int
    block_bytes: int
    blocks_per_slab: int
    places: tuple[Place, ...]
    layers: tuple[tuple[str, ...], ...]

    @property
    def record_bytes(self) -> int:
        """Bytes of records, padding left out: of one token in all needs, or of one layer's state."""
        return sum(place.record_bytes for place in self.places)

    @property
    def sequence_blocks(self) -> int:
        """Blocks of a sequence's state; 0 for a token group."""
        return len(self.layers) if self.unit == "state" else 0

    def first_page(self, position: int) -> int:
        """Number of the first page that a token at ``position`` sees. Pages before it may be left out or freed."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.page_tokens


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copy state blocks of a group: source -> target, one pair for each layer of the group."""

    group: str
    source: tuple[int, ...]
    target: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """groups: token groups first. aliases: need -> need whose storage it is; one allocation for both."""

    groups: tuple[Group, ...]
    slab_bytes: int
    page_tokens: int
    aliases: Mapping[str, str] = field(default_factory=dict)

    @property
    def token_groups(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if g.unit == "token")

    @property
    def state_groups(self) -> tuple[Group, ...]:
        return tuple(g for g in self.groups if g.unit == "state")

    @property
    def token_bytes(self) -> int:
        """Growth for each token of context; windows are left out (they stop growing). As arch.cost counts."""
        return sum(g.record_bytes for g in self.token_groups if g.window is None)

    @property
    def window_bytes(self) -> int:
        """What a sequence holds in window groups once they are full. As arch.cost counts."""
        return sum(g.record_bytes * g.window for g in self.token_groups if g.window is not None)

    @property
    def sequence_bytes(self) -> int:
        """State of one sequence. As arch.cost counts."""
        return sum(g.record_bytes * len(g.layers) for g in self.state_groups)

    @property
    def state_footprint(self) -> int:
        """Bytes of the pool that one sequence's state, or one snapshot, takes up: padding of blocks included."""
        return sum(g.block_bytes * len(g.layers) for g in self.state_groups)

    def group(self, name: str) -> Group:
        return next(g for g in self.groups if g.name == name)

    def locate(self, need: str) -> tuple[Group, Place, int]:
        """(group, place, layer) of a need, aliases followed. layer: index into ``group.layers``, 0 for tokens."""
        owner = self.aliases.get(need, need)
        for group in self.groups:
            for number, names in enumerate(group.layers):
                if owner in names:
                    return group, group.places[names.index(owner)], number
        raise KeyError(need)

    def unused(self, group: Group) -> float:
        """Share of a slab that holds no record when the slab is full of the group's blocks."""
        records = group.record_bytes * (group.page_tokens or 1)
        return 1.0 - group.blocks_per_slab * records / self.slab_bytes

    def lines(self) -> list[tuple[str, str]]:
        """(label, text) for the start-up table."""
        out = [("cache page", counted(self.page_tokens, "token")), ("cache slab", bytes_text(self.slab_bytes))]
        for g in self.groups:
            if g.unit == "token":
                names = ", ".join(dict.fromkeys(p.packed.record for p in g.places if p.packed is not None))
                what = f"{counted(len(g.places), 'need')}, {g.record_bytes:,} B a token" + (names and f" ({names})")
                what += f", the last {counted(g.window, 'token')}" if g.window is not None else ""
            else:
                total = bytes_text(g.record_bytes * len(g.layers))
                what = f"{counted(len(g.layers), 'layer')}, {total} a sequence"
            where = f"block {bytes_text(g.block_bytes)}, {g.blocks_per_slab} a slab, {self.unused(g):.1%} unused"
            out.append((f"cache group {g.name}", f"{what}; {where}"))
        if self.aliases:
            out.append(("cache aliases", f"{counted(len(self.aliases), 'need')} in another layer's storage"))
        return out


def lay_out(needs: Sequence[CacheNeed], *, dtype: Dtype, page_tokens: int = PAGE_TOKENS) -> Layout:
    """Layout of the needs of one rank. Needs with element ``f32`` stay float32, packed ones lie as they say, all others
    are kept in ``dtype``.

    A slab is the least multiple (up to 8) of the largest block that leaves at most 5 % of a slab unused in every
    group; where there is none, the multiple that leaves least. Raises ModelError for needs that contradict each other,
    UsageError for pages that packed rows do not fit.
    """
    assert dtype in ELEMENT_BYTES and page_tokens > 0, (dtype, page_tokens)
    if not needs:
        raise ModelError("The model keeps nothing between steps; there is no cache to lay out.")
    by_name = {need.name: need for need in needs}
    if len(by_name) != len(needs):
        twice = sorted(n for n in by_name if sum(need.name == n for need in needs) > 1)
        raise ModelError(f"Two cache needs have the same name {twice[0]}; the recipe must name each need once.")
    aliases = {need.name: _owner(need, by_name) for need in needs if need.shares is not None}
    owners = [need for need in needs if need.name not in aliases]
    windows = _windows(needs, aliases)
    groups = [*_token_groups(owners, windows, dtype, page_tokens), *_state_groups(owners, dtype)]
    slab_bytes = _slab_bytes([g.block_bytes for g in groups])
    return Layout(
        tuple(_with_slab(g, slab_bytes) for g in groups), slab_bytes, page_tokens, dict(sorted(aliases.items()))
    )


def _owner(need: CacheNeed, by_name: Mapping[str, CacheNeed]) -> str:
    seen, now = {need.name}, need
    while now.shares is not None:
        if now.shares not in by_name:
            raise ModelError(f"Cache need {now.name} shares the storage of {now.shares}, which no layer declares.")
        if now.shares in seen:
            raise ModelError(f"Cache need {need.name} shares storage in a circle: {', '.join(sorted(seen))}.")
        now = by_name[now.shares]
        seen.add(now.name)
    for trait in ("unit", "shape", "element", "record", "packed"):
        mine, its = getattr(need, trait), getattr(now, trait)
        if mine != its:
            raise ModelError(
                f"Cache need {need.name} shares the storage of {now.name}, but its {trait} is {mine}, not {its}."
            )
    return now.name


def _windows(needs: Iterable[CacheNeed], aliases: Mapping[str, str]) -> dict[str, int | None]:
    """Owner -> window: the largest of its own and those of all that read its storage."""
    out: dict[str, int | None] = {}
    for need in needs:
        if need.window is not None and need.window < 1:
            raise ModelError(f"Cache need {need.name} has a window of {need.window} tokens; it must be at least 1.")
        name = aliases.get(need.name, need.name)
        known = out.get(name, need.window)
        out[name] = None if known is None or need.window is None else max(known, need.window)
    return out


def _places(named: Iterable[tuple[str, CacheNeed]], dtype: Dtype, records: int) -> tuple[tuple[Place, ...], int]:
    """(places, block_bytes) of ``records`` records of each need, one need after another."""
    places, offset = [], 0
    for name, need in named:
        place = Place(name, offset, need.shape, "f32" if need.element == "f32" else dtype, need.packed)
        places.append(place)
        offset = round_up(offset + records * place.record_bytes, ALIGN_BYTES)
    return tuple(places), offset


def _token_groups(
    owners: Sequence[CacheNeed], windows: Mapping[str, int | None], dtype: Dtype, page_tokens: int
) -> list[Group]:
    by_window: dict[int | None, list[CacheNeed]] = {}
    for need in owners:
        if need.packed is not None and page_tokens % PACKED_PAGE_TOKENS:
            raise UsageError(
                f"page_tokens is {page_tokens}; rows kept in {need.record} need a multiple of {PACKED_PAGE_TOKENS}"
            )
        if need.unit == "token":
            by_window.setdefault(windows[need.name], []).append(need)
    out = []
    for window in sorted(by_window, key=lambda w: (w is not None, w or 0)):
        members = by_window[window]
        places, size = _places(((need.name, need) for need in members), dtype, page_tokens)
        name = "tokens" if window is None else f"tokens.w{window}"
        out.append(Group(name, "token", window, page_tokens, size, 0, places, (tuple(n.name for n in members),)))
    return out


def _state_groups(owners: Sequence[CacheNeed], dtype: Dtype) -> list[Group]:
    by_layer: dict[str, list[CacheNeed]] = {}
    for need in owners:
        if need.unit == "state":
            by_layer.setdefault(layer_of(need.name), []).append(need)
    by_shape: dict[object, list[str]] = {}
    for layer, members in by_layer.items():
        by_shape.setdefault(tuple((m.shape, m.element == "f32") for m in members), []).append(layer)
    out = []
    for number, layers in enumerate(by_shape.values()):
        first = by_layer[layers[0]]
        inner = [(need.name.removeprefix(layers[0]).lstrip("."), need) for need in first]
        places, size = _places(inner, dtype, 1)
        names = tuple(tuple(need.name for need in by_layer[layer]) for layer in layers)
        out.append(Group(f"state.{number}" if number else "state", "state", None, 0, size, 0, places, names))
    return out


def layer_of(need: str) -> str:
    """``layers.3.mixer.state`` -> ``layers.3``: up to the first part that is a number, else all but the last part."""
    parts = need.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), len(parts) - 2)
    return ".".join(parts[: number + 1])


def _slab_bytes(block_bytes: Sequence[int]) -> int:
    largest = max(block_bytes)

    def unused(multiple: int) -> float:
        return max((multiple * largest % size) / (multiple * largest) for size in block_bytes)

    good = (m for m in range(1, MAX_SLAB_BLOCKS + 1) if unused(m) <= MAX_UNUSED)
    return largest * next(good, min(range(1, MAX_SLAB_BLOCKS + 1), key=unused))


def _with_slab(group: Group, slab_bytes: int) -> Group:
    return Group(
        group.name, group.unit, group.window, group.page_tokens, group.block_bytes, slab_bytes // group.block_bytes,
        group.places, group.layers,
    )  # fmt: skip
