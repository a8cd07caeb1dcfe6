"""Snapshots of recurrent state: where they are taken, what they cost, when they go."""

from __future__ import annotations

import pytest

from dayzero.cache.layout import lay_out
from dayzero.cache.manager import CacheManager
from tests.paper.cache_world import CONV, DELTA, LAYOUTS, LOCAL, PAGE, Request, World, layers, world
from tests.paper.model_configs import real

SIZE = LAYOUTS["hybrid"].state_footprint


def held(here: World) -> int:
    return here.cache.sums()["snapshots"]


def ends(here: World, request: Request, until: int, budget: int = 1000) -> list[int]:
    """Ends of the chunks of a prompt."""
    out = []
    while request.scheduled < until:
        out.append(here.schedule(request, min(until, request.scheduled + budget)))
        here.retire()
    return out


def decode(here: World, request: Request, until: int) -> None:
    while request.scheduled < until:
        here.schedule(request, request.scheduled + 1)
        here.retire()


# --- chunks -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("length", "expected"), [(3, [3]), (4, [4]), (5, [4, 5]), (8, [4, 8]), (9, [8, 9])])
def test_a_prompt_ends_a_chunk_at_its_last_page_boundary(length: int, expected: list[int]) -> None:
    here = world("hybrid", snapshot_tokens=400)
    request = here.open([1] * length)
    assert request and ends(here, request, length) == expected


def test_chunks_end_at_page_boundaries_and_every_snapshot_tokens() -> None:
    here = world("hybrid", snapshot_tokens=12)
    request = here.open([1] * 31)
    assert request and ends(here, request, 31, budget=10) == [8, 12, 20, 24, 28, 31]
    assert held(here) == here.cache.stats.snapshots_taken == 3, "at 12, 24 and 28"


def test_without_states_only_the_budget_cuts_a_prompt() -> None:
    here = world("tokens")
    request = here.open([1] * 31)
    assert request and ends(here, request, 31) == [31]
    request = here.open([2] * 31)
    assert request and ends(here, request, 31, budget=10) == [8, 16, 24, 31]
    request = here.open([3] * 9)
    assert request and ends(here, request, 9, budget=3) == [3, 4, 7, 9], "less than a page at a time"


def test_a_prompt_is_not_cut_where_its_snapshot_is_held() -> None:
    here = world("hybrid", snapshot_tokens=8)
    here.run([1] * 17)
    other = here.open([1] * 17)
    assert other and other.opened.hit == 16
    request = here.open([1] * 16 + [2] * 10)
    assert request and request.opened.hit == 16
    assert ends(here, request, 26) == [24, 26]
    here.end()


# --- policy -----------------------------------------------------------------------------------------------------


def test_the_next_turn_restores_the_end_of_the_one_before() -> None:
    here = world("hybrid", snapshot_tokens=400)
    first = here.open([1] * 9)
    assert first
    ends(here, first, 9)
    decode(here, first, 22)
    assert held(here) == 2, "of the prompt, and the newest of the answer"
    here.close(first)
    second = here.open([*first.tokens[:22], 5, 5, 5])
    assert second and second.opened.hit == 20
    assert second.opened.before[0].group == "state" and len(second.opened.before[0].source) == 3
    ends(here, second, 25)
    here.end()


def test_a_provisional_snapshot_is_replaced_by_the_next_one() -> None:
    here = world("hybrid", snapshot_tokens=400)
    request = here.open([1])
    assert request
    for end, expected in ((4, 1), (8, 1), (23, 1)):
        decode(here, request, end)
        assert held(here) == expected
    here.close(request)
    assert here.run([*request.tokens[:20], 5]).hit == 20
    assert here.run([*request.tokens[:8], 5, 5]).hit == 0


def test_a_provisional_snapshot_that_another_request_used_stays() -> None:
    here = world("hybrid", snapshot_tokens=400)
    request = here.open([1])
    assert request
    decode(here, request, 9)
    assert here.run([*request.tokens[:8], 7]).hit == 8
    decode(here, request, 20)
    assert here.run([*request.tokens[:8], 6]).hit == 8
    here.end()


def test_regular_snapshots_of_an_answer_stay() -> None:
    here = world("hybrid", snapshot_tokens=8)
    request = here.open([1])
    assert request
    decode(here, request, 30)
    assert held(here) == 4, "8, 16, 24 and the provisional one at 28"
    here.close(request)
    assert here.run([*request.tokens[:16], 5]).hit == 16


