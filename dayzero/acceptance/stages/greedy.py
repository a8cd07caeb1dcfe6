"""Greedy answers: the same request gives the same answer again, streamed as whole, in the first turn as in a later one.

Where two answers part, the two likeliest tokens of that place are asked for. Closer than the server's arithmetic can
tell (``ties.py``) they may be turned over by rounding, which differs with the batch and the kernel; further apart
something is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from dayzero.acceptance.stages.answers import CHAT, Api, Refused, Reply
from dayzero.acceptance.stages.asking import Ask, Check, Checks
from dayzero.acceptance.stages.robust_ask import at_once

REPEATS = 2
PROMPTS = (
    "What is the capital of France?",
    "Count from one to five.",
    "Write a short sentence about the sea.",
    "Name three colours.",
    "Why is the sky blue?",
    "Translate 'good morning' to German.",
    "What comes after Wednesday?",
    "Give me a word that rhymes with 'light'.",
    "How many legs does a spider have?",
    "Write the first line of a poem.",
    "What is 17 plus 25?",
    "Describe a cat in five words.",
)
REMEDIES = {
    "cache": "The first answer was computed, later ones may be from the prefix cache: serve without it and compare.",
    "operator": "Check that temperature 0 takes the likeliest token, and that a result hangs on nothing beside it.",
    "scheduler": "Alone the answer is the same again, so it depends on its company: serve with --bind '*=reference', "
    "then with --max-running 1, to tell operator and scheduler apart.",
    "drawn": "These answers are drawn: follow temperature 0 from the request to the sampler. Do defaults of the "
    "checkpoint's generation_config.json go before it?",
    "server": "Compare the chunks with the whole answer: what is cut, doubled, or put into another field?",
}
TIES = "Rounding decides here, if this is rare: look at the margins, not at the answers."
RARE = 1 / 3  # of all comparisons; where more end at ties, it is no rounding


@dataclass(frozen=True)
class Parted:
    """Where an answer leaves the first one. place: in tokens, -1 where only the text is known. margin: between the two
    likeliest tokens there; None: the server does not tell. bound: margins up to it are ties. company: asked once more,
    with nobody beside it, it did not leave the first one. drawn: a greedy answer to the same has a token that is not
    the likeliest by its own log-probabilities."""

    place: int
    margin: float | None
    bound: float
    company: bool = False
    drawn: bool = False

    @property
    def tie(self) -> bool:
        return self.margin is not None and self.margin <= self.bound


def checks() -> tuple[Check, ...]:
    return (
        Check("greedy.repeat", "the same greedy request gives the same answer", _first_turn, core=True, layer="cache"),
        Check(
            "greedy.turn", "a later turn's greedy answer is the same again", _later_turn, capability="chat",
            layer="cache", apis=CHAT,
        ),
    )  # fmt: skip


def tokens_of(ask: Ask) -> int:
    return ask.amount(12, 32, 64)


def _first_turn(ask: Ask, out: Checks) -> None:
    api = ask.api or "chat"
    again, streams = [], []
    for prompt in PROMPTS[: ask.amount(3, 8, 12)]:
        repeats, stream = _compare(ask, api, prompt)
        again += repeats
        streams += stream
        out.sample("greedy answers repeat", prompt, not any(one and not one.tie for one in repeats))
    _judge(ask, out, "greedy.repeat", f"the same greedy request gives the same answer {REPEATS + 1} times", again)
    _judge(ask, out, "greedy.stream", "a greedy answer is the same streamed as whole", streams, layer="server")


def _later_turn(ask: Ask, out: Checks) -> None:
    """The conversation grows by the model's own answers, so that its beginning is found in a cache."""
    turns: list[dict[str, Any]] = []
    again, streams = [], []
    for prompt in PROMPTS[: ask.amount(2, 4, 6)]:
        turns.append({"role": "user", "content": prompt})
        repeats, stream = _compare(ask, "chat", turns)
        again += repeats
        streams += stream
        answer = ask.whole("chat", turns, **_fields(ask)).one
        turns.append({"role": "assistant", "content": answer.text or "Yes."})
    _judge(ask, out, "greedy.turn", f"greedy answers are the same again up to turn {len(turns) // 2}", again)
    _judge(
        ask, out, "greedy.turn-stream", f"and the same streamed up to turn {len(turns) // 2}", streams, layer="server"
    )


