"""Prompts: ids against golden renderings of the chat template, and text that must come back from its ids as it was."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dayzero.acceptance.stages.answers import CHAT, Malformed, Refused, at
from dayzero.acceptance.stages.asking import Ask, Check, Checks
from dayzero.acceptance.stages.rendering import Library, Unrendered, first_difference, own_chat, own_ids
from dayzero.acceptance.stages.tools import WEATHER
from dayzero.errors import UsageError

Served = list[int] | int | str  # ids of a prompt; how many there are; why it is refused
LAYER = "tokenizer+template"
LOST = "The template is right, so it was given less: follow the message from the request's body to the template."
REMEDY = "Render the same messages with both, and compare the texts: a header, a space, a special token, a default."


@dataclass(frozen=True)
class Talk:
    name: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


Golden = Callable[[Talk], list[int]]  # Errors: Unrendered, UsageError
TALKS = (
    Talk("one question", (_user("Hello!"),)),
    Talk("a system message", ({"role": "system", "content": "Be brief."}, _user("What is up?"))),
    Talk("three turns", (_user("One?"), {"role": "assistant", "content": "Two."}, _user("Three?"))),
    Talk("letters of the world", (_user("Grüße, 世界 \U0001f642 e\u0301 \u05e9\u05dc\u05d5\u05dd"),)),
    Talk("white space", (_user("  two  spaces\n\n\tand a tab"),)),
    Talk("digits and code", (_user("def f(x):\n    return x**2 + 1234567890.5  # 10_000"),)),
    Talk("what an earlier answer thought", (
        _user("2 + 2?"), {"role": "assistant", "content": "4.", "reasoning_content": "Two pairs."}, _user("And 3 + 3?"),
    )),
    Talk("tools", (_user("What is the weather in Paris?"),), (WEATHER,)),
)  # fmt: skip
TEXTS = (
    ("plain", "The quick brown fox, 3.14 times."),
    ("composed and decomposed", "caf\u00e9 cafe\u0301 \u1e9b\u0323 \ufb01"),
    ("emoji with joiners", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1e9"),
    ("right to left", "\u200f\u05e9\u05dc\u05d5\u05dd \u202eabc\u202c \u0645\u0631\u062d\u0628\u0627"),
    ("beyond the first plane", "\U00020000\U0002a6d6 \U0001d518\U0001d52b"),
    ("white space", " a  b\t\tc\n\n d \r\n e\u00a0f\u3000g "),
    ("controls", "a\x01b\x7fc\x1b[0m"),
    ("marks alone", "\u0301\u0302 \u20e3 \u200b\u200d"),
    ("a mark of bytes", "\ufeffa\ufffdb"),
    ("one letter often", "a" * 200 + "\u6f22" * 50),
    ("code", 'x = {"a": [1, 2.5e-3], \'b\': r"\\n"} <!-- % -->'),
)  # fmt: skip


def checks() -> tuple[Check, ...]:
    return (
        Check("template.ids", "prompts have the ids of golden renderings", _golden, "chat", layer=LAYER, apis=CHAT),
        Check("tokenize.identity", "text comes back from its ids as it was", _identity, "tokenizer", layer=LAYER),
    )  # fmt: skip


# --- golden renderings


def _golden(ask: Ask, out: Checks) -> None:
    served = {talk.name: _served(ask, talk) for talk in TALKS}
    ours: Golden | None = None  # by the code that the server runs too, where it is one of this package
    chat, why = own_chat(ask.subject)
    claim = "prompt ids are those of our own rendering of the checkpoint"
    if chat is None or chat.encoding is None:
        out.skip("template.own", claim, why or (chat.why_no_chat if chat else ""), LAYER)
    else:
        encoding = chat
        own: Golden = lambda talk: own_ids(encoding, talk.messages, talk.tools)  # noqa: E731
        ours = own if ask.ours else None
        _compare(out, "template.own", claim, served, own, ours)
    claim = "prompt ids are those that transformers renders"
    if ask.subject.source is None:
        out.skip("template.independent", claim, why, LAYER)
        return
    try:
        library = Library(ask.subject.source)
    except Unrendered as error:
        out.skip("template.independent", claim, str(error), LAYER)
        return
    _compare(out, "template.independent", claim, served, lambda talk: library.ids(talk.messages, talk.tools), ours)


def _served(ask: Ask, talk: Talk) -> Served:
    """Ids of the prompt, as the forward pass reads them where the server tells, else by /tokenize; else their number;
    else why it is refused."""
    more = {"tools": list(talk.tools)} if talk.tools else {}
    try:
        reply = ask.whole("chat", list(talk.messages), max_tokens=1, temperature=0, **more)
    except Refused as error:
        return f"refused with {error}"
    if reply.prompt_ids is not None:
        return reply.prompt_ids
    try:
        ids = ask.tokenized(messages=list(talk.messages), **more)
    except (Refused, Malformed):
        return reply.used.prompt
    return ids if len(ids) == reply.used.prompt else reply.used.prompt


def _compare(
    out: Checks, kind: str, claim: str, served: dict[str, Served], golden: Golden, ours: Golden | None
) -> None:
    """ours: what the server's own code renders in this process. Where that is golden, and the server's prompts are
    wrong in some conversations alone, its template is right and was given less than the requests hold."""
    wrong, left_out, equal, counted, given_less = {}, {}, 0, 0, ours is not None
    for talk in TALKS:
        given = served[talk.name]
        if isinstance(given, str):
            left_out[talk.name] = given
            continue
        try:
            ids = golden(talk)
        except (Unrendered, UsageError) as error:
            left_out[talk.name] = str(error)
            continue
        if isinstance(given, int):
            counted += 1
            if given != len(ids):
                wrong[talk.name] = f"{given} tokens against {len(ids)}"
        elif given != ids:
            wrong[talk.name] = first_difference(given, ids)
        equal += talk.name not in wrong
        given_less &= talk.name not in wrong or _renders(ours, talk, ids)
        out.sample(claim, talk.name, talk.name not in wrong)
    if not equal and not wrong:
        out.skip(kind, claim, str(left_out), LAYER)
        return
    measured: dict[str, Any] = {"equal": equal}
    measured |= {"counts only": counted} if counted else {}
    measured |= {"differ": wrong} if wrong else {}
    measured |= {"left out": left_out} if left_out else {}
    servers = bool(wrong) and equal > 0 and given_less
    out.judge(
        kind, claim, not wrong, measured, f"equal ids in {len(TALKS)} conversations",
        layer="server" if servers else LAYER, remedy=LOST if servers else REMEDY,
    )  # fmt: skip


def _renders(ours: Golden | None, talk: Talk, ids: list[int]) -> bool:
    try:
        return ours is not None and ours(talk) == ids
    except (Unrendered, UsageError):
        return False


# --- text and ids


def _identity(ask: Ask, out: Checks) -> None:
    claim = "text comes back from its ids as it was"
    lost: dict[str, str] = {}
    normal: dict[str, str] = {}
    for name, text in TEXTS:
        back = _back(ask, text)
        out.sample(claim, name, back == text)
        if back == text:
            continue
        forms = [unicodedata.normalize(form, text) for form in ("NFC", "NFKC", "NFD")]
        (normal if back in forms or back == f" {text}" else lost)[name] = back[:40]
    out.judge(
        "tokenize.identity", claim, not lost and not normal, {"lost": lost, "normalised": normal},
        f"equal in {len(TEXTS)} texts", layer=LAYER, bad="fail" if lost else "note",
        remedy="Look at the tokenizer's normalizer and decoder: is each byte of a text in some token?",
    )  # fmt: skip
    _concatenation(ask, out)


def _back(ask: Ask, text: str, ids: Sequence[int] | None = None) -> str:
    if ids is None:
        ids = ask.tokenized(prompt=text, add_special_tokens=False)
    answer = ask.client.post("/detokenize", {"model": ask.model, "tokens": list(ids)})
    if not answer.ok:
        raise Refused(answer)
    return at(answer.json, "prompt", kind=str)


def _concatenation(ask: Ask, out: Checks) -> None:
    """The answer's text is that of its ids, all at once: nothing is lost where pieces are put together."""
    claim = "an answer's text is that of its ids"
    if not ask.ids or "completions" in ask.why_not:
        out.skip("tokenize.answer", claim, "the server tells no ids of plain completions", LAYER)
        return
    wrong = {}
    for prompt in ("Once upon a time", "1, 2, 3,"):
        one = ask.whole("completions", prompt, temperature=0, max_tokens=12, skip_special_tokens=False).one
        ids = one.ids or []
        text = _back(ask, "", ids)
        if text != one.text and (one.finish != "stop" or _back(ask, "", ids[:-1]) != one.text):
            wrong[prompt] = (one.text[:40], text[:40])
    out.judge(
        "tokenize.answer", claim, not wrong, wrong or "equal", "equal text", layer=LAYER,
        remedy="Detokenise incrementally: keep bytes back until they are whole characters, and lose none.",
    )  # fmt: skip
