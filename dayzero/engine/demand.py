"""Demand: pool bytes that requests will still ask for to compute the tokens they already have. Paper.

Admission holds a new request back while those that run could not finish their prompts beside it: blocks are taken
chunk by chunk, and two half-computed prompts that fill the pool would only take turns in throwing each other out.
"""

from __future__ import annotations

from collections.abc import Iterable

from dayzero.cache.layout import Layout
from dayzero.engine.sequence import Sequence


class Demand:
    """Byte counts of one layout. max_step_tokens: longest chunk, which a window group holds on top of its window."""

    def __init__(self, layout: Layout, num_slabs: int, max_step_tokens: int) -> None:
        self.pool_bytes = layout.slab_bytes * num_slabs
        self._page = layout.page_tokens
        # (bytes of a page, most pages at once) of each token group
        self._groups = [
            (group.block_bytes, None if group.window is None else (group.window + max_step_tokens) // self._page + 2)
            for group in layout.token_groups
        ]
        self._growth = sum(group.block_bytes for group in layout.token_groups)

    def fits(self, seq: Sequence, running: Iterable[Sequence], used: float) -> bool:
        """Whether ``seq`` can run beside ``running``, with one page for each to grow. used: share of the pool in use,
        what ``seq`` found in the cache included."""
        need = self._more(seq) + self._growth
        for other in running:
            need += self._more(other) + self._growth
        return used * self.pool_bytes + need <= self.pool_bytes

    def _more(self, seq: Sequence) -> int:
        pages = -(-(len(seq.known) - seq.allocated) // self._page)
        if pages <= 0:
            return 0
        return sum(size * (pages if most is None else min(pages, most)) for size, most in self._groups)
