"""Mutations of cache, scheduler, sampler and engine. No torch outside the functions: HTTP processes read this file."""

from __future__ import annotations

from typing import Any

from tests.cpu.mutations.mutation import Mutation, Part, Patches

TESTS = "tests.cpu.test_accept_equalities:"
# (function of the stage's own tests, name, kind, layer, features that it can touch)
OF_TESTS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("stale_key", "all pages have one key", "K", "cache", ("prefix",)),
    ("nothing_restored", "nothing is restored from the cache", "K", "cache", ("prefix",)),
    ("neighbours", "rows of a step see each other", "T", "scheduler", ("together",)),
    ("forgets", "a preempted request comes back with another token", "S", "scheduler", ("tight",)),
    ("small_pages", "pages of 16 are read at other places", "K", "cache", ("page",)),
    ("seedless", "draws depend on what was drawn before", "T", "operator", ("sampled", "chunk")),
    ("shared_scale", "a quantised row depends on those written with it", "D", "cache", ("narrow", "chunk")),
    ("together_in_small_pages", "small pages and a batch together go wrong", "K", "scheduler", ("together", "page")),
    ("no_last_piece", "a stream loses a token", "I", "server", ("single",)),
    ("goes_on", "a request that was left goes on", "S", "scheduler", ("single",)),
    ("places_of_the_first_step", "a recorded step goes on reading its first places", "N", "compiler", ("single",)),
    ("padding_writes", "padding of a recorded step is written over a row", "N", "compiler", ("single",)),
    ("wrong_scale", "quantised rows are read with scales of other places", "D", "cache", ("single",)),
)


def state_not_restored(patches: Patches) -> None:
    """The copies of a snapshot are never made: a hit goes on from whatever state lies in its blocks."""
    patches.wrap("dayzero.cache.snapshots:Snapshots.copies", lambda copies: lambda self, source, target: ())


def snapshot_of_later(patches: Patches) -> None:
    """A snapshot is published under the key of the page before."""

    def make(publish: Any) -> Any:
        def changed(self: Any, sequence: Any, snapshot: Any, page: int, last: int) -> None:
            publish(self, sequence, snapshot, max(1, page - 1), last)

        return changed

    patches.wrap("dayzero.cache.reuse:Reuse._publish_snapshot", make)


