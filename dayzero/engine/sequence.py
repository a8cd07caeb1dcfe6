"""Sequence: what the scheduler knows about one request. Private to the scheduler; nobody else writes to it. Paper.

``known`` are the ids the host knows. ``computed`` counts the tokens handed to steps, those in flight included;
``retired`` counts the tokens of steps whose results are in. ``pending`` counts sampled tokens still in flight.
"""

from __future__ import annotations

from typing import Literal

from dayzero.engine.events import Logprobs, Output
from dayzero.engine.request import FinishReason, NewRequest, SamplingParams
from dayzero.engine.step import Row, RowResult

# waiting: holds nothing. running: holds a slot and blocks, gets rows. leaving: preempted, ended: has its finish; both
# hold slot and blocks only until the last step that names them has retired.
Status = Literal["waiting", "running", "leaving", "ended"]


class Sequence:
    """One request from ``add`` until the last step that names it has retired."""

    __slots__ = (
        "allocated", "cached", "collected", "computed", "finish", "flights", "id", "key", "known", "last",
        "leader", "max_new", "params", "pending", "prompt", "prompt_tokens", "request", "retired", "seen", "slot",
        "status", "stop_ids", "times", "told",
    )  # fmt: skip

    def __init__(self, request: NewRequest, number: int, max_new: int, stop_ids: frozenset[int]) -> None:
        """number: order of arrival. max_new: tokens the answer may have. stop_ids: the model's own."""
        params = request.params
        self.id = request.id
        self.request = request
        self.params: SamplingParams = params
        self.key = (request.priority, request.arrival, number)  # lower goes first
        self.known = list(request.prompt)
        self.prompt_tokens = len(self.known)
        self.max_new = max_new
        # Positions that are ever computed: nothing follows the last token of an answer.
        self.last = self.prompt_tokens + max(max_new - 1, 0)
        self.stop_ids = (frozenset() if params.ignore_eos else stop_ids) | frozenset(params.stop_token_ids)
        self.leader = request.leader
        self.status: Status = "waiting"
        self.finish: FinishReason | None = None
        self.slot = -1
        self.computed = 0
        self.retired = 0
        self.pending = 0
        self.flights = 0  # steps in flight that name it
        self.allocated = 0  # tokens that blocks are there for
        self.seen = 0  # most tokens it ever had behind it
        self.cached: int | None = None  # prompt tokens found in the prefix cache, at the first start
        self.prompt: list[Logprobs] = []  # of prompt tokens 1.., in order
        self.collected = 0  # rows of prompt log-probabilities that are in
        self.told = False  # whether an output has been made
        self.times = {"arrival": request.arrival}

    @property
    def todo(self) -> int:
        """Tokens that are known, or in flight, and not yet computed."""
        return min(len(self.known) + self.pending, self.last) - self.computed

    @property
    def prompt_done(self) -> bool:
        """Whether the prompt's pages can be found by others."""
        return self.seen >= self.prompt_tokens

    def row(self, end: int) -> Row:
        """The row that computes up to ``end``; counts it as computed and in flight."""
        start, known = self.computed, self.known
        sample = end == len(known) + self.pending and self.max_new > 0
        index = len(known) - self.prompt_tokens + self.pending if sample else 0
        row = Row(
            self.id,
            self.slot,
            start,
            end - start,
            tuple(known[start:end]),
            sample,
            index,
            self.params.prompt_logprobs is not None and start < self.prompt_tokens - 1 and end > self.collected,
        )
        self.computed = end
        self.pending += sample
        self.flights += 1
        return row

    def started(self, slot: int, hit: int, now: float) -> None:
        """It runs from now on, with ``hit`` tokens restored from the cache."""
        self.status = "running"
        self.slot = slot
        self.computed = self.retired = hit
        if self.cached is None:
            self.cached = min(hit, self.prompt_tokens)
            self.times["scheduled"] = now

    def stopped(self) -> None:
        """It holds nothing any more. What has been sampled stays."""
        assert not self.flights, f"{self.id}: {self.flights} steps in flight still name it"
        self.slot = -1
        self.computed = self.retired = self.allocated = self.pending = 0

    def retire(self, row: Row) -> int:
        """A step with ``row`` has retired. Returns how many of its tokens lay behind the request already, computed or
        restored, before it was preempted."""
        assert row.start == self.retired, f"{self.id}: positions from {row.start} on, but {self.retired} had retired"
        end = row.start + row.count
        self.retired = end
        seen = self.seen
        if row.start >= seen:
            self.seen = end
            return 0
        self.seen = max(seen, end)
        return min(end, seen) - row.start

    def take_prompt_logprobs(self, row: Row, result: RowResult) -> None:
        """Keep the log-probabilities of prompt tokens this row gave and no earlier one did."""
        end = min(row.start + row.count, self.prompt_tokens - 1)
        assert len(result.prompt) == end - row.start, f"{self.id}: {len(result.prompt)} prompt log-probabilities"
        assert row.start <= self.collected, f"{self.id}: prompt log-probabilities from {self.collected} on are missing"
        self.prompt += result.prompt[self.collected - row.start :]
        self.collected = max(self.collected, end)

    def take_token(self, row: Row, result: RowResult, now: float) -> Output:
        """Commit the row's sampled token and decide whether the answer ends with it."""
        token, known = result.token, self.known
        before = len(known) - self.prompt_tokens
        assert token is not None, f"{self.id}: no token and no reason"
        assert row.index == before, f"{self.id}: token {row.index} of the answer came as number {before}"
        assert before < self.max_new, f"{self.id}: token {before} of an answer of {self.max_new}"
        known.append(token)
        if before == 0:
            self.times["first_token"] = now
        if token in self.stop_ids and before >= self.params.min_tokens:
            return self.ended("stop", now, stop_id=token)
        logprobs = []
        if self.params.logprobs is not None:
            assert result.logprobs is not None, f"{self.id}: log-probabilities were asked for and did not come"
            logprobs = [result.logprobs]
        if before + 1 == self.max_new:
            return self.ended("length", now, tokens=[token], logprobs=logprobs)
        return self.output(tokens=[token], logprobs=logprobs)

    def ended(
        self,
        finish: FinishReason,
        now: float,
        *,
        tokens: list[int] | None = None,
        logprobs: list[Logprobs] | None = None,
        stop_id: int | None = None,
        error: tuple[str, str] | None = None,
    ) -> Output:
        """Its last output. Blocks and slot are the caller's to free."""
        assert self.finish is None, f"{self.id}: ended twice, {self.finish} and {finish}"
        self.finish = finish
        self.times["finished"] = now
        return self.output(tokens or [], logprobs or [], finish, stop_id, error)

    def output(
        self,
        tokens: list[int],
        logprobs: list[Logprobs],
        finish: FinishReason | None = None,
        stop_id: int | None = None,
        error: tuple[str, str] | None = None,
    ) -> Output:
        """What is new. The first one also says what was cached and carries the prompt's log-probabilities."""
        first, self.told = not self.told, True
        whole = first and self.params.prompt_logprobs is not None and self.collected >= self.prompt_tokens - 1
        return Output(
            id=self.id,
            tokens=tokens,
            logprobs=logprobs,
            finish=finish,
            stop_id=stop_id,
            cached=self.cached if first else None,
            prompt_logprobs=self.prompt if whole else None,
            error=error,
            times=dict(self.times) if first or finish else {},
        )
