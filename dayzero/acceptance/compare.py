"""How far two results are apart, and how far they may be: pure functions over tensors.

T tokens, D width, V vocabulary, N chosen ids of a token.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dayzero.arch.channels import GLU, MoE
from dayzero.arch.mixers import MLA, Attention, Delta
from dayzero.arch.spec import LayerSpec, ModelSpec

UNIT = 2.0**-24  # half the spacing of float32 at 1
SAFETY = 8.0
WORST_TOKEN = 8.0
FREE_LOGITS = 1e-4
MARGIN_NOISE_NATS, MARGIN_BUG_NATS = 0.05, 1.0


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest relative L2 error that float32 arithmetic explains, and the reason in words."""

    value: float
    why: str


@dataclass(frozen=True, slots=True)
class Distance:
    """ours against the oracle's, over the compared tokens.

    rel_l2: |ours - oracle| / |oracle|. worst_token: the largest such ratio of one token, worst_at: which.
    max_over_spread: largest absolute error over (max - min) of the oracle. first_wrong: first token whose ratio lies
    above the bound for one token, None when there is none.
    """

    rel_l2: float
    worst_token: float
    worst_at: int
    max_abs: float
    max_over_spread: float
    cosine: float
    num_tokens: int
    first_wrong: int | None = None

    def within(self, bound: float) -> bool:
        """False for NaN. One token may be eight times as far out: its own norm can be small by cancellation."""
        return self.rel_l2 <= bound and self.worst_token <= WORST_TOKEN * bound


def distance(ours: Tensor, oracle: Tensor, keep_T: Tensor | None, bound: float) -> Distance:
    """Distance of [T, ...] results over the tokens that ``keep_T`` (bool, default all) marks; float64 inside."""
    assert ours.shape == oracle.shape, f"{tuple(ours.shape)} is compared to {tuple(oracle.shape)}"
    a_TD, b_TD = ours.flatten(1).double(), oracle.flatten(1).double()
    where = torch.arange(len(a_TD)) if keep_T is None else keep_T.nonzero()[:, 0]
    if not len(where):
        return Distance(0.0, 0.0, 0, 0.0, 0.0, 1.0, 0)
    a_TD, b_TD = a_TD[where], b_TD[where]
    error_TD = a_TD - b_TD
    ratio_T = _ratio(error_TD.norm(dim=1), b_TD.norm(dim=1))
    wrong_T = ~(ratio_T <= WORST_TOKEN * bound)
    worst = int(torch.where(ratio_T.isnan(), math.inf, ratio_T).argmax())
    spread = float(b_TD.max() - b_TD.min())
    most = float(error_TD.abs().max())
    dot = float((a_TD * b_TD).sum())
    size = float(a_TD.norm() * b_TD.norm())
    return Distance(
        rel_l2=float(_ratio(error_TD.norm(), b_TD.norm())),
        worst_token=float(ratio_T[worst]),
        worst_at=int(where[worst]),
        max_abs=most,
        max_over_spread=most / spread if spread else (0.0 if most == 0 else math.inf),
        cosine=dot / size if size else (1.0 if most == 0 else 0.0),
        num_tokens=len(where),
        first_wrong=int(where[int(wrong_T.nonzero()[0])]) if bool(wrong_T.any()) else None,
    )


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """part / whole; 0 / 0 is 0, and anything else over 0 is infinite."""
    return torch.where(part == 0, torch.zeros_like(part), part / whole)


def bound_at(spec: ModelSpec, site: str, num_tokens: int) -> Bound:
    """What float32 on the oracle's side explains at ``site``; ours accumulates wider, so the oracle's counts.

    Rounding errors of a sum of K products grow like sqrt(K) units (random walk, Higham 2002, ch. 2.8). A module chains
    a few such sums; their errors add. The safety factor covers cancellation between large terms.
    """
    parts = site.split(".")
    if site == "embed":
        return Bound(2 * UNIT, "a looked-up row is exact, a scale rounds once")
    if parts[0] == "vision":
        return _vision_bound(spec, parts)
    if parts[0] != "layers":
        return _bound(spec.dim, 2, "one norm and one product")
    layer = spec.layers[int(parts[1])]
    mixer, channel = _mixer_sums(layer, num_tokens), _channel_sums(layer)
    word = parts[2] if len(parts) > 2 else "layer"
    if word == "mixer":
        return _bound(*mixer)
    if word == "channel":
        return _bound(max(mixer[0], channel[0]), mixer[1] + channel[1], f"{mixer[2]}, then {channel[2]}")
    return _bound(max(mixer[0], channel[0]), mixer[1] + channel[1], "mixer and channel together")


