"""What a load test asks follows from its seed, and counts exactly what it should."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest

from dayzero.acceptance.load.workload import IdPrompts, Lengths, Level, TextPrompts, Workload, requests
from dayzero.errors import UsageError
from tests.paper.server_support import byte_tokenizer


def work(**more: object) -> Workload:
    return Workload(**({"prompt": Lengths(20, 60), "output": Lengths(3, 9)} | more))  # type: ignore[arg-type]


def ids(prefix: int = 0, seed: int = 0) -> IdPrompts:
    return IdPrompts(range(5, 300), prefix, seed)


@pytest.mark.parametrize("text", ["0", "-1", "", "a", "5:", ":5", "9:3", "1:2:3", "1.5"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--x"):
        Lengths.parse("--x", text)


def test_lengths_are_read_and_drawn_to_both_ends() -> None:
    assert Lengths.parse("--x", "512") == Lengths(512, 512)
    found = Lengths.parse("--x", "3:5")
    assert {found.draw(random.Random(n)) for n in range(50)} == {3, 4, 5}
    assert (str(found), str(Lengths(7, 7))) == ("3:5", "7")


def test_the_same_seed_gives_the_same_requests_and_another_one_does_not() -> None:
    level = Level(concurrency=2)
    one, two = (requests(work(seed=4), level, 0, ids(seed=4)) for _ in range(2))
    assert one == two
    assert one != requests(work(seed=5), level, 0, ids(seed=5))


def test_repeats_differ_in_tokens_only_and_no_prompt_comes_twice() -> None:
    level = Level(rate=5.0)
    runs = [requests(work(shared_prefix=7, num_requests=30), level, repeat, ids(7)) for repeat in (0, 1, "warm-up")]
    shapes = [[(r.prompt_tokens, r.output_tokens, r.at) for r in run] for run in runs]
    assert shapes[0] == shapes[1] == shapes[2]
    prompts = [tuple(r.prompt) for run in runs for r in run]
    assert len(set(prompts)) == 90
    assert len({p[:7] for p in prompts}) == 1
    assert len({p[:9] for p in prompts}) > 80
    assert all(len(p) == r.prompt_tokens for p, r in zip(prompts, [r for run in runs for r in run]))
    assert all(20 <= len(p) <= 60 and set(p) <= set(range(5, 300)) for p in prompts)
    assert len({tuple(requests(work(), Level(concurrency=c), 0, ids())[0].prompt) for c in (1, 2, 3)}) == 3


def test_arrivals_are_poisson() -> None:
    run = requests(work(num_requests=4000), Level(rate=20.0), 0, ids())
    gaps = [b.at - a.at for a, b in itertools.pairwise(run)]
    assert run[0].at == 0
    # of n exponential gaps the mean has a relative error of 1/sqrt(n) = 1.6 %, and so has the deviation: five of it
    assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.08)
    assert statistics.stdev(gaps) == pytest.approx(1 / 20, rel=0.08)
    assert {r.at for r in requests(work(), Level(concurrency=4), 0, ids())} == {0.0}


def test_how_many_requests_a_level_has() -> None:
    assert [work().count(Level(concurrency=c)) for c in (1, 4, 16)] == [8, 8, 32]
    assert work().count(Level(rate=2.0)) == 8
    assert work(num_requests=3).count(Level(concurrency=16)) == 3


def test_a_shared_prefix_leaves_room_to_differ() -> None:
    with pytest.raises(UsageError, match="--shared-prefix 20"):
        work(shared_prefix=20)


@pytest.mark.parametrize("bare", [False, True])
def test_texts_count_exactly_what_was_asked(bare: bool) -> None:
    tokenizer = byte_tokenizer()  # puts a token before each text that no template made
    prompts = TextPrompts(tokenizer, shared_prefix=5, seed=1, bare=bare)
    found = [prompts.make(random.Random(n), 20 + n) for n in range(40)]
    for number, (text, counted) in enumerate(found):
        assert isinstance(text, str)
        assert len(tokenizer.encode(text, special=True, begin=not bare)) == 20 + number
        assert counted == (None if bare else 20 + number)
    assert len({text[:5] for text, _ in found}) == 1
    assert len({text for text, _ in found}) == 40


def test_a_length_that_no_text_has_is_refused() -> None:
    with pytest.raises(UsageError, match="no text of exactly 1 tokens"):
        TextPrompts(byte_tokenizer(), shared_prefix=5, seed=1).make(random.Random(0), 1)
