"""The noise floor of a number type, measured: our reference forward, with every operator's result moved by rounding.

It is what an honest implementation of the same model in that type loses, whichever order it sums in. bfloat16: results
are rounded to it, weights and sums are not. float32: results are moved at random by eight units of rounding, which is
what sums in another order come to.

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.acceptance.compare import SAFETY, UNIT
from dayzero.acceptance.walk import KeepOne
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import stacked_experts
from dayzero.blocks.open import LoadedModel
from dayzero.blocks.site import Bind, reference
from dayzero.blocks.stack import Stack, vocabulary_matrices
from dayzero.ops.contract import CONTRACTS

# Results that stay float32 in a bf16 model (logits of head and router, weights of experts), or that only move values.
KEPT = ("linear.matmul_f32", "moe.route", "embed.lookup", "cache.", "sparse_index.", "sample.")
SEED = 29


@dataclass(frozen=True, slots=True)
class Floor:
    """Logits [T, V] float32 of the reference forward in float32, and of the same with noise. KL in nats, by token."""

    dtype: str
    clean_TV: Tensor
    noisy_TV: Tensor

    @property
    def kl_T(self) -> Tensor:
        a, b = self.clean_TV.double().log_softmax(-1), self.noisy_TV.double().log_softmax(-1)
        return (a.exp() * (a - b)).sum(-1).clamp_min(0)

    @property
    def gap_error(self) -> float:
        """How far the distance between a token's two best logits moves, at most."""
        ids = self.clean_TV.topk(2, -1).indices
        clean, noisy = (x.double().gather(1, ids) for x in (self.clean_TV, self.noisy_TV))
        return float((clean - noisy).diff(dim=-1).abs().max())

    def target_errors(self, tokens: Sequence[int]) -> Tensor:
        """[T - 1]: how far the log-probability of each next token moves."""
        at = torch.tensor(tokens[1:])[:, None]
        clean, noisy = (x.double().log_softmax(-1)[:-1].gather(1, at) for x in (self.clean_TV, self.noisy_TV))
        return (noisy - clean)[:, 0]


def noise_floors(model: LoadedModel, tokens: Sequence[int], dtypes: Sequence[str], expert_bytes: int) -> list[Floor]:
    """A Floor for each of ``dtypes`` (``f32``, ``bf16``). Layers are loaded once for all of them, used and dropped."""
    load = partial(
        model.loader.load,
        lazy=stacked_experts(model.spec) | vocabulary_matrices(model.spec),
        keep_bytes=expert_bytes,
    )
    kept = KeepOne(load)
    binds: list[Bind] = [reference, *(noisy(dtype) for dtype in dtypes)]
    stacks = [Stack(model.spec, kept, bind=bind, resident=False) for bind in binds]
    views = [LocalCache(model.spec, torch.float32).view(list(tokens)) for _ in stacks]
    carries = [stack.open(view) for stack, view in zip(stacks, views, strict=True)]
    for number in range(len(model.spec.layers)):
        runs = zip(stacks, carries, views, strict=True)
        carries = [stack.layer(number, carry, view) for stack, carry, view in runs]
    logits = [stack.head(stack.close(carry)) for stack, carry in zip(stacks, carries, strict=True)]
    return [Floor(dtype, logits[0], made) for dtype, made in zip(dtypes, logits[1:], strict=True)]


def noisy(dtype: str) -> Bind:
    """References whose results are rounded to bf16, or moved by eight units of float32."""
    draw = torch.Generator().manual_seed(SEED)

    def bind(contract: str, site: str) -> Callable[..., Any]:
        op = reference(contract, site)
        if CONTRACTS[contract].composed:  # the operators that it is made of have their own results moved
            return op
        if contract.startswith(KEPT) if dtype == "bf16" else contract.startswith(KEPT[1:]):
            return op

        def moved(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(moved(part) for part in value)
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            if dtype == "bf16":
                return value.bfloat16().to(value.dtype)
            return value * (1 + SAFETY * UNIT * torch.randn(value.shape, generator=draw))

        return lambda *args, **options: moved(op(*args, **options))

    return bind
