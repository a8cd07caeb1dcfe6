"""What an engine may not change: cold = warm, one chunk = any chunks, alone = together, preempted = not, one form =
the other, on reference operators (design §6). Tokens are equal, logits within 1e-5 of their spread.

Five families stand for all by default: plain attention, windows with sinks, states beside a latent cache, a sparse
index, and states beside a sparse index under a bank of earlier sums. The others are slow tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("transformers")
from small_models import NAMES, write_small

from dayzero.blocks.stack import Forms
from dayzero.engine.request import NewRequest, SamplingParams
from tests.cpu.engine_support import Answer, Engine, ask, least_slabs, prompt_ids

PAGE = 16
STANDING_FOR_ALL = ("llama", "gpt_oss", "kimi_linear", "deepseek_v32", "kimi_k31")
LONG = 70  # more than one page of 64; windows, top-k and chunks of the tiny models are below
CHUNKS = (1, 7, 16, 63, 64, 65)
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
SAMPLED = SamplingParams(temperature=5.0, top_p=0.99, seed=11, max_tokens=8, ignore_eos=True)
TURNED = Forms(latent="expanded", recurrence="chunked")


class Model:
    """A folder, and the answers of an engine without a prefix cache to one request at a time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[tuple[int, ...], Answer] = {}

    @cached_property
    def lone(self) -> Engine:
        return self.engine(prefix_cache=False, record=True)

    def engine(self, **options: object) -> Engine:
        return Engine(self.folder, **{"page_tokens": PAGE, "pool_bytes": 4 << 20, **options})  # type: ignore[arg-type]

    def alone(self, prompt: list[int]) -> Answer:
        """The greedy answer in one chunk, by itself."""
        key = tuple(prompt)
        if key not in self._known:
            self._known[key] = self.lone.one(prompt, GREEDY)
        return self._known[key]


@pytest.fixture(
    scope="module",
    params=[name if name in STANDING_FOR_ALL else pytest.param(name, marks=pytest.mark.slow) for name in NAMES],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_small(request.param, tmp_path_factory.mktemp(request.param)))


def assert_equal(got: Answer, want: Answer, what: object = "") -> None:
    """Same tokens; logits within 1e-5 of their spread: sums over other shapes round differently, in float32."""
    assert got.tokens == want.tokens and got.finish == want.finish, what
    assert len(got.logits) == len(got.tokens) == len(want.logits), what
    for i, (one, other) in enumerate(zip(got.logits, want.logits, strict=True)):
        spread = float(other.max() - other.min())
        assert float((one - other).abs().max()) <= 1e-5 * spread, (what, i)


def assert_all_alone(model: Model, requests: Iterable[NewRequest], answers: Mapping[str, Answer]) -> None:
    for request in requests:
        assert_equal(answers[request.id], model.alone(request.prompt), request.id)


def test_any_chunking_gives_the_same(model: Model) -> None:
    want = model.alone(prompt_ids(LONG, LONG))
    for i, chunk_tokens in enumerate(CHUNKS):
        ahead, page = bool(i % 2), 64 if chunk_tokens > 60 else PAGE
        engine = model.engine(
            chunk_tokens=chunk_tokens, prefix_cache=False, record=True, run_ahead=ahead, page_tokens=page
        )
        assert_equal(engine.one(prompt_ids(LONG, LONG), GREEDY), want, chunk_tokens)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_together_equals_alone(model: Model, run_ahead: bool) -> None:
    """Eight requests of five lengths, arriving one after another, in steps of 40 tokens."""
    engine = model.engine(max_running=8, max_step_tokens=40, prefix_cache=False, record=True, run_ahead=run_ahead)
    lengths = [5, 63, LONG, 64, 65, 5, LONG, 63]
    requests = [ask(str(i), prompt_ids(length, length), GREEDY) for i, length in enumerate(lengths)]
    assert_all_alone(model, requests, engine.run(requests, arrive={str(i): i for i in range(8)}))


