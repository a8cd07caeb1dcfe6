"""Which experts are held: always the right ones, never more than fit, the useful ones longest, and no hang."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.engine.residency import FetchedStack, Residency


@dataclass
class Shelf:
    """A tier whose experts say who they are. seconds: a fetch takes. broken: experts that cannot be fetched."""

    layer: int
    num_experts: int = 8
    expert_bytes: int = 10
    seconds: float = 0.0
    broken: set[int] = field(default_factory=set)
    fetched: list[int] = field(default_factory=list)

    def fetch(self, expert: int) -> dict[str, Any]:
        time.sleep(self.seconds)
        self.fetched.append(expert)
        if expert in self.broken:
            raise OSError(f"layer {self.layer}, expert {expert} is gone")
        return {"gate": (self.layer, expert, "gate"), "up": (self.layer, expert, "up")}


@pytest.fixture
def opened() -> Iterator[list[Residency]]:
    made: list[Residency] = []
    yield made
    for residency in made:
        residency.close()


def run_pass(residency: Residency, layer: int, experts: Sequence[int]) -> None:
    residency.expect(layer, experts)
    for expert in experts:
        for name in ("gate", "up"):
            assert residency.get(layer, expert)[name] == (layer, expert, name)
            assert residency.held_bytes <= residency.capacity_bytes


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sets(st.integers(0, 7), min_size=1)), min_size=1, max_size=30),
    st.integers(2, 34),
    st.integers(1, 3),
)
def test_any_passes_at_any_size(passes: list[tuple[int, set[int]]], held: int, threads: int) -> None:
    shelves = {layer: Shelf(layer) for layer in range(4)}
    residency = Residency(shelves, 10 * held + 3, threads)
    counts: dict[str, float] = {}
    for layer, experts in passes:
        run_pass(residency, layer, sorted(experts))
        for name, number in residency.take_counts().items():
            counts[name] = counts.get(name, 0) + number
    residency.close()
    asked = sum(len(experts) for _, experts in passes)
    assert counts.get("expert_hits", 0) + counts["expert_misses"] == asked
    assert residency.most_bytes <= residency.capacity_bytes
    read = sum(len(shelf.fetched) for shelf in shelves.values())
    assert read >= len({(layer, e) for layer, experts in passes for e in experts})
    assert 10 * counts["expert_misses"] <= counts["expert_bytes_read"] + 10 * counts.get("expert_evictions", 0)
    if held >= 32:
        assert read == len({(layer, e) for layer, experts in passes for e in experts}), "all fit: each is read once"


def test_layers_of_different_sizes_share_one_budget(opened: list[Residency]) -> None:
    shelves = {0: Shelf(0, expert_bytes=7), 2: Shelf(2, expert_bytes=20), 5: Shelf(5, expert_bytes=11)}
    residency = Residency(shelves, 40)
    opened.append(residency)
    draw = random.Random(3)
    for step in range(60):
        for layer in shelves:
            run_pass(residency, layer, sorted(draw.sample(range(8), 1 + step % 5)))
    assert residency.most_bytes <= 40
    with pytest.raises(ValueError, match="2 experts take 40 bytes"):
        Residency(shelves, 39)


def test_what_is_used_often_stays(opened: list[Residency]) -> None:
    """Two experts of each layer are chosen in every step, others once in a while: the two stay, which a queue by the
    last use alone would lose in every round."""
    shelves = {layer: Shelf(layer, num_experts=64) for layer in range(4)}
    residency = Residency(shelves, 10 * 14)
    opened.append(residency)
    for step in range(40):
        for layer in range(4):
            run_pass(residency, layer, [0, 1, 2 + step % 60])
    for shelf in shelves.values():
        assert shelf.fetched.count(0) <= 2 and shelf.fetched.count(1) <= 2


def test_old_fame_fades(opened: list[Residency]) -> None:
    shelves = {0: Shelf(0, num_experts=8)}
    residency = Residency(shelves, 30)
    opened.append(residency)
    for _ in range(500):
        run_pass(residency, 0, [0, 1])
    for _ in range(700):
        run_pass(residency, 0, [5, 6, 7])
    shelves[0].fetched.clear()
    run_pass(residency, 0, [5, 6, 7])
    assert not shelves[0].fetched, "the new favourites are held"


def test_the_next_layer_is_read_ahead_by_what_it_chose_last(opened: list[Residency]) -> None:
    shelves = {0: Shelf(0), 1: Shelf(1)}
    residency = Residency(shelves, 10 * 5)
    opened.append(residency)
    run_pass(residency, 0, [1, 2])
    run_pass(residency, 1, [3, 4])
    run_pass(residency, 0, [5, 6, 7])
    residency.take_counts()
    run_pass(residency, 0, [1, 2])
    waited(shelves[1], {3, 4})
    before = len(shelves[1].fetched)
    run_pass(residency, 1, [3, 4])
    assert len(shelves[1].fetched) == before, "they were there, or had come meanwhile"
    assert residency.take_counts()["expert_hits"] >= 2


def waited(shelf: Shelf, experts: set[int]) -> None:
    for _ in range(200):
        if experts <= set(shelf.fetched):
            return
        time.sleep(0.005)
    raise AssertionError(f"{experts} were not read ahead: {shelf.fetched}")


def test_reads_go_on_while_an_expert_is_in_use(opened: list[Residency]) -> None:
    shelf = Shelf(0, seconds=0.02)
    residency = Residency({0: shelf}, 20)
    opened.append(residency)
    residency.expect(0, [0, 1, 2, 3])
    residency.get(0, 0)
    for _ in range(200):
        if 1 in shelf.fetched:
            break
        time.sleep(0.005)
    assert 1 in shelf.fetched, "expert 1 comes while 0 is in use"
    for expert in (1, 2, 3):
        assert residency.get(0, expert)["gate"] == (0, expert, "gate")


def test_what_cannot_be_read_is_an_error_each_time_and_nothing_else_suffers(opened: list[Residency]) -> None:
    shelf = Shelf(0, broken={2})
    residency = Residency({0: shelf}, 30)
    opened.append(residency)
    for _ in range(3):
        residency.expect(0, [0, 2, 3])
        assert residency.get(0, 0)["gate"] == (0, 0, "gate")
        with pytest.raises(OSError, match="expert 2 is gone"):
            residency.get(0, 2)
        assert residency.get(0, 3)["up"] == (0, 3, "up")
        assert residency.held_bytes <= 30
    shelf.broken.clear()
    run_pass(residency, 0, [1, 2, 3])


def test_a_failed_read_ahead_troubles_nobody_who_does_not_ask(opened: list[Residency]) -> None:
    shelves = {0: Shelf(0), 1: Shelf(1)}
    residency = Residency(shelves, 40)
    opened.append(residency)
    run_pass(residency, 0, [0, 1])
    run_pass(residency, 1, [2, 3])
    shelves[1].broken = {2, 3}
    for _ in range(3):
        run_pass(residency, 0, [4, 5])
        run_pass(residency, 0, [0, 1])
        run_pass(residency, 1, [6, 7])


def test_asking_without_expecting_works(opened: list[Residency]) -> None:
    residency = Residency({0: Shelf(0), 1: Shelf(1)}, 20)
    opened.append(residency)
    for layer, expert in ((0, 3), (1, 3), (0, 3), (0, 7), (0, 1)):
        assert residency.get(layer, expert)["gate"] == (layer, expert, "gate")


def test_many_held_experts_cost_little_to_choose_among(opened: list[Residency]) -> None:
    """As many as a large host holds: a pass of 16 over 20,000 held ones within a few milliseconds each."""
    shelves = {layer: Shelf(layer, num_experts=896) for layer in range(40)}
    residency = Residency(shelves, 10 * 20_000)
    opened.append(residency)
    draw = random.Random(0)
    for layer in range(40):
        run_pass(residency, layer, range(520))
    began, passes = time.perf_counter(), 0
    for layer in range(40):
        run_pass(residency, layer, sorted(draw.sample(range(896), 16)))
        passes += 1
    assert (time.perf_counter() - began) / passes < 0.05
    assert residency.held_bytes <= residency.capacity_bytes


def test_a_stack_is_indexed_as_a_tensor_is(opened: list[Residency]) -> None:
    residency = Residency({4: Shelf(4)}, 20)
    opened.append(residency)
    stack = FetchedStack(residency, 4, "up", (8, 3, 5))
    stack.expect([1, 6])
    assert stack[1] == (4, 1, "up") and stack[6] == (4, 6, "up") and len(stack) == 8 and stack.shape == (8, 3, 5)


def test_no_thread_is_left_behind() -> None:
    before = threading.active_count()
    residency = Residency({0: Shelf(0)}, 20, threads=4)
    run_pass(residency, 0, range(8))
    residency.close()
    for _ in range(200):
        if threading.active_count() <= before:  # a thread of an earlier test may end meanwhile
            return
        time.sleep(0.01)
    raise AssertionError(f"{threading.active_count() - before} threads are left")
