"""What is asked of an answer, through the whole engine, against plain arithmetic on logits of the publisher's code.

The oracle computes the whole forward for every token. Log-probabilities agree within 1e-4: float32 logits of another
implementation differ by 1e-5 of their spread.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("transformers")
import torch
from tiny_configs import write_tiny
from torch import Tensor

from dayzero.cache.layout import lay_out
from dayzero.engine.request import Grammar, SamplingParams
from dayzero.engine.sampler import uniform
from tests.cpu.engine_support import Engine, ask, least_slabs, prompt_ids
from tests.paper.small_tokenizer import small_tokenizer, small_tokenizer_json

EOS = 2  # of the tiny models
PROMPT = prompt_ids(23, 8)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
Shape = Callable[[list[int], list[int], list[float]], None]  # prompt, generated, logits [V], changed in place


class Tiny:
    def __init__(self, folder: Path, model: Any) -> None:
        self.folder, self._model = folder, model
        self.engine = Engine(folder, page_tokens=16, chunk_tokens=9, pool_bytes=4 << 20)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        """[T, V] float64."""
        return self._model(torch.tensor([tokens]), use_cache=False).logits[0].double()

    def greedy(self, prompt: list[int], count: int, shape: Shape = lambda prompt, made, logits: None) -> list[int]:
        """The first of the largest logits, after ``shape`` has changed them."""
        made: list[int] = []
        while len(made) < count:
            logits = self.logits(prompt + made)[-1].tolist()
            shape(prompt, made, logits)
            made.append(max(range(len(logits)), key=lambda i: (logits[i], -i)))
        return made


@pytest.fixture(scope="module", params=["llama", pytest.param("kimi_linear", marks=pytest.mark.slow)])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    out = tmp_path_factory.mktemp(request.param)
    model = write_tiny(request.param, out)
    (out / "tokenizer.json").write_text(small_tokenizer_json())
    return Tiny(out, model)


def changed(**fields: Any) -> SamplingParams:
    return msgspec.structs.replace(GREEDY, **fields)


def test_logprobs_and_ranks(tiny: Tiny) -> None:
    answer = tiny.engine.one(PROMPT, changed(logprobs=4, prompt_logprobs=3))
    want = torch.log_softmax(tiny.logits(PROMPT + answer.tokens), -1)
    assert answer.tokens == tiny.greedy(PROMPT, 8)
    assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(PROMPT) - 1
    told = [*answer.prompt_logprobs, *answer.logprobs]
    ids = (PROMPT + answer.tokens)[1:]
    for at, (one, token, logs_V) in enumerate(zip(told, ids, want[:-1], strict=True)):
        num_top = 3 if at < len(PROMPT) - 1 else 4
        assert one.token == token and one.logprob == pytest.approx(float(logs_V[token]), abs=1e-4)
        assert one.rank == int((logs_V > logs_V[token] + 1e-5).sum()) + 1
        best = torch.sort(logs_V, descending=True, stable=True)
        assert [i for i, _ in one.top] == best.indices[:num_top].tolist()
        assert [value for _, value in one.top] == pytest.approx(best.values[:num_top].tolist(), abs=1e-4)


def test_a_stop_id_ends_it_and_min_tokens_holds_it_back(tiny: Tiny) -> None:
    plain = tiny.greedy(PROMPT, 8)
    stop = plain[2]
    first = plain.index(stop)
    answer = tiny.engine.one(PROMPT, changed(stop_token_ids=(stop,)))
    assert (answer.tokens, answer.finish, answer.stop_id) == (plain[:first], "stop", stop)

    def held_back(prompt: list[int], made: list[int], logits: list[float]) -> None:
        if len(made) < 5:
            logits[stop] = logits[EOS] = -math.inf

    want = tiny.greedy(PROMPT, 8, held_back)
    end = next((i for i, token in enumerate(want) if i >= 5 and token in (stop, EOS)), 8)
    params = changed(stop_token_ids=(stop,), min_tokens=5, ignore_eos=False)
    assert tiny.engine.one(PROMPT, params).tokens == want[:end]


def test_the_models_own_stop_id_and_ignoring_it(tiny: Tiny) -> None:
    wanted = {EOS: 100.0}
    answer = tiny.engine.one(PROMPT, changed(logit_bias=wanted, ignore_eos=False))
    assert (answer.tokens, answer.finish, answer.stop_id) == ([], "stop", EOS)
    assert tiny.engine.one(PROMPT, changed(logit_bias=wanted)).tokens == [EOS] * 8
    answer = tiny.engine.one(PROMPT, changed(logit_bias=wanted, ignore_eos=False, min_tokens=3))
    assert len(answer.tokens) == 3 and EOS not in answer.tokens and answer.stop_id == EOS


@pytest.mark.parametrize(
    "fields",
    [{"presence_penalty": 1.5}, {"frequency_penalty": 1.0}, {"repetition_penalty": 1.7}, {"repetition_penalty": 0.5},
     {"logit_bias": {7: 3.0, 300: -100.0, 41: 2.5}},
     {"presence_penalty": -1.0, "frequency_penalty": -0.5, "repetition_penalty": 1.3, "logit_bias": {9: 2.0}}],
    ids=str,
)  # fmt: skip
def test_penalties_and_biases(tiny: Tiny, fields: dict[str, Any]) -> None:
    params = changed(**fields, max_tokens=12)

    def shape(prompt: list[int], made: list[int], logits: list[float]) -> None:
        for i in set(prompt + made):
            r = params.repetition_penalty
            logits[i] = logits[i] / r if logits[i] > 0 else logits[i] * r
        for i, count in Counter(made).items():
            logits[i] -= params.presence_penalty + params.frequency_penalty * count
        for i, addend in params.logit_bias.items():
            logits[i] += addend

    assert tiny.engine.one(PROMPT, params).tokens == tiny.greedy(PROMPT, 12, shape)


def test_a_seeded_draw_is_the_inverse_of_the_distribution(tiny: Tiny) -> None:
    """Ids in order without filters, likeliest first with them; one uniform number from (seed, index)."""
    params = SamplingParams(temperature=1.7, seed=5, max_tokens=8, ignore_eos=True)
    for filters in ({}, {"top_k": 20}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02}):
        made = tiny.engine.one(PROMPT, msgspec.structs.replace(params, **filters)).tokens
        want: list[int] = []
        while len(want) < 8:
            p = torch.softmax(tiny.logits(PROMPT + want)[-1] / params.temperature, -1).tolist()
            want.append(_inverse(_left(p, **filters), uniform(5, len(want))))
        assert made == want, filters


def _left(p: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[tuple[int, float]]:
    if not (top_k or top_p < 1 or min_p):
        return list(enumerate(p))
    left = sorted(enumerate(p), key=lambda item: (-item[1], item[0]))[: top_k or len(p)]
    total, mass, kept = sum(share for _, share in left), 0.0, []
    for i, share in left:
        if mass / total < top_p and share >= min_p * left[0][1]:
            kept.append((i, share))
        mass += share
    return kept


def _inverse(left: list[tuple[int, float]], chance: float) -> int:
    at, mass = chance * sum(share for _, share in left), 0.0
    for i, share in left:
        mass += share
        if mass > at:
            return i
    return left[-1][0]


def test_n_answers_share_a_prompt_and_are_what_each_seed_gives_alone(tiny: Tiny) -> None:
    """What the callers make of ``n``: a leader, and others that find its prompt in the cache."""
    params = SamplingParams(temperature=3.0, max_tokens=6, ignore_eos=True)
    seeds = {str(i): msgspec.structs.replace(params, seed=40 + i) for i in range(3)}
    prompt = prompt_ids(45, 77)
    engine = Engine(tiny.folder, page_tokens=16, pool_bytes=4 << 20)
    answers = engine.run([ask(name, prompt, one, leader=None if name == "0" else "0") for name, one in seeds.items()])
    alone = {name: tiny.engine.one(prompt, one).tokens for name, one in seeds.items()}
    assert {name: answer.tokens for name, answer in answers.items()} == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == 3
    assert [answers[name].cached for name in seeds] == [0, 32, 32]


def test_a_choice_is_the_best_where_the_choices_part(tiny: Tiny) -> None:
    """Tokens that may follow are those whose text goes on with some choice; where several next letters may come, the
    largest logit among them wins. (Where only one may, the grammar asks for the tokens that the text has anyway.)"""
    choices = ["the table", "abab12", '{"":12}', "then", "another"]
    pieces = {i: small_tokenizer().decode([i], skip_special_tokens=False) for i in range(4, 270)}
    grammar = Grammar(kind="choice", text=json.dumps(choices))
    for seed in range(3):
        prompt = prompt_ids(12, seed)
        answer = tiny.engine.one(prompt, changed(grammar=grammar, ignore_eos=False, max_tokens=12))
        assert answer.finish == "stop" and small_tokenizer().decode(answer.tokens) in choices
        parted = 0
        for at, token in enumerate(answer.tokens):
            text = small_tokenizer().decode(answer.tokens[:at])
            left = [choice[len(text) :] for choice in choices if choice.startswith(text)]
            if len({rest[0] for rest in left}) > 1:
                logits_V = tiny.logits(prompt + answer.tokens[:at])[-1]
                may = [i for i, piece in pieces.items() if any(rest.startswith(piece) for rest in left)]
                assert token == max(may, key=lambda i: float(logits_V[i])), (seed, at)
                parted += 1
        assert parted


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_schema_holds_in_company_and_over_preemption(tiny: Tiny, temperature: float) -> None:
    """Random weights write any JSON the schema allows, and nothing else; alone and together the same."""
    schema = {
        "type": "object", "required": ["a", "b"], "additionalProperties": False,
        "properties": {
            "a": {"enum": ["the", "ab", 12, None]}, "b": {"type": "array", "maxItems": 2, "items": {"type": "boolean"}},
        },
    }  # fmt: skip
    grammar = Grammar(kind="json_schema", text=json.dumps(schema))
    blanks = {i: -100.0 for i in range(270) if not small_tokenizer().decode([i]).strip()}  # JSON allows any number
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=44, grammar=grammar, logit_bias=blanks)
    prompts = {str(i): prompt_ids(10 + i, i) for i in range(4)}
    alone = {name: tiny.engine.one(prompt, params) for name, prompt in prompts.items()}
    layout = lay_out(tiny.engine.runner._ready.model.spec.cache(), dtype="f32", page_tokens=4)
    pool_bytes = least_slabs(layout, 58) * layout.slab_bytes
    tight = Engine(tiny.folder, page_tokens=4, pool_bytes=pool_bytes)
    answers = tight.run([ask(name, prompt, params) for name, prompt in prompts.items()])
    for name, answer in answers.items():
        assert answer.tokens == alone[name].tokens and answer.finish == "stop", name
        value = json.loads(small_tokenizer().decode(answer.tokens))
        assert set(value) == {"a", "b"} and value["a"] in ("the", "ab", 12, None)
        assert len(value["b"]) <= 2 and all(isinstance(item, bool) for item in value["b"])
    if not layout.state_groups:  # there a snapshot more is what is to spare
        assert tight.loop.progress().counters["preemptions"]