def test_a_warm_prefix_gives_the_same_at_every_place_in_a_page(model: Model) -> None:
    """Prompts that share one to two pages and part at every place of the second; in the second round all is warm."""
    warm = model.engine(record=True, run_ahead=False, pool_bytes=16 << 20)  # room for every snapshot
    base = prompt_ids(3 * PAGE, 9)
    prompts = [base[:cut] + prompt_ids(5, cut) for cut in range(PAGE, 2 * PAGE + 1)]
    states = bool(warm.runner.layout.state_groups)
    for number in range(2):
        for prompt in prompts:
            answer = warm.one(prompt, GREEDY)
            assert_equal(answer, model.alone(prompt), (number, len(prompt)))
            # The first round finds the shared page; with states, only where an earlier prompt left a snapshot.
            shared = 0 if states or prompt is prompts[0] else PAGE
            least = (len(prompt) - 1) // PAGE * PAGE if number else shared
            assert answer.cached is not None and answer.cached >= least, (number, len(prompt))


def test_a_turn_goes_on_where_the_last_one_ended(model: Model) -> None:
    """A conversation of three turns: each prompt holds the answer before it, and finds what that left."""
    engine = model.engine(record=True)
    prompt = prompt_ids(20, 21)
    for turn in range(3):
        answer = engine.one(prompt, GREEDY)
        assert_equal(answer, model.alone(prompt), turn)
        assert answer.cached is not None and (answer.cached >= PAGE) == (turn > 0)
        prompt = [*prompt, *answer.tokens, *prompt_ids(9 + turn, turn)]


def test_preempted_equals_not_preempted(model: Model) -> None:
    """A pool so small that four requests cannot run together to their ends."""
    params = msgspec.structs.replace(SAMPLED, max_tokens=24)
    wide = model.engine(prefix_cache=False)
    requests = [ask(str(i), prompt_ids(14 + i, i), params) for i in range(4)]
    want = {name: answer.tokens for name, answer in wide.run(requests).items()}
    least = least_slabs(wide.runner.layout, 48) + 1  # with nothing to spare they come one after another
    for slabs in range(least, 4 * least):
        ahead, one_by_one = (_with_slabs(model, slabs, run_ahead) for run_ahead in (True, False))
        assert {name: answer.tokens for name, answer in ahead.run(requests).items()} == want, slabs
        if ahead.loop.progress().counters["preemptions"]:
            assert {name: answer.tokens for name, answer in one_by_one.run(requests).items()} == want, slabs
            assert one_by_one.loop.progress().counters["preemptions"]
            return
    raise AssertionError("no pool was tight enough to preempt anybody")


def _with_slabs(model: Model, slabs: int, run_ahead: bool) -> Engine:
    engine = model.engine(pool_bytes=slabs * model.lone.runner.layout.slab_bytes, run_ahead=run_ahead)
    assert engine.runner.info.max_model_len >= 48, "what fits is what is promised"
    return engine


def test_one_form_equals_the_other(model: Model) -> None:
    """Absorbed = expanded, gathered = masked, recurrent = chunked: in chunks, together, and restored from a prefix."""
    spec = model.lone.runner._ready.model.spec
    if not {"MLA", "Delta"} & {type(layer.mixer).__name__ for layer in spec.layers}:
        return  # plain attention has one form
    engine = model.engine(forms=TURNED, record=True, max_running=3, max_step_tokens=40)
    requests = [ask(str(length), prompt_ids(length, length), GREEDY) for length in (5, 63, LONG)]
    assert_all_alone(model, requests, engine.run(requests))
    again = engine.run(requests)
    assert_all_alone(model, requests, again)
    assert again[str(LONG)].cached == 64


def test_a_seed_gives_the_same_in_any_company(model: Model) -> None:
    engine = model.engine(max_running=4, max_step_tokens=64)
    lone = engine.one(prompt_ids(30, 2), SAMPLED).tokens
    crowd = [ask(str(i), prompt_ids(20 + i, i), msgspec.structs.replace(SAMPLED, seed=i)) for i in range(3)]
    assert engine.run([*crowd, ask("x", prompt_ids(30, 2), SAMPLED)])["x"].tokens == lone
    assert engine.one(prompt_ids(30, 2), msgspec.structs.replace(SAMPLED, seed=12)).tokens != lone


