"""A cache with contents: a CacheManager driven as a scheduler does, and a block store in which a record of a token says
which tokens it was computed from. Whatever is read is compared with what a cold run would have written. No torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from dayzero.cache.layout import Layout, StateCopy, lay_out
from dayzero.cache.manager import CacheManager, Opened
from dayzero.decl import CacheNeed

PAGE = 4


def tokens_need(name: str, width: int = 8, window: int | None = None, shares: str | None = None) -> CacheNeed:
    return CacheNeed(name, (width,), "bf16", "kv_bf16", window=window, shares=shares)


def state_need(name: str, width: int, element: str = "f32") -> CacheNeed:
    return CacheNeed(name, (width,), element, "state_f32", "state")


def layers(count: int, *needs: CacheNeed) -> list[CacheNeed]:
    """The needs, named ``layers.{i}.…``, for each of ``count`` layers after the ones before."""
    out = []
    for i in range(count):
        for n in needs:
            shares = n.shares and n.shares.format(i=i)
            out.append(CacheNeed(n.name.format(i=i), n.shape, n.element, n.record, n.unit, (), n.window, shares))
    return out


FULL = tokens_need("layers.{i}.mixer.kv", 64)
LOCAL = tokens_need("layers.1{i}.mixer.kv", 96, window=6)
WIDE = tokens_need("layers.2{i}.mixer.kv", 32, window=9)
DELTA = state_need("layers.3{i}.mixer.state", 160)
CONV = state_need("layers.3{i}.mixer.conv", 24, "bf16")
OTHER = state_need("layers.4{i}.mixer.state", 300)
SHARED = tokens_need("layers.5{i}.mixer.kv", 96, window=10, shares="layers.1{i}.mixer.kv")

LAYOUTS: dict[str, Layout] = {
    name: lay_out(needs, dtype="bf16", page_tokens=PAGE)
    for name, needs in {
        "tokens": layers(2, FULL),
        "window": layers(1, LOCAL),
        "two windows": layers(2, FULL) + layers(1, LOCAL) + layers(3, WIDE),
        "shared": layers(2, FULL) + layers(2, LOCAL) + layers(2, SHARED),
        "hybrid": layers(1, FULL) + layers(3, DELTA, CONV),
        "hybrid with windows": layers(2, FULL) + layers(1, LOCAL) + layers(2, DELTA, CONV) + layers(1, OTHER),
        "states": layers(2, DELTA) + layers(1, OTHER),
        "states with a window": layers(1, LOCAL) + layers(3, DELTA),
    }.items()
}


@dataclass
class Request:
    """tokens: all that will ever be looked at so far; scheduled: tokens whose step is scheduled."""

    id: str
    tokens: list[int]
    salt: str | None
    scheduled: int
    opened: Opened
    copies: tuple[StateCopy, ...]
    in_flight: int = 0

    def prefix(self, length: int) -> tuple[object, ...]:
        """What a record of the last of ``length`` tokens depends on."""
        return (self.salt, *self.tokens[:length])


@dataclass(frozen=True)
class Step:
    request: Request
    start: int
    end: int
    rows: dict[str, tuple[tuple[int, ...], int]]
    before: tuple[StateCopy, ...]
    after: tuple[StateCopy, ...]


@dataclass
class World:
    """steps are executed as late as can be: right before they retire, in order."""

    cache: CacheManager
    contents: dict[tuple[str, int, int], object] = field(default_factory=dict)
    requests: dict[str, Request] = field(default_factory=dict)
    steps: deque[Step] = field(default_factory=deque)
    count: int = 0

    def open(self, tokens: Sequence[int], salt: str | None = None) -> Request | None:
        opened = self.cache.open(f"r{self.count}", tokens, salt=salt)
        if opened is None:
            return None
        assert opened.hit % PAGE == 0 and 0 <= opened.hit < len(tokens)
        best = (len(tokens) - 1) // PAGE * PAGE
        assert bool(opened.why) == (opened.hit < best), (opened, best)
        request = Request(f"r{self.count}", list(tokens), salt, opened.hit, opened, opened.before)
        self.requests[request.id] = request
        self.count += 1
        return request

    def schedule(self, request: Request, want: int) -> int:
        """Schedule tokens up to ``want`` at most; tokens beyond those known are made up. The end; 0: no room."""
        want = self.cache.reach(request.id, want)
        if want <= request.scheduled:
            assert not self.cache.extend(request.id, request.scheduled + 1)
            return 0
        start = request.scheduled
        end = self.cache.chunk_end(request.id, start, want)
        assert start < end <= want
        assert self.cache.extend(request.id, end)
        while len(request.tokens) < end:
            request.tokens.append(hash(request.prefix(len(request.tokens))) % 2)
        rows = self.cache.rows(request.id, end)
        held = self.cache.inventory(request.id)
        assert {name: table for name, (table, _) in rows.items()} == held, "rows name a block that is not held"
        after = self.cache.ran(request.id, end)
        self.steps.append(Step(request, start, end, rows, request.copies, after))
        request.copies, request.scheduled = (), end
        request.in_flight += 1
        return end

    def retire(self) -> None:
        step = self.steps.popleft()
        self.execute(step)
        request = step.request
        request.in_flight -= 1
        self.cache.retire(request.id, step.end, request.tokens)

    def close(self, request: Request, *, finished: bool = True) -> None:
        assert not request.in_flight
        self.cache.close(request.id, finished=finished)
        del self.requests[request.id]

    def execute(self, step: Step) -> None:
        request, page = step.request, self.cache.layout.page_tokens
        for copy in step.before:
            self.copy(copy)
        for group in self.cache.layout.groups:
            table, first = step.rows[group.name]
            if group.unit == "state":
                assert len(table) == len(group.layers) and first == 0
                for layer, block in enumerate(table):
                    if step.start:
                        assert self.contents[group.name, block, 0] == (layer, request.prefix(step.start))
                    self.contents[group.name, block, 0] = (layer, request.prefix(step.end))
                continue
            assert first % page == 0 and len(table) == -(-step.end // page) - first // page
            oldest = 0 if group.window is None else max(0, step.start - group.window + 1)
            assert first <= oldest
            for position in range(oldest, step.end):
                at = (group.name, table[(position - first) // page], position % page)
                if position < step.start:
                    assert self.contents[at] == request.prefix(position + 1), (group.name, position, step)
                else:
                    self.contents[at] = request.prefix(position + 1)
        for copy in step.after:
            self.copy(copy)

    def copy(self, copy: StateCopy) -> None:
        assert len(copy.source) == len(copy.target) == len(self.cache.layout.group(copy.group).layers)
        for source, target in zip(copy.source, copy.target):
            assert source != target
            self.contents[copy.group, target, 0] = self.contents[copy.group, source, 0]

    def run(self, tokens: Sequence[int], until: int = 0, salt: str | None = None, chunk: int = 1000) -> Opened:
        """Open, compute up to max(len(tokens), until), close: one step at a time."""
        request = self.open(tokens, salt)
        assert request is not None
        while request.scheduled < max(len(tokens), until):
            known = max(len(tokens), request.scheduled + 1)
            assert self.schedule(request, min(known, request.scheduled + chunk))
            self.retire()
        self.close(request)
        return request.opened

    def end(self) -> None:
        while self.steps:
            self.retire()
        for request in list(self.requests.values()):
            self.close(request)


def world(layout: str | Layout, num_slabs: int = 1000, **options: object) -> World:
    chosen = LAYOUTS[layout] if isinstance(layout, str) else layout
    return World(CacheManager(chosen, num_slabs, debug=True, **options))  # type: ignore[arg-type]
