"""Sampled tokens against the softmax that the server itself states: temperature, top-p, top-k, seeds and biases.

How the softmax is shaped, and how likely draws are under it: ``softmax.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from dayzero.acceptance.accept.paired import tail
from dayzero.acceptance.stages.answers import Api, Choice, Refused
from dayzero.acceptance.stages.asking import Ask, Check, Checks
from dayzero.acceptance.stages.robust_ask import at_once
from dayzero.acceptance.stages.softmax import (
    OTHER,
    Told,
    chance_of,
    clear_cut,
    clear_cuts,
    clear_of,
    draws_for,
    inside,
    likeliest,
    nucleus,
    ratio_chance,
    tempered,
)

NUM_TOP = 20  # the most that the API has
# A sound sampler falls below it once in a thousand times, then it is asked again: twice in a row is one in a million.
LEAST_CHANCE = 1e-3
TEMPERATURES = (0.3, 1.5)
ALMOST_NEVER = 1e-9
TOP_K = 3  # or as near to it as a cut does not hang on rounding
TIED = "no two stated chances lie so far apart that rounding could not exchange them"
MORE = 14  # times the usual number of draws, at most
PROMPTS = ("Once upon a time there was a", "The best thing about it is", "My favourite number is", "I think that")
REMEDY = "Compare the sampler's temperature, its cuts and its random numbers with the reference sampler."


def checks() -> tuple[Check, ...]:
    return (
        Check("sampling", "sampled tokens follow the softmax that the server states", _distribution, layer="operator"),
        Check("sampling.seed", "a seed gives the same answer again", _seeds),
        Check("sampling.bias", "logit_bias decides what is sampled", _bias),
    )


# --- the distribution


def _distribution(ask: Ask, out: Checks) -> None:
    found = _told(ask)
    told = max(found, key=lambda one: (not one.hidden, one.kinds), default=None)
    if told is None or len(told.chances) < 4:
        out.skip("sampling", "sampled tokens follow the softmax that is stated", "it states no log-probabilities")
        return
    claim = f"tokens sampled at temperature 1 follow the stated softmax ({told.prompt!r})"
    expected = {**told.chances, OTHER: max(0.0, 1 - told.inside)}
    _follow(ask, out, "sampling.softmax", claim, told, expected, {"temperature": 1})
    if told.hidden:
        out.skip("sampling.top-p", "top_p cuts the softmax", "tokens without a text of their own are told by none")
    elif (cut := nucleus(told.chances, clear_of(ask.rounding))) is None:
        out.skip("sampling.top-p", "top_p cuts the softmax", TIED)
    else:
        top_p, kept = cut
        _follow(
            ask, out, "sampling.top-p", f"top_p {top_p:.3f} leaves {len(kept)} tokens, and their chances as they were",
            told, kept, {"temperature": 1, "top_p": top_p}, {},
        )  # fmt: skip
    cuts = _top_k(ask, out, told)
    for temperature in TEMPERATURES:
        _temperature(ask, out, found if cuts else [told], temperature, cuts)


def _top_k(ask: Ask, out: Checks, told: Told) -> bool:
    """Whether top_k cuts as it must."""
    claim = "top_k leaves so many tokens, and their chances as they were"
    if not told.whole:
        out.skip("sampling.top-k", claim, "tokens without a text of their own are told by none")
        return False
    count = min(clear_cuts(told, clear_of(ask.rounding)), key=lambda n: abs(n - TOP_K), default=0)
    if not count:
        out.skip("sampling.top-k", claim, TIED)
        return False
    claim = f"top_k {count} leaves {count} tokens, and their chances as they were"
    try:
        fields = {"temperature": 1, "top_k": count}
        return _follow(ask, out, "sampling.top-k", claim, told, likeliest(told, count, 1), fields, {})
    except Refused as error:
        if ask.ours:
            raise
        out.skip("sampling.top-k", claim, f"refused with {error}")
        return False


def _temperature(ask: Ask, out: Checks, found: list[Told], temperature: float, cuts: bool) -> None:
    """cuts: top_k holds, so that all that may come is stated; of the prompts the most telling one is asked. Below 1
    it must tell a sharper temperature too: where nearly all falls to one token, sharper ones look alike."""
    name, claim = f"sampling.temperature-{temperature:g}", f"temperature {temperature:g} shapes the softmax as it must"
    others = (1.0, temperature**2) if temperature < 1 else (1.0,)
    told_by = [max((draws_for(likeliest(one, n, temperature), likeliest(one, n, other)), n, other) for other in others)
               + (one,) for one in found if cuts and (n := clear_cut(one, clear_of(ask.rounding))) > 2]  # fmt: skip
    if not told_by:
        _follow(ask, out, name, claim, found[0], tempered(found[0].chances, temperature), {"temperature": temperature})
        return
    _, count, other, told = min(told_by, key=lambda each: each[:2])
    _follow(
        ask, out, name, f"{claim}, among the likeliest {count}", told, likeliest(told, count, temperature),
        {"temperature": temperature, "top_k": count}, likeliest(told, count, other),
    )  # fmt: skip


def _told(ask: Ask) -> list[Told]:
    """Of a few prompts, on the first API that states all: completions before chat, whose template is a prompt of many
    tokens that each draw computes."""
    found: list[Told] = []
    for api in ("completions", "chat"):
        if api in ask.why_not or any(not one.hidden for one in found):
            continue
        for prompt in PROMPTS:
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
                whole = api == "chat" or (not hidden and len(top) >= NUM_TOP)
                found.append(Told(api, prompt, clear, hidden, whole))
    return found


def _follow(
    ask: Ask,
    out: Checks,
    kind: str,
    claim: str,
    told: Told,
    expected: Mapping[Hashable, float],
    fields: dict[str, Any],
    rival: Mapping[Hashable, float] | None = None,
) -> bool:
    """Whether draws follow ``expected``. rival: what a sampler draws from that leaves out what is tried; nothing but
    what is expected may come then, and as many draws are made as tell the two apart, up to MORE times the profile's;
    empty: none in particular. None: what is not expected is left out, or counted as OTHER."""
    usual, needed = ask.amount(96, 384, 1536), draws_for(expected, rival) if rival else 0
    number = min(max(usual, needed), MORE * usual)
    for attempt in range(2):
        drawn = [_key(one) for one in _draws(ask, told, number * (1 + attempt), fields)]
        chance, kept = _chance(ask, told, expected, drawn, None if rival is not None else float(fields["temperature"]))
        if rival:  # two tests at once: half the chance is left to either
            chance = min(1.0, 2 * min(chance, ratio_chance(Counter(kept), expected, rival, ask.seed)))
        if chance >= LEAST_CHANCE:
            break
    counts = Counter(kept)
    strange = [key for key in counts if key not in expected]
    measured = f"chance {chance:.4f} with {len(kept)} tokens of {len(counts)} kinds"
    if strange:
        measured += f"; {sum(counts[key] for key in strange)} that may not come"
    if needed > number:
        measured += f"; {needed} draws would tell for sure"
    out.judge(
        kind, claim, chance >= LEAST_CHANCE, measured, f"a chance of {LEAST_CHANCE} or more, at the second try",
        layer="operator", remedy=REMEDY,
    )  # fmt: skip
    out.sample("chance of sampled tokens", kind, chance)
    return chance >= LEAST_CHANCE


def _chance(
    ask: Ask, told: Told, expected: Mapping[Hashable, float], drawn: list[Hashable], temperature: float | None
) -> tuple[float, list[Hashable]]:
    """(chance of these draws, those of them that were counted). temperature: None where nothing but ``expected`` may
    come."""
    if OTHER in expected:
        kept = [key if key in expected else OTHER for key in drawn]
        return chance_of(Counter(kept), expected, ask.seed), kept
    if temperature is None:
        return chance_of(Counter(drawn), expected, ask.seed), drawn
    kept = [key for key in drawn if key in expected]
    bounded = tail(len(kept), len(drawn), inside(told, temperature), above=temperature > 1)
    # two tests at once: each may be at fault, and half the chance is left to either
    return min(1.0, 2 * min(chance_of(Counter(kept), expected, ask.seed), bounded)), kept


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

    def said(seeds: Sequence[int | None]) -> list[str]:
        """Answers at once, each in the company of the others."""
        drawn = [{} if seed is None else {"seed": seed} for seed in seeds]
        return at_once(lambda more: ask.whole(api, PROMPTS[0], **fields, **ignore, **more).one.said, drawn, len(drawn))

    # one after the other: where kernels depend on the batch, company changes the logits that are drawn from
    one = [answer for _ in range(3) for answer in said([11])]
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
        ("sampling.seeds", said(range(4)), "other seeds give other answers"),
        ("sampling.unseeded", said([None] * 4), "without a seed, answers are drawn anew"),
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