@pytest.mark.parametrize("finished", [True, False])
def test_a_request_that_was_preempted_finds_its_newest_snapshot(finished: bool) -> None:
    here = world("hybrid", snapshot_tokens=400)
    request = here.open([1] * 6)
    assert request
    ends(here, request, 6)
    decode(here, request, 14)
    here.close(request, finished=finished)
    back = here.open(request.tokens)
    assert back and back.opened.hit == 12
    here.end()


def test_a_branch_gets_a_snapshot_where_no_group_keeps_all_pages() -> None:
    here = world("states", snapshot_tokens=400)
    here.run([1] * 21)
    here.run([1] * 12 + [2] * 9)
    assert here.run([1] * 12 + [3] * 9).hit == 12


def test_two_that_take_the_same_snapshot_keep_one() -> None:
    here = world("hybrid", snapshot_tokens=400)
    first, second = here.open([1] * 9), here.open([1] * 9)
    assert first and second
    for request in (first, second, first, second):
        here.schedule(request, 9)
    while here.steps:
        here.retire()
    assert held(here) == 1 and here.cache.stats.snapshots_taken == 2
    assert here.cache.sums()["snapshot_bytes"] == SIZE
    here.end()


def test_a_snapshot_whose_step_never_retired_is_given_up() -> None:
    cache = CacheManager(LAYOUTS["hybrid"], 100, debug=True)
    start = cache.sums()
    assert cache.open("a", [1] * 9) and cache.extend("a", 8)
    assert cache.ran("a", 8)
    assert cache.sums()["snapshot_bytes"] == SIZE
    cache.close("a")
    assert cache.sums() == start


def test_a_snapshot_stays_until_the_step_that_restores_it_has_retired() -> None:
    here = world("hybrid", snapshot_tokens=400)
    here.run([1] * 9)
    request = here.open([1] * 9)
    assert request and request.opened.hit == 8
    here.cache.forget()
    assert held(here) == 1
    here.schedule(request, 9)
    here.retire()
    here.cache.forget()
    assert held(here) == 0
    here.end()


def test_tokens_not_known_when_a_step_retires_leave_no_snapshot() -> None:
    """The last id was dropped after a late stop."""
    cache = CacheManager(LAYOUTS["hybrid"], 100, debug=True)
    assert cache.open("a", [1] * 7) and cache.extend("a", 8) and cache.ran("a", 8)
    cache.retire("a", 8, [1] * 7)
    assert cache.sums()["snapshots"] == cache.sums()["snapshot_bytes"] == 0
    cache.close("a")
    assert cache.sums()["tokens.cached"] == 1


# --- budget and room --------------------------------------------------------------------------------------------


def test_the_budget_holds_and_the_least_recently_used_goes() -> None:
    here = world("hybrid", snapshot_tokens=400, snapshot_bytes=2 * SIZE)
    here.run([1] * 9)
    here.run([2] * 9)
    assert here.run([1] * 9).hit == 8
    here.run([3] * 9)
    assert held(here) == 2 and here.cache.sums()["snapshot_bytes"] == 2 * SIZE
    assert [here.run([token] * 9).hit for token in (1, 3)] == [8, 8]
    assert here.run([2] * 9).hit == 0


def test_the_budget_does_not_take_what_is_about_to_be_restored() -> None:
    here = world("hybrid", snapshot_tokens=400, snapshot_bytes=SIZE)
    here.run([1] * 9)
    request = here.open([1] * 9)
    assert request and request.opened.hit == 8
    here.run([2] * 9)
    assert here.cache.stats.snapshots_taken == 1
    here.schedule(request, 9)
    here.retire()
    here.end()


def test_an_answer_under_a_full_budget_replaces_its_own_snapshot_first() -> None:
    here = world("hybrid", snapshot_tokens=400, snapshot_bytes=2 * SIZE)
    here.run([1] * 9)
    request = here.open([2])
    assert request
    decode(here, request, 30)
    assert here.run([1] * 9).hit == 8
    here.close(request)