def half_keys(patches: Patches) -> None:
    """Keys of pages are made of their first halves."""

    def make(grow: Any) -> Any:
        def changed(self: Any, tokens: Any, num_pages: int) -> None:
            half = [token if i % self._page < self._page // 2 else 0 for i, token in enumerate(tokens)]
            grow(self, half, num_pages)

        return changed

    patches.wrap("dayzero.cache.prefix:Chain.grow", make)


def blocks_leak(patches: Patches) -> None:
    """A request that did not come to its end keeps its blocks."""

    def make(let_go: Any) -> Any:
        def changed(self: Any, request_id: str, *, finished: bool = True) -> None:
            sequence = self._open[request_id]
            if not finished:
                for held in sequence.pages:
                    held.blocks = []
            let_go(self, request_id, finished=finished)

        return changed

    patches.wrap("dayzero.cache.manager:CacheManager.close", make)


def slots_leak(patches: Patches) -> None:
    """An aborted request stays in the queue's books."""
    patches.wrap("dayzero.engine.scheduler:Scheduler.abort", lambda abort: lambda self, request_id: None)


def limit_one_short(patches: Patches) -> None:
    """A request that just fits is refused by the scheduler."""

    def make(add: Any) -> Any:
        def changed(self: Any, request: Any) -> Any:
            self.max_model_len -= 1
            try:
                return add(self, request)
            finally:
                self.max_model_len += 1

        return changed

    patches.wrap("dayzero.engine.scheduler:Scheduler.add", make)


def one_token_more(patches: Patches) -> None:
    """Answers are one token longer than asked for."""

    def make(take: Any) -> Any:
        def changed(self: Any, request: Any, number: int, max_new: int, stop_ids: Any) -> None:
            take(self, request, number, max_new + 1, stop_ids)

        return changed

    patches.wrap("dayzero.engine.sequence:Sequence.__init__", make)


def stop_ids_lost(patches: Patches) -> None:
    """Tokens that end an answer do not."""

    def make(take: Any) -> Any:
        def changed(self: Any, request: Any, number: int, max_new: int, stop_ids: Any) -> None:
            take(self, request, number, max_new, frozenset())

        return changed

    patches.wrap("dayzero.engine.sequence:Sequence.__init__", make)


def masks_lost(patches: Patches) -> None:
    """What a grammar allows is not told to the sampler."""
    patches.wrap("dayzero.engine.grammar:Grammars.mask", lambda mask: lambda self, request_id: None)


def _drawn_with(patches: Patches, change: Any) -> None:
    """Draw with other parameters than were asked for. change: params -> the fields that differ."""

    def make(draw: Any) -> Any:
        def changed(logits_V: Any, params: Any, chance: float) -> Any:
            import msgspec

            return draw(logits_V, msgspec.structs.replace(params, **change(params)), chance)

        return changed

    patches.wrap("dayzero.engine.choose:draw", make)


def temperature_squared(patches: Patches) -> None:
    _drawn_with(patches, lambda params: {"temperature": params.temperature**2})


def top_k_one_more(patches: Patches) -> None:
    _drawn_with(patches, lambda params: {"top_k": params.top_k + (params.top_k > 0)})


def top_p_ignored(patches: Patches) -> None:
    _drawn_with(patches, lambda params: {"top_p": 1.0})


def not_the_likeliest(patches: Patches) -> None:
    """Greedy takes the second of two."""

    def make(draw: Any) -> Any:
        def changed(logits_V: Any, params: Any, chance: float) -> Any:
            if params.temperature == 0:
                logits_V[logits_V.argmax()] = float("-inf")
            return draw(logits_V, params, chance)

        return changed

    patches.wrap("dayzero.engine.choose:draw", make)


def scores_of_doubled(patches: Patches) -> None:
    """Log-probabilities are stated of doubled logits."""
    patches.wrap(
        "dayzero.engine.choose:logprobs_of",
        lambda told: lambda logits, tokens, counts: told(2.0 * logits, tokens, counts),
    )


def nan_in_a_batch(patches: Patches) -> None:
    """An operator gives no numbers when a step has several rows."""

    def make(head: Any) -> Any:
        def changed(self: Any, hidden: Any) -> Any:
            out = head(self, hidden)
            return out * float("nan") if len(hidden) > 2 else out

        return changed

    patches.wrap("dayzero.blocks.stack:Stack.head", make)


def swapped_under_load(patches: Patches) -> None:
    """In a step of several requests each gets the token of the next."""

    def make(results: Any) -> Any:
        def changed(self: Any) -> Any:
            from dataclasses import replace

            found = results(self)
            others = [*found[1:], *found[:1]]
            whole = len(found) > 1 and all(one.token is not None for one in found)
            return [replace(one, token=its.token) for one, its in zip(found, others)] if whole else found

        return changed

    patches.wrap("dayzero.engine.choose:_Known.results", make)


def hits_cut_short(patches: Patches) -> None:
    """Of what could be restored, one page is."""

    def make(find: Any) -> Any:
        def changed(self: Any, keys: Any, snapshots: Any) -> Any:
            from dataclasses import replace

            found = find(self, keys, snapshots)
            return replace(found, pages=min(1, found.pages), why="cut" if found.pages > 1 else found.why)

        return changed

    patches.wrap("dayzero.cache.prefix:PrefixSearch.find", make)


def rows_counted_twice(patches: Patches) -> None:
    """A token is planned with twice the bytes that its rows have."""
    patches.wrap("dayzero.cache.layout:Layout.token_bytes", lambda old: property(lambda self: 2 * old.fget(self)))


def other_decoding(patches: Patches) -> None:
    """A step of single tokens computes something else than a chunk."""

    def make(forward: Any) -> Any:
        def changed(self: Any, x_TD: Any, view: Any) -> Any:
            single = all(span.count == 1 for span in view.spans)
            return forward(self, x_TD * (1.02 if single else 1.0), view)

        return changed

    patches.wrap("dayzero.blocks.attention:AttentionBlock.forward", make)


def queue_without_end(patches: Patches) -> None:
    patches.wrap("dayzero.engine.client:AsyncEngine._admit", lambda admit: lambda self: None)


def never_stalled(patches: Patches) -> None:
    """A frozen engine counts as moving."""

    def make(status: Any) -> Any:
        def changed(self: Any) -> Any:
            import msgspec

            return msgspec.structs.replace(status(self), stalled=False)

        return changed

    patches.wrap("dayzero.engine.client:AsyncEngine.status", make)


def never_restarted(patches: Patches) -> None:
    """A dead engine stays dead."""
    patches.wrap("dayzero.engine.client:AsyncEngine._may_restart", lambda may: lambda self: False)


FUNCTIONAL, CONTRACT = "functional", "contract"


def _asked(stage: str, *checks: str) -> tuple[Part, ...]:
    return (Part(stage, checks),)


MUTATIONS: tuple[Mutation, ...] = (
    *(
        Mutation(name, kind, layer, "small", _asked("equalities", *features), plant=TESTS + place)
        for place, name, kind, layer, features in OF_TESTS
    ),
    Mutation("a state is not restored", "K", "cache", "channel_delta", _asked("equalities", "prefix"),
             "sglang#31474", plant=state_not_restored, process="engine"),
    Mutation("a snapshot under the key of the page before", "K", "cache", "channel_delta",
             _asked("equalities", "prefix", "page"), "sglang#31474", plant=snapshot_of_later, process="engine"),
    Mutation("keys of pages leave out half of the tokens", "K", "cache", "small", _asked("equalities", "prefix"),
             plant=half_keys, process="engine"),
    Mutation("blocks of clients that left are kept", "S", "cache", "small", _asked(CONTRACT, "cancel.freed"),
             "vllm#50425", plant=blocks_leak, process="engine"),
    Mutation("requests of clients that left run on", "S", "scheduler", "small", _asked(CONTRACT, "cancel.freed"),
             "vllm#50425", plant=slots_leak, process="engine"),
    Mutation("the limit is one token short", "J", "scheduler", "small",
             _asked("long_context", "limits"), "sglang#9599", plant=limit_one_short, process="engine"),
    Mutation("answers are one token too long", "J", "scheduler", "small", _asked(FUNCTIONAL, "tokens.max"),
             plant=one_token_more, process="engine"),
    Mutation("stop ids do not end an answer", "H", "tokenizer+template", "small", _asked(FUNCTIONAL, "stop.model"),
             "TensorRT-LLM#10389", plant=stop_ids_lost, process="engine"),
    Mutation("masks of grammars are lost", "Q", "scheduler", "small",
             _asked(FUNCTIONAL, "structured.schema", "structured.regex"), "vllm#51660", plant=masks_lost,
             process="engine"),
    Mutation("temperature is squared", "T", "operator", "small", _asked(FUNCTIONAL, "sampling"),
             plant=temperature_squared, process="engine"),
    Mutation("top_p is ignored", "T", "operator", "small", _asked(FUNCTIONAL, "sampling"), plant=top_p_ignored,
             process="engine"),
    Mutation("top_k keeps one more", "T", "operator", "small", _asked(FUNCTIONAL, "sampling"),
             plant=top_k_one_more, process="engine"),
    Mutation("greedy takes the second likeliest", "T", "operator", "small", _asked(FUNCTIONAL, "logprobs"),
             plant=not_the_likeliest, process="engine"),
    Mutation("log-probabilities of doubled logits", "J", "operator", "small",
             _asked(FUNCTIONAL, "logprobs", "sampling"), plant=scores_of_doubled, process="engine"),
    Mutation("no numbers in a batch", "J", "operator", "small", _asked(CONTRACT, "many.same"), "vllm#13035",
             plant=nan_in_a_batch, process="engine"),
    Mutation("results of two requests are swapped under load", "T", "scheduler", "small",
             _asked(CONTRACT, "many.same"), "vllm#53257", plant=swapped_under_load, process="engine"),
    Mutation("a hit restores one page at most", "K", "cache", "small", _asked("performance", "hits"),
             plant=hits_cut_short, process="engine"),
    Mutation("rows are planned twice as large", "M", "cache", "small", _asked("long_context", "limits"),
             plant=rows_counted_twice, process="engine"),
    Mutation("decoding differs from reading a prompt", "E", "operator", "small", _asked("long_context", "exact"),
             "vllm#3385", plant=other_decoding, process="engine"),
    Mutation("more wait than may", "S", "server", "small", _asked("robustness", "load"), plant=queue_without_end,
             process="http"),
    Mutation("a frozen engine counts as moving", "S", "server", "small", _asked("robustness", "hurt"), "vllm#39863",
             plant=never_stalled, process="http"),
    Mutation("a dead engine stays dead", "S", "server", "small", _asked("robustness", "hurt"), "Fastllm-proxy#19",
             plant=never_restarted, process="http"),
    Mutation("blocks of requests that were ended are kept", "S", "cache", "small", _asked("robustness", "load"),
             "vllm#50425", plant=blocks_leak, process="engine"),
)  # fmt: skip
