"""Sampled tokens against the softmax that the server itself states: temperature, top-p, top-k, seeds and biases.

Log-probabilities are of the model's own distribution, at temperature 1. What a temperature T makes of it is known among
the stated tokens, p_i^(1/T) over its sum, so they are counted given that one of them came. Of the others it is known
that none is likelier than the last one stated, p_n. So for T below 1 their p_j^(1/T) add up to no more than what they
have in all times p_n^(1/T - 1), and for T above 1 to no less: a bound on how often a stated token comes. At temperature
1 it is known exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from math import exp, lgamma, log
from typing import Any

import numpy as np

from dayzero.acceptance.stages.answers import Api, Choice, Refused
from dayzero.acceptance.stages.asking import Ask, Check, Checks

NUM_TOP = 20  # the most that the API has
OTHER = "(other)"
# A sound sampler falls below it once in a thousand times, then it is asked again: twice in a row is one in a million.
LEAST_CHANCE = 1e-3
TEMPERATURES = (0.3, 1.5)
DRAWS = 20_000  # of the multinomial distribution, for the chance of a statistic
LEAST_EXPECTED = 1.0  # of one kind; rarer ones are counted together
ALMOST_NEVER = 1e-9
PROMPTS = ("Once upon a time there was a", "The best thing about it is", "My favourite number is", "I think that")
REMEDY = "Compare the sampler's temperature, its cuts and its random numbers with the reference sampler."


@dataclass(frozen=True)
class Told:
    """What the server says of the first token behind a prompt: key -> probability at temperature 1. hidden: those of
    stated tokens that cannot be told from others by their text."""

    api: Api
    prompt: str
    chances: Mapping[Any, float]
    hidden: tuple[float, ...] = ()

    @property
    def inside(self) -> float:
        return sum(self.chances.values())

    @property
    def kinds(self) -> float:
        """How many tokens it is as if one were drawn from: exp of the entropy of what is stated."""
        p = np.array(list(self.chances.values()))
        p = p[p > 0] / p.sum()
        return float(np.exp(-(p * np.log(p)).sum()))


def checks() -> tuple[Check, ...]:
    return (
        Check("sampling", "sampled tokens follow the softmax that the server states", _distribution, layer="operator"),
        Check("sampling.seed", "a seed gives the same answer again", _seeds),
        Check("sampling.bias", "logit_bias decides what is sampled", _bias),
    )


# --- the distribution


def chance_of(counts: Mapping[Hashable, int], chances: Mapping[Hashable, float], seed: int) -> float:
    """How likely a sound sampler is to be as far from ``chances`` as ``counts``, by Pearson's statistic: a share of
    DRAWS from the multinomial distribution, so that it is true of small numbers too. 0 when something was drawn that
    cannot be."""
    total = sum(counts.values())
    if not total or any(key not in chances for key in counts):
        return 0.0 if total else 1.0
    keys = sorted(chances, key=lambda key: -chances[key])
    p = np.array([chances[key] for key in keys])
    seen = np.array([counts.get(key, 0) for key in keys])
    p = p / p.sum()
    large = max(1, int((p * total >= LEAST_EXPECTED).sum()))
    if large < len(p):
        p, seen = np.append(p[:large], p[large:].sum()), np.append(seen[:large], seen[large:].sum())
    if (seen[p == 0] > 0).any():
        return 0.0
    seen, p = seen[p > 0], p[p > 0]
    drawn = np.random.default_rng(seed).multinomial(total, p, size=DRAWS)
    far = ((drawn - total * p) ** 2 / (total * p)).sum(axis=1)
    own = ((seen - total * p) ** 2 / (total * p)).sum()
    return float((1 + (far >= own - 1e-9).sum()) / (DRAWS + 1))


def tempered(chances: Mapping[Hashable, float], temperature: float) -> dict[Hashable, float]:
    """Of the stated tokens alone, what a temperature makes of them."""
    powers = {key: p ** (1 / temperature) for key, p in chances.items()}
    total = sum(powers.values())
    return {key: p / total for key, p in powers.items()}


def inside(told: Told, temperature: float) -> float:
    """Bound on the chance that a stated token comes: the least one below temperature 1, the most above."""
    powers = sum(p ** (1 / temperature) for p in told.chances.values())
    hidden = sum(p ** (1 / temperature) for p in told.hidden)
    least = min((*told.chances.values(), *told.hidden))
    rest = max(0.0, 1 - told.inside - sum(told.hidden)) * least ** (1 / temperature - 1)
    return powers / (powers + hidden + rest)


def tail(count: int, total: int, chance: float, above: bool) -> float:
    """Chance of ``count`` or more (above), or or fewer, of ``total`` draws of a kind that has ``chance``."""
    if not 0 < chance < 1:
        return 1.0 if count == (total if chance >= 1 else 0) or above == (chance >= 1) else 0.0
    logs = [
        lgamma(total + 1) - lgamma(k + 1) - lgamma(total - k + 1) + k * log(chance) + (total - k) * log(1 - chance)
        for k in (range(count, total + 1) if above else range(count + 1))
    ]
    return min(1.0, sum(exp(value) for value in logs))


def nucleus(chances: Mapping[Hashable, float]) -> tuple[float, dict[Hashable, float]]:
    """A top_p whose set is well inside what is stated and does not hang on rounding, and that set with its chances."""
    keys = sorted(chances, key=lambda key: -chances[key])
    sums = np.cumsum([chances[key] for key in keys])
    # the cut falls in the middle of a token: the one that crosses top_p is the last that stays
    size = 1 + max(range(1, max(2, len(keys) // 2)), key=lambda n: chances[keys[n]])
    top_p = float((sums[size - 2] + sums[size - 1]) / 2)
    kept = {key: chances[key] / float(sums[size - 1]) for key in keys[:size]}
    return top_p, kept


def _distribution(ask: Ask, out: Checks) -> None:
    told = _told(ask)
    if told is None or len(told.chances) < 4:
        out.skip("sampling", "sampled tokens follow the softmax that is stated", "it states no log-probabilities")
        return
    claim = f"tokens sampled at temperature 1 follow the stated softmax ({told.prompt!r})"
    expected = {**told.chances, OTHER: max(0.0, 1 - told.inside)}
    _follow(ask, out, "sampling.softmax", claim, told, expected, {"temperature": 1})
    for temperature in TEMPERATURES:
        name = f"sampling.temperature-{temperature:g}"
        claim = f"temperature {temperature:g} shapes the softmax as it must"
        fields = {"temperature": temperature}
        _follow(ask, out, name, claim, told, tempered(told.chances, temperature), fields)
    if told.hidden:
        out.skip(
            "sampling.top-p", "top_p and top_k cut the softmax", "tokens without a text of their own are told by none"
        )
        return
    top_p, kept = nucleus(told.chances)
    _follow(
        ask, out, "sampling.top-p", f"top_p {top_p:.3f} leaves {len(kept)} tokens, and their chances as they were",
        told, kept, {"temperature": 1, "top_p": top_p}, closed=True,
    )  # fmt: skip
    three = dict(sorted(told.chances.items(), key=lambda pair: -pair[1])[:3])
    claim = "top_k 3 leaves three tokens, and their chances as they were"
    try:
        fields = {"temperature": 1, "top_k": 3}
        _follow(ask, out, "sampling.top-k", claim, told, tempered(three, 1), fields, closed=True)
    except Refused as error:
        if ask.ours:
            raise
        out.skip("sampling.top-k", claim, f"refused with {error}")


def _told(ask: Ask) -> Told | None:
    """Of a few prompts the one with most tokens to choose from, so that there is something to see."""
    found = []
    for api in ("completions", "chat"):
        for prompt in PROMPTS if api not in ask.why_not else ():
            try:
                one = ask.whole(api, prompt, max_tokens=1, temperature=1, **ask.scored(api, NUM_TOP)).one
            except Refused:
                break
            top = one.scores[0].top if one.scores else ()
            # Tokens go by their text: those without one, or with half a character, may stand for many ids.
            kinds = Counter(key for key, _ in top)
            alone = {key for key, number in kinds.items() if number == 1 and key and "\ufffd" not in str(key)}
            chances = [(key, float(np.exp(logprob))) for key, logprob in top]
            clear = {key: chance for key, chance in chances if key in alone}
            if clear:
                hidden = tuple(chance for key, chance in chances if key not in alone)
                found.append(Told(api, prompt, clear, hidden))
    return max(found, key=lambda told: (not told.hidden, told.kinds), default=None)


def _follow(
    ask: Ask,
    out: Checks,
    kind: str,
    claim: str,
    told: Told,
    expected: Mapping[Hashable, float],
    fields: dict[str, Any],
    closed: bool = False,
) -> None:
    """closed: nothing but what is expected may come; else what is not expected is left out, or counted as OTHER."""
    number = ask.amount(96, 384, 1536)
    for attempt in range(2):
        bounded: float | None = None
        drawn = [_key(one) for one in _draws(ask, told, number * (1 + attempt), fields)]
        if OTHER in expected:
            drawn = [key if key in expected else OTHER for key in drawn]
        elif not closed:
            stated = [key for key in drawn if key in expected]
            temperature = float(fields["temperature"])
            bounded = tail(len(stated), len(drawn), inside(told, temperature), above=temperature > 1)
            drawn = stated
        counts = Counter(drawn)
        chance = chance_of(counts, expected, ask.seed)
        # two tests at once: each may be at fault, and half the chance is left to either
        chance = chance if bounded is None else min(1.0, 2 * min(chance, bounded))
        if chance >= LEAST_CHANCE:
            break
    strange = [key for key in counts if key not in expected]
    measured = f"chance {chance:.4f} with {len(drawn)} tokens of {len(counts)} kinds"
    if strange:
        measured += f"; {sum(counts[key] for key in strange)} that may not come"
    out.judge(
        kind, claim, chance >= LEAST_CHANCE, measured, f"a chance of {LEAST_CHANCE} or more, at the second try",
        layer="operator", remedy=REMEDY,
    )  # fmt: skip
    out.sample("chance of sampled tokens", kind, chance)


def _key(one: Choice) -> Hashable:
    return one.scores[0].key if one.scores else None


def _draws(ask: Ask, told: Told, number: int, fields: dict[str, Any]) -> list[Choice]:
    """So many first tokens, drawn in batches where the server takes ``n``, else one by one."""
    more = {**ask.scored(told.api, 1), **fields, "max_tokens": 1}
    got: list[Choice] = []
    batch = min(number, 32)
    while len(got) < number:
        try:
            new = ask.whole(told.api, told.prompt, **more, **({"n": batch} if batch > 1 else {})).choices
        except Refused:
            if batch == 1:
                raise
            batch, number = 1, min(number, 64)
            continue
        # a server that takes n without a word and gives one answer is found by the check of n
        batch = 1 if len(new) == 1 else batch
        number = min(number, 64) if batch == 1 else number
        got += new
    return got[:number]


# --- seeds and biases


def _seeds(ask: Ask, out: Checks) -> None:
    api = ask.api or "chat"
    fields = {"temperature": 1, "max_tokens": 16}
    ignore = {"ignore_eos": True} if ask.ignores_stops else {}

    def said(**more: Any) -> str:
        return ask.whole(api, PROMPTS[0], **fields, **ignore, **more).one.said

    one = [said(seed=11) for _ in range(3)]
    out.judge(
        "sampling.seed", "a seed gives the same answer again", len(set(one)) == 1,
        f"{len(set(one))} answers to 3 requests with one seed", 1, remedy="Draw from the request's seed alone.",
        bad="fail" if ask.ours else "note",
    )  # fmt: skip
    stream = ask.streamed(api, PROMPTS[0], **fields, **ignore, seed=11).one.said
    out.judge(
        "sampling.seed-stream", "a seed gives the same answer streamed", stream == one[0], stream == one[0], True,
        remedy="Draw from the request's seed alone, streamed or not.", bad="fail" if ask.ours else "note",
    )  # fmt: skip
    for kind, answers, claim in (
        ("sampling.seeds", [said(seed=seed) for seed in range(4)], "other seeds give other answers"),
        ("sampling.unseeded", [said() for _ in range(4)], "without a seed, answers are drawn anew"),
    ):
        # 16 tokens of a model that is sure of itself may well be the same; a chance below 1e-9 they must not have
        likely = _sameness(ask, api, fields | ignore)
        out.judge(
            kind, claim, len(set(answers)) > 1 or likely > ALMOST_NEVER,
            f"{len(set(answers))} of {len(answers)} answers differ; the same by chance: {likely:.1e}",
            f"more than one, unless their being the same has a chance above {ALMOST_NEVER}", layer="operator",
            remedy="The random numbers of different requests must differ: look at how they are seeded.",
        )  # fmt: skip


def _sameness(ask: Ask, api: Api, fields: dict[str, Any]) -> float:
    """How likely four sampled answers are to be the same at most: the likeliest answer's chance cubed, taken from what
    the greedy one states; 1 where nothing is stated."""
    try:
        scores = ask.whole(api, PROMPTS[0], **fields | {"temperature": 0}, **ask.scored(api, 1)).one.scores or []
    except Refused:
        return 1.0
    return float(np.exp(3 * sum(score.logprob for score in scores))) if scores else 1.0


def _bias(ask: Ask, out: Checks) -> None:
    """A bias of +100 is more than logits differ by; -100 takes the likeliest token away."""
    if not ask.ids:
        out.skip("sampling.bias", "logit_bias decides what is sampled", "token ids are not told, so none can be named")
        return
    api = ask.api or "chat"
    first = (ask.whole(api, PROMPTS[1], temperature=0, max_tokens=2).one.ids or [0])[0]
    second = ask.whole(api, PROMPTS[1], temperature=0, max_tokens=2, logit_bias={str(first): -100}).one.ids or []
    out.judge(
        "sampling.bias-down", "logit_bias -100 keeps the likeliest token from being sampled",
        bool(second) and second[0] != first, f"{first}, then {second[:1]}", "another token", layer="operator",
        remedy="Add logit_bias to the logits before sampling.",
    )  # fmt: skip
    wanted = second[0] if second else first
    forced = ask.whole(api, PROMPTS[1], temperature=1, max_tokens=3, logit_bias={str(wanted): 100}).one.ids or []
    ends = len(forced) < 3  # the token may be one that ends the answer
    out.judge(
        "sampling.bias-up", "logit_bias +100 makes a token certain", bool(forced) and set(forced) == {wanted},
        f"{forced}{' (ended)' * ends}", f"{wanted} alone", layer="operator",
        remedy="Add logit_bias to the logits before sampling.",
    )  # fmt: skip