def _vision_bound(spec: ModelSpec, parts: list[str]) -> Bound:
    """The tower runs freely from the pixels on, so that every block adds its own error to those before it."""
    tower = spec.vision
    assert tower is not None
    if parts[-1] == "embed":
        return _bound(3 * tower.patch**2, 2, "pixels, one product, positions")
    num_blocks = tower.layers if len(parts) == 1 else int(parts[2]) + 1
    widest = max(tower.dim, tower.inner, tower.qkv_dim)
    if len(parts) > 1:
        return _bound(widest, 2 + 7 * num_blocks, f"{num_blocks} blocks of two norms, projections, scores, gelu")
    merged = tower.dim * tower.merge**2
    return _bound(max(widest, merged), 6 + 7 * num_blocks, f"{num_blocks} blocks, a norm, two products, a norm")


def free_bound(spec: ModelSpec, num_tokens: int) -> Bound:
    """What a free run's logits may be off by, over their spread: each layer may be off by its bound, independently."""
    layers = range(len(spec.layers))
    added = math.sqrt(sum(bound_at(spec, f"layers.{i}", num_tokens).value ** 2 for i in layers))
    return Bound(
        max(FREE_LOGITS, added),
        f"the bounds of {len(layers)} layers added in quadrature, {added:.1e}, but no less than {FREE_LOGITS:g}",
    )


def _bound(longest: int, stages: int, what: str) -> Bound:
    value = SAFETY * stages * UNIT * math.sqrt(max(longest, 1))
    return Bound(value, f"float32: {SAFETY:g} x {stages} chained sums ({what}) x 2^-24 x sqrt({longest} terms)")


def _mixer_sums(layer: LayerSpec, num_tokens: int) -> tuple[int, int, str]:
    mixer = layer.mixer
    if isinstance(mixer, Attention):
        return max(mixer.dim, mixer.heads * mixer.head_dim), 5, "norm, projections, scores, values, output"
    if isinstance(mixer, MLA):
        stages = 8 if mixer.q_rank is not None else 7
        return max(mixer.dim, mixer.heads * mixer.v_dim), stages, "norms, low-rank projections, scores, values, output"
    if not isinstance(mixer, Delta):
        return mixer.sums(num_tokens)
    # The state is a running sum over the tokens: its errors are carried along, each step adding its own.
    stages = 8 + math.ceil(math.sqrt(num_tokens))
    return max(mixer.dim, mixer.heads * mixer.value_dim), stages, "norms, projections, gates, a running state, output"


def _channel_sums(layer: LayerSpec) -> tuple[int, int, str]:
    channel = layer.channel
    if isinstance(channel, MoE):
        longest = max(channel.dim, channel.inner, channel.shared.inner if channel.shared else 0)
        return longest, 7 if channel.latent else 5, "norm, router, gate and up, down, sum over experts"
    if not isinstance(channel, GLU):
        return channel.sums()
    return max(channel.dim, channel.inner), 3, "norm, gate and up, down"


# --- discrete choices ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """Agreement of chosen ids as sets. differing: tokens whose sets differ; missed: ids that one side alone chose."""

    num_tokens: int
    differing: tuple[int, ...]
    missed: int

    @property
    def agreement(self) -> float:
        return 1.0 - len(self.differing) / self.num_tokens if self.num_tokens else 1.0


def compare_choices(ours_TN: Tensor, oracle_TN: Tensor, causal: bool) -> Choice:
    """ids [T, N] and [T, M] as sets by token. Negative ids are pads; causal: ids beyond the token's position too."""
    differing, missed = [], 0
    for token, (a, b) in enumerate(zip(ours_TN.tolist(), oracle_TN.tolist(), strict=True)):
        limit = token if causal else math.inf
        left = {x for x in a if 0 <= x <= limit} ^ {x for x in b if 0 <= x <= limit}
        if left:
            differing.append(token)
            missed += len(left)
    return Choice(len(ours_TN), tuple(differing), missed)


