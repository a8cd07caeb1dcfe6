"""Scheduler: which tokens of which requests the next step computes, and what its results mean. Paper.

There is no prefill and no decode: every live request is given tokens until what is computed has caught up with what is
known, within a token budget a step. Steps are scheduled one ahead of results: a row whose input token is still being
sampled is scheduled as a late row. The order of calls is

    step = schedule(); released slots are told to the executor; submit(step); commit(result of the step before)
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from dayzero.cache.layout import Layout
from dayzero.cache.manager import CacheManager
from dayzero.cache.prefix import Media
from dayzero.engine import buckets
from dayzero.engine.config import EngineConfig
from dayzero.engine.demand import Demand
from dayzero.engine.events import Output
from dayzero.engine.grammar_words import TOO_COMPLEX
from dayzero.engine.live import Live
from dayzero.engine.packer import Flight, Packer
from dayzero.engine.request import NewRequest
from dayzero.engine.sequence import Sequence
from dayzero.engine.step import Row, RowResult, Step, StepResult

MAX_IN_FLIGHT = 2  # the step whose result is waited for, and the one scheduled ahead of it


class Scheduler:
    """The only writer of a request's state, and the only caller of the cache manager."""

    def __init__(
        self,
        layout: Layout,
        num_slabs: int,
        config: EngineConfig,
        stop_ids: Iterable[int],
        max_model_len: int,
        *,
        fingerprint: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """layout, num_slabs: the pool's. stop_ids: the model's, from every source. max_model_len: longest prompt +
        answer in tokens. fingerprint: of all that decides what a cached block holds. clock: seconds since the epoch."""
        self.manager = CacheManager(
            layout,
            num_slabs,
            fingerprint=fingerprint,
            snapshot_tokens=config.snapshot_tokens,
            snapshot_bytes=config.snapshot_bytes,
            prefix=config.prefix_cache,
            debug=config.debug,
        )
        self.max_model_len = max_model_len
        self._stop_ids = frozenset(stop_ids)
        self._clock = clock
        self._page = layout.page_tokens
        self._groups = tuple(group.name for group in layout.groups)
        self._max_step_tokens = config.max_step_tokens
        self._chunk_tokens = min(config.chunk_tokens or config.max_step_tokens, config.max_step_tokens)
        self._demand = Demand(layout, num_slabs, self._chunk_tokens)
        self._live = Live(self.manager, config.max_running)
        self._flights: deque[tuple[int, Flight]] = deque()
        self._outputs: list[Output] = []  # of requests that schedule() had to end
        self._blocked: Sequence | None = None  # the candidate there was no room for, until something is freed
        self._num_added = 0
        self._number = 0
        self._counters = dict.fromkeys(_COUNTERS, 0.0)

    # --- requests -------------------------------------------------------------------------------------------------

    def add(self, request: NewRequest) -> Output | None:
        """Take a request. An Output: it can never be served, and has ended with this error."""
        asked, room = request.params.max_tokens, self.max_model_len - len(request.prompt)
        seq = Sequence(request, self._num_added, room if asked is None else asked, self._stop_ids)
        self._num_added += 1
        why = None
        if not request.prompt:
            why = "the prompt is empty; it must have at least one token"
        elif room < 0 or seq.max_new > room:
            why = (
                f"the prompt has {len(request.prompt)} tokens and the answer may have {max(seq.max_new, 0)}; this "
                f"model takes at most {self.max_model_len} tokens, prompt and answer together"
            )
        else:
            why = self.manager.why_never(seq.last)
        if why is None:
            self._live.add(seq)
            return None
        self._counters["refused"] += 1
        return seq.ended("error", self._clock(), error=("too_long", why))

    def abort(self, request_id: str) -> Output | None:
        """End a request wherever it stands; its last output. None: there is no such request, or it has ended."""
        seq = self._live.by_id.get(request_id)
        if seq is None or seq.finish is not None:
            return None
        self._counters["aborted"] += 1
        output = seq.ended("abort", self._clock())
        self._live.end(seq)
        return output

    def live_ids(self) -> list[str]:
        """Requests that have not ended."""
        return [seq.id for seq in self._live.by_id.values() if seq.finish is None]

    # --- steps ----------------------------------------------------------------------------------------------------

    def schedule(self) -> Step | None:
        """The next step. None: nothing to compute before the next result or request comes."""
        assert len(self._flights) < MAX_IN_FLIGHT, "scheduled more than one step ahead of results"
        while True:
            packer = Packer(self.manager, self._max_step_tokens)
            preemptions = self._live.num_preemptions
            self._continue_running(packer)
            if self._live.num_preemptions == preemptions:  # else room was just made for those that run
                self._admit(packer)
            if packer:
                self._number += 1
                step, flight = packer.step(self._number, self._groups)
                self._flights.append((self._number, flight))
                return step
            if self._flights or not self._get_unstuck():
                return None

    def _continue_running(self, packer: Packer) -> None:
        """Rows for those that run: the single tokens first, then chunks, each in order of priority."""
        chunks = []
        for seq in list(self._live.running):
            todo = seq.todo if seq.status == "running" else 0  # some are preempted for rows before theirs
            if todo == 1:
                self._continue(seq, seq.computed + 1, packer)
            elif todo:
                chunks.append(seq)
        for seq in chunks:
            if packer.budget and seq.status == "running":
                self._continue(seq, self._chunk_end(seq, packer.budget), packer)

    def _continue(self, seq: Sequence, end: int, packer: Packer) -> None:
        if end > seq.allocated:
            end = self._make_room(seq, end)
        if end > seq.computed:
            packer.add(seq, end)

    def _chunk_end(self, seq: Sequence, budget: int) -> int:
        want = seq.computed + min(seq.todo, budget, self._chunk_tokens)
        return want if want == seq.computed + 1 else self.manager.chunk_end(seq.id, seq.computed, want)

    def _make_room(self, seq: Sequence, end: int) -> int:
        """Blocks for ``seq`` up to ``end``, preempting those behind it if need be. Returns how far they reach; not
        beyond what is computed: it must wait for steps in flight."""
        live, manager = self._live, self.manager
        while not manager.extend(seq.id, end):
            victim = live.running[-1]
            if victim is seq or live.num_parting:
                reached = manager.reach(seq.id, end)
                if reached <= seq.computed or not manager.extend(seq.id, reached):
                    return seq.computed
                end = reached
                break
            live.preempt(victim)
        seq.allocated = -(-end // self._page) * self._page
        return end

    def _admit(self, packer: Packer) -> None:
        """Start waiting requests, in order, while there are tokens, slots and blocks for them. Nobody overtakes the
        first one that finds no room, so that it is not starved by smaller ones."""
        live = self._live
        while packer.budget and live.slots and not live.num_leaving:
            seq = live.candidate()
            if seq is None:
                return
            if seq is self._blocked and not live.freed and (live.running or self._flights):
                return
            live.freed = False
            self._blocked = None if self._start(seq, packer) else seq
            if self._blocked is not None:
                return

    def _start(self, seq: Sequence, packer: Packer) -> bool:
        """Open ``seq`` and give it its first row. False: no room now, nothing has changed."""
        live, manager = self._live, self.manager
        limit = None
        if seq.params.prompt_logprobs is not None and seq.collected < seq.prompt_tokens - 1:
            limit = seq.collected  # what is not computed gives no log-probabilities
        opened = manager.open(seq.id, seq.known, salt=seq.request.salt, media=_media(seq), limit=limit)
        if opened is None:
            return False
        seq.computed = seq.allocated = opened.hit
        alone = not live.running and not self._flights
        end = 0
        if alone or self._demand.fits(seq, live.running, manager.usage()):
            end = self._chunk_end(seq, packer.budget)
            if not manager.extend(seq.id, end):
                end = manager.reach(seq.id, end) if alone else 0
                if end > opened.hit and not manager.extend(seq.id, end):
                    end = 0
        if end <= opened.hit:
            manager.close(seq.id, finished=False)
            seq.stopped()
            return False
        if seq.cached is None:
            self._counters["prefix_queries"] += seq.prompt_tokens
            self._counters["prefix_hits"] += opened.hit
        live.start(seq, opened.hit, self._clock())
        seq.allocated = -(-end // self._page) * self._page
        packer.begin(seq, opened)
        packer.add(seq, end)
        return True

    def _get_unstuck(self) -> bool:
        """Nothing is in flight and nobody got a row. False: there is nobody.

        One that runs alone may have no room because its blocks lie scattered: it begins again, and they come together.
        One that finds no room even in an empty pool is ended, so that the others go on. ``why_never`` refuses such
        requests when they come, so that would be a fault of ours, told to one request instead of to all.
        """
        live = self._live
        if live.running:
            assert len(live.running) == 1, f"{[seq.id for seq in live.running]}: several run and none has room"
            live.preempt(live.running[0])
            return True
        seq = live.candidate()
        if seq is None:
            assert not live.by_id, f"{sorted(live.by_id)}: nobody can start"
            return False
        why = f"the cache pool has no room for the {len(seq.known)} tokens of this request, though nothing else runs"
        self._outputs.append(seq.ended("error", self._clock(), error=("too_long", why)))
        self._counters["stuck"] += 1
        live.end(seq)
        return True

    # --- results --------------------------------------------------------------------------------------------------

    def commit(self, result: StepResult) -> list[Output]:
        """Take the result of the oldest step in flight; what it means for its requests, in the order of rows."""
        assert self._flights, f"a result of step {result.number}, but none is in flight"
        number, flight = self._flights.popleft()
        assert result.number == number, f"the result of step {result.number} came before that of step {number}"
        assert len(result.rows) == len(flight), f"step {number} has {len(flight)} rows, its result {len(result.rows)}"
        outputs, now = self.take_outputs(), self._clock()
        for name, more in result.facts.items():
            self._counters[name] += more
        for (seq, row), got in zip(flight, result.rows):
            assert got.request_id == seq.id, f"step {number}: a result of {got.request_id} in the row of {seq.id}"
            seq.flights -= 1
            self._counters["recomputed_tokens"] += seq.retire(row)
            if seq.finish is not None:
                self._drop(seq, row, got)
            else:
                output = self._commit_row(seq, row, got, now)
                if output is not None:
                    outputs.append(output)
                if seq.finish is not None:
                    self._live.end(seq)
                    continue
            if not seq.flights and seq.status != "running":
                self._live.land(seq)
        return outputs

    def _commit_row(self, seq: Sequence, row: Row, got: RowResult, now: float) -> Output | None:
        end = row.start + row.count
        seq.pending -= row.sample
        if got.bad is not None:  # what the row wrote may be bad too: it is not published
            return self._bad(seq, got.bad, now)
        self.manager.retire(seq.id, end, seq.known)
        self._counters["computed_tokens"] += row.count
        if row.prompt_logprobs:
            seq.take_prompt_logprobs(row, got)
        if row.sample:
            self._counters["generated_tokens"] += 1
            return seq.take_token(row, got, now)
        if seq.max_new == 0 and end == seq.last:
            return seq.ended("length", now)
        return None

    def _bad(self, seq: Sequence, why: str, now: float) -> Output:
        if why == "nan":
            self._counters["bad_rows"] += 1
            sentence = f"the model gave logits that are no numbers behind token {seq.retired} of this request"
            return seq.ended("error", now, error=("nan_logits", sentence))
        self._counters["grammar_failures"] += 1
        return seq.ended("error", now, error=("grammar_too_complex" if why == TOO_COMPLEX else "grammar", why))

    def _drop(self, seq: Sequence, row: Row, got: RowResult) -> None:
        """A row that was in flight when its request ended: its token is nobody's. What it computed may be of use to
        others, as far as the ids are known: not behind a token that was dropped itself, and not if it went bad."""
        self._counters["dropped_tokens"] += row.sample
        if seq.finish != "error" and got.bad is None:
            self.manager.retire(seq.id, row.start + row.count, seq.known)

    def take_outputs(self) -> list[Output]:
        """Outputs of requests that ``schedule`` had to end, once; ``commit`` returns them too."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def take_released(self) -> list[int]:
        """Slots that became free, once. To be told to the executor before the next step is submitted."""
        released, self._live.released = self._live.released, []
        return released

    # --- numbers --------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> frozenset[str]:
        """Requests of the newest step that have ended since it was scheduled: their rows need no sampling."""
        newest = self._flights[-1][1] if self._flights else []
        return frozenset([seq.id for seq, _ in newest if seq.finish is not None])

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def num_running(self) -> int:
        return len(self._live.running)

    @property
    def num_waiting(self) -> int:
        """Requests in the queue, those on their way back to it included."""
        return len(self._live.waiting) + self._live.num_leaving

    def usage(self) -> float:
        """Share of the pool in use, [0, 1]."""
        return self.manager.usage()

    def counters(self) -> dict[str, float]:
        """Numbers that only go up; tokens unless the name says otherwise."""
        stats = self.manager.stats
        return {
            **self._counters,
            "steps": float(self._number),
            "preemptions": float(self._live.num_preemptions),
            "evictions": float(stats.evictions),
            "snapshots_taken": float(stats.snapshots_taken),
            "snapshots_restored": float(stats.snapshots_restored),
        }


_COUNTERS = (
    "prefix_queries", "prefix_hits", "computed_tokens", "recomputed_tokens", "generated_tokens", "dropped_tokens",
    "bad_rows", "grammar_failures", "aborted", "refused", "stuck", "mm_queries", "mm_hits",
    "expert_hits", "expert_misses", "expert_prefetches", "expert_evictions", "expert_bytes_read",
    *buckets.COUNTERS,
)  # fmt: skip


def _media(seq: Sequence) -> list[Media]:
    return [(image.key, image.first, image.tokens) for image in seq.request.media]
