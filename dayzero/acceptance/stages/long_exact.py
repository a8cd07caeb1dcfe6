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
from dayzero.acceptance.stages.robust_same import CAP, Difference, bound_of, difference, extended
from dayzero.finding import Finding

ANSWER_TOKENS = 4
FLOOR_FACTOR = 3.0  # over the noise of lengths that are no threshold
NUM_PLAIN = 2  # lengths that are no threshold
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
    """floor: largest difference at lengths that are no threshold. skipped: threshold -> why it was not tried."""

    bound: float
    floor: float = 0.0
    plain: list[Trial] = field(default_factory=list)
    trials: dict[Threshold, list[Trial]] = field(default_factory=dict)
    skipped: dict[Threshold, str] = field(default_factory=dict)


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
    """Lengths that are no threshold first: their differences are the noise that thresholds are held to."""
    base = bound_of(known.dtype)
    out = Exact(base)
    rng = random.Random(f"{seed} exact")
    first = _needed(at[0]) if at else (0.0, 0.0)
    for tokens in plain_lengths(known, at):
        if out.plain and not pace.affords(ASKED * tokens + first[0], ANSWERED + first[1]):
            break  # one is enough where the time is short; no threshold is not
        told(f"{tokens} tokens")
        work = partial(try_prompt, known, tokens, rng, CAP)
        out.plain.append(pace.timed(ASKED * tokens, ANSWERED, work))
    out.floor = max((d.worst for trial in out.plain for d in trial.found.values()), default=0.0)
    out.bound = min(CAP, max(base, FLOOR_FACTOR * out.floor))
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


def plain_lengths(known: Known, at: Sequence[Threshold]) -> list[int]:
    """Lengths inside of pages and away from every threshold."""
    limit, page = limit_of(known) or 1 << 30, known.page or 16
    near = {n for one in at for n in range(one.tokens - ANSWER_TOKENS - 1, one.tokens + 2)}
    found = [n for n in range(page // 2 - 1, 4 * page, max(1, page // 3)) if n >= 2 and n not in near and n % page > 1]
    return [n for n in found if n + 2 * ANSWER_TOKENS <= limit][:NUM_PLAIN]


def findings(known: Known, exact: Exact) -> list[Finding]:
    out = [_plain(exact)] if exact.plain else []
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
    rows += [(trial.item(None), trial) for trial in exact.plain]
    pairs = [(f"{item}, {how}", d) for item, trial in rows for how, d in trial.found.items()]
    return {
        "same answer": {item: d.same for item, d in pairs},
        "largest difference of a log-probability": {item: d.worst for item, d in pairs},
    }


def _said(threshold: Threshold) -> str:
    return f"{threshold.name} ({threshold.tokens:,} tokens)"


def _plain(exact: Exact) -> Finding:
    """Lengths without a threshold: they set the noise, and so must be sound themselves."""
    wrong = [f"{trial.tokens} tokens: {trial.why}" for trial in exact.plain if trial.why]
    wrong += [
        f"{t.tokens} tokens, {HOW[how]}: {d.why}" for t in exact.plain for how, d in t.found.items() if not d.same
    ]
    return Finding(
        "long.repeat", "cache" if wrong else "operator", "fail" if wrong else "pass",
        "away from thresholds, the same prompt gives the same answer however it is asked",
        measured=f"largest difference of a log-probability {exact.floor:.3g}" + (f"; {wrong[0]}" if wrong else ""),
        bound=f"{CAP} on every log-probability of the answer, other tokens only where the two best are closer",
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
    return f"the dtype's arithmetic, or {FLOOR_FACTOR:g} times the noise away from thresholds ({exact.floor:.3g})"


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
