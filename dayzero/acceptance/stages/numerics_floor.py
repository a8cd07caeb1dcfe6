"""The noise floor of a number type, measured: our reference forward, with every operator's result moved by rounding.

It is what an honest implementation of the same model in that type loses, whichever order it sums in. bfloat16: results
are rounded to it, weights and sums are not. float32: results are moved at random by eight units of rounding, which is
what sums in another order come to.

Where a model chooses (experts, rows of a sparse index), one run tells little: rounding turns a choice over at a near
tie, or does not, and a turned choice costs a hundred times what all rounding beside it does. Single runs of one twin
lie between 2e-5 and 2e-3 nat of mean KL; held to one another at four times their size, a fifth of all pairs failed, and
so did a sound service. There the floor is several runs: in the first, results are rounded to the nearest number, in the
others they are moved at random within half a step of the type, which is as much. What is held to the floor is held to
the runs' mean, or to half their worst, whichever is more: what turned over once in all runs may turn over in the
service. Models that choose nothing have one run, and the bounds that they always had.

T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from dayzero.acceptance.compare import SAFETY, UNIT
from dayzero.acceptance.rounding import BF16_BITS
from dayzero.acceptance.walk import KeepOne
from dayzero.arch.channels import MoE
from dayzero.arch.cost import total_params
from dayzero.arch.mixers import MLA
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import stacked_experts
from dayzero.blocks.open import LoadedModel
from dayzero.blocks.site import Bind, reference
from dayzero.blocks.stack import Stack, vocabulary_matrices
from dayzero.ops.contract import CONTRACTS

# Results that stay float32 in a bf16 model (logits of head and router, weights of experts), or that only move values.
KEPT = ("linear.matmul_f32", "moe.route", "embed.lookup", "cache.", "sparse_index.", "sample.")
SEED = 29
# Runs of a model that chooses. Two turned choices in a small twin are many; a large one turns dozens over in each run.
FEW_PARAMS, RUNS_OF_FEW, RUNS_OF_MANY = 50_000_000, 16, 4
WORST_SHARE = 0.5  # of the worst run


def size_of_runs(sizes: Iterable[float]) -> float:
    """One size for what several runs lost: their mean, or half of the worst. Of a single run, its own."""
    every = list(sizes)
    return max(fmean(every), WORST_SHARE * max(every))


@dataclass(frozen=True, slots=True)
class Floor:
    """Logits [T, V] float32 of the reference forward in float32, and of the same with noise. KL in nats, by token.

    further: [T, V] each, of other runs with noise, where one is not enough.
    """

    dtype: str
    clean_TV: Tensor
    noisy_TV: Tensor
    further: tuple[Tensor, ...] = ()

    @property
    def runs(self) -> list[Floor]:
        """Each run as a floor of its own."""
        return [Floor(self.dtype, self.clean_TV, made) for made in (self.noisy_TV, *self.further)]

    def first(self, count: int) -> Floor:
        """Of the first tokens alone."""
        clean, noisy, *further = (x[:count] for x in (self.clean_TV, self.noisy_TV, *self.further))
        return Floor(self.dtype, clean, noisy, tuple(further))

    @property
    def kl_T(self) -> Tensor:
        a, b = self.clean_TV.double().log_softmax(-1), self.noisy_TV.double().log_softmax(-1)
        return (a.exp() * (a - b)).sum(-1).clamp_min(0)

    @property
    def gap_error(self) -> float:
        """How far the distance between a token's two best logits moves in the first run, at most."""
        ids = self.clean_TV.topk(2, -1).indices
        clean, noisy = (x.double().gather(1, ids) for x in (self.clean_TV, self.noisy_TV))
        return float((clean - noisy).diff(dim=-1).abs().max())

    def target_errors(self, tokens: Sequence[int]) -> Tensor:
        """[T - 1]: how far the log-probability of each next token moves in the first run."""
        at = torch.tensor(tokens[1:])[:, None]
        clean, noisy = (x.double().log_softmax(-1)[:-1].gather(1, at) for x in (self.clean_TV, self.noisy_TV))
        return (noisy - clean)[:, 0]


def noise_floors(model: LoadedModel, tokens: Sequence[int], dtypes: Sequence[str], expert_bytes: int) -> list[Floor]:
    """A Floor for each of ``dtypes`` (``f32``, ``bf16``). Layers are loaded once for all of them, used and dropped."""
    more = 0
    if chooses(model.spec) and "bf16" in dtypes:
        more = (RUNS_OF_FEW if total_params(model.spec) <= FEW_PARAMS else RUNS_OF_MANY) - 1
    load = partial(
        model.loader.load,
        lazy=stacked_experts(model.spec) | vocabulary_matrices(model.spec),
        keep_bytes=expert_bytes,
    )
    kept = KeepOne(load)
    binds: list[Bind] = [
        reference,
        *(noisy(dtype) for dtype in dtypes),
        *(within_a_step(SEED + n) for n in range(more)),
    ]
    stacks = [Stack(model.spec, kept, bind=bind, resident=False) for bind in binds]
    views = [LocalCache(model.spec, torch.float32).view(list(tokens)) for _ in stacks]
    carries = [stack.open(view) for stack, view in zip(stacks, views, strict=True)]
    for number in range(len(model.spec.layers)):
        runs = zip(stacks, carries, views, strict=True)
        carries = [stack.layer(number, carry, view) for stack, carry, view in runs]
    logits = [stack.head(stack.close(carry)) for stack, carry in zip(stacks, carries, strict=True)]
    clean, first, further = logits[0], logits[1 : 1 + len(dtypes)], tuple(logits[1 + len(dtypes) :])
    return [
        Floor(dtype, clean, made, further if dtype == "bf16" else ()) for dtype, made in zip(dtypes, first, strict=True)
    ]


def chooses(spec: ModelSpec) -> bool:
    """Whether rounding can turn a choice over: of experts, or of rows by a sparse index."""
    return any(
        isinstance(layer.channel, MoE) or (isinstance(layer.mixer, MLA) and layer.mixer.index is not None)
        for layer in spec.layers
    )


def noisy(dtype: str) -> Bind:
    """References whose results are rounded to bf16, or moved by eight units of float32."""
    draw = torch.Generator().manual_seed(SEED)
    if dtype == "bf16":
        return _moving(KEPT, lambda value: value.bfloat16().to(value.dtype))
    return _moving(KEPT[1:], lambda value: value * (1 + SAFETY * UNIT * torch.randn(value.shape, generator=draw)))


def within_a_step(seed: int) -> Bind:
    """References whose results are moved evenly within half a step of bf16, as far as rounding to it moves them."""
    draw = torch.Generator().manual_seed(seed)

    def moved(value: Tensor) -> Tensor:
        step = torch.ldexp(torch.ones_like(value), torch.frexp(value)[1] - 1 - BF16_BITS)
        return torch.where(value == 0, value, value + step * (torch.rand(value.shape, generator=draw) - 0.5))

    return _moving(KEPT, moved)


def _moving(kept: tuple[str, ...], move: Callable[[Tensor], Tensor]) -> Bind:
    """kept: what contracts begin with whose results stay as they are."""

    def moved(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(moved(part) for part in value)
        return move(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def bind(contract: str, site: str) -> Callable[..., Any]:
        op = reference(contract, site)
        # of a composed one the operators that it is made of have their own results moved
        if CONTRACTS[contract].composed or contract.startswith(kept):
            return op
        return lambda *args, **options: moved(op(*args, **options))

    return bind
