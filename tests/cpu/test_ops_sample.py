"""Sampling as functions of tensors against the engine's row by row, which has its own tests."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dayzero.engine.request import SamplingParams
from dayzero.engine.sampler import SlotState, apply_mask, draw, shape_logits, uniform
from dayzero.ops import sample
from dayzero.ops.cases import CASES

MASK = (1 << 64) - 1


@pytest.mark.parametrize("case", CASES["sample.draw"], ids=lambda case: case.name)
def test_a_batch_draws_what_each_row_draws(case: object) -> None:
    given = case.make(3)  # type: ignore[attr-defined]
    got = sample.draw(**given)
    logits_SV: Tensor = given.pop("logits_SV")
    for s, logits_V in enumerate(logits_SV):
        t, k, p, m, seed, index = (value[s].item() for value in given.values())
        top = logits_V.amax().item()
        if not float("-inf") < top < float("inf"):
            assert got[s] == logits_SV.shape[1]
            continue
        params = SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m)
        assert got[s] == draw(logits_V, params, uniform(seed & MASK, index))


def test_shapes_are_the_engines() -> None:
    given = CASES["sample.shape"][0].make(5)
    got = sample.shape(**given)
    vocab = given["logits_SV"].shape[1]
    for s, logits_V in enumerate(given["logits_SV"].clone()):
        row = {k: v[s] for k, v in given.items()}
        repetition, presence, frequency = row["penalties_S3"].tolist()
        at = int(row["prompt_S"])
        known = row["ids_SL"].tolist()
        prompt, own = ([i for i in part if i >= 0] for part in (known[:at], known[at:]))
        bias = {i: b for i, b in zip(row["bias_ids_SB"].tolist(), row["bias_SB"].tolist(), strict=True) if i >= 0}
        params = SamplingParams(
            repetition_penalty=repetition, presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias,
            min_tokens=1, stop_token_ids=tuple(i for i in row["banned_SC"].tolist() if i >= 0),
        )  # fmt: skip
        shape_logits(logits_V, SlotState("r", params, 1, len(prompt), (), prompt + own), 0)
        apply_mask(logits_V, row["allowed_SW"].numpy().tobytes())
        assert torch.equal(got[s], logits_V), vocab