def _fields(ask: Ask) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": tokens_of(ask)}


def _compare(ask: Ask, api: Api, prompt: Any) -> tuple[list[Parted | None], list[Parted | None]]:
    """(each repeat, the stream) against the first answer; None where they are the same."""
    first = ask.whole(api, prompt, **_fields(ask))
    # the first one is computed; those behind it come at once, and may come from a cache
    ways = [*[ask.whole] * REPEATS, ask.streamed]
    *repeats, stream = at_once(lambda way: way(api, prompt, **_fields(ask)), ways, len(ways))
    again = [parted(ask, api, prompt, first, one) for one in repeats]
    streams = [parted(ask, api, prompt, first, stream)]
    return _told_apart(ask, api, prompt, first, again, ask.whole), _told_apart(
        ask, api, prompt, first, streams, ask.streamed
    )


def _told_apart(
    ask: Ask, api: Api, prompt: Any, first: Reply, found: list[Parted | None], way: Callable[..., Reply]
) -> list[Parted | None]:
    """What is no tie may come of what was asked beside it: ``found`` with whether it did, which is asked for."""
    if not any(one is not None and not one.tie for one in found):
        return found
    alone = parted(ask, api, prompt, first, way(api, prompt, **_fields(ask)))
    company = alone is None or alone.tie
    return [one and replace(one, company=company) for one in found]


def parted(ask: Ask, api: Api, prompt: Any, first: Reply, other: Reply) -> Parted | None:
    """Where ``other`` leaves ``first``, both greedy answers of ``tokens_of`` tokens or fewer; None: nowhere."""
    if first.one.shown == other.one.shown and first.one.ids == other.one.ids:
        return None
    a, b = first.one.ids, other.one.ids
    if a is None or b is None or a == b:
        return Parted(-1, None, ask.rounding)
    place = next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
    try:
        scores = ask.whole(api, prompt, **_fields(ask), **ask.scored(api, 2)).one.scores or []
    except Refused:
        scores = []
    top = scores[place].top if place < len(scores) else ()
    drawn = any(score.logprob < max((p for _, p in score.top), default=-math.inf) - ask.rounding for score in scores)
    return Parted(place, top[0][1] - top[1][1] if len(top) > 1 else None, ask.rounding, drawn=drawn)


def _judge(ask: Ask, out: Checks, kind: str, claim: str, found: list[Parted | None], layer: str = "") -> None:
    odd = [one for one in found if one is not None]
    real = [one for one in odd if not one.tie]
    if not real and len(odd) > RARE * len(found):
        real = odd
    measured = f"{len(odd)} of {len(found)} differ" + (f" ({shown(odd)})" if odd else "")
    # the first answer is the cold one: when all later ones differ from it, and not only some, the cache is at fault
    where = layer or ("operator" if 0 < len(odd) < len(found) else "cache")
    drawn = any(one.drawn for one in real)
    if drawn:
        where = "server"
    elif real and all(one.company for one in real):
        where = "scheduler"
    out.judge(
        kind, claim, not odd, measured,
        f"equal, but for rare places where the two likeliest lie within {ask.rounding:.2g} nat",
        layer=where, remedy=REMEDIES["drawn" if drawn else where] if real else TIES, bad="fail" if real else "note",
    )  # fmt: skip


def shown(odd: list[Parted]) -> str:
    """The first few places, with their margins."""
    places = ", ".join("in the text" if one.place < 0 else f"token {one.place}" for one in odd[:4])
    return f"{places}; margins {[one.margin for one in odd[:4]]}"
