"""A sequence that has the pool to itself gets as far as ``why_never`` promised, whatever others left behind.

Layouts, pools and lives are drawn from a seed. Seeds with a name never got on when one of the three guards was taken
out: dense packing, room for the rest beside a restored prefix, a restart without the prefix.
"""

from __future__ import annotations

import random

import pytest

from dayzero.cache.layout import Layout, lay_out
from tests.paper.cache_world import PAGE, Request, World, layers, state_need, tokens_need, world

DENSE = (10, 65, 142, 158, 173, 1303, 1424, 1454)
REST = (484, 657, 982)
RESTART = (11, 287, 529, 710, 760, 1008, 1194, 1305)


def some_layout(draw: random.Random) -> Layout:
    """Blocks of very different sizes, so that slabs hold many of one group and few of another."""
    needs = []
    if draw.random() < 0.8:
        needs += layers(1, tokens_need("layers.{i}.mixer.kv", draw.choice([32, 64, 96, 160, 224])))
    for number, window in enumerate(draw.sample([5, 6, 9, 13, 17, 21, 33], draw.randint(0, 2))):
        width = draw.choice([32, 64, 96, 160])
        needs += layers(1, tokens_need(f"layers.{number + 1}{{i}}.mixer.kv", width, window=window))
    if draw.random() < 0.5:
        needs += layers(draw.randint(1, 3), state_need("layers.7{i}.mixer.state", draw.choice([64, 160, 320])))
    return lay_out(needs or [tokens_need("layers.0.mixer.kv")], dtype="bf16", page_tokens=PAGE)


def others_leave_their_blocks(here: World, draw: random.Random, stem: list[int]) -> None:
    """Some have closed, some are still open."""
    kept = draw.randint(0, 8)
    for number in range(draw.randint(0, 8)):
        tokens = stem[: draw.randint(0, 50)] + [draw.randint(0, 1) for _ in range(draw.randint(1, 20))]
        request = here.open(tokens)
        while request and request.scheduled < len(tokens):
            if not here.schedule(request, min(len(tokens), request.scheduled + draw.randint(1, 20))):
                break
            here.retire()
        if request and number >= kept:
            here.close(request)


def go_on(here: World, request: Request, until: int, ahead: bool, chunk: int) -> None:
    """Run one sequence, alone, as a scheduler would."""
    again = 0
    while request.scheduled < until:
        known = max(request.scheduled + 1, min(len(request.tokens), request.scheduled + chunk))
        if here.schedule(request, min(known, until)):
            if not ahead or len(here.steps) > 1:
                here.retire()
        elif here.steps:
            here.retire()
        else:
            here.close(request, finished=False)
            reopened = here.open(request.tokens, request.salt)
            assert reopened is not None, "it cannot come back"
            request, again = reopened, again + 1
            assert again < 10, "it never gets on"


@pytest.mark.parametrize("seed", [*DENSE, *REST, *RESTART, *range(2000, 2060)])
def test_a_sequence_that_is_alone_gets_as_far_as_promised(seed: int) -> None:
    draw = random.Random(seed)
    layout, num_slabs = some_layout(draw), draw.randint(2, 16)
    options = {} if draw.random() < 0.5 else {"snapshot_tokens": 4, "snapshot_bytes": 1 << 30}
    here, length = world(layout, num_slabs, **options), draw.randint(1, 40)
    until = max((n for n in range(length, 160) if here.cache.why_never(n) is None), default=0)
    if not until:
        return
    stem = [draw.randint(0, 1) for _ in range(60)]
    others_leave_their_blocks(here, draw, stem)
    tokens = stem[: draw.randint(0, length)]
    tokens += [draw.randint(0, 1) for _ in range(length - len(tokens))]
    request = here.open(tokens)
    for rest in [r for r in here.requests.values() if r is not request]:
        here.close(rest)
    request = request or here.open(tokens)
    assert request is not None, "it cannot begin"
    go_on(here, request, until, draw.random() < 0.5, draw.randint(1, 20))
    here.end()
