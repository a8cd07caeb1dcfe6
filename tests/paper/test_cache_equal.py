"""Random lives of many sequences in small pools: what is read is what a cold run would have, and nothing is lost."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.paper.cache_world import LAYOUTS, PAGE, Request, world

TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=30)
SALTS = st.sampled_from([None, None, "a"])


class Lives(RuleBasedStateMachine):
    @initialize(
        name=st.sampled_from(sorted(LAYOUTS)),
        num_slabs=st.integers(1, 40),
        prefix=st.sampled_from([True, True, True, False]),
        snapshot_tokens=st.sampled_from([None, 1, 8]),
        snapshot_bytes=st.sampled_from([None, 1 << 13, 1 << 30]),
    )
    def begin(
        self, name: str, num_slabs: int, prefix: bool, snapshot_tokens: int | None, snapshot_bytes: int | None
    ) -> None:
        self.world = world(
            name, num_slabs, prefix=prefix, snapshot_tokens=snapshot_tokens, snapshot_bytes=snapshot_bytes
        )
        self.start = self.world.cache.sums()
        self.stems: list[list[int]] = [[]]

    @property
    def requests(self) -> list[Request]:
        return list(self.world.requests.values())

    @rule(stem=st.integers(0, 99), cut=st.integers(0, 40), tokens=TOKENS, salt=SALTS)
    def open(self, stem: int, cut: int, tokens: list[int], salt: str | None) -> None:
        tokens = self.stems[stem % len(self.stems)][:cut] + tokens
        before = self.world.cache.sums()
        request = self.world.open(tokens, salt)
        if request is not None:
            self.stems.append(request.tokens)
            return
        after = self.world.cache.sums()
        assert {k: v for k, v in before.items() if "evictable" not in k} == {
            k: v for k, v in after.items() if "evictable" not in k
        }

    @precondition(lambda self: self.world.requests and len(self.world.steps) < 6)
    @rule(which=st.integers(0, 99), chunk=st.integers(1, 20))
    def schedule(self, which: int, chunk: int) -> None:
        request = self.requests[which % len(self.requests)]
        if request.in_flight < 2 and request.scheduled < 60:
            self.world.schedule(
                request, max(request.scheduled + 1, min(len(request.tokens), request.scheduled + chunk))
            )

    @precondition(lambda self: self.world.steps)
    @rule(count=st.integers(1, 6))
    def retire(self, count: int) -> None:
        for _ in range(min(count, len(self.world.steps))):
            self.world.retire()

    @precondition(lambda self: any(not r.in_flight for r in self.world.requests.values()))
    @rule(which=st.integers(0, 99), finished=st.booleans())
    def close(self, which: int, finished: bool) -> None:
        idle = [r for r in self.requests if not r.in_flight]
        self.world.close(idle[which % len(idle)], finished=finished)

    @rule(which=st.integers(0, 99))
    def come_back(self, which: int) -> None:
        """Preempted, and opened again with everything that is known."""
        idle = [r for r in self.requests if not r.in_flight]
        if idle:
            request = idle[which % len(idle)]
            self.world.close(request, finished=False)
            self.world.open(request.tokens, request.salt)

    @rule()
    def forget(self) -> None:
        self.world.cache.forget()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()
            self.world.cache.forget()
            assert self.world.cache.sums() == self.start
            assert self.start["slabs.free"] == self.start["slabs"]
            assert self.world.cache.usage() == 0.0


def test_lives() -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=60,
            stateful_step_count=50,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.slow
def test_many_lives() -> None:
    run_state_machine_as_test(
        Lives,
        settings=settings(
            max_examples=400, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@pytest.mark.parametrize("name", sorted(LAYOUTS))
@pytest.mark.parametrize("length", range(1, 3 * PAGE + 2))
def test_the_same_prompt_again_restores_all_but_the_last_page(name: str, length: int) -> None:
    here = world(name)
    prompt = [i % 3 for i in range(length)]
    assert here.run(prompt).hit == 0
    again = here.run(prompt)
    assert (again.hit, again.why) == ((length - 1) // PAGE * PAGE, "")
    assert here.cache.stats.prefix_queries == 2 * length
    assert here.cache.stats.prefix_hits == again.hit
