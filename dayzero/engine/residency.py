"""Experts that do not all fit: which are held, which are read next, and which go. No torch; knows no device.

A layer's experts lie in a *tier* below (a folder, an object store; for an accelerator the host's memory) and are
brought up when a step chose them. A step goes through a layer's chosen experts in ascending order, whatever is held,
so that sums do not depend on it: it waits for the next one while those behind it are being read. Room for two is
enough: the one in use, and the one that is coming.

Out goes first what was used least (counts are halved every ``HALF_LIFE`` steps), of those the one that its layer has
passed over most often since, of those the one whose layer comes round last. What the pass under way still needs goes
only when nothing else is left, its end first. Between two layers the next layer's experts of the step before are read
ahead, as tokens in a row often choose the same; for them nothing goes that is used more often.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Protocol

Key = tuple[int, int]  # layer, expert
HALF_LIFE = 64  # steps
LOOK_AHEAD = 16  # experts of the pass under way that are read before they are asked for
EXAMINED = 128  # held experts among which the one to go is looked for
LEAST_EXPERTS = 2  # the one in use and the one that is coming

Expert = Mapping[str, Any]  # matrix by name, ready to be used where it is held


class Tier(Protocol):
    """Where a layer's experts are when they are not held."""

    @property
    def expert_bytes(self) -> int:
        """Of one expert where it is held."""

    @property
    def num_experts(self) -> int: ...

    def fetch(self, expert: int) -> Expert:
        """Bring one up: new memory of ``expert_bytes``. Called from several threads. Errors are the caller's."""


@dataclass(slots=True)
class _Held:
    """value: of a read that may still be under way. passes: of its layer, when it was last used. ahead: read for the
    pass under way and not yet used. counted: its bytes are."""

    value: Future[Expert]
    num_bytes: int
    passes: int
    ahead: bool = False
    counted: bool = False