def test_prompt_logprobs_are_the_same_in_one_chunk_and_in_many(model: Model) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=3, logprobs=2, ignore_eos=True)
    whole = model.engine().one(prompt_ids(40, 1), params)
    engine = model.engine(chunk_tokens=7)
    parts = engine.one(prompt_ids(40, 1), params)
    assert whole.prompt_logprobs is not None and parts.prompt_logprobs is not None
    assert len(whole.prompt_logprobs) == len(parts.prompt_logprobs) == 40 - 1
    for one, other in zip(whole.prompt_logprobs, parts.prompt_logprobs, strict=True):
        assert one.token == other.token and abs(one.logprob - other.logprob) < 1e-4
    assert [entry.token for entry in whole.logprobs] == whole.tokens == parts.tokens
    again = engine.one(prompt_ids(40, 1), params)  # pages that lie in the cache give no log-probabilities
    assert again.prompt_logprobs == parts.prompt_logprobs and again.cached == 0


@pytest.mark.parametrize(
    ("length", "max_tokens", "wanted"),
    [(47, 0, 0), (47, 1, 1), (47, None, 1), (48, 0, 0), (48, 1, None), (48, None, 0),
     (49, 0, None), (49, 1, None), (49, None, None), (40, 8, 8), (41, 8, None), (43, None, 5)],
)  # fmt: skip
@pytest.mark.parametrize("run_ahead", [True, False])
def test_the_edges_of_the_context(
    short: Engine, length: int, max_tokens: int | None, wanted: int | None, run_ahead: bool
) -> None:
    """wanted: tokens of the answer; None: it is refused as too long."""
    assert short.runner.info.max_model_len == 48
    short.loop._run_ahead = run_ahead
    answer = short.one(prompt_ids(length, 4), msgspec.structs.replace(GREEDY, max_tokens=max_tokens))
    if wanted is None:
        assert answer.finish == "error" and answer.error is not None and answer.error[0] == "too_long"
    else:
        assert (len(answer.tokens), answer.finish) == (wanted, "length")


@pytest.fixture(scope="module")
def short(model: Model) -> Engine:
    return model.engine(max_model_len=48)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_aborted_anywhere_leaves_the_pool_as_it_was(model: Model, run_ahead: bool) -> None:
    """In turn 0 (waiting), while it waits for a slot, in every chunk and every token, in the turn it ends, and behind
    it; beside requests that go on undisturbed."""
    engine = model.engine(max_running=3, max_step_tokens=24, run_ahead=run_ahead)
    before = engine.manager.sums()
    stays = prompt_ids(33, 5)
    for turn in range(0, 12, 1 if run_ahead else 4):
        requests = [ask(str(i), prompt_ids(25 + i, i), GREEDY) for i in range(3)]
        answers = engine.run([*requests, ask("stays", stays, GREEDY)], abort={str(i): turn + i for i in range(3)})
        assert answers["stays"].tokens == model.alone(stays).tokens
        for request in requests:
            answer, whole = answers[request.id], model.alone(request.prompt)
            assert answer.finish in ("abort", "length"), request.id
            assert answer.tokens == whole.tokens[: len(answer.tokens)]
            assert answer.finish == "abort" or len(answer.tokens) == len(whole.tokens)
        assert engine.manager.sums()["sequences"] == 0 and engine.manager.usage() == 0
    engine.manager.forget()
    assert engine.manager.sums() == before


@pytest.mark.slow
def test_a_hundred_storms_of_aborts_in_a_tight_pool(model: Model) -> None:
    """While they are preempted, wait for leaders, or are restored from what others left."""
    engine = _with_slabs(model, least_slabs(model.lone.runner.layout, 48) + 1, run_ahead=True)
    before = engine.manager.sums()
    for storm in range(100):
        requests = [
            ask(str(i), prompt_ids(10 + 3 * (i % 4), i % 3), GREEDY, leader="0" if i % 2 else None) for i in range(6)
        ]
        answers = engine.run(requests, abort={str(i): (storm * 7 + i * 3) % 29 for i in range(6)})
        assert {answer.finish for answer in answers.values()} <= {"abort", "length"}
        assert engine.manager.sums()["sequences"] == 0 and engine.manager.usage() == 0
    engine.manager.forget()
    assert engine.manager.sums() == before
