"""What the service computes in its own number type, through the offline API, against the oracle in float32.

A prompt's log-probabilities come with the 20 likeliest ids of each place; KL is taken over these and all others as one,
which is at most the KL over the vocabulary. It is held to what the number type loses by itself (``numerics_floor``).

T tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dayzero.acceptance.compare import MARGIN_BUG_NATS, MARGIN_NOISE_NATS
from dayzero.acceptance.stages.numerics_floor import Floor, size_of_runs
from dayzero.engine.check import MAX_LOGPROBS
from dayzero.engine.events import Logprobs
from dayzero.engine.llm import LLM
from dayzero.engine.request import SamplingParams
from dayzero.finding import Finding

FACTOR, TAIL_FACTOR = 4.0, 8.0  # errors of one size: so much may means over dozens of places, or the worst, differ
LEAST_PLACES = 8
LEAST_PAGES, PAGE_TOKENS = 4, 64
SERVED_REMEDY = (
    "Run `dayzero align --bind` with the variants that are bound (facts): the first that diverges is at fault; when "
    "none does, look at what is kept in bfloat16 and should be float32 (router, decay, state), and at the cache."
)


@dataclass(frozen=True, slots=True)
class Served:
    """What the service said of ``tokens``: for places 1 .. T - 1 the log-probability of the token, and the likeliest
    ids. facts: bindings and records."""

    tokens: tuple[int, ...]
    places: tuple[Logprobs, ...]
    dtype: str
    bindings: dict[str, str]


def ask_service(llm: LLM, tokens: Sequence[int]) -> Served:
    """One request for all of ``tokens``."""
    params = SamplingParams(
        temperature=0, max_tokens=1, ignore_eos=True, prompt_logprobs=min(MAX_LOGPROBS, llm.info.vocab)
    )
    (output,) = llm.generate([list(tokens)], params)
    output.raise_error()
    assert output.prompt_logprobs is not None
    return Served(
        tuple(tokens), tuple(output.prompt_logprobs), llm.info.dtype, dict(llm.info.facts.get("bindings", {}))
    )


def kl_of_places(logits_TV: Tensor, places: Sequence[Logprobs]) -> Tensor:
    """[T - 1] nats: the oracle's distribution behind each token against the service's."""
    log_TV = logits_TV.double().log_softmax(-1)
    return torch.tensor([_kl(log_V, place.top) for log_V, place in zip(log_TV, places)], dtype=torch.float64)


def kl_of_floor(floor: Floor, places: Sequence[Logprobs]) -> Tensor:
    """The same of the floor's two sides in its first run, over as many likeliest ids."""
    noisy_TV = floor.noisy_TV.double().log_softmax(-1)
    clean_TV = floor.clean_TV.double().log_softmax(-1)
    found = []
    for clean_V, noisy_V, place in zip(clean_TV, noisy_TV, places):
        best = noisy_V.topk(len(place.top))
        found.append(_kl(clean_V, list(zip(best.indices.tolist(), best.values.tolist(), strict=True))))
    return torch.tensor(found, dtype=torch.float64)


def _kl(log_V: Tensor, top: Sequence[tuple[int, float]]) -> float:
    """sum of p log(p / q) over the listed ids and the rest together."""
    ids = torch.tensor([i for i, _ in top])
    log_q = torch.tensor([lp for _, lp in top], dtype=torch.float64)
    log_p = log_V[ids]
    kl = float((log_p.exp() * (log_p - log_q)).sum())
    rest_p, rest_q = (max(0.0, 1 - float(x.exp().sum())) for x in (log_p, log_q))
    if rest_p > 1e-9:
        kl += rest_p * (math.log(rest_p) - math.log(max(rest_q, 1e-12)))
    return max(0.0, kl)


def served_findings(prefix: str, served: Served, oracle_TV: Tensor, floor: Floor) -> Iterator[Finding]:
    """KL, flips and perplexity. oracle [T, V]: of the same tokens."""
    if len(served.places) < LEAST_PLACES:
        yield Finding(
            f"{prefix}.served", "operator", "not applicable", "the service agrees with the oracle in its own type",
            f"only {len(served.places)} places of text stand before the first image",
        )  # fmt: skip
        return
    yield from _kl_findings(prefix, served, oracle_TV, floor)
    yield _flips(prefix, served, oracle_TV, floor)
    yield _perplexity(prefix, served, oracle_TV, floor)