class Residency:
    """The experts of all layers of a rank within ``capacity_bytes``, what is being read included.

    tiers: by layer number. threads: reads at once. Not for several threads. ValueError when two experts of some layer
    do not fit. held_bytes, most_bytes: now, and at most so far.
    """

    def __init__(self, tiers: Mapping[int, Tier], capacity_bytes: int, threads: int = 1) -> None:
        self._tiers = dict(sorted(tiers.items()))
        least = LEAST_EXPERTS * max(tier.expert_bytes for tier in tiers.values())
        if capacity_bytes < least:
            raise ValueError(f"{LEAST_EXPERTS} experts take {least:,} bytes")
        self.capacity_bytes = capacity_bytes
        self.held_bytes = self.most_bytes = 0
        self._order = {layer: place for place, layer in enumerate(self._tiers)}
        self._held: OrderedDict[Key, _Held] = OrderedDict()
        self._uses: Counter[Key] = Counter()
        self._passes: Counter[int] = Counter()  # by layer
        self._chosen: dict[int, Sequence[int]] = {}  # by layer, of its newest pass
        self._layer, self._step = -1, 0
        self._pass: Sequence[int] = ()  # experts of the pass under way, in its order
        self._place: dict[int, int] = {}  # expert -> its place in the pass
        self._at = -1  # place in the pass of the one in use
        self._current: Key | None = None
        self._foreseen: deque[Key] = deque()  # of the following layer
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="experts")
        self._coming: list[Future[Expert]] = []
        self._counts: Counter[str] = Counter()

    def expert_bytes(self, layer: int) -> int:
        """Of one of the layer's experts where it is held."""
        return self._tiers[layer].expert_bytes

    # --- the pass of a step through a layer

    def expect(self, layer: int, experts: Sequence[int]) -> None:
        """A step comes to ``layer`` and will ask for these experts in this order."""
        if layer <= self._layer:
            self._step += 1
            if self._step % HALF_LIFE == 0:
                self._uses = Counter({key: n // 2 for key, n in self._uses.items() if n > 1})
        self._layer, self._current, self._at = layer, None, -1
        self._pass, self._place = tuple(experts), {expert: place for place, expert in enumerate(experts)}
        following = self._following()
        self._foreseen = deque((following, expert) for expert in self._chosen.get(following, ()))
        self._chosen[layer] = self._pass
        self._passes[layer] += 1
        self._uses.update((layer, expert) for expert in experts)
        self._read_ahead()

    def get(self, layer: int, expert: int) -> Expert:
        """The expert's matrices, to be let go of before another one is asked for.

        Errors: those of its tier; nothing of a failed read is kept.
        """
        key = (layer, expert)
        if key != self._current:
            self._begin(key)
        held = self._held[key]
        error = held.value.exception()  # waits
        if error is not None:
            self._current = None
            self._drop(key)
            raise error
        self._count(held)
        return held.value.result()

    def _begin(self, key: Key) -> None:
        """Make ``key`` the one in use, read it unless it is held or coming, and let the next ones come."""
        self._current = key
        if key[0] == self._layer:
            self._at = max(self._at, self._place.get(key[1], -1))
        held = self._held.get(key)
        self._counts["expert_misses" if held is None or held.ahead else "expert_hits"] += 1
        if held is None:
            held = self._start(key, lambda other: other != key)
            assert held is not None, "two experts fit, and only one is in use"
        held.ahead, held.passes = False, self._passes[key[0]]
        self._read_ahead()

    # --- reading ahead

    def _read_ahead(self) -> None:
        """Start reads of what this pass needs next, as far as there is room; then of what the next layer chose in the
        step before."""
        for place in range(self._at + 1, min(self._at + 1 + LOOK_AHEAD, len(self._pass))):
            key = (self._layer, self._pass[place])
            if key not in self._held:
                started = self._start(key, partial(self._later_than, place)) if self._may_read() else None
                if started is None:
                    return
                started.ahead = True
        while self._foreseen and self._may_read():
            key = self._foreseen.popleft()
            if key not in self._held:
                if self._start(key, partial(self._less_wanted, key)) is None:
                    self._foreseen.clear()
                else:
                    self._counts["expert_prefetches"] += 1

    def _may_read(self) -> bool:
        """Whether one more read would not stand in the way of one that is waited for."""
        self._coming = [future for future in self._coming if not future.done()]
        return len(self._coming) <= self._threads

    def _following(self) -> int:
        layers = list(self._tiers)
        return layers[(self._order[self._layer] + 1) % len(layers)]

    def _place_ahead(self, key: Key) -> int:
        """Where in the pass under way the key is still to come; -1 when it is not."""
        place = self._place.get(key[1], -1) if key[0] == self._layer else -1
        return place if place > self._at else -1

    def _later_than(self, place: int, key: Key) -> bool:
        """Whether ``key`` is not needed before that place of the pass."""
        ahead = self._place_ahead(key)
        return key != self._current and (ahead < 0 or ahead > place)

    def _less_wanted(self, wanted: Key, key: Key) -> bool:
        foreseen = key[0] == wanted[0] and key[1] in self._chosen.get(wanted[0], ())
        needed = key == self._current or self._place_ahead(key) >= 0
        return not needed and not foreseen and self._uses[key] <= self._uses[wanted]

    # --- room

    def _start(self, key: Key, may_go: Callable[[Key], bool]) -> _Held | None:
        """Begin to read ``key``; None when there is no room, and what may go would not make enough."""
        tier = self._tiers[key[0]]
        leaving = self._leaving(tier.expert_bytes, may_go)
        if leaving is None:
            return None
        for victim in leaving:
            self._drop(victim)
            self._counts["expert_evictions"] += 1
        held = _Held(self._pool.submit(tier.fetch, key[1]), tier.expert_bytes, self._passes[key[0]])
        self._coming.append(held.value)
        self._held[key] = held
        self.held_bytes += held.num_bytes
        self.most_bytes = max(self.most_bytes, self.held_bytes)
        return held

    def _leaving(self, num_bytes: int, may_go: Callable[[Key], bool]) -> list[Key] | None:
        """Who goes to make room for so many bytes; None when all who may are too few."""
        lacking = self.held_bytes + num_bytes - self.capacity_bytes
        leaving: list[Key] = []
        while lacking > 0:
            victim = self._victim(lambda key: key not in leaving and may_go(key))
            if victim is None:
                return None
            leaving.append(victim)
            lacking -= self._held[victim].num_bytes
        return leaving

    def _victim(self, may_go: Callable[[Key], bool]) -> Key | None:
        """The least wanted of the next ``EXAMINED`` that are held, in a round; of all where none of those may go."""
        examined = list(islice(self._held, EXAMINED))
        if len(self._held) > EXAMINED:
            for key in examined:
                self._held.move_to_end(key)
        victim = min(filter(may_go, examined), key=self._worth, default=None)
        if victim is None and len(self._held) > EXAMINED:
            victim = min(filter(may_go, self._held), key=self._worth, default=None)
        return victim

    def _worth(self, key: Key) -> tuple[int, int, int, int]:
        """The lowest goes first; see the top of this file."""
        ahead = self._place_ahead(key)
        coming = len(self._pass) - ahead if ahead >= 0 else 0
        passed_over = self._passes[key[0]] - self._held[key].passes
        distance = (self._order[key[0]] - self._order.get(self._layer, 0) - 1) % len(self._order)
        return coming, self._uses[key], -passed_over, -distance

    def _drop(self, key: Key) -> None:
        """Its memory is free when this returns: a read under way is waited for, and its error, if any, is nobody's."""
        held = self._held.pop(key)
        if not held.value.cancel() and held.value.exception() is None:
            self._count(held)
        self.held_bytes -= held.num_bytes

    def _count(self, held: _Held) -> None:
        if not held.counted:
            held.counted = True
            self._counts["expert_bytes_read"] += held.num_bytes

    # --- what is told

    def take_counts(self) -> dict[str, float]:
        """Hits, misses, reads ahead of the next layer, evictions and bytes read since the last call."""
        counts, self._counts = self._counts, Counter()
        return {name: float(number) for name, number in counts.items()}

    def close(self) -> None:
        """Begin no further reads."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class FetchedStack:
    """One matrix of a layer's experts in the place of a stack [E, R, C]: indexed by expert, it is brought up."""

    def __init__(self, residency: Residency, layer: int, name: str, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._residency, self._layer, self._name = residency, layer, name

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def nbytes(self) -> int:
        """Of all experts where they are held, a third: what the layer's three matrices say adds up to their bytes."""
        return self.shape[0] * self._residency.expert_bytes(self._layer) // 3

    def __getitem__(self, expert: int) -> Any:
        return self._residency.get(self._layer, expert)[self._name]

    def expect(self, experts: Sequence[int]) -> None:
        """See ``Residency.expect``; said to one matrix of a layer, it is said for all."""
        self._residency.expect(self._layer, experts)
