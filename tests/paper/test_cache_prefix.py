"""Prefix reuse: what makes a key, when a page may be reused, and why not more was."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.cache.layout import lay_out
from dayzero.cache.manager import CacheManager
from dayzero.cache.prefix import Chain, Media, PageIndex, PrefixSearch, Remembered, root_key
from tests.paper.cache_world import LAYOUTS, PAGE, tokens_need, world

IMAGE, OTHER = b"\x01" * 32, b"\x02" * 32
PLACEHOLDER = 9
NOTHING = "No cached sequence begins with these tokens under this salt."


def keys(
    tokens: list[int], *, salt: str | None = None, media: tuple[Media, ...] = (), plan: bytes = b""
) -> list[bytes]:
    chain = Chain(root_key(plan, salt, PAGE), PAGE, media)
    chain.grow(tokens, len(tokens) // PAGE)
    return chain.keys


def same(a: list[bytes], b: list[bytes]) -> list[bool]:
    return [x == y for x, y in zip(a, b, strict=True)]


def test_a_key_holds_all_tokens_before_it() -> None:
    base = list(range(12))
    assert same(keys(base), keys([*base[:5], 99, *base[6:]])) == [True, False, False]
    assert len(set(keys([7] * 12))) == 3, "equal pages at different places"


def test_a_chain_grows_as_tokens_become_known() -> None:
    tokens = list(range(20))
    chain = Chain(root_key(b"", None, PAGE), PAGE)
    for known in (3, 4, 9, 9, 20):
        chain.grow(tokens[:known], known // PAGE)
    assert chain.keys == keys(tokens)


@pytest.mark.parametrize("salts", [(None, "a"), (None, ""), ("", "a"), ("a", "b")])
def test_salts_separate(salts: tuple[str | None, str | None]) -> None:
    assert not any(same(keys([1] * 8, salt=salts[0]), keys([1] * 8, salt=salts[1])))


def test_plans_separate_and_are_not_mistaken_for_salts() -> None:
    assert not any(same(keys([1] * 8, plan=b"p"), keys([1] * 8, plan=b"q")))
    assert root_key(b"xsalta", None, PAGE) != root_key(b"x", "a", PAGE)
    assert root_key(b"", None, 4) != root_key(b"", None, 8)


def test_two_images_of_one_size_are_told_apart_in_either_order() -> None:
    """Placeholder ids are equal; pages before the first difference are shared, all from it on are not."""
    tokens = [1, 2, *[PLACEHOLDER] * 6, 3, 4, *[PLACEHOLDER] * 6, 5, 6, 7, 8]
    ab: tuple[Media, ...] = ((IMAGE, 2, 6), (OTHER, 10, 6))
    ba: tuple[Media, ...] = ((OTHER, 2, 6), (IMAGE, 10, 6))
    aa: tuple[Media, ...] = ((IMAGE, 2, 6), (IMAGE, 10, 6))
    assert same(keys(tokens, media=ab), keys(tokens, media=ba)) == [False] * 5
    assert same(keys(tokens, media=ab), keys(tokens, media=aa)) == [True, True, False, False, False]
    assert keys(tokens, media=ab) == keys(tokens, media=ab[::-1]), "in whatever order they are listed"
    assert not any(same(keys(tokens, media=ab), keys(tokens)))


def test_the_place_of_an_image_within_a_page_counts() -> None:
    tokens = [PLACEHOLDER] * 8
    first, second = keys(tokens, media=((IMAGE, 0, 2),)), keys(tokens, media=((IMAGE, 1, 2),))
    assert first != second
    assert keys(tokens, media=((IMAGE, 0, 6),))[0] != keys(tokens, media=((IMAGE, -0, 8),))[0], "another scaling"


def test_an_image_changes_the_pages_it_overlaps_and_those_behind() -> None:
    tokens = [1] * 20
    assert same(keys(tokens), keys(tokens, media=((IMAGE, 8, 4),))) == [True, True, False, False, False]
    assert same(keys(tokens), keys(tokens, media=((IMAGE, 7, 1),))) == [True, False, False, False, False]


def test_media_and_salt_reach_the_keys() -> None:
    cache = CacheManager(LAYOUTS["tokens"], 100, debug=True)
    tokens = [PLACEHOLDER] * 10

    def run(name: str, salt: str | None, media: tuple[Media, ...]) -> int:
        opened = cache.open(name, tokens, salt=salt, media=media)
        assert opened is not None and cache.extend(name, 10)
        cache.retire(name, 10, tokens)
        cache.close(name)
        return opened.hit

    a: tuple[Media, ...] = ((IMAGE, 0, 5),)
    b: tuple[Media, ...] = ((OTHER, 0, 5),)
    assert [run("1", None, a), run("2", None, b), run("3", "s", a)] == [0, 0, 0]
    assert [run("4", None, a), run("5", None, b), run("6", "s", a), run("7", "s", b)] == [8, 8, 8, 0]


# --- when -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tokens", "shared", "hybrid"])
def test_nothing_of_a_step_is_reusable_before_it_has_retired(name: str) -> None:
    here = world(name)
    prompt = list(range(9))
    first = here.open(prompt)
    assert first
    while first.scheduled < 9:
        here.schedule(first, 9)
    second = here.open(prompt)
    assert second and second.opened.hit == 0 and second.opened.why == NOTHING
    here.retire()
    third = here.open(prompt)
    assert third and third.opened.hit == 8
    here.end()


def test_of_two_that_compute_a_page_at_the_same_time_the_first_to_retire_publishes() -> None:
    here = world("tokens")
    prompt = list(range(9))
    first, second = here.open(prompt), here.open(prompt)
    assert first and second
    here.schedule(first, 9)
    here.schedule(second, 9)
    here.retire()
    here.retire()
    assert here.cache.sums()["tokens.cached"] == 2
    owned = [set(here.cache.inventory(r.id)["tokens"]) for r in (first, second)]
    assert not owned[0] & owned[1]
    here.close(first)
    assert here.cache.sums()["tokens.evictable"] == 2
    here.close(second)
    assert here.cache.sums()["tokens.cached"] == here.cache.sums()["tokens.evictable"] == 2


def test_shared_pages_are_held_by_all_who_use_them() -> None:
    here = world("tokens")
    here.run([1] * 9)
    first, second = here.open([1] * 9), here.open([1] * 12)
    assert first and second
    assert here.cache.inventory(first.id)["tokens"] == here.cache.inventory(second.id)["tokens"]
    assert here.cache.sums()["tokens.referenced"] == 2
    here.close(first)
    here.cache.forget()
    assert here.cache.sums()["tokens.cached"] == 2, "the other one holds them"
    here.end()


def test_answers_are_reusable_too() -> None:
    here = world("tokens")
    request = here.open([1, 2, 3])
    assert request
    while request.scheduled < 11:
        here.schedule(request, max(3, request.scheduled + 1))
        here.retire()
    here.close(request)
    assert here.run([*request.tokens[:11], 7]).hit == 8


def test_tokens_not_known_when_a_step_retires_stay_private() -> None:
    """The last id may have been dropped after a late stop."""
    cache = CacheManager(LAYOUTS["tokens"], 10, debug=True)
    assert cache.open("a", [1] * 7)
    assert cache.extend("a", 8)
    cache.retire("a", 7, [1] * 7)
    cache.retire("a", 8, [1] * 7)
    cache.close("a")
    assert cache.sums()["tokens.cached"] == 1


def test_the_last_pages_of_a_sequence_are_evicted_first() -> None:
    here = world("tokens", 9)
    here.run([1] * 33)
    here.run([2] * 9)
    assert here.cache.stats.evictions == 2
    assert here.run([1] * 33).hit == 24, "8 pages were published, 2 went"


# --- windows ----------------------------------------------------------------------------------------------------


def test_pages_that_fell_out_of_the_window_are_released_when_the_step_retires() -> None:
    """Window 6, pages of 4: the query at position p sees p-5 .. p."""
    here = world("window")
    request = here.open([1])
    assert request
    for position in range(24):
        here.schedule(request, position + 1)
        held = here.cache.inventory(request.id)["tokens.w6"]
        assert len(held) == position // PAGE + 1 - max(0, position - 5) // PAGE
        here.retire()
        held = here.cache.inventory(request.id)["tokens.w6"]
        assert len(held) == position // PAGE + 1 - max(0, position + 1 - 5) // PAGE
    here.end()


def test_in_flight_steps_keep_their_window() -> None:
    here = world("window")
    request = here.open([1])
    assert request
    for position in range(24):
        here.schedule(request, position + 1)
        if position:
            here.retire()  # the step before; execution checks what this one and the next one read
    here.end()


def test_with_windows_only_the_pages_in_the_window_are_needed() -> None:
    here = world("window", 4)
    here.run(list(range(33)))
    sums = here.cache.sums()
    assert sums["tokens.w6.cached"] < 8, "the pool is too small for all of its pages"
    opened = here.run(list(range(33)))
    assert (opened.hit, opened.why) == (32, "")


def test_a_window_group_limits_a_hit_when_its_pages_are_gone() -> None:
    """The full group still matches; the window before the end of the match was evicted."""
    here = world("shared")
    prompt = list(range(17))
    here.run(prompt)
    pool, index = here.cache._pool, here.cache._reuse.indices[1]
    assert index.group.window == 10
    lost = index.blocks[keys(prompt)[2]]
    pool.evict(index.number, lost)
    opened = here.run(prompt)
    assert opened.hit == 8
    assert opened.why == (
        "The first 16 tokens match, but pages of group tokens.w10 in the window before 16 were evicted; 8 restored."
    )


# --- why --------------------------------------------------------------------------------------------------------


def test_why_is_empty_when_nothing_more_could_be_restored() -> None:
    here = world("tokens")
    assert here.run([1]).why == "" and here.run([1] * 4).why == ""
    assert here.run([2] * 5).why == NOTHING
    assert here.run([2] * 5).why == ""


def test_why_names_the_first_tokens_that_differ() -> None:
    here = world("tokens")
    here.run([1] * 17)
    opened = here.run([1] * 9 + [2] * 8)
    assert (opened.hit, opened.why) == (8, "No cached sequence goes on with tokens 8 to 11.")


def test_why_tells_an_evicted_page() -> None:
    here = world("tokens", 8)
    here.run([1] * 13)
    here.run([2] * 30)
    opened = here.run([1] * 13)
    assert opened.hit == 0 and opened.why == "The page of tokens 0 to 3 was evicted from group tokens."


def test_why_says_that_the_prefix_cache_is_off() -> None:
    here = world("hybrid", prefix=False)
    assert here.run([1] * 9).hit == 0
    opened = here.run([1] * 9)
    assert (opened.hit, opened.why) == (0, "The prefix cache is off.")
    assert here.cache.sums()["tokens.cached"] == 0
    assert here.cache.lines() == [("prefix cache", "off")]


def test_why_names_a_missing_snapshot() -> None:
    """Two prompts part at token 12: the pages of the first 12 are cached, but the state is known at 20 only."""
    here = world("hybrid", snapshot_tokens=400)
    here.run([1] * 21)
    opened = here.run([1] * 12 + [2] * 9)
    assert opened.hit == 0
    assert opened.why == (
        "The first 12 tokens match, but there is no state to go on from at 12: no snapshot was taken there; 0 restored."
    )
    third = here.run([1] * 12 + [3] * 9)
    assert third.hit == 12, "where the second one branched off, a snapshot was taken"
    assert third.why == "No cached sequence goes on with tokens 12 to 15."


def test_why_names_a_snapshot_that_was_evicted() -> None:
    size = LAYOUTS["hybrid"].state_footprint
    here = world("hybrid", snapshot_tokens=400, snapshot_bytes=size)
    here.run([1] * 9)
    here.run([2] * 9)
    opened = here.run([1] * 9)
    assert opened.hit == 0
    assert opened.why == (
        "The first 8 tokens match, but there is no state to go on from at 8: its snapshot was evicted; 0 restored."
    )


def test_why_says_that_snapshots_do_not_fit() -> None:
    here = world("hybrid", snapshot_bytes=100)
    here.run([1] * 9)
    why = here.run([1] * 9).why
    assert "no state to go on from at 8: a snapshot takes 3.00 KiB, and the budget for all is 100 B; 0 restored" in why
    assert here.cache.lines()[0][1].startswith("nothing can be reused: a snapshot takes 3.00 KiB")


def test_never_too_many_keys_are_remembered() -> None:
    kept = Remembered(3)
    for key in (b"a", b"b", b"a", b"c", b"d"):
        kept.add(key)
    assert [key in kept for key in (b"a", b"b", b"c", b"d")] == [True, False, True, True]


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 63, 64, 65])
@pytest.mark.parametrize("page", [1, 4, 64])
def test_the_first_page_that_is_needed(window: int, page: int) -> None:
    group = lay_out([tokens_need("a.k", window=window)], dtype="bf16", page_tokens=page).groups[0]
    for n in range(6):
        seen = range(max(0, n * page - window + 1), n * page)  # by the first token that will be computed
        assert PageIndex(group, 0).first_needed(n) == (seen[0] // page if seen else n)


WINDOWS = st.lists(st.sampled_from([None, 1, 4, 5, 6, 9, 13]), max_size=3, unique=True)


class Shots:
    """Snapshots, as a search sees them."""

    def __init__(self, held: set[bytes]) -> None:
        self.held, self.gone, self.why_none = held, Remembered(), ""


@settings(max_examples=200, deadline=None)
@given(windows=WINDOWS, data=st.data(), num_pages=st.integers(0, 8))
def test_the_longest_prefix_that_all_groups_can_restore_is_found(
    windows: list[int | None], data: st.DataObject, num_pages: int
) -> None:
    """Against every length tried in turn, by the words of the definition."""
    chain = keys(list(range(num_pages * PAGE)))
    needs = [tokens_need(f"{i}.k", window=window) for i, window in enumerate(windows)]
    groups = lay_out(needs, dtype="bf16", page_tokens=PAGE).groups if needs else ()
    indices = [PageIndex(group, i) for i, group in enumerate(groups)]
    for index in indices:
        for page in data.draw(st.sets(st.integers(0, 7))) ^ {0, 1, 2, 3}:
            if page < num_pages:
                index.put(chain[page], page)
    shots = data.draw(st.none() | st.builds(Shots, st.just(set(chain[:1] + chain[3:]))))
    search = PrefixSearch(indices, PAGE)
    search.retired(chain)

    def restorable(n: int) -> bool:
        for index in indices:
            window = index.group.window
            for position in range(n * PAGE):
                seen = window is None or position > n * PAGE - window
                if seen and chain[position // PAGE] not in index.blocks:
                    return False
        return n == 0 or shots is None or chain[n - 1] in shots.held

    found = search.find(chain, shots)
    assert found.pages == max(n for n in range(num_pages + 1) if restorable(n))
    assert found.pages <= found.matched <= num_pages
    assert bool(found.why) == (found.pages < num_pages)