def _kl_findings(prefix: str, served: Served, oracle_TV: Tensor, floor: Floor) -> Iterator[Finding]:
    kl_T = kl_of_places(oracle_TV, served.places)
    runs = [kl_of_floor(run, served.places) for run in floor.runs]
    measures: tuple[tuple[str, Callable[[Tensor], Tensor], float], ...] = (
        ("mean", torch.mean, FACTOR),
        ("p99", lambda values: values.quantile(0.99), TAIL_FACTOR),
        ("max", torch.max, TAIL_FACTOR),
    )
    for name, of, factor in measures:
        value, by_floor = float(of(kl_T)), size_of_runs(float(of(run_T)) for run_T in runs)
        bound = factor * by_floor
        good = value <= bound
        yield Finding(
            f"{prefix}.served.kl.{name}",
            "operator",
            "pass" if good else "fail",
            f"the service in {served.dtype} is as near to the oracle as {served.dtype} allows: {name} of KL",
            f"{value:.2e} nat over {len(kl_T)} places",
            f"{bound:.2e}: {factor:g} x {by_floor:.2e}, measured with operators' results rounded to {served.dtype}"
            + _in_runs(floor),
            () if good else tuple(f"token {t + 1}" for t in kl_T.topk(min(3, len(kl_T))).indices.tolist()),
            "" if good else SERVED_REMEDY,
        )


def _in_runs(floor: Floor) -> str:
    many = len(floor.further)
    return f" in {many + 1} runs, since rounding turns choices over: their mean, or half the worst" if many else ""


def _flips(prefix: str, served: Served, oracle_TV: Tensor, floor: Floor) -> Finding:
    limit = 2 * size_of_runs(run.gap_error for run in floor.runs)
    bins = {f"<{MARGIN_NOISE_NATS:g}": [0, 0], f"{MARGIN_NOISE_NATS:g}-{MARGIN_BUG_NATS:g}": [0, 0], "more": [0, 0]}
    names, beyond = list(bins), []
    for at, (logits_V, place) in enumerate(zip(oracle_TV.double(), served.places)):
        best = logits_V.topk(2)
        margin = float(best.values[0] - best.values[1])
        flipped = place.top[0][0] != int(best.indices[0])
        name = names[(margin >= MARGIN_NOISE_NATS) + (margin > MARGIN_BUG_NATS)]
        bins[name][0] += flipped
        bins[name][1] += 1
        if flipped and margin > limit:
            beyond.append(at)
    return Finding(
        f"{prefix}.served.top1",
        "operator",
        "fail" if beyond else "pass",
        "the service's likeliest token is the oracle's, but where two are closer than its number type",
        ", ".join(f"margin {name} nat: {count} of {total} differ" for name, (count, total) in bins.items() if total),
        f"none where the oracle's margin is above {limit:.2e} nat: twice what rounding to {served.dtype} moves it",
        tuple(f"token {t + 1}" for t in beyond),
        SERVED_REMEDY if beyond else "",
    )


def _perplexity(prefix: str, served: Served, oracle_TV: Tensor, floor: Floor) -> Finding:
    at = torch.tensor(served.tokens[1:])[:, None]
    oracle_T = oracle_TV.double().log_softmax(-1)[:-1].gather(1, at)[:, 0]
    own_T = torch.tensor([place.logprob for place in served.places], dtype=torch.float64)
    assert [place.token for place in served.places] == list(served.tokens[1:])
    moved = float((own_T - oracle_T).mean())
    runs = [run.target_errors(served.tokens) for run in floor.runs]
    size = size_of_runs(float(run_T.square().mean().sqrt()) for run_T in runs)
    bound = FACTOR * size / math.sqrt(len(runs[0])) + abs(float(torch.stack(runs).mean()))
    good = abs(moved) <= bound
    return Finding(
        f"{prefix}.served.perplexity",
        "operator",
        "pass" if good else "fail",
        f"the service's perplexity of {len(served.tokens)} tokens of text is the oracle's",
        f"{math.exp(-float(own_T.mean())):.4f} against {math.exp(-float(oracle_T.mean())):.4f}, log {moved:+.2e}",
        f"{bound:.2e}: {FACTOR:g} standard errors of what rounding to {served.dtype} moves it, and its bias",
        (),
        "" if good else SERVED_REMEDY,
    )
