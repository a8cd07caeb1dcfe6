"""lm-eval against the service: token ids in, echoed prompts with log-probabilities out, and answers until a text.

What it reports for each sample is held against the same model in this process.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dayzero import LLM, SamplingParams
from tests.clients.service import NAME, Service, program, run

DATA = Path(__file__).parent / "data"
SECONDS = 900
UNTIL = ("\n", "e")
NUM_SAMPLES = 10
NUM_CHOICES = 3
# Sums of a few float32 log-probabilities, computed in other batches: both sides differ in their last bits.
CLOSE = 1e-3

Samples = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def samples(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Samples:
    """Task -> what lm-eval noted of each document."""
    out = tmp_path_factory.mktemp("lm_eval")
    arguments = {
        "model": NAME, "base_url": f"{service.address}/v1/completions", "tokenizer_backend": "huggingface",
        "tokenizer": service.folder, "tokenized_requests": True, "num_concurrent": 3, "max_retries": 1,
        "max_length": 512,
    }  # fmt: skip
    command = [
        program("eval", "lm_eval"), "run", "--model", "local-completions", "--model_args",
        ",".join(f"{name}={value}" for name, value in arguments.items()), "--tasks", "local_larger,local_after",
        "--batch_size", "2",
        "--include_path", str(DATA), "--output_path", str(out), "--log_samples",
    ]  # fmt: skip
    run(command, DATA, SECONDS, HF_HOME=str(out / "hub"))
    found: Samples = {}
    for file in out.rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
        found[file.name.removeprefix("samples_").rpartition("_")[0]] = sorted(lines, key=lambda one: one["doc_id"])
    assert {task: len(lines) for task, lines in found.items()} == {
        "local_larger": NUM_SAMPLES,
        "local_after": NUM_SAMPLES,
    }
    return found


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), dtype="float32", threads=1, pool_bytes=64 << 20) as found:
        yield found


def likelihood(llm: LLM, context: str, continuation: str) -> tuple[float, bool]:
    """(log-probability of the continuation, whether each of its tokens is the likeliest one)."""
    whole, start = llm.encode(context + continuation), len(llm.encode(context))
    (output,) = llm.generate(whole, SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0))
    told = output.prompt_logprobs
    assert told is not None and len(told) == len(whole) - 1
    own = told[start - 1 :]
    assert [one.token for one in own] == whole[start:]
    return sum(one.logprob for one in own), all(one.rank == 1 for one in own)


def test_likelihoods_are_the_models(samples: Samples, llm: LLM) -> None:
    for sample in samples["local_larger"]:
        choices = sample["doc"]["choices"]
        assert len(choices) == len(sample["filtered_resps"]) == NUM_CHOICES
        context = f"Question: {sample['doc']['question']}\nAnswer:"
        for choice, (told, greedy) in zip(choices, sample["filtered_resps"]):
            wanted, likeliest = likelihood(llm, context, f" {choice}")
            assert float(told) == pytest.approx(wanted, abs=CLOSE), (context, choice)
            assert str(greedy) == str(likeliest)


def test_answers_are_the_models(samples: Samples, llm: LLM) -> None:
    cut = 0
    for sample in samples["local_after"]:
        context = f"Question: {sample['doc']['question']}\nAnswer:"
        params = SamplingParams(max_tokens=12, temperature=0, stop=UNTIL)
        (output,) = llm.generate(context, params)
        assert sample["filtered_resps"] == [output.text]
        cut += output.finish_reason == "stop"
    assert cut, "no answer met a stop text, so these samples did not try it"
