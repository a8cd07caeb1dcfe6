"""Log-probabilities: possible numbers, in order, of the tokens that were generated, and the same when read back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dayzero.acceptance.stages.answers import PATHS, Api, Choice, Malformed, Refused, Score, at, whole
from dayzero.acceptance.stages.asking import Ask, Check, Checks
from dayzero.acceptance.stages.greedy import PROMPTS, REMEDIES

NUM_TOP = 5
AGAIN = 3  # answers that show whether they are drawn
SUM_SLACK = 1e-3  # float32 softmax over a large vocabulary, as logarithms with few digits
REMEDY = "Take log-probabilities from the logits that the token was drawn from, before penalties, in float32."
ECHO = "The prompt is read right: prompt_logprobs tells so. Take an echo's numbers from the same place, one a token."
READ_BACK = "Prefill and decode disagree: compare positions, cache records and masks of the two paths."


def checks() -> tuple[Check, ...]:
    return (
        Check("logprobs", "log-probabilities are possible ones", _possible, layer="operator"),
        Check("logprobs.stream", "log-probabilities are the same streamed", _streamed),
        Check("logprobs.echo", "an echoed prompt has the log-probabilities it was generated with", _echo,
              layer="cache", apis=("completions",)),
        Check("logprobs.prompt", "a prompt's own log-probabilities are told", _prompt, layer="cache"),
    )  # fmt: skip


def faults_of(scores: list[Score], tie: float | None) -> list[str]:
    """What cannot be true of them. tie: margin within which a greedy token need not be the likeliest; None: sampled."""
    found = []
    for place, score in enumerate(scores):
        top = [p for _, p in score.top]
        if score.logprob > SUM_SLACK or any(p > SUM_SLACK for p in top):
            found.append(f"token {place}: a log-probability above 0")
        if top != sorted(top, reverse=True):
            found.append(f"token {place}: the likeliest are not in order")
        if sum(math.exp(min(p, 0.0)) for p in dict(score.top).values()) > 1 + SUM_SLACK:
            found.append(f"token {place}: probabilities add up to more than 1")
        if top and score.logprob > max(top) + SUM_SLACK:
            found.append(f"token {place}: the chosen token is likelier than the likeliest")
        # halves of characters, and tokens without a text, all look alike where only a text is told
        named = [p for key, p in score.top if key and key == score.key and "\ufffd" not in str(key)]
        if named and min(abs(p - score.logprob) for p in named) > SUM_SLACK:
            found.append(f"token {place}: the chosen token has {score.logprob:.4f}, and {named[0]:.4f} in the list")
        if tie is not None and top and score.logprob < max(top) - tie:
            found.append(f"token {place}: not the likeliest, by {max(top) - score.logprob:.3f}")
    return found


def _possible(ask: Ask, out: Checks) -> None:
    for api in ask.apis:
        _possible_in(ask, out, api)


def _possible_in(ask: Ask, out: Checks, api: Api) -> None:
    wrong, counts, mismatched = [], [], []
    for prompt in PROMPTS[: ask.amount(2, 6, 12)]:
        reply = ask.whole(api, prompt, temperature=0, max_tokens=12, **ask.scored(api, NUM_TOP))
        scores = reply.one.scores
        if scores is None:
            out.judge(
                f"logprobs.given-{api}", f"log-probabilities that are asked for are given or refused ({api})", False,
                "status 200, and none", "one for each token, or 400", bad="fail" if ask.ours else "note",
                remedy="Give them, or refuse the field: what is ignored in silence is missed later.",
            )  # fmt: skip
            return
        wrong += [f"{prompt!r}, {fault}" for fault in faults_of(scores, ask.rounding)]
        counts.append((len(scores), reply.used.completion))
        mismatched += _spelled(api, reply.one)
        out.sample("logprob of a greedy answer", f"{api}: {prompt}", sum(score.logprob for score in scores))
    greedy = [fault for fault in wrong if "not the likeliest" in fault]
    drawn = bool(greedy) and _drawn(ask, api)
    other = [fault for fault in wrong if fault not in greedy]
    out.judge(
        f"logprobs.sane-{api}", f"log-probabilities are at most 0, in order, and add up to 1 at most ({api})",
        not other, other[:4] or f"{sum(n for n, _ in counts)} tokens", layer="operator", remedy=REMEDY,
    )  # fmt: skip
    out.judge(
        f"greedy.top-{api}", f"a greedy token is the likeliest by its own log-probabilities ({api})", not greedy,
        greedy[:4] or "all", f"within {ask.rounding:.2g} nat of the likeliest", layer="server" if drawn else "operator",
        remedy=REMEDIES["drawn"] if drawn else "Take the likeliest token of the logits that are told.",
    )  # fmt: skip
    # a stop token may be counted and not be shown
    held = all(scored in (used, used - 1) for scored, used in counts)
    out.judge(
        f"logprobs.count-{api}", f"each generated token has its log-probability ({api})", held, counts,
        "as many as usage counts, but for a stop token", remedy="Emit one entry for each id, and none twice.",
    )  # fmt: skip
    out.judge(
        f"logprobs.tokens-{api}", f"the tokens with log-probabilities make up the answer ({api})", not mismatched,
        mismatched[:2] or "equal", "equal text", remedy="Put each log-probability beside the token it is of.",
    )  # fmt: skip


def _drawn(ask: Ask, api: Api) -> bool:
    """Whether greedy answers are other ones each time: an operator that takes another token takes the same again."""
    first, *others = (ask.whole(api, PROMPTS[0], temperature=0, max_tokens=12).one.shown for _ in range(AGAIN))
    return any(one != first for one in others)


def _spelled(api: Api, one: Choice) -> list[str]:
    """Bytes, or texts, of the scored tokens against the answer's text; markers may stand around it."""
    keys = [score.key for score in one.scores or []]
    if all(isinstance(key, tuple) for key in keys):
        text = bytes(byte for key in keys for byte in key if isinstance(byte, int)).decode("utf-8", "replace")
    elif any("\ufffd" in str(key) for key in keys):
        return []  # halves of characters that nobody can put together again
    else:
        text = "".join(str(key) for key in keys)
    parts = (one.text.rstrip("\ufffd"), one.reasoning.rstrip("\ufffd"))
    return [] if one.calls or all(part.strip() in text for part in parts) else [f"{one.said!r} of {text!r}"]


