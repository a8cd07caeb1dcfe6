"""Needles in filler text: a sentence with a number in it at some depth, and the same sentence begun again at the end.

The filler is public-domain text. A model without instruction tuning goes on with the number; one that wants to be asked
is asked in a conversation. A checkpoint may say how its needles look, in ``dayzero_needle.json``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from dayzero.acceptance.accept.http import NoAnswer
from dayzero.acceptance.prompt import TEXT
from dayzero.acceptance.stages.answers import PATHS, Malformed, Refused, whole
from dayzero.acceptance.stages.long_known import Known
from dayzero.acceptance.stages.robust_ask import Asker, Prompt, at_once
from dayzero.checkpoint.source import Source
from dayzero.errors import UsageError

FILE = "dayzero_needle.json"
CHAT_TOKENS = 64
CHARS_A_TOKEN = 4.0  # of English, where no tokenizer says
_SENTENCE = re.compile(r"[^.:;]+[.:;]\s*")


@dataclass(frozen=True, slots=True)
class Form:
    """How a needle looks. sentence, question: with ``{name}`` and ``{value}``; what the question leaves open is the
    value. asked: the question of a conversation. names: of which each prompt takes one. digits: of the value.

    promised: share that the checkpoint's maker says is found, up to ``promised_tokens``; None: nothing is promised.
    """

    sentence: str = " The secret number of {name} is {value}."
    question: str = " The secret number of {name} is"
    asked: str = "What is the secret number of {name}? Answer with the number alone."
    names: tuple[str, ...] = ("Esther", "Amos", "Naomi", "Micah", "Lydia", "Boaz", "Dinah", "Ezra")
    digits: int = 5
    promised: float | None = None
    promised_tokens: int = 0


def read_form(source: Source | None) -> Form:
    """The checkpoint's own form, or the usual one. UsageError for a file that is no form."""
    if source is None or not source.exists(FILE):
        return Form()
    try:
        found = json.loads(source.text(FILE))
    except ValueError as error:
        raise UsageError(f"{FILE} of {source.name} is no JSON: {error}; mend it, or leave it out.") from error
    return form_from(found, f"{FILE} of {source.name}")


def form_from(found: Any, where: str) -> Form:
    """From a JSON object with some of the fields of Form. UsageError names the field."""
    known = {field.name for field in fields(Form)}
    if not isinstance(found, dict) or set(found) - known:
        raise UsageError(f"{where}: must be an object with fields of {', '.join(sorted(known))}.")
    for name, value in found.items():
        good = {
            "names": isinstance(value, list) and bool(value) and all(isinstance(n, str) and n for n in value),
            "digits": type(value) is int and 1 <= value <= 12,
            "promised": value is None or (type(value) in (int, float) and 0 < value <= 1),
            "promised_tokens": type(value) is int and value >= 0,
        }.get(name, isinstance(value, str) and "{name}" in value)
        if not good:
            raise UsageError(f"{where}: {name} is {value!r:.80}, which it cannot be.")
    if "{value}" not in found.get("sentence", "{value}"):
        raise UsageError(f"{where}: sentence must hold {{value}}.")
    made = dict(found)
    if "names" in made:
        made["names"] = tuple(made["names"])
    return replace(Form(), **made)


@dataclass(frozen=True, slots=True)
class Piece:
    """Of a prompt. size: tokens, counted or guessed. ids: None where nobody counts."""

    text: str
    size: int
    ids: tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Needle:
    """One needle to be found. depth: 0 is the start of the filler, 1 its end. number: of several in one cell."""

    tokens: int
    depth: float
    number: int

    @property
    def item(self) -> str:
        return f"depth {self.depth:g}, {self.tokens} tokens, {self.number}"


