"""A value that is no number ends the request it is in, and no other one; nothing it wrote is found by anybody."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers")
import torch
from safetensors.torch import load_file, save_file
from tiny_configs import write_tiny
from torch import Tensor

from dayzero.engine.request import SamplingParams
from dayzero.view import StepView
from tests.cpu.engine_support import REFERENCE, Engine, ask, prompt_ids

CURSED = 511  # a token id whose embedding is no number; ``prompt_ids`` gives none so large
FAST: tuple[tuple[str, str], ...] = ()
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module", params=["gpt_oss", "kimi_linear", "deepseek_v32"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp(request.param)
    write_tiny(request.param, out)
    shard = out / "model.safetensors"
    tensors = load_file(shard)
    tensors["model.embed_tokens.weight"][CURSED] = torch.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    return out


@pytest.mark.parametrize(
    ("bindings", "run_ahead"), [(REFERENCE, True), (FAST, False)], ids=["reference-ahead", "fast-one-by-one"]
)
def test_one_request_ends_and_all_others_are_as_alone(
    folder: Path, bindings: tuple[tuple[str, str], ...], run_ahead: bool
) -> None:
    """In one step with the others, in chunks; the bad token at the prompt's end, in its middle, or sampled itself."""
    options = {"page_tokens": 16, "bindings": bindings, "run_ahead": run_ahead}
    lone = Engine(folder, prefix_cache=False, **options)
    good = {str(i): prompt_ids(18 + 5 * i, i) for i in range(3)}
    want = {name: lone.one(prompt, GREEDY).tokens for name, prompt in good.items()}
    engine = Engine(folder, chunk_tokens=16, **options)
    before = engine.manager.sums()
    shared = prompt_ids(33, 7)
    forced = SamplingParams(temperature=0, max_tokens=8, logit_bias={CURSED: 100.0}, ignore_eos=True)
    bad = [
        ask("end", [*good["1"], CURSED], GREEDY),
        ask("middle", [*shared[:20], CURSED, *shared[20:]], GREEDY),
        ask("sampled", prompt_ids(9, 9), forced),
    ]
    answers = engine.run(
        [bad[0], *(ask(name, prompt, GREEDY) for name, prompt in good.items()), *bad[1:]], arrive={"2": 2}
    )
    assert {name: answers[name].tokens for name in good} == want
    for request in bad:
        answer = answers[request.id]
        assert answer.finish == "error" and answer.error is not None and answer.error[0] == "nan_logits", request.id
    assert answers["end"].tokens == answers["middle"].tokens == [] and answers["sampled"].tokens == [CURSED]
    assert engine.loop.progress().counters["bad_rows"] == 3
    # Memory that held the bad values is used again, and what was found in the cache is sound.
    again = engine.run([ask(name, prompt, GREEDY) for name, prompt in good.items()])
    assert {name: answer.tokens for name, answer in again.items()} == want
    engine.manager.forget()
    assert engine.manager.sums() == before


def test_pages_of_a_chunk_that_went_bad_are_not_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that passes: in a chunk whose tokens are not sampled, once. The same prompt is computed anew then."""
    engine = Engine(folder, page_tokens=16, chunk_tokens=16)
    prompt = prompt_ids(50, 3)
    want = Engine(folder, prefix_cache=False).one(prompt, GREEDY).tokens
    stack = engine.runner.stack
    layer, steps = stack.layer, [0]

    def faulty(number: int, carry: object, view: StepView) -> object:
        steps[0] += number == 0
        if number == 1 and steps[0] == 2:
            carry.main[3] = torch.nan  # type: ignore[attr-defined]
        return layer(number, carry, view)  # type: ignore[arg-type]

    monkeypatch.setattr(stack, "layer", faulty)
    first = engine.one(prompt, GREEDY)
    assert first.finish == "error" and first.error is not None and first.error[0] == "nan_logits"
    assert steps[0] <= 3, "it ends where it went bad, not at the prompt's end"
    second = engine.one(prompt, GREEDY)
    assert second.tokens == want and second.cached == (0 if engine.runner.layout.state_groups else 16)
    assert engine.one(prompt, GREEDY).tokens == want


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1, max_tokens=4, logprobs=2)], ids=["greedy", "drawn"])
def test_infinite_logits_are_no_numbers_either(
    folder: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The softmax of an infinite logit is none; it would be drawn from, and told, as such."""
    engine = Engine(folder)
    head = engine.runner.stack.head

    def infinite(hidden_TD: Tensor) -> Tensor:
        logits_TV = head(hidden_TD).clone()
        logits_TV[:, 17] = torch.inf
        return logits_TV

    monkeypatch.setattr(engine.runner.stack, "head", infinite)
    answer = engine.one(prompt_ids(5, 1), params)
    assert answer.finish == "error" and answer.error is not None and answer.error[0] == "nan_logits"