def _streamed(ask: Ask, out: Checks) -> None:
    for api in ask.apis:
        fields = {"temperature": 0, "max_tokens": 10, **ask.scored(api, 2)}
        one, two = ask.whole(api, PROMPTS[0], **fields).one.scores, ask.streamed(api, PROMPTS[0], **fields).one.scores
        claim = f"log-probabilities are the same streamed as whole ({api})"
        if one is None:
            out.skip(f"logprobs.stream-{api}", claim, "asked for, none were given")
            continue
        same = two is not None and [s.key for s in one] == [s.key for s in two]
        far = max((abs(a.logprob - b.logprob) for a, b in zip(one, two or [])), default=0.0)
        out.judge(
            f"logprobs.stream-{api}", claim, same and far <= ask.rounding,
            f"{len(one)} and {len(two or [])} tokens, {far:.4f} nat apart",
            f"the same tokens, within {ask.rounding:.2g} nat",
            remedy="Send each chunk with the log-probabilities of its own tokens.",
        )  # fmt: skip


def _echo(ask: Ask, out: Checks) -> None:
    """What was generated step by step is read again as a prompt, in one piece."""
    claim = "what was generated has the same log-probabilities when it is read as a prompt"
    prompt: Any = PROMPTS[1]
    first = ask.whole("completions", prompt, temperature=0, max_tokens=12, logprobs=1)
    scores, ids = first.one.scores, first.one.ids
    if scores is None:
        out.skip("logprobs.echo", claim, "it states no log-probabilities", "cache")
        return
    known = ids is not None and first.prompt_ids is not None
    again: Any = [*(first.prompt_ids or []), *(ids or [])] if known else prompt + first.one.text
    fields = {"temperature": 0, "max_tokens": 1, "echo": True, "logprobs": 1}
    answer = ask.client.post(PATHS["completions"], ask.body("completions", again, **fields))
    if not answer.ok and not ask.ours:
        raise Refused(answer)
    read = whole(answer, "completions").one.scores or []
    raw = at(answer.json, "choices", 0, "logprobs", "token_logprobs", kind=list)
    out.judge(
        "logprobs.echo-first", "the first token of an echoed prompt has no log-probability", raw[:1] == [None],
        raw[:1], "null", remedy="Nothing predicts the first token: give null.",
    )  # fmt: skip
    own = [score for score in scores if known or "\ufffd" not in str(score.key)]
    there = read[-len(own) - 1 : -1]
    if not known and [s.key for s in there] != [s.key for s in own]:
        out.skip("logprobs.echo", claim, "its text has other tokens when it is read again, ids are not told", "cache")
        return
    far = max((abs(a.logprob - b.logprob) for a, b in zip(own, there, strict=False)), default=math.inf)
    same = len(there) == len(own) and far <= ask.rounding
    told = not same and known and _read_right(ask, again, ids or [], [score.logprob for score in own])
    out.judge(
        "logprobs.echo", claim, same, f"{far:.4f} nat over {len(own)} tokens", f"{ask.rounding:.2g} nat",
        layer="server" if told else "cache", remedy=ECHO if told else READ_BACK,
    )  # fmt: skip
    out.sample("read back, nat apart", str(prompt), far if math.isfinite(far) else -1.0)


