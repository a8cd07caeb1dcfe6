"""An executor without tensors: a deterministic "model" whose records live only where a step's tables say.

Each token group keeps, for every position, a number that depends on all tokens up to it, made from the number one
position back, *read from its page*. Each state layer keeps a number in its working block. The next token depends on
all records that are visible and on all states. So a wrong table, a page given to two requests, a stale or misplaced
state copy, a lost or doubled token each change the answer, or read what nobody wrote, which is an error at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dayzero.cache.layout import Group, Layout, StateCopy
from dayzero.engine.events import Logprobs
from dayzero.engine.request import SamplingParams
from dayzero.engine.step import Row, RowResult, Step, StepResult

VOCAB = 97


def mix(*values: int) -> int:
    """A number below 2**61 that depends on all ``values``, the same in every process."""
    return hash(values) % (2**61 - 1)


def name_number(name: str) -> int:
    return int.from_bytes(name.encode(), "big") % (2**61 - 1)


class Model:
    """The function itself, on plain lists: what every way of scheduling must come to."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.token_groups = [(group, name_number(group.name)) for group in layout.token_groups]
        self.state_groups = [(group, name_number(group.name)) for group in layout.state_groups]

    def record(self, salt: int, before: int, token: int) -> int:
        return mix(salt, before, token)

    def state(self, salt: int, layer: int, before: int, token: int) -> int:
        return mix(salt, layer, before, token, 1)

    def next_token(self, seen: Sequence[int], states: Sequence[int], params: SamplingParams, index: int) -> int:
        """Temperature 0 depends on nothing else; a seeded draw on the seed and the number of the token."""
        drawn = 0 if params.temperature == 0 else mix(params.seed or 0, index)
        return mix(*seen, *states, drawn) % VOCAB

    def logprob(self, seen: Sequence[int], token: int) -> Logprobs:
        value = mix(*seen, token)
        return Logprobs(token, -(value % 1009) / 64.0, value % VOCAB + 1, [(token, 0.0)])

    def visible(self, group: Group, position: int) -> int:
        """First position that ``position`` sees."""
        return 0 if group.window is None else max(0, position - group.window + 1)

    def trail(self, tokens: Sequence[int]) -> tuple[dict[str, list[int]], list[int]]:
        """(records of each token group, states) after ``tokens``, computed from nothing."""
        records: dict[str, list[int]] = {}
        for group, salt in self.token_groups:
            row: list[int] = []
            for token in tokens:
                row.append(self.record(salt, row[-1] if row else 0, token))
            records[group.name] = row
        states = []
        for group, salt in self.state_groups:
            for layer in range(len(group.layers)):
                value = 0
                for token in tokens:
                    value = self.state(salt, layer, value, token)
                states.append(value)
        return records, states

    def seen(self, records: Mapping[str, Sequence[int]], position: int) -> list[int]:
        return [r for g, _ in self.token_groups for r in records[g.name][self.visible(g, position) : position + 1]]

    def answer(self, prompt: Sequence[int], params: SamplingParams, stop_ids: frozenset[int]) -> tuple[list[int], str]:
        """(tokens, finish) of a request that runs alone, cold and token by token."""
        stops = (frozenset() if params.ignore_eos else stop_ids) | frozenset(params.stop_token_ids)
        known, out = list(prompt), []
        assert params.max_tokens is not None
        for index in range(params.max_tokens):
            records, states = self.trail(known)
            token = self.next_token(self.seen(records, len(known) - 1), states, params, index)
            if token in stops and index >= params.min_tokens:
                return out, "stop"
            out.append(token)
            known.append(token)
        return out, "length"

    def prompt_logprobs(self, prompt: Sequence[int]) -> list[float]:
        records, _ = self.trail(prompt)
        return [self.logprob(self.seen(records, i), prompt[i + 1]).logprob for i in range(len(prompt) - 1)]


@dataclass(slots=True)
class Slot:
    request_id: str
    params: SamplingParams
    prompt_tokens: int
    known: list[int]
    next: int | None = None  # where its next row must begin; None: it has none yet


