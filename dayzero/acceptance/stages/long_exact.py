"""Answers at the lengths where another path is taken: the same from scratch, from the cache, and read as a prompt.

No judge and no able model is needed: each answer is held against the same server's own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dayzero.acceptance.stages.long_known import Known, Threshold, limit_of
from dayzero.acceptance.stages.long_pace import Pace
from dayzero.acceptance.stages.robust_same import Difference, difference, extended
from dayzero.acceptance.stages.ties import bound_of
from dayzero.finding import Finding, Verdict

ANSWER_TOKENS = 4
USUAL_PAGE = 16  # of a server that does not say
NOISE_FACTOR = 3.0  # over the noise of short prompts: theirs is the largest of some dozen numbers, not of all there are
MOST_NOISE = 2.0  # times the dtype's arithmetic; what is further apart is no rounding
NUM_SHORT, NUM_PLAIN = 3, 2  # prompts that no cache can hold; lengths that are no threshold
ASKED, ANSWERED = 3.5, 4 * 4 + 1  # of a trial: prompts that it computes, and tokens of answers
HOW = {
    "repeated": "asked again at once",
    "after": "asked again behind another prompt",
    "extended": "read as part of the prompt",
}
REMEDY = {
    "repeated": "Serve with --no-prefix-cache: if the difference is gone, the cache restores what it did not keep.",
    "after": "Serve with --max-running 1 and --no-prefix-cache: what of another request is left behind?",
    "extended": "Decoding and reading a prompt differ here: run `dayzero align` at this length.",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """Of one prompt. found: how it was asked again -> what differed from the first answer. cached: most prompt tokens
    that came from the cache when it was asked again."""

    tokens: int
    found: dict[str, Difference]
    cached: int | None
    why: str = ""  # the first answer did not come

    def item(self, threshold: Threshold | None) -> str:
        return f"{threshold.name if threshold else 'plain'} {self.tokens} tokens"


@dataclass
class Exact:
    """arithmetic: what the dtype's rounding explains (``ties.bound_of``). short: trials of prompts shorter than a page,
    which no cache holds: what their answers differ by is noise. bound: what the longer ones are held to. plain: at
    lengths that are no threshold. skipped: threshold -> why it was not tried."""

    arithmetic: float
    bound: float
    short: list[Trial] = field(default_factory=list)
    plain: list[Trial] = field(default_factory=list)
    trials: dict[Threshold, list[Trial]] = field(default_factory=dict)
    skipped: dict[Threshold, str] = field(default_factory=dict)

    @property
    def noise(self) -> float:
        """Largest difference of a log-probability in what no cache holds."""
        return max((d.worst for trial in self.short for d in trial.found.values()), default=0.0)


def try_prompt(known: Known, tokens: int, rng: random.Random, bound: float) -> Trial:
    """One prompt from scratch, again, behind another, and with its answer as a part of a longer prompt."""
    ask = known.asker.complete
    prompt, other = known.prompt(rng, tokens), known.prompt(rng, tokens)
    first = ask(prompt, ANSWER_TOKENS, logprobs=2)
    if not first.good:
        return Trial(tokens, {}, None, first.error)
    again = ask(prompt, ANSWER_TOKENS, logprobs=2)
    ask(other, ANSWER_TOKENS)
    after = ask(prompt, ANSWER_TOKENS, logprobs=2)
    found = {"repeated": difference(first, again, bound), "after": difference(first, after, bound)}
    if isinstance(prompt, list) and first.tokens:
        longer = ask([*prompt, *first.tokens], 1, prompt_logprobs=0)
        if longer.prompt_logprobs or not longer.good:
            found["extended"] = extended(first, longer, tokens, bound)
    hits = [one.cached for one in (again, after) if one.cached is not None]
    return Trial(tokens, found, max(hits, default=None))


def try_all(known: Known, at: Sequence[Threshold], pace: Pace, seed: int, told: Callable[[str], None]) -> Exact:
    """Short prompts first: what their answers differ by is the noise that the others are held to."""
    arithmetic = bound_of("" if known.cache != "bf16" else known.dtype)  # other records round more than logits
    most = MOST_NOISE * arithmetic
    out = Exact(arithmetic, arithmetic)
    rng = random.Random(f"{seed} exact")
    told("short prompts")
    for tokens in short_lengths(known):
        out.short.append(pace.timed(ASKED * tokens, ANSWERED, partial(try_prompt, known, tokens, rng, most)))
    out.bound = min(most, max(arithmetic, NOISE_FACTOR * out.noise))
    first = _needed(at[0]) if at else (0.0, 0.0)
    for tokens in plain_lengths(known, at):
        if out.plain and not pace.affords(ASKED * tokens + first[0], ANSWERED + first[1]):
            break  # one is enough where the time is short; no threshold is not
        told(f"{tokens} tokens")
        work = partial(try_prompt, known, tokens, rng, out.bound)
        out.plain.append(pace.timed(ASKED * tokens, ANSWERED, work))
    for threshold in at:
        if not pace.affords(*_needed(threshold)):
            out.skipped[threshold] = pace.why_not(*_needed(threshold))
            continue
        told(f"{threshold.name}, {threshold.tokens} tokens")
        out.trials[threshold] = [
            pace.timed(ASKED * n, ANSWERED, partial(try_prompt, known, n, rng, out.bound)) for n in _lengths(threshold)
        ]
    return out


def _lengths(threshold: Threshold) -> tuple[int, int, int]:
    return threshold.tokens - 1, threshold.tokens, threshold.tokens + 1


def _needed(threshold: Threshold) -> tuple[float, float]:
    """Tokens of prompts and of answers that its trials compute."""
    return ASKED * sum(_lengths(threshold)), 3.0 * ANSWERED


def short_lengths(known: Known) -> list[int]:
    """Prompts that end, with their answers, within the first page."""
    most = min((known.page or USUAL_PAGE) - ANSWER_TOKENS - 1, (limit_of(known) or 1 << 30) - ANSWER_TOKENS - 1)
    return [max(1, most - i) for i in range(NUM_SHORT)] if most >= 1 else []


def plain_lengths(known: Known, at: Sequence[Threshold]) -> list[int]:
    """Lengths inside of pages, behind the first one, and away from every threshold."""
    limit, page = limit_of(known) or 1 << 30, known.page or USUAL_PAGE
    near = {n for one in at for n in range(one.tokens - ANSWER_TOKENS - 1, one.tokens + 2)}
    sizes = range(page + page // 2 - 1, 5 * page, max(1, page // 3))
    found = [n for n in sizes if n >= 2 and n not in near and n % page > 1]
    return [n for n in found if n + 2 * ANSWER_TOKENS <= limit][:NUM_PLAIN]


def findings(known: Known, exact: Exact) -> list[Finding]:
    out = [_noise(exact)] if exact.short else []
    out += [_plain(exact)] if exact.plain else []
    for threshold, trials in exact.trials.items():
        out += [_judged(exact, threshold, trials, how) for how in HOW]
    out += [
        Finding(
            "long.threshold", one.layer, "not applicable", f"answers around {_said(one)} are the same", measured=why
        )
        for one, why in exact.skipped.items()
    ]
    if not exact.trials and not exact.skipped:
        out.append(
            Finding(
                "long.threshold", "operator", "not applicable", "answers around thresholds are the same",
                measured=f"no threshold is known: {known.why_no_paper or 'the model has none within its limit'}",
            )
        )  # fmt: skip
    out.append(_cached(known, exact))
    return out


def samples(exact: Exact) -> dict[str, dict[str, float | bool]]:
    """For paired statistics: whether each trial was the same, and how far it was off."""
    rows = [(trial.item(one), trial) for one, trials in exact.trials.items() for trial in trials]
    rows += [(trial.item(None), trial) for trial in (*exact.short, *exact.plain)]
    pairs = [(f"{item}, {how}", d) for item, trial in rows for how, d in trial.found.items()]
    return {
        "same answer": {item: d.same for item, d in pairs},
        "largest difference of a log-probability": {item: d.worst for item, d in pairs},
    }


def _said(threshold: Threshold) -> str:
    return f"{threshold.name} ({threshold.tokens:,} tokens)"


def _wrong(trials: Sequence[Trial]) -> list[str]:
    silent = [f"{trial.tokens} tokens: {trial.why}" for trial in trials if trial.why]
    return silent + [
        f"{t.tokens} tokens, {HOW[how]}: {d.why}" for t in trials for how, d in t.found.items() if not d.same
    ]


def _noise(exact: Exact) -> Finding:
    """What nothing but rounding can change must not change by more than rounding does."""
    wrong, loud = _wrong(exact.short), exact.noise > exact.arithmetic
    verdict: Verdict = "fail" if wrong else "note" if loud else "pass"
    remedy = "All below is held to this noise: find its source, such as records of few bits or sums in drawn order."
    return Finding(
        "long.noise", "operator", verdict,
        "a prompt shorter than a page gives the same answer however it is asked, but for rounding",
        measured=f"largest difference of a log-probability {exact.noise:.3g}" + (f"; {wrong[0]}" if wrong else ""),
        bound=f"{exact.arithmetic:.2g}, the dtype's arithmetic; no answer at all beyond {MOST_NOISE:g} times that",
        evidence=tuple(wrong), remedy=remedy if verdict != "pass" else "",
    )  # fmt: skip


def _plain(exact: Exact) -> Finding:
    """Lengths without a threshold: pages that are full, and a cache that holds them."""
    wrong = _wrong(exact.plain)
    worst = max((d.worst for trial in exact.plain for d in trial.found.values()), default=0.0)
    return Finding(
        "long.repeat", "cache", "fail" if wrong else "pass",
        "away from thresholds, the same prompt gives the same answer however it is asked",
        measured=f"largest difference of a log-probability {worst:.3g}" + (f"; {wrong[0]}" if wrong else ""),
        bound=f"{exact.bound:.3g}: {bound_of_text(exact)}; other tokens only where the two best are as close",
        evidence=tuple(wrong), remedy=REMEDY["repeated"] if wrong else "",
    )  # fmt: skip


def _judged(exact: Exact, threshold: Threshold, trials: Sequence[Trial], how: str) -> Finding:
    claim = f"one before, at and one behind {_said(threshold)}, a prompt {HOW[how]} gives the same answer"
    layer = "cache" if how == "repeated" and threshold.layer == "operator" else threshold.layer
    seen = [(trial, trial.found[how]) for trial in trials if how in trial.found]
    silent = [f"{trial.tokens} tokens: {trial.why}" for trial in trials if trial.why]
    if not seen and not silent:
        why = "the server sends no log-probabilities of prompts, or no token ids"
        return Finding(f"long.threshold.{how}", layer, "not applicable", claim, measured=why)
    wrong = silent + [f"{trial.tokens} tokens: {d.why}" for trial, d in seen if not d.same]
    ties = sum(d.tie for _, d in seen)
    worst = max((d.worst for _, d in seen), default=0.0)
    said = f"largest difference of a log-probability {worst:.3g}, {ties} of {len(seen)} part at a tie"
    return Finding(
        f"long.threshold.{how}", layer, "fail" if wrong else "pass", claim, measured="; ".join(wrong[:3]) or said,
        bound=f"{exact.bound:.3g}: {bound_of_text(exact)}", evidence=tuple(wrong), remedy=REMEDY[how] if wrong else "",
    )  # fmt: skip


def bound_of_text(exact: Exact) -> str:
    """Why the bound is what it is."""
    return f"the dtype's arithmetic, or {NOISE_FACTOR:g} times the noise of short prompts ({exact.noise:.3g})"


def _cached(known: Known, exact: Exact) -> Finding:
    """Whether the comparisons above have tried the cache at all."""
    claim = "a prompt longer than a page that is asked again is found in the cache"
    trials = [*exact.plain, *(trial for group in exact.trials.values() for trial in group)]
    long = [trial for trial in trials if known.page and trial.tokens > known.page and not trial.why]
    told = [trial for trial in long if trial.cached is not None]
    if not told or not known.prefix_cache:
        why = "the prefix cache is off" if not known.prefix_cache else "no such prompt, or the server does not tell"
        return Finding("long.cache.used", "cache", "not applicable", claim, measured=why)
    missed = [f"{trial.tokens} tokens" for trial in told if not trial.cached]
    return Finding(
        "long.cache.used", "cache", "fail" if missed else "pass", claim,
        measured=f"{len(told) - len(missed)} of {len(told)} prompts", bound="all", evidence=tuple(missed),
        remedy="Without hits, nothing above has judged the cache: see prefix_cache_hits in /metrics." if missed else "",
    )  # fmt: skip
