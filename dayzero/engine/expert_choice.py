"""How evenly experts are chosen, as the entropy of the choice against what an even choice would give.

Time of a step depends on how many experts its tokens touch. Made weights whose router prefers a few would measure a
model that nobody has; such a run is void.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from dayzero.arch.channels import MoE
from dayzero.arch.spec import ModelSpec
from dayzero.blocks.site import Bind
from dayzero.ops.contract import CONTRACTS

FLOOR = 0.8  # of the entropy that an even choice by as many tokens has
ROUTES = {"moe.route": "route", "moe.matmul_route": "choose"}  # contracts that choose, and their words in a layer


@dataclass(frozen=True, slots=True)
class Evenness:
    """Of several steps and layers. entropy, even: nats, means over them: of the experts chosen in a step of a layer,
    and what is expected of an even choice by as many tokens. worst: the smallest ratio of a layer. tokens: of a step,
    at most."""

    entropy: float
    even: float
    worst: float
    layers: int
    tokens: int

    @property
    def share(self) -> float:
        return self.entropy / self.even if self.even else 1.0

    @property
    def void(self) -> bool:
        return self.share < FLOOR

    def text(self) -> str:
        return (
            f"entropy {self.entropy:.2f} nats, {self.share:.0%} of an even choice's {self.even:.2f} "
            f"(worst layer {self.worst:.0%}, floor {FLOOR:.0%}), {self.layers} layers, {self.tokens:,} tokens a step"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "entropy_nats": self.entropy, "even_nats": self.even, "share": self.share, "worst_layer": self.worst,
            "floor": FLOOR, "void": self.void, "layers": self.layers, "tokens": self.tokens,
        }  # fmt: skip


class Choices:
    """Keeps which experts are chosen, by layer and step, while ``listening``; else it costs a branch a layer."""

    def __init__(self, spec: ModelSpec) -> None:
        self.listening = False
        self._routers = {
            f"layers.{i}.channel": layer.channel.router
            for i, layer in enumerate(spec.layers)
            if isinstance(layer.channel, MoE)
        }
        self._seen: dict[str, list[Tensor]] = {}

    @property
    def any(self) -> bool:
        """Whether the model has routers at all."""
        return bool(self._routers)

    def bind(self, bind: Bind) -> Bind:
        """``bind``, with routers that are listened to."""

        def bound(contract: str, site: str) -> Callable[..., Any]:
            function = bind(contract, site)
            declared = CONTRACTS.get(contract)
            if contract not in ROUTES or (declared is not None and declared.composed and function is declared.body):
                return function  # where it stands for others in turn, those are listened to
            layer = site.removesuffix(f".{ROUTES[contract]}")

            def route(*args: Any, **kwargs: Any) -> Any:
                chosen = function(*args, **kwargs)
                if self.listening:
                    self._seen.setdefault(layer, []).append(chosen[0])
                return chosen

            return route

        return bound

    def take(self) -> Evenness | None:
        """What was heard since the last time; None: nothing."""
        seen, self._seen = self._seen, {}
        heard = {layer: [ids.cpu().numpy() for ids in steps] for layer, steps in seen.items()}
        ratios, entropies, evens, most = [], [], [], 0
        for layer, steps in heard.items():
            router = self._routers[layer]
            found = [entropy(ids) for ids in steps]
            even = [even_entropy(len(ids), router.top_k, router.experts) for ids in steps]
            entropies += found
            evens += even
            ratios.append(sum(found) / sum(even) if sum(even) else 1.0)
            most = max(most, *map(len, steps))
        if not entropies:
            return None
        return Evenness(_mean(entropies), _mean(evens), min(ratios), len(heard), most)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def entropy(ids_TN: np.ndarray) -> float:
    """Nats of the shares that experts have of all choices; negative ids are none."""
    counts = np.bincount(ids_TN[ids_TN >= 0].ravel())
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log(shares)).sum())


def even_entropy(tokens: int, top_k: int, experts: int) -> float:
    """Expected nats when each token takes ``top_k`` different experts, all sets alike: an expert's count is then
    binomial (tokens, top_k / experts). For few tokens it lies far below log(experts)."""
    n, p = tokens, top_k / experts
    if n == 0 or p >= 1:
        return math.log(top_k) if n else 0.0
    counts = np.arange(1, n + 1)
    logs = [math.lgamma(n + 1) - math.lgamma(c + 1) - math.lgamma(n - c + 1) for c in counts]
    chance = np.exp(np.array(logs) + counts * math.log(p) + (n - counts) * math.log1p(-p))
    share = counts / (n * top_k)
    return float(experts * (chance * -share * np.log(share)).sum())