def test_a_snapshot_leaves_every_sequence_a_page_to_go_on() -> None:
    """A slab holds 1 block of state or 2 pages; the working state takes 3 slabs, so does a snapshot."""
    assert [g.blocks_per_slab for g in LAYOUTS["hybrid"].groups] == [2, 1]
    for num_slabs, taken in ((8, 1), (7, 0)):
        here = world("hybrid", num_slabs, snapshot_bytes=1 << 30, snapshot_tokens=400)
        request = here.open([1] * 9)
        assert request and ends(here, request, 9) == [8, 9]
        assert here.cache.stats.snapshots_taken == taken, num_slabs
        here.end()


@pytest.mark.parametrize("tight", ["budget", "pool"])
def test_the_end_of_a_finished_turn_counts_as_just_used(tight: str) -> None:
    """Its snapshot is older than that of another prompt, but the turn finished after that."""
    here = world("hybrid", 22, snapshot_tokens=400, snapshot_bytes=2 * SIZE if tight == "budget" else 1 << 30)
    answer = here.open([1])
    assert answer
    decode(here, answer, 5)
    here.run([2] * 5)
    here.close(answer)
    assert held(here) == 2
    if tight == "budget":
        here.run([3] * 5)
    else:
        while held(here) == 2:
            assert here.open([4])
        here.end()
    assert here.run([*answer.tokens[:4], 9]).hit == 4
    assert here.run([2] * 5).hit == 0


def test_pages_behind_which_a_sequence_branched_off_count_as_used() -> None:
    """They will be restored together with the snapshot that it takes there."""
    here = world("hybrid", snapshot_tokens=400)
    here.run([1] * 21)
    here.run([5] * 21)
    request = here.open([1] * 12 + [2] * 9)
    assert request and request.opened.hit == 0
    index, pool = here.cache._reuse.indices[0], here.cache._pool
    keys = here.cache._open[request.id].chain.keys
    assert list(pool.shelves[0].evictable)[-3:] == [index.blocks[keys[page]] for page in (2, 1, 0)]
    here.end()


def test_a_snapshot_is_evicted_as_a_whole() -> None:
    here = world("hybrid", 8, snapshot_bytes=1 << 30, snapshot_tokens=400)
    here.run([1] * 9)
    assert here.cache.sums()["state.cached"] == 3 and here.cache.stats.evictions == 0
    request = here.open([2])
    assert request and ends(here, request, 1) == [1] and held(here) == 1
    decode(here, request, 9)
    sums = here.cache.sums()
    assert (sums["state.cached"], sums["snapshots"]) == (3, 1), "the old one has gone, the new one has come"
    assert here.cache.sums()["snapshot_bytes"] == SIZE
    assert here.cache.stats.evictions == 4, "2 pages, the old snapshot, and the provisional one before the last"
    here.end()


# --- defaults ---------------------------------------------------------------------------------------------------


def test_by_default_snapshots_lie_as_far_apart_as_weighs_what_one_weighs() -> None:
    large = CacheManager(lay_out(real("kimi_k3").spec.cache(), dtype="bf16"), 400)
    assert large.snapshot_tokens == 254 * 64, "16,253 tokens, rounded up to pages"
    text = dict(large.lines())["prefix cache"]
    assert text == (
        "on, smallest reusable prefix 64 tokens; snapshots of 428.55 MiB every 16,256 tokens and at the ends of "
        "prompts and turns, 1.21 GiB at most"
    )
    plain = CacheManager(lay_out(real("qwen3_8b").spec.cache(), dtype="bf16"), 4)
    assert plain.snapshot_tokens is None
    assert dict(plain.lines())["prefix cache"] == "on, smallest reusable prefix 64 tokens"
    assert CacheManager(LAYOUTS["hybrid"], 4, snapshot_tokens=5).snapshot_tokens == 8
    windows = lay_out(layers(1, LOCAL) + layers(1, DELTA, CONV), dtype="bf16", page_tokens=PAGE)
    assert CacheManager(windows, 4).snapshot_tokens == 1024, "no rows grow with the context"


def test_what_can_never_fit_is_told_with_the_numbers() -> None:
    cache = CacheManager(LAYOUTS["hybrid with windows"], 4)
    assert cache.why_never(6 * PAGE) is None
    assert cache.why_never(6 * PAGE + 1) == (
        "A sequence of 25 tokens needs 5 slabs of the cache (tokens: 7 blocks, tokens.w6: 4 blocks, state: 2 blocks, "
        "state.1: 1 block), but there are 4; give the cache more memory or ask for fewer tokens."
    )