# --- logits -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Logits:
    """Our logits against the oracle's. margin: the oracle's gap between its two best, in nats.

    top1: bin of the margin -> (tokens, tokens whose best id agrees). KL: oracle against ours, nats; kl_T: of each
    token. exact_tokens:
    leading tokens before which no discrete choice of the free run differed; error_over_spread is over these.
    flips_beyond_noise: tokens among these whose best id differs though the margin exceeds twice the allowed error.
    """

    top1: dict[str, tuple[int, int]]
    kl_mean: float
    kl_p99: float
    kl_max: float
    perplexity_ours: float
    perplexity_oracle: float
    error_over_spread: float
    bound: float
    why: str
    exact_tokens: int
    flips_beyond_noise: tuple[int, ...]
    kl_T: tuple[float, ...] = field(default=(), repr=False)

    @property
    def passed(self) -> bool:
        return self.error_over_spread <= self.bound and not self.flips_beyond_noise and math.isfinite(self.kl_mean)

    def to_json(self) -> dict[str, Any]:
        return {
            "top1": {k: {"tokens": n, "agreeing": same} for k, (n, same) in self.top1.items()},
            "kl": {"mean": self.kl_mean, "p99": self.kl_p99, "max": self.kl_max},
            "perplexity": {"ours": self.perplexity_ours, "oracle": self.perplexity_oracle},
            "error_over_spread": self.error_over_spread,
            "bound": self.bound,
            "why": self.why,
            "exact_tokens": self.exact_tokens,
            "flips_beyond_noise": list(self.flips_beyond_noise),
        }


def compare_logits(ours_TV: Tensor, oracle_TV: Tensor, tokens: list[int], bound: Bound, exact_tokens: int) -> Logits:
    """Compare logits [T, V] of the same tokens, ours from a free run. bound: on the largest error over the spread."""
    assert ours_TV.shape == oracle_TV.shape, f"{tuple(ours_TV.shape)} against {tuple(oracle_TV.shape)}"
    a, b = ours_TV.double(), oracle_TV.double()
    log_a, log_b = a.log_softmax(-1), b.log_softmax(-1)
    kl_T = (log_b.exp() * (log_b - log_a)).sum(-1).clamp_min(0)
    best, second = b.topk(2, -1).values.T
    margin_T = best - second
    same_T = a.argmax(-1) == b.argmax(-1)
    edges = [
        (f"<{MARGIN_NOISE_NATS:g}", margin_T < MARGIN_NOISE_NATS),
        (f"{MARGIN_NOISE_NATS:g}-{MARGIN_BUG_NATS:g}", (margin_T >= MARGIN_NOISE_NATS) & (margin_T <= MARGIN_BUG_NATS)),
        (f">{MARGIN_BUG_NATS:g}", margin_T > MARGIN_BUG_NATS),
    ]
    spread = float(b.max() - b.min())
    allowed = 2 * bound.value * spread
    exact_T = torch.arange(len(a)) < exact_tokens
    error_T = (a - b).abs().amax(-1)
    error = float(error_T[:exact_tokens].max()) if exact_tokens else 0.0
    return Logits(
        top1={name: (int(in_T.sum()), int((in_T & same_T).sum())) for name, in_T in edges},
        kl_mean=float(kl_T.mean()),
        kl_p99=float(kl_T.quantile(0.99)) if bool(kl_T.isfinite().all()) else math.nan,
        kl_max=float(kl_T.max()),
        perplexity_ours=_perplexity(log_a, tokens),
        perplexity_oracle=_perplexity(log_b, tokens),
        error_over_spread=error / spread if spread else (0.0 if error == 0 else math.inf),
        bound=bound.value,
        why=bound.why,
        exact_tokens=exact_tokens,
        flips_beyond_noise=tuple((exact_T & ~same_T & (margin_T > allowed)).nonzero()[:, 0].tolist()),
        kl_T=tuple(kl_T.tolist()),
    )


def _perplexity(log_TV: Tensor, tokens: list[int]) -> float:
    """exp of the mean negative log probability of each next token."""
    if len(tokens) < 2:
        return math.nan
    picked = log_TV[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return float(torch.exp(-picked.mean()))
