"""What an engine may not change: cold = warm, one chunk = any chunks, alone = together, preempted = not, for all
families, on reference operators (design §6)."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

pytest.importorskip("transformers")
from tiny_configs import FAMILIES, write_tiny

from dayzero.engine.request import SamplingParams
from dayzero.errors import MachineError
from tests.cpu.engine_support import GREEDY, Engine, ask, prompt_ids

LONG = 70  # more than one page of 64; windows, top-k and chunks of the tiny models are below
CHUNKS = (1, 7, 16, 63, 64, 65)
SAMPLED = SamplingParams(temperature=5.0, top_p=0.99, seed=11, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=list(FAMILIES))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    write_tiny(request.param, out)
    return out


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[int, list[int]]:
    """prompt length -> the greedy answer, each from an engine that has seen nothing else."""
    engine = Engine(folder, prefix_cache=False)
    return {length: engine.one(prompt_ids(length, length)).tokens for length in (5, 63, 64, 65, LONG)}


def test_any_chunking_gives_the_same_tokens(folder: Path, alone: dict[int, list[int]]) -> None:
    for chunk_tokens in CHUNKS:
        engine = Engine(folder, chunk_tokens=chunk_tokens, prefix_cache=False)
        assert engine.one(prompt_ids(LONG, LONG)).tokens == alone[LONG], chunk_tokens


def test_together_equals_alone(folder: Path, alone: dict[int, list[int]]) -> None:
    """Eight requests of five lengths, arriving one after another, in steps of 40 tokens."""
    engine = Engine(folder, max_running=8, max_step_tokens=40, prefix_cache=False)
    lengths = [5, 63, LONG, 64, 65, 5, LONG, 63]
    requests = [ask(str(i), prompt_ids(length, length)) for i, length in enumerate(lengths)]
    answers = engine.run(requests, arrive={str(i): i for i in range(8)})
    assert [answers[str(i)].tokens for i in range(8)] == [alone[length] for length in lengths]


def test_a_warm_prefix_gives_the_same_at_every_place_in_a_page(folder: Path) -> None:
    """Prompts that share 0 to 2 pages and part at different places behind; the second time everything is warm."""
    cold, warm = Engine(folder, prefix_cache=False, page_tokens=16), Engine(folder, page_tokens=16)
    base = prompt_ids(50, 9)
    prompts = [base[:cut] + prompt_ids(7, cut) for cut in (*range(14, 19), 31, 32, 33, 47, 48, 49)]
    want = [cold.one(prompt).tokens for prompt in prompts]
    for _ in range(2):
        answers = [warm.one(prompt) for prompt in prompts]
        assert [answer.tokens for answer in answers] == want
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.cached == (len(prompt) - 1) // 16 * 16, "the second time, all whole pages are found"


def test_preempted_equals_not_preempted(folder: Path) -> None:
    """A pool so small that four requests cannot run together to their ends."""
    params = msgspec.structs.replace(SAMPLED, max_tokens=50)
    wide = Engine(folder, page_tokens=16, prefix_cache=False)
    requests = [ask(str(i), prompt_ids(20 + i, i), params) for i in range(4)]
    want = {name: answer.tokens for name, answer in wide.run(requests).items()}
    for slabs in range(4, 200, 4):
        try:
            tight = Engine(folder, page_tokens=16, pool_bytes=slabs * wide.runner.layout.slab_bytes)
        except MachineError:
            continue  # not even one sequence fits
        if tight.runner.info.max_model_len < 80:
            continue
        assert {name: answer.tokens for name, answer in tight.run(requests).items()} == want
        if tight.loop.progress().counters["preemptions"]:
            return
    raise AssertionError("no pool was tight enough to preempt anybody")


def test_a_seed_gives_the_same_in_any_company(folder: Path) -> None:
    engine = Engine(folder, max_running=4, max_step_tokens=64)
    lone = engine.one(prompt_ids(30, 2), SAMPLED).tokens
    crowd = [ask(str(i), prompt_ids(20 + i, i), msgspec.structs.replace(SAMPLED, seed=i)) for i in range(3)]
    assert engine.run([*crowd, ask("x", prompt_ids(30, 2), SAMPLED)])["x"].tokens == lone
    assert engine.one(prompt_ids(30, 2), msgspec.structs.replace(SAMPLED, seed=12)).tokens != lone


def test_prompt_logprobs_are_the_same_in_one_chunk_and_in_many(folder: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, logprobs=2, ignore_eos=True)
    whole = Engine(folder).one(prompt_ids(LONG, 1), params)
    parts = Engine(folder, chunk_tokens=7).one(prompt_ids(LONG, 1), params)
    assert whole.prompt_logprobs is not None and parts.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(parts.prompt_logprobs) == LONG - 1
    for one, other in zip(whole.prompt_logprobs, parts.prompt_logprobs, strict=True):
        assert one.token == other.token and abs(one.logprob - other.logprob) < 1e-4
    assert [entry.token for entry in whole.logprobs] == whole.tokens == parts.tokens
    assert whole.cached == 0


def test_the_edges_of_the_context(folder: Path) -> None:
    engine = Engine(folder, max_model_len=48)
    assert engine.runner.info.max_model_len == 48
    for length, max_tokens, wanted in ((47, 1, 1), (48, 0, 0), (40, 8, 8), (47, 0, 0)):
        params = msgspec.structs.replace(GREEDY, max_tokens=max_tokens)
        answer = engine.one(prompt_ids(length, 4), params)
        assert (len(answer.tokens), answer.finish) == (wanted, "length"), (length, max_tokens)
    open_end = msgspec.structs.replace(GREEDY, max_tokens=None)
    assert len(engine.one(prompt_ids(41, 4), open_end).tokens) == 7
    for length, max_tokens in ((49, 0), (48, 1), (41, 8)):
        answer = engine.one(prompt_ids(length, 4), msgspec.structs.replace(GREEDY, max_tokens=max_tokens))
        assert answer.finish == "error" and answer.error is not None and answer.error[0] == "too_long"


def test_aborted_anywhere_leaves_the_pool_as_it_was(folder: Path) -> None:
    engine = Engine(folder, max_running=3, max_step_tokens=24, page_tokens=16, prefix_cache=False)
    before = engine.manager.sums()
    for turn in range(12):
        requests = [ask(f"{turn}.{i}", prompt_ids(25 + i, i)) for i in range(4)]
        answers = engine.run(requests, abort={f"{turn}.{i}": turn + i % 2 for i in range(3)})
        assert answers[f"{turn}.3"].finish == "length" and len(answers[f"{turn}.3"].tokens) == 12
        assert engine.manager.sums() == before