class Haystack:
    """Makes prompts of the server's own tokens where it lends its tokenizer, else of text of about the length."""

    def __init__(self, known: Known, form: Form, seed: int) -> None:
        self.known, self.form, self._seed = known, form, seed
        text = " ".join(TEXT.read_text(encoding="utf-8").split())
        sentences = [" " + found.strip() for found in _SENTENCE.findall(text)]
        self.exact = known.tokenizer and known.ids
        self._begin = self._ids("", True) if self.exact else ()
        made = at_once(lambda one: self._piece(one), sentences, 4)
        self._filler = [piece for piece in made if piece.size]

    def least(self) -> int:
        """Fewest tokens of a prompt that hides anything."""
        needle, question = self._parts(Needle(0, 0.5, 0))
        return len(self._begin) + needle.size + question.size + 2 * max(piece.size for piece in self._filler)

    def prompt(self, needle: Needle) -> Prompt:
        """Of ``needle.tokens`` tokens: exactly so where ids are sent."""
        told, question = self._parts(needle)
        room = needle.tokens - told.size - question.size - len(self._begin)
        filler = self._filling(max(0, room), needle)
        place = round(needle.depth * len(filler))
        pieces = [*filler[:place], told, *filler[place:], question]
        if self.exact:
            return [*self._begin, *(token for piece in pieces for token in piece.ids or ())]
        return "".join(piece.text for piece in pieces).strip()

    def value(self, needle: Needle) -> str:
        return str(self._draw(needle)[1])

    def question(self, needle: Needle) -> str:
        """Of a conversation."""
        return self.form.asked.format(name=self._draw(needle)[0], value=self.value(needle))

    def _draw(self, needle: Needle) -> tuple[str, int]:
        """Name and value, the same at every length: needles of two lengths are pairs."""
        deal = random.Random(f"{self._seed} needle {needle.depth} {needle.number}")
        return deal.choice(self.form.names), deal.randrange(10 ** (self.form.digits - 1), 10**self.form.digits)

    def _parts(self, needle: Needle) -> tuple[Piece, Piece]:
        name, value = self._draw(needle)
        told, question = (text.format(name=name, value=value) for text in (self.form.sentence, self.form.question))
        return self._piece(told), self._piece(question)

    def _filling(self, room: int, needle: Needle) -> list[Piece]:
        """Sentences in their order from a drawn one on; the first is cut to the length."""
        start = random.Random(f"{self._seed} filler {needle.depth} {needle.number}").randrange(len(self._filler))
        out: list[Piece] = []
        while room > 0:
            piece = self._filler[(start - len(out)) % len(self._filler)]
            if piece.size > room:
                words = piece.text.split(" ")
                cut = " ".join(words[-max(1, len(words) * room // piece.size) :])
                piece = Piece(f" {cut}", room, None if piece.ids is None else piece.ids[-room:])
            out.append(piece)
            room -= piece.size
        return out[::-1]

    def _piece(self, text: str) -> Piece:
        if not self.exact:
            return Piece(text, max(1, round(len(text) / CHARS_A_TOKEN)), None)
        ids = self._ids(text, False)
        return Piece(text, len(ids), ids)

    def _ids(self, text: str, begin: bool) -> tuple[int, ...]:
        asker = self.known.asker
        body = {"model": asker.server.model, "prompt": text, "add_special_tokens": begin}
        try:
            found = asker.client.post("/tokenize", body)
        except NoAnswer:
            return ()
        tokens = found.json.get("tokens") if found.ok and isinstance(found.json, Mapping) else None
        return tuple(tokens) if isinstance(tokens, list) else ()


@dataclass(frozen=True, slots=True)
class Found:
    """Whether a needle was found. said: the start of the answer. error: why there was none."""

    needle: Needle
    right: bool
    said: str
    error: str = ""


def ask_all(asker: Asker, hay: Haystack, needles: Sequence[Needle], chat: bool, workers: int) -> list[Found]:
    return at_once(lambda needle: ask(asker, hay, needle, chat), needles, workers)


def ask(asker: Asker, hay: Haystack, needle: Needle, chat: bool) -> Found:
    """One needle: right when its number stands in the answer."""
    prompt = hay.prompt(needle)
    if chat:
        said, error = _conversation(asker, hay, needle)
    else:
        # a digit may be a token of its own, and a blank too
        answer = asker.complete(prompt, hay.form.digits + 3, ignore_eos=None)
        said, error = answer.text, answer.error
    return Found(needle, not error and hay.value(needle) in said.replace(",", ""), said[:60], error)


def _conversation(asker: Asker, hay: Haystack, needle: Needle) -> tuple[str, str]:
    text_hay = hay.prompt(needle)
    if isinstance(text_hay, list):
        found = asker.client.post("/detokenize", {"model": asker.server.model, "tokens": text_hay})
        text_hay = found.json.get("prompt", "") if found.ok and isinstance(found.json, dict) else ""
    body = {
        "model": asker.server.model, "max_tokens": CHAT_TOKENS, "temperature": 0,
        "messages": [{"role": "user", "content": f"{text_hay}\n\n{hay.question(needle)}"}],
    }  # fmt: skip
    try:
        one = whole(asker.client.post(PATHS["chat"], body), "chat").one
    except (NoAnswer, Refused, Malformed) as error:
        return "", str(error)
    return one.text or one.reasoning, ""
