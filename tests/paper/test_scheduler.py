"""The scheduler, against a machine on which any wrong table, copy, slot or token changes the answer."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayzero.cache.layout import Layout
from dayzero.engine.grammar_words import TOO_COMPLEX
from dayzero.engine.request import NewRequest
from dayzero.engine.step import RowResult, StepResult
from tests.paper.step_driver import STOP_IDS, Driver, layout_of, prompt, request

KINDS = ("dense", "window", "hybrid", "mixed")
CHUNKS = (1, 7, 16, 63, 64, 65, None)
LAYOUTS = {(kind, page): layout_of(kind, page) for kind in KINDS for page in (4, 64)}


def least_slabs(layout: Layout, num_tokens: int) -> int:
    """Slabs of the smallest pool that one sequence of ``num_tokens`` fits into when it is alone."""
    return next(n for n in itertools.count(1) if Driver(layout, n).scheduler.manager.why_never(num_tokens) is None)


# --- equalities ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_chunking_gives_the_same_answer(kind: str, chunk: int | None) -> None:
    driver = Driver(LAYOUTS[kind, 64], 60, chunk_tokens=chunk, max_step_tokens=256, max_model_len=600)
    for i, length in enumerate((1, 63, 64, 65, 200)):
        driver.add(request(f"r{i}", prompt(length, i), logprobs=0, prompt_logprobs=0 if i % 2 else None))
    driver.run()
    for name in driver.requests:
        driver.check_answer(name)
    longest = max(row.count for step in driver.machine.steps for row in step.rows)
    assert longest <= (chunk or 256)
    driver.check_idle()


@st.composite
def loads(draw: st.DrawFn) -> list[tuple[int, NewRequest]]:
    """(turn at which it comes, request), with shared prefixes, priorities, leaders and all ways to end."""
    num = draw(st.integers(1, 9))
    out = []
    for i in range(num):
        shared = draw(st.integers(0, 40))
        own = draw(st.integers(0 if shared else 1, 30))
        ids = prompt(shared, 99) + prompt(own, draw(st.integers(0, 3)))
        max_tokens = draw(st.integers(0, 30))
        out.append((
            draw(st.integers(0, 12)),
            request(
                f"r{i}", ids, priority=draw(st.integers(0, 2)), arrival=float(i), max_tokens=max_tokens,
                min_tokens=draw(st.integers(0, max_tokens)), ignore_eos=draw(st.booleans()),
                stop_token_ids=tuple(draw(st.lists(st.integers(0, 96), max_size=3))),
                temperature=draw(st.sampled_from([0.0, 1.0])), seed=draw(st.integers(0, 5)),
                logprobs=draw(st.sampled_from([None, 0])), prompt_logprobs=draw(st.sampled_from([None, None, 0])),
                salt=draw(st.sampled_from([None, None, "a"])),
                leader=f"r{draw(st.integers(0, i - 1))}" if i and draw(st.booleans()) else None,
            ),
        ))  # fmt: skip
    return sorted(out, key=lambda item: item[0])


@st.composite
def engines(draw: st.DrawFn) -> Driver:
    """A model, a pool between just enough for one request and plenty, and every way of chunking."""
    layout = LAYOUTS[draw(st.sampled_from(KINDS)), draw(st.sampled_from([4, 4, 64]))]
    max_running = draw(st.integers(1, 6))
    spare = draw(st.sampled_from([0, 0, 1, 2, 5, 40]))
    return Driver(
        layout,
        _LEAST[layout.groups] + spare,
        max_model_len=110,
        ahead=draw(st.booleans()),
        max_running=max_running,
        max_step_tokens=draw(st.integers(max_running, 24) | st.just(200)),
        chunk_tokens=draw(st.sampled_from(CHUNKS)),
        prefix_cache=draw(st.sampled_from([True, True, True, False])),
        snapshot_tokens=draw(st.sampled_from([None, layout.page_tokens, 2 * layout.page_tokens])),
        snapshot_bytes=draw(st.sampled_from([None, 0, 1 << 20])),
    )


_LEAST = {layout.groups: least_slabs(layout, 110) for layout in LAYOUTS.values()}


def serve(engine: Driver, load: list[tuple[int, NewRequest]], strike: Callable[[str], None] | None = None) -> None:
    """Run the load to its end; nothing may be held afterwards but cached pages, which can be dropped."""
    left = list(load)
    for turn in range(4000):
        while left and left[0][0] <= turn:
            engine.add(left.pop(0)[1])
        if not engine.turn(strike or (lambda point: None)) and not left:
            break
    engine.check_idle()
    engine.scheduler.manager.forget()
    fresh = Driver(engine.machine.layout, engine.machine.num_slabs).scheduler.manager.sums()
    assert engine.scheduler.manager.sums() == fresh


def loaded_engines_answer(engine: Driver, load: list[tuple[int, NewRequest]]) -> None:
    """Batched, chunked, cached, preempted, one ahead: as alone, cold and in one piece; nothing lost or doubled."""
    serve(engine, load)
    for name in engine.requests:
        engine.check_answer(name)


def loaded_engines_bear_aborts(engine: Driver, load: list[tuple[int, NewRequest]], data: st.DataObject) -> None:
    """Whoever is aborted, wherever it stands, was told the beginning of its answer; the others notice nothing."""
    aborted: set[str] = set()

    def maybe_abort(point: str) -> None:
        ids = engine.scheduler.live_ids()
        if ids and data.draw(st.integers(0, 9), label=point) == 0:
            aborted.add(name := data.draw(st.sampled_from(ids), label="who"))
            engine.abort(name)

    serve(engine, load, maybe_abort)
    for name in engine.requests:
        assert (engine.finish(name) == "abort") == (name in aborted)
        (engine.check_part if name in aborted else engine.check_answer)(name)


FEW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
MANY = settings(FEW, max_examples=600)

test_every_request_of_a_load_gets_its_own_answer = FEW(given(engines(), loads())(loaded_engines_answer))
test_aborts_anywhere_leave_nothing_behind = FEW(given(engines(), loads(), st.data())(loaded_engines_bear_aborts))
test_many_loads = pytest.mark.slow(MANY(given(engines(), loads())(loaded_engines_answer)))
test_many_aborts = pytest.mark.slow(MANY(given(engines(), loads(), st.data())(loaded_engines_bear_aborts)))


def test_what_was_restored_and_then_lost_counts_as_computed_again() -> None:
    """One begins with 40 cached tokens and is thrown out; its pages are evicted, and it computes them itself."""
    layout = LAYOUTS["dense", 4]
    driver = Driver(layout, least_slabs(layout, 100), max_model_len=100, max_running=2)
    driver.add(request("first", prompt(41, 1), max_tokens=1, ignore_eos=True))
    driver.run()
    driver.add(request("low", prompt(41, 1), max_tokens=30, ignore_eos=True, priority=1))
    driver.turn()
    driver.add(request("high", prompt(8, 2), max_tokens=92, ignore_eos=True))
    driver.run()
    assert driver.outputs["low"][0].cached == 40
    counters = driver.scheduler.counters()
    assert counters["preemptions"] == 1 and counters["recomputed_tokens"] > 40
    for name in driver.requests:
        driver.check_answer(name)
    driver.check_idle()


# --- aborts -------------------------------------------------------------------------------------------------------

POINTS = ("before schedule", "submitted", "computed", "committed", "sampled")


@pytest.mark.parametrize("kind", ["dense", "mixed"])
@pytest.mark.parametrize("point", POINTS)
def test_a_hundred_aborts_at_each_point_leave_the_sums_as_before(kind: str, point: str) -> None:
    """One victim after the other, each aborted at another turn of its life, beside requests that live on."""
    layout = LAYOUTS[kind, 4]
    driver = Driver(layout, 2 * least_slabs(layout, 200), max_step_tokens=8, max_model_len=200)
    keepers = [request(f"keeper{i}", prompt(9, 50 + i), max_tokens=80, ignore_eos=True) for i in range(50)]
    for i in range(100):
        victim, age, struck = f"victim{i}", i % 13, []
        driver.add(request(victim, prompt(20 + i % 9, i), max_tokens=9, ignore_eos=True))

        def strike(at: str, victim: str = victim, struck: list[str] = struck) -> None:
            if at == point and not struck:
                struck.append(at)
                driver.abort(victim)

        for turn in range(age + 3):  # two more turns, and the last step that named it has retired
            if not driver.scheduler.live_ids() or driver.scheduler.live_ids() == [victim]:
                driver.add(keepers.pop())
            driver.turn(strike if turn >= age else lambda at: None)
        assert struck and driver.finish(victim) in ("abort", "length")
        live, sums = driver.scheduler.live_ids(), driver.scheduler.manager.sums()
        assert victim not in live and driver.scheduler.num_waiting == 0
        held = driver.scheduler.manager.inventory(live[0]) if live else {}
        for group in layout.groups:
            more = sums[f"{group.name}.referenced"] - len(held.get(group.name, ()))
            assert more in ((0,) if group.unit == "token" else (0, len(group.layers))), f"{group.name}: {more} leaked"
    driver.run()
    for name in driver.requests:
        (driver.check_part if name.startswith("victim") else driver.check_answer)(name)
    driver.check_idle()


def test_aborting_what_is_unknown_or_has_ended_says_nothing() -> None:
    driver = Driver(LAYOUTS["dense", 4], 10)
    driver.add(request("a", prompt(5), max_tokens=2, ignore_eos=True))
    driver.run()
    assert driver.scheduler.abort("a") is None and driver.scheduler.abort("never") is None
    driver.add(request("b", prompt(5)))
    driver.abort("b")
    assert driver.scheduler.abort("b") is None
    assert driver.finish("b") == "abort" and driver.tokens("b") == []
    driver.check_idle()


# --- edges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, None])
@pytest.mark.parametrize("length", [31, 32, 33])
def test_edges_of_the_context(length: int, max_tokens: int | None) -> None:
    driver = Driver(LAYOUTS["mixed", 4], 30, max_model_len=32)
    driver.add(request("a", prompt(length), max_tokens=max_tokens, ignore_eos=True))
    driver.run()
    room = 32 - length
    if (max_tokens or 0) > room or room < 0:
        error = driver.outputs["a"][0].error
        assert driver.finish("a") == "error" and error is not None and error[0] == "too_long"
        assert str(length) in error[1] and "32" in error[1]
    else:
        assert driver.finish("a") == "length"
        assert len(driver.tokens("a")) == (room if max_tokens is None else max_tokens)
    driver.check_idle()


def test_no_tokens_asked_for_still_computes_the_prompt() -> None:
    driver = Driver(LAYOUTS["dense", 4], 20, max_step_tokens=8)
    driver.add(request("a", prompt(21), max_tokens=0, prompt_logprobs=0))
    driver.run()
    driver.check_answer("a")
    assert driver.tokens("a") == [] and driver.finish("a") == "length"
    assert [step.num_tokens for step in driver.machine.steps] == [8, 8, 5]
    driver.check_idle()


def test_a_prompt_of_one_token_has_no_prompt_logprobs() -> None:
    driver = Driver(LAYOUTS["dense", 4], 20)
    driver.add(request("a", [5], prompt_logprobs=0))
    driver.run()
    driver.check_answer("a")
    assert driver.outputs["a"][0].prompt_logprobs == []


def test_what_can_never_fit_is_refused_when_it_comes() -> None:
    layout = LAYOUTS["hybrid", 4]
    slabs = least_slabs(layout, 60)
    driver = Driver(layout, slabs)
    longest = next(n for n in range(60, 400) if driver.scheduler.manager.why_never(n + 1) is not None)
    driver.add(request("over", prompt(50), max_tokens=longest - 50 + 2, ignore_eos=True))
    assert driver.finish("over") == "error"
    assert driver.outputs["over"][0].error == ("too_long", driver.scheduler.manager.why_never(longest + 1))
    driver.add(request("just", prompt(50), max_tokens=longest - 50 + 1, ignore_eos=True))  # the last is not computed
    driver.run()
    driver.check_answer("just")
    driver.check_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_two_that_fill_the_pool_alone_take_turns(kind: str) -> None:
    layout = LAYOUTS[kind, 4]
    driver = Driver(layout, _LEAST[layout.groups], max_step_tokens=16, max_model_len=111)
    for i in range(3):
        driver.add(request(f"r{i}", prompt(30, i), max_tokens=81, ignore_eos=True, arrival=float(i)))
    driver.run()
    for name in driver.requests:
        driver.check_answer(name)
    driver.check_idle()


# --- order --------------------------------------------------------------------------------------------------------


def test_lower_priority_numbers_go_first_then_arrival() -> None:
    driver = Driver(LAYOUTS["dense", 4], 40, max_running=1)
    for i, (priority, arrival) in enumerate([(1, 5.0), (0, 7.0), (1, 4.0), (0, 6.0), (0, 6.0)]):
        driver.add(request(f"r{i}", prompt(6, i), priority=priority, arrival=arrival, max_tokens=2, ignore_eos=True))
    driver.run()
    assert driver.order == ["r3", "r4", "r1", "r2", "r0"]


def test_running_requests_get_their_token_in_every_step_beside_a_long_prompt() -> None:
    """A long prompt of a higher priority takes what the budget leaves, and no more."""
    driver = Driver(LAYOUTS["dense", 4], 200, max_running=4, max_step_tokens=8)
    for i in range(3):
        driver.add(request(f"r{i}", prompt(3, i), max_tokens=60, ignore_eos=True, priority=1))
    for _ in range(4):
        driver.turn()
    before = len(driver.machine.steps)
    driver.add(request("long", prompt(150, 9), max_tokens=1, ignore_eos=True, priority=0))
    for _ in range(20):
        driver.turn()
    for step in driver.machine.steps[before:]:
        assert {"r0", "r1", "r2"} <= {row.request_id for row in step.rows}
        assert step.rows[-1].request_id == "long" and step.rows[-1].count in (4, 5)  # 4: to the end of a page


def test_the_first_in_the_queue_is_not_overtaken_by_smaller_ones() -> None:
    layout = LAYOUTS["dense", 4]
    driver = Driver(layout, least_slabs(layout, 100), max_model_len=100)
    driver.add(request("first", prompt(40, 1), max_tokens=20, ignore_eos=True))
    driver.turn()
    driver.add(request("big", prompt(90, 2), max_tokens=2, ignore_eos=True))
    for i in range(5):
        driver.add(request(f"small{i}", prompt(3, i), max_tokens=20, ignore_eos=True))
    driver.run()
    assert driver.order[:2] == ["first", "big"]
    for name in driver.requests:
        driver.check_answer(name)


def test_preemption_takes_the_lowest_priority_and_latest_arrival_first() -> None:
    layout = LAYOUTS["dense", 4]
    driver = Driver(layout, 2 * least_slabs(layout, 60), max_model_len=110)
    order = [("low_early", 1, 1.0), ("low_late", 1, 2.0), ("high_late", 0, 4.0), ("high_early", 0, 3.0)]
    for i, (name, priority, arrival) in enumerate(order):
        new = request(name, prompt(12, i), priority=priority, arrival=arrival, max_tokens=60, ignore_eos=True)
        driver.add(new)
    left, running = [], set()
    while driver.turn():
        still = {seq.id for seq in driver.scheduler._live.running}
        left += [name for name in running - still if driver.finish(name) is None]
        running = still
    for name in driver.requests:
        driver.check_answer(name)
    assert left[:3] == ["low_late", "low_early", "high_late"] and "high_early" not in left
    assert driver.scheduler.counters()["preemptions"] == len(left)
    ended = sorted(driver.requests, key=lambda name: driver.outputs[name][-1].times["finished"])
    assert ended.index("high_early") == 0 and ended.index("low_late") == 3
    driver.check_idle()


@pytest.mark.parametrize("ahead", [True, False])
def test_what_was_preempted_comes_back_with_its_pages(ahead: bool) -> None:
    layout = LAYOUTS["dense", 4]
    driver = Driver(layout, 2 * least_slabs(layout, 60), max_model_len=110, ahead=ahead)
    for i in range(4):
        driver.add(request(f"r{i}", prompt(12, i), max_tokens=60, ignore_eos=True))
    driver.run()
    counters = driver.scheduler.counters()
    assert counters["preemptions"] > 0
    assert 0 <= counters["recomputed_tokens"] < counters["preemptions"] * 72
    for name in driver.requests:
        driver.check_answer(name)
    driver.check_idle()


# --- one ahead ----------------------------------------------------------------------------------------------------


def test_steps_are_scheduled_one_ahead_and_no_further() -> None:
    driver = Driver(LAYOUTS["dense", 4], 40)
    driver.add(request("a", prompt(9), max_tokens=6, ignore_eos=True))
    scheduler = driver.scheduler
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first is not None and second is not None
    assert [(r.late, r.count, r.index, r.sample) for r in first.rows] == [(False, 9, 0, True)]
    assert [(r.late, r.count, r.index, r.sample) for r in second.rows] == [(True, 1, 1, True)]
    with pytest.raises(AssertionError, match="one step ahead"):
        scheduler.schedule()


def test_in_the_steady_state_every_row_is_late_and_no_step_is_idle() -> None:
    driver = Driver(LAYOUTS["dense", 4], 60)
    for i in range(4):
        driver.add(request(f"r{i}", prompt(4, i), max_tokens=20, ignore_eos=True))
    driver.run()
    assert len(driver.machine.steps) == 20
    assert all(row.late for step in driver.machine.steps[1:] for row in step.rows)
    driver.check_idle()


def test_a_late_stop_drops_the_row_in_flight() -> None:
    """The step behind a stop is already on its way: its token is not told nor counted, and it holds the blocks."""
    layout = LAYOUTS["mixed", 4]
    model = Driver(layout, 20).machine.model
    params = request("", [0]).params
    seed = next(s for s in range(99) if model.answer(prompt(7, s), params, STOP_IDS)[1] == "stop")
    driver = Driver(layout, 20)
    driver.add(request("a", prompt(7, seed)))
    while driver.finish("a") is None:
        driver.turn()
    driver.check_answer("a")
    last = driver.outputs["a"][-1]
    assert last.finish == "stop" and last.stop_id in (3, 4) and last.tokens == []
    assert driver.scheduler.num_in_flight == 1 and driver.scheduler.usage() > 0.0
    assert driver.scheduler.num_running == 0 and driver.scheduler.live_ids() == []
    driver.turn()
    assert driver.scheduler.usage() == 0.0
    counters = driver.scheduler.counters()
    assert counters["dropped_tokens"] == 1
    assert counters["generated_tokens"] == len(driver.tokens("a")) + 1  # the stop token itself
    driver.check_idle()


@pytest.mark.parametrize("kind", ["dense", "window"])
def test_what_the_dropped_row_computed_is_found_by_the_next_turn(kind: str) -> None:
    """A conversation goes on behind the stop token, whose page only the dropped row could fill."""
    layout = LAYOUTS[kind, 4]
    model, params = Driver(layout, 20).machine.model, request("", [0]).params
    for seed in itertools.count():
        answer, finish = model.answer(prompt(7, seed), params, STOP_IDS)
        if finish == "stop" and (7 + len(answer) + 1) % 4 == 0:
            break
    driver = Driver(layout, 40)
    driver.add(request("a", prompt(7, seed)))
    driver.run()
    stop_id = driver.outputs["a"][-1].stop_id
    assert driver.scheduler.counters()["dropped_tokens"] == 1 and stop_id is not None
    turn = [*prompt(7, seed), *answer, stop_id]
    driver.add(request("b", [*turn, 9, 9]))
    driver.run()
    assert driver.outputs["b"][0].cached == len(turn)
    driver.check_answer("b")
    driver.check_idle()


def test_a_length_is_known_beforehand_so_nothing_is_dropped() -> None:
    driver = Driver(LAYOUTS["dense", 4], 20)
    driver.add(request("a", prompt(7), max_tokens=5, ignore_eos=True))
    driver.run()
    assert driver.scheduler.counters()["dropped_tokens"] == 0
    assert driver.machine.furthest == {"a": 7 + 5 - 1}  # the last token is not computed


def test_results_out_of_order_or_of_other_rows_are_refused() -> None:
    driver = Driver(LAYOUTS["dense", 4], 40)
    driver.add(request("a", prompt(9)))
    scheduler = driver.scheduler
    with pytest.raises(AssertionError, match="none is in flight"):
        scheduler.commit(StepResult(1, ()))
    scheduler.schedule()
    scheduler.schedule()
    with pytest.raises(AssertionError, match="came before"):
        scheduler.commit(StepResult(2, (RowResult("a", 7),)))


def test_a_token_committed_twice_is_caught() -> None:
    driver = Driver(LAYOUTS["dense", 4], 40)
    driver.add(request("a", prompt(9)))
    first, _ = driver.scheduler.schedule(), driver.scheduler.schedule()
    seq = driver.scheduler._flights[1][1][0][0]
    driver.scheduler._flights[1] = (2, [(seq, first.rows[0])])  # the second step claims the first one's row
    driver.scheduler.commit(StepResult(1, (RowResult("a", 7),)))
    with pytest.raises(AssertionError, match="positions from 0 on, but 9 had retired"):
        driver.scheduler.commit(StepResult(2, (RowResult("a", 8),)))


# --- bad rows -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("why", "kind", "counter"), [
    ("nan", "nan_logits", "bad_rows"),
    ("no token fits the schema here", "grammar", "grammar_failures"),
    (TOO_COMPLEX, "grammar_too_complex", "grammar_failures"),
])  # fmt: skip
@pytest.mark.parametrize("index", [0, 3])
def test_a_bad_row_ends_its_request_only(why: str, kind: str, counter: str, index: int) -> None:
    driver = Driver(LAYOUTS["mixed", 4], 60, max_step_tokens=16)
    for i in range(3):
        driver.add(request(f"r{i}", prompt(15, i), max_tokens=8, ignore_eos=True))
    driver.machine.bad["r1", index] = why
    driver.run()
    last = driver.outputs["r1"][-1]
    assert last.finish == "error" and last.error is not None and last.error[0] == kind
    assert len(driver.tokens("r1")) == index
    assert driver.scheduler.counters()[counter] == 1
    driver.check_part("r1")
    driver.check_answer("r0")
    driver.check_answer("r2")
    driver.check_idle()


def test_what_a_bad_row_wrote_is_not_reused() -> None:
    driver = Driver(LAYOUTS["dense", 4], 60)
    driver.add(request("a", prompt(17), ignore_eos=True))
    driver.machine.bad["a", 0] = "nan"
    driver.run()
    driver.add(request("b", prompt(17), ignore_eos=True))
    driver.run()
    assert driver.outputs["b"][0].cached == 0
    driver.check_answer("b")


# --- prefixes and leaders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", range(8, 14))
def test_cold_equals_warm_at_every_residue_of_the_page(kind: str, length: int) -> None:
    driver = Driver(LAYOUTS[kind, 4], 60)
    for name in ("cold", "warm"):
        driver.add(request(name, prompt(length), ignore_eos=True))
        driver.run()
    assert driver.tokens("cold") == driver.tokens("warm")
    assert driver.outputs["cold"][0].cached == 0
    assert driver.outputs["warm"][0].cached == (length - 1) // 4 * 4
    driver.check_answer("warm")
    counters = driver.scheduler.counters()
    assert (counters["prefix_queries"], counters["prefix_hits"]) == (2 * length, (length - 1) // 4 * 4)


def test_prompt_logprobs_are_whole_though_the_prompt_is_cached() -> None:
    driver = Driver(LAYOUTS["window", 4], 60)
    for name in ("cold", "warm"):
        driver.add(request(name, prompt(21), ignore_eos=True, prompt_logprobs=0))
        driver.run()
        driver.check_answer(name)
    assert driver.outputs["warm"][0].cached == 0
    driver.add(request("plain", prompt(21), ignore_eos=True))  # and what they computed is found by others
    driver.run()
    assert driver.outputs["plain"][0].cached == 20


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid", "mixed"])
def test_what_a_request_with_prompt_logprobs_computes_is_found_by_others(kind: str) -> None:
    """It restores nothing itself, but leaves pages, and the snapshots without which a hybrid finds none of them."""
    hits = []
    for first in (0, None):
        driver = Driver(layout_of(kind), 60)
        driver.add(request("a", prompt(30), ignore_eos=True, prompt_logprobs=first))
        driver.run()
        driver.add(request("b", [*prompt(30), 7, 8], ignore_eos=True))
        driver.run()
        hits.append(driver.outputs["b"][0].cached)
    assert hits[0] == hits[1] and (hits[0] or 0) >= 28
    driver.add(request("c", prompt(30), ignore_eos=True, prompt_logprobs=0))
    driver.run()
    assert driver.outputs["c"][0].cached == 0 and len(driver.outputs["c"][0].prompt_logprobs or ()) == 29


def test_prompt_logprobs_come_once_though_the_prompt_is_computed_twice() -> None:
    """Preempted in the middle of its prompt."""
    layout = LAYOUTS["dense", 4]
    driver = Driver(layout, least_slabs(layout, 80), max_step_tokens=2, max_running=2)
    driver.add(request("high", prompt(8, 2), max_tokens=60, ignore_eos=True))
    for _ in range(5):
        driver.turn()
    driver.add(request("low", prompt(50, 1), max_tokens=4, priority=1, prompt_logprobs=0))
    driver.run()
    assert driver.scheduler.counters()["preemptions"] >= 1
    driver.check_answer("low")
    driver.check_answer("high")
    driver.check_idle()


@pytest.mark.parametrize("kind", KINDS)
def test_followers_wait_for_the_leaders_prompt_and_find_it(kind: str) -> None:
    driver = Driver(LAYOUTS[kind, 4], 80, max_step_tokens=10)
    driver.add(request("r0", prompt(33), ignore_eos=True, temperature=1.0, seed=0))
    for i in (1, 2, 3):
        driver.add(request(f"r{i}", prompt(33), ignore_eos=True, temperature=1.0, seed=i, leader="r0"))
    driver.add(request("other", prompt(5, 8), ignore_eos=True))
    driver.run()
    assert driver.order == ["r0", "other", "r1", "r2", "r3"]
    assert [driver.outputs[f"r{i}"][0].cached for i in range(4)] == [0, 32, 32, 32]
    for name in driver.requests:
        driver.check_answer(name)
    driver.check_idle()


@pytest.mark.parametrize("turns", [0, 1, 2])
def test_followers_go_on_when_the_leader_ends_early(turns: int) -> None:
    driver = Driver(LAYOUTS["dense", 4], 80, max_step_tokens=10)
    driver.add(request("leader", prompt(33)))
    driver.add(request("follower", prompt(33), leader="leader"))
    driver.add(request("lost", prompt(9), leader="never was"))
    for _ in range(turns):
        driver.turn()
    driver.abort("leader")
    driver.run()
    driver.check_answer("follower")
    driver.check_answer("lost")
    driver.check_idle()


def test_salted_requests_share_nothing() -> None:
    driver = Driver(LAYOUTS["dense", 4], 80)
    for name, salt in (("a", "x"), ("b", "y"), ("c", "x")):
        driver.add(request(name, prompt(17), salt=salt))
        driver.run()
    assert [driver.outputs[name][0].cached for name in "abc"] == [0, 0, 16]


# --- what is told -------------------------------------------------------------------------------------------------


def test_times_are_told_with_the_first_output_and_the_last() -> None:
    driver = Driver(LAYOUTS["dense", 4], 20)
    driver.add(request("a", prompt(7), max_tokens=3, ignore_eos=True, arrival=999.5))
    driver.run()
    first, middle, last = driver.outputs["a"]
    assert first.times == {"arrival": 999.5, "scheduled": 1001.0, "first_token": 1002.0}
    assert middle.times == {}
    assert last.times == {**first.times, "finished": 1004.0}


def test_numbers_of_the_queue_and_the_pool() -> None:
    driver = Driver(LAYOUTS["dense", 4], 40, max_running=2)
    for i in range(5):
        driver.add(request(f"r{i}", prompt(7, i), max_tokens=4, ignore_eos=True))
    scheduler = driver.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 5)
    driver.turn()
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 3)
    assert 0.0 < scheduler.usage() < 1.0
    driver.run()
    counters = scheduler.counters()
    assert counters["generated_tokens"] == 20 and counters["computed_tokens"] == 5 * (7 + 3)
    assert counters["steps"] == len(driver.machine.steps)
    driver.check_idle()