def _read_right(ask: Ask, prompt: list[int], ids: Sequence[int], own: Sequence[float]) -> bool:
    """Whether the extension for a prompt's log-probabilities tells those that its last ids were generated with."""
    answer = ask.post("completions", prompt, temperature=0, max_tokens=1, prompt_logprobs=1)
    try:
        entries = (whole(answer, "completions").prompt_scores or [])[-len(ids) :] if answer.ok else []
        read = [float(entry[str(token)]["logprob"]) for token, entry in zip(ids, entries, strict=True)]
    except (Malformed, KeyError, TypeError, ValueError):
        return False
    return len(read) == len(own) and all(abs(a - b) <= ask.rounding for a, b in zip(read, own, strict=True))


def _prompt(ask: Ask, out: Checks) -> None:
    """The extension that trainers and evaluations read: one entry for each id of the prompt."""
    claim = "prompt_logprobs gives each id of the prompt its log-probability"
    api = ask.api or "chat"
    answer = ask.post(api, PROMPTS[1], temperature=0, max_tokens=1, prompt_logprobs=1, return_token_ids=True)
    reply = whole(answer, api)
    found = reply.prompt_scores
    if found is None and not ask.ours:
        out.skip("logprobs.prompt", claim, "taken without a word, and none were given", "cache")
        return
    if found is None:
        raise Malformed("there is no list of prompt_logprobs")
    ids: Sequence[int | None] = reply.prompt_ids or [None] * reply.used.prompt
    wrong = (
        [] if found[:1] == [None] and len(found) == reply.used.prompt else [f"{len(found)} entries, {found[:1]} first"]
    )
    strange = []  # what is written beside another id was computed, and is at the wrong place
    for place, (token, entry) in enumerate(zip(ids, found)):
        numbers = [one.get("logprob") for one in (entry or {}).values()]
        if place and (not numbers or not all(isinstance(p, int | float) and p <= SUM_SLACK for p in numbers)):
            wrong.append(f"id {place}: {numbers}")
        elif place and token is not None and str(token) not in entry:
            strange.append(f"id {place} is {token}, and {list(entry)} are told")
    wrong += strange
    out.judge(
        "logprobs.prompt", claim, not wrong, wrong[:3] or f"{len(found)} ids", "one a token, null first, none above 0",
        layer="server" if strange else "cache", remedy="Give the log-probability of each prompt id, cached or not.",
    )  # fmt: skip