class Machine:
    """Executor over a Model. Steps run in order when their results are asked for; before that only their claims are
    checked. bad: (request id, index of token) -> what is wrong with that row."""

    def __init__(self, layout: Layout, num_slabs: int, *, depth: int = 2) -> None:
        self.model = Model(layout)
        self.layout = layout
        self.groups = {group.name: group for group in layout.groups}
        self.num_slabs = num_slabs
        self.depth = depth
        self.bad: dict[tuple[str, int], str] = {}
        self.slots: dict[int, Slot] = {}
        # slab -> (group it serves, block in the slab -> records by position in the page, or the state)
        self.slabs: list[tuple[str, dict[int, list[int | None]]]] = [("", {}) for _ in range(num_slabs)]
        self.queue: list[Step] = []
        self.dropped: dict[int, frozenset[str]] = {}
        self.furthest: dict[str, int] = {}  # request -> most tokens it ever had behind it
        self.num_again = 0  # tokens computed though their request had been past them before
        self.steps: list[Step] = []

    # --- Executor -------------------------------------------------------------------------------------------------

    def submit(self, step: Step) -> int:
        assert len(self.queue) < self.depth, "submitted more than one step ahead"
        assert step.number == (self.steps[-1].number + 1 if self.steps else 1)
        assert step.rows, "an empty step"
        counts = [row.count for row in step.rows]
        assert counts == sorted(counts, key=lambda count: count != 1), "single-token rows do not come first"
        assert len({row.request_id for row in step.rows}) == len({row.slot for row in step.rows}) == len(step.rows)
        self._check_writes(step)
        self.queue.append(step)
        self.steps.append(step)
        return step.number

    def sample(self, number: int, dropped: frozenset[str]) -> None:
        self.dropped[number] = dropped

    def result(self, number: int) -> StepResult:
        step = self.queue.pop(0)
        assert step.number == number
        for copy in step.before:
            self._copy(copy)
        for new in step.new:
            self.slots[new.slot] = Slot(new.request_id, new.params, new.prompt_tokens, list(new.known))
        rows = [self._forward(step, i, row) for i, row in enumerate(step.rows)]
        for copy in step.after:
            self._copy(copy)
        return StepResult(number, tuple(rows))

    def release(self, slot: int) -> None:
        for step in self.queue:
            assert all(row.slot != slot for row in step.rows), f"slot {slot} was freed while a step in flight names it"
        del self.slots[slot]

    # --- what a step may claim ------------------------------------------------------------------------------------

    def _visible_blocks(self, step: Step) -> dict[tuple[str, int], set[str]]:
        """Blocks a step's rows read or write -> requests."""
        users: dict[tuple[str, int], set[str]] = {}
        for name, where in step.groups.items():
            group = self.groups[name]
            for row, table, first in zip(step.rows, where.tables, where.first, strict=True):
                skip = 0 if group.unit == "state" else group.first_page(row.start) - first // group.page_tokens
                assert skip >= 0, f"{row.request_id}: pages of {name} that row {row.start} sees are gone"
                for block in table[skip:]:
                    users.setdefault((name, block), set()).add(row.request_id)
        return users

    def _check_writes(self, step: Step) -> None:
        """What a step writes, no other row of it reads, and no step in flight of another request either."""
        own = self._visible_blocks(step)
        flying = [self._visible_blocks(other) for other in self.queue]
        for name, where in step.groups.items():
            group = self.groups[name]
            for row, table, first in zip(step.rows, where.tables, where.first, strict=True):
                written = table
                if group.unit == "token":
                    assert first % group.page_tokens == 0
                    pages = -(-(row.start + row.count - first) // group.page_tokens)
                    assert len(table) == pages, f"{row.request_id}: {len(table)} pages in {name}, {pages} expected"
                    written = table[(row.start - first) // group.page_tokens :]
                else:
                    assert len(table) == len(group.layers) and first == 0
                for block in written:
                    users = own[name, block].union(*(other.get((name, block), ()) for other in flying))
                    assert users == {row.request_id}, f"{name} block {block} written by {row.request_id}, used: {users}"
        for copy in (*step.before, *step.after):
            assert len(copy.source) == len(copy.target) == len(self.groups[copy.group].layers)

    # --- memory ---------------------------------------------------------------------------------------------------

    def _page(self, group: Group, block: int, write: bool = False) -> list[int | None]:
        """A block's records. A slab that turns to another group has lost what it held."""
        slab, inner = divmod(block, group.blocks_per_slab)
        assert 0 <= slab < self.num_slabs, f"{group.name} block {block} lies outside the pool"
        name, blocks = self.slabs[slab]
        if name != group.name:
            assert write, f"block {block} is read as {group.name}, but slab {slab} holds {name or 'nothing'}"
            blocks = {}
            self.slabs[slab] = (group.name, blocks)
        return blocks.setdefault(inner, [None] * max(group.page_tokens, 1))

    def _copy(self, copy: StateCopy) -> None:
        group = self.groups[copy.group]
        values = [self._page(group, block)[0] for block in copy.source]
        assert None not in values, f"a state of {copy.group} is copied that nobody wrote"
        for block, value in zip(copy.target, values, strict=True):
            self._page(group, block, write=True)[0] = value

    def _read(self, group: Group, table: Sequence[int], first: int, position: int) -> int:
        page, offset = divmod(position - first, group.page_tokens)
        assert page >= 0, f"position {position} of {group.name} lies before the table"
        value = self._page(group, table[page])[offset]
        assert value is not None, f"position {position} of {group.name} was never written"
        return value

    # --- the forward ----------------------------------------------------------------------------------------------

    def _forward(self, step: Step, number: int, row: Row) -> RowResult:
        slot = self.slots[row.slot]
        assert slot.request_id == row.request_id, f"slot {row.slot} is {slot.request_id}'s, not {row.request_id}'s"
        tokens = slot.known[row.start : row.start + row.count]
        if len(tokens) < row.count and row.late and row.request_id in self.dropped[step.number]:
            tokens.append(VOCAB)  # its input was never sampled; a device computes with whatever is there
        assert len(tokens) == row.count and tuple(tokens[: len(row.tokens)]) == row.tokens, "wrong ids"
        assert len(row.tokens) == row.count or (row.count == 1 and not row.tokens)
        end, furthest = row.start + row.count, self.furthest.get(row.request_id, 0)
        assert slot.next in (None, row.start), f"{row.request_id}: from {row.start} on, after {slot.next} tokens"
        slot.next = end
        self.num_again += max(0, min(end, furthest) - row.start)
        self.furthest[row.request_id] = max(furthest, end)
        seen, states = self._run_groups(step, number, row, tokens)
        prompt: tuple[Logprobs, ...] = ()
        if row.prompt_logprobs:
            ends = range(row.start, min(row.start + row.count, slot.prompt_tokens - 1))
            prompt = tuple(self.model.logprob(seen[i - row.start], slot.known[i + 1]) for i in ends)
        if not row.sample or row.request_id in self.dropped[step.number]:
            return RowResult(row.request_id, prompt=prompt)
        assert row.index == len(slot.known) - slot.prompt_tokens, "the number of the token is wrong"
        why = self.bad.get((row.request_id, row.index))
        if why is not None:
            return RowResult(row.request_id, bad=why)
        token = self.model.next_token(seen[-1], states, slot.params, row.index)
        slot.known.append(token)
        logprobs = None if slot.params.logprobs is None else self.model.logprob(seen[-1], token)
        return RowResult(row.request_id, token, None, logprobs, prompt)

    def _run_groups(
        self, step: Step, number: int, row: Row, tokens: Sequence[int]
    ) -> tuple[list[list[int]], list[int]]:
        """Write records and states of the row's tokens. Returns (what each token sees, states behind the last)."""
        seen: list[list[int]] = [[] for _ in tokens]
        for group, salt in self.model.token_groups:
            table, first = step.groups[group.name].tables[number], step.groups[group.name].first[number]
            for i, token in enumerate(tokens):
                position = row.start + i
                before = self._read(group, table, first, position - 1) if position else 0
                page, offset = divmod(position - first, group.page_tokens)
                self._page(group, table[page], write=True)[offset] = self.model.record(salt, before, token)
            wanted = range(len(tokens)) if row.prompt_logprobs else [len(tokens) - 1] if row.sample else []
            for i in wanted:
                start = self.model.visible(group, row.start + i)
                seen[i] += [self._read(group, table, first, p) for p in range(start, row.start + i + 1)]
        states: list[int] = []
        for group, salt in self.model.state_groups:
            for layer, block in enumerate(step.groups[group.name].tables[number]):
                value = self._page(group, block, write=row.start == 0)[0] if row.start else 0
                assert value is not None, f"{row.request_id}: the state of {group.name} was never written"
                for token in tokens:
                    value = self.model.state(salt, layer, value, token)
                self._page(group, block, write=True)[0] = value
                states.append(value)
        return seen, states
