"""Every family's recipe, loader and blocks against the publisher's code in transformers, on tiny checkpoints.

Both sides run in float32. Ours rounds once per operator from float64, transformers accumulates in float32 over widths
of about 100, so the two differ by some 1e-6 of the logits' spread; 1e-4 leaves room for the depth and fails for any
fault of maths, which moves logits by 1e-2 and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("transformers")
import torch
from tiny_configs import FAMILIES, VOCAB, write_tiny

from dayzero.blocks.generate import greedy
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.blocks.stack import Stack

NUM_PROMPT, NUM_GENERATED = 48, 64
RELATIVE = 1e-4  # of the spread (standard deviation) of the logits


@dataclass(frozen=True)
class Pair:
    """The same weights in transformers and here."""

    theirs: Any
    model: LoadedModel
    prompt: torch.Tensor

    def stack(self) -> Stack:
        return Stack(self.model.spec, self.model.loader.load)

    def cache(self) -> LocalCache:
        return LocalCache(self.model.spec, torch.float32)


@pytest.fixture(scope="module", params=list(FAMILIES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    theirs = write_tiny(request.param, folder)
    prompt = torch.randint(3, VOCAB, (NUM_PROMPT,), generator=torch.Generator().manual_seed(1))
    return Pair(theirs, open_model(str(folder)), prompt)


def close(got: torch.Tensor, want: torch.Tensor, relative: float = RELATIVE) -> None:
    worst = float((got - want).abs().max() / want.std())
    assert worst < relative, f"differs by {worst:.2e} of the spread"


def test_logits_equal_the_publishers_code(pair: Pair) -> None:
    with torch.no_grad():
        want = pair.theirs(input_ids=pair.prompt[None], use_cache=False).logits[0]
    stack = pair.stack()
    close(stack.head(stack.forward(pair.cache().view(pair.prompt))), want)
    assert pair.model.loader.findings == []


def test_greedy_ids_equal_the_publishers_code(pair: Pair) -> None:
    want = pair.theirs.generate(
        pair.prompt[None], max_new_tokens=NUM_GENERATED, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0, NUM_PROMPT:]
    got = list(greedy(pair.stack(), pair.cache(), pair.prompt.tolist(), NUM_GENERATED))
    assert got == want.tolist()


def test_decoding_with_cache_equals_the_full_forward(pair: Pair) -> None:
    """The same operators on the same float64 sums, in other batch shapes: only their last bits may differ."""
    stack, cache = pair.stack(), pair.cache()
    whole = stack.head(stack.forward(pair.cache().view(pair.prompt)))
    parts = [stack.forward(cache.view(pair.prompt[:31]))]
    parts += [stack.forward(cache.view(pair.prompt[i : i + 1])) for i in range(31, NUM_PROMPT)]
    close(stack.head(torch.cat(parts)), whole, 1e-5)


def test_streaming_layers_changes_no_bit(pair: Pair) -> None:
    kept = pair.stack()
    streamed = Stack(pair.model.spec, pair.model.loader.load, resident=False)
    want = kept.head(kept.forward(pair.cache().view(pair.prompt)))
    got = streamed.head(streamed.forward(pair.cache().view(pair.prompt)))
    assert torch.equal(got, want)
