"""Greedy decoding of one sequence on the reference path."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.stack import Stack


def greedy(
    stack: Stack,
    cache: LocalCache,
    prompt_ids: Sequence[int],
    num_tokens: int,
    stop_ids: Collection[int] = (),
    *,
    row: int = 0,
    chunk_tokens: int | None = None,
) -> Iterator[int]:
    """Up to ``num_tokens`` ids, each the likeliest (lowest id on ties); ends before a stop id, which is not given.

    The prompt continues what ``row`` of the cache holds, in steps of at most ``chunk_tokens``. A token is put into the
    cache when the one after it is asked for.
    """
    assert len(prompt_ids) > 0, "a prompt has at least one token"
    choose = stack.site.op("sample.greedy", "sample")
    step = chunk_tokens or len(prompt_ids)
    for first in range(0, len(prompt_ids), step):
        hidden_TD = stack.forward(cache.view(prompt_ids[first : first + step], row=row))
    for left in range(num_tokens, 0, -1):
        token = int(choose(stack.head(hidden_TD[-1:]))[0])
        assert 0 <= token < stack.spec.vocab, "the logits hold a NaN"
        if token in stop_ids:
            return
        yield token
        if left > 1:
            hidden_TD = stack.forward(cache.view([token], row=row))
