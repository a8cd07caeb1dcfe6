"""Rung 0: any model transformers can load, recipe or not, behind the same scheduler and sampler."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
import transformers

from dayzero.engine.build import engine_loop, executor_of
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.request import SamplingParams
from dayzero.errors import ModelError, UsageError
from tests.cpu.engine_support import GREEDY, Engine, ask, prompt_ids


class Upstream(Engine):
    """The same driver over the publisher's code."""

    def __init__(self, source: Path, **config: Any) -> None:
        options = {"dtype": "float32", "debug": True} | config
        launch = LaunchSpec(source=str(source), config=EngineConfig(**options), executor="upstream")
        self.runner = executor_of(launch, lambda loaded, total: None)
        self.runner.load()
        self._logits = {}
        self.loop = engine_loop(launch, self.runner)
        self.manager = self.loop._scheduler.manager


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A family that no recipe knows: learned positions, biases, LayerNorm."""
    out = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_embd=48, n_head=4, n_layer=2, vocab_size=520, n_positions=128, eos_token_id=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(out)
    return out


def test_nothing_of_the_library_is_called_that_it_takes_back(gpt2: Path) -> None:
    """It says so in FutureWarnings; a later release would not load the model."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        answer = Upstream(gpt2).run([ask("a", prompt_ids(7, 1))])["a"]
    assert answer.tokens


def test_greedy_answers_are_the_publishers(gpt2: Path) -> None:
    model = transformers.GPT2LMHeadModel.from_pretrained(gpt2)
    prompts = [prompt_ids(length, length) for length in (5, 20, 70)]
    engine = Upstream(gpt2, max_running=2, max_step_tokens=24)
    answers = engine.run([ask(str(i), prompt) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        want = model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert answers[str(i)].tokens == want[0, len(prompt) :].tolist()
        assert answers[str(i)].cached == 0


def test_prompt_logprobs_and_context_are_the_publishers(gpt2: Path) -> None:
    model, prompt = transformers.GPT2LMHeadModel.from_pretrained(gpt2), prompt_ids(30, 1)
    engine = Upstream(gpt2, chunk_tokens=7)
    assert engine.runner.info.max_model_len == 128
    answer = engine.one(prompt, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1))
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([prompt])).logits[0].double(), -1)
    assert answer.prompt_logprobs is not None
    for at, entry in enumerate(answer.prompt_logprobs):
        assert entry.token == prompt[at + 1] and abs(entry.logprob - float(logs[at, prompt[at + 1]])) < 1e-4


def test_a_preempted_request_begins_with_an_empty_cache(gpt2: Path) -> None:
    engine = Upstream(gpt2, max_running=3, max_step_tokens=40)
    first = engine.run([ask(str(i), prompt_ids(10, i)) for i in range(5)], abort={"1": 3})
    again = engine.run([ask(f"b{i}", prompt_ids(10, i)) for i in range(5)])
    assert first["0"].tokens == again["b0"].tokens and first["4"].tokens == again["b4"].tokens
    assert len(again["b1"].tokens) == GREEDY.max_tokens


def test_what_cannot_be_loaded_is_one_sentence(gpt2: Path, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_bytes((gpt2 / "config.json").read_bytes())
    torch.save({}, pickled / "pytorch_model.bin")
    with pytest.raises(UsageError, match="pickle"):
        Upstream(pickled)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "no_such_model", "vocab_size": 9}')
    with pytest.raises(ModelError, match="transformers cannot load"):
        Upstream(broken)
    with pytest.raises(UsageError, match=r"nowhere"):
        Upstream(tmp_path / "nowhere")
