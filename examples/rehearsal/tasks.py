"""Rows to learn from: needles in text and in conversations, copies, small talk, pictures, plain text.

Each builder fills one row of an exact length. Every token has a weight, how much it counts in the loss as something to
predict, and a kind, by which accuracy is logged. What cannot be known (a number said for the first time) weighs
nothing. Facts are said again at random places, so that a long row asks many questions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bpe
import images
import numpy as np
import phrases
from chat import Writer
from numpy.typing import NDArray

NOTHING, TEXT, ANSWER, NUMBER, PICTURE = range(5)
KINDS = ("nothing", "text", "answer", "number", "picture")
IN_TEXT, SHARP = 0.3, 5.0  # weights: of filler around needles; of a number's digits
TURN = 72  # no question with its answer takes more tokens

Random = np.random.Generator
Ids = NDArray[Any]


@dataclass
class Row:
    """ids int64 [length + 1], weight float32, kind uint8; pixels and the place of its first placeholder, if any."""

    ids: Ids
    weight: Ids
    kind: Ids
    pixels: Any = None
    place: int = -1


class Tasks:
    """text: uint16 ids of the corpus."""

    def __init__(self, encoder: bpe.Encoder, text: Ids) -> None:
        self.encoder, self.text = encoder, text
        self.padding = encoder.control["[PAD]"]
        decoded = [token.decode("ascii", "ignore") for token in encoder.tokens]
        self.words = [w.strip() for w in decoded if w.startswith(" ") and w.strip().isalpha() and len(w) > 4]
        self.fillers = [np.array(encoder.encode(text)) for text in phrases.FILLERS]

    # --- pieces ---

    def name(self, random: Random) -> str:
        pick = random.random()
        if pick < 0.35:
            return str(random.choice(phrases.NAMES))
        if pick < 0.7:
            made = "".join(random.choice(phrases.SYLLABLES, random.integers(2, 5)))
            return made.capitalize() if random.random() < 0.5 else made
        if pick < 0.85:
            return str(random.choice(self.words))
        return f"{random.choice(('the', 'old', 'my', 'red', 'great'))} {random.choice(phrases.NAMES)}"

    def facts(self, random: Random, count: int) -> list[tuple[str, str]]:
        """(name, number) with no name twice."""
        found: dict[str, str] = {}
        while len(found) < count:
            digits = 5 if random.random() < 0.7 else int(random.integers(3, 8))
            found[self.name(random)] = str(random.integers(10 ** (digits - 1), 10**digits))
        return list(found.items())

    def filler(self, random: Random, length: int) -> tuple[Ids, float]:
        """(ids, their weight): mostly the corpus, at times a part of it over and over, or words in no order."""
        pick = random.random()
        if pick < 0.65:
            first = int(random.integers(0, len(self.text) - length))
            return self.text[first : first + length].astype(np.int64), IN_TEXT
        if pick < 0.9:
            first, size = int(random.integers(0, len(self.text) - 1024)), int(random.integers(20, 1024))
            unit = self.text[first : first + size].astype(np.int64)
            return np.resize(unit if pick < 0.8 else self.fillers[size % len(self.fillers)], length), 0.02
        return random.integers(256, len(self.encoder.tokens), length), 0.0

    def statement(self, name: str, number: str, again: bool) -> Writer:
        """A fact as a sentence; said again, what follows the name is known."""
        out = Writer(self.encoder)
        head, _, tail = phrases.STATEMENT.partition("{}")
        out.say(f" {head}{name}")
        out.say(tail, 0.2 if again else 0.0)
        out.say(" ", 1.0 if again else 0.0)
        out.say(number, SHARP if again else 0.0)
        out.say(".", 1.0 if again else 0.0)
        return out

    # --- rows ---

    def plain(self, random: Random, length: int) -> Row:
        first = int(random.integers(0, len(self.text) - length - 1))
        ids = self.text[first : first + length + 1].astype(np.int64)
        return Row(ids, np.ones(length + 1, np.float32), np.full(length + 1, TEXT, np.uint8))

    def needles(self, random: Random, length: int) -> Row:
        """Facts in filler, each said again at least once somewhere behind, one of them at the very end."""
        most = max(1, min(48, length // 80))
        facts = self.facts(random, int(np.exp(random.uniform(0, np.log(most + 1)))))
        events: list[tuple[float, Writer]] = []
        for name, number in facts:
            first = random.random()
            events.append((first, self.statement(name, number, False)))
            for _ in range(int(random.integers(1, 3))):
                events.append((random.uniform(first, 1.0), self.statement(name, number, True)))
        events.append((1.0, self.statement(*facts[int(random.integers(len(facts)))], again=True)))
        events.sort(key=lambda one: one[0])
        return self._woven(random, events, length + 1)

    def _woven(self, random: Random, events: Sequence[tuple[float, Writer]], total: int) -> Row:
        """Sentences at their places (0 to 1, rising) in filler, ``total`` tokens in all."""
        room = total - sum(len(event.ids) for _, event in events)
        if room < 0:
            return self._woven(random, events[-1:] if total < 40 else events[len(events) // 2 :], total)
        filler, weight = self.filler(random, room)
        ids: list[Ids] = []
        weights: list[Ids] = []
        kinds: list[Ids] = []
        done = 0
        for where, event in [*events, (1.0, Writer(self.encoder))]:
            cut = filler[done : int(where * room)]
            done = int(where * room)
            own = np.array(event.weights, np.float32)
            ids += [cut, np.array(event.ids, np.int64)]
            weights += [np.full(len(cut), weight, np.float32), own]
            kinds += [np.full(len(cut), TEXT if weight == IN_TEXT else NOTHING, np.uint8)]
            kinds += [np.where(own >= SHARP, NUMBER, NOTHING).astype(np.uint8)]
        return Row(np.concatenate(ids), np.concatenate(weights), np.concatenate(kinds))

    def needle_chat(self, random: Random, length: int) -> Row:
        """A long message that holds facts, then questions about some of them."""
        thinking = bool(random.random() < 0.5)
        turns = int(random.integers(1, 2 + min(6, length // 400)))
        facts = self.facts(random, max(1, min(24, int(random.integers(1, 2 + length // 160)))))
        out = Writer(self.encoder)
        out.open_user()
        room = length + 1 - len(out.ids) - turns * TURN
        events = sorted(((random.random(), self.statement(*fact, again=False)) for fact in facts), key=lambda e: e[0])
        while len(events) > 1 and sum(len(event.ids) for _, event in events) > room:
            events.pop()
        said = [fact for fact in facts if any(_holds(event, self.encoder, fact) for _, event in events)]
        body = self._woven(random, events, max(room, sum(len(event.ids) for _, event in events)))
        out.add(body.ids.tolist())
        for number in range(turns):
            name, value = said[int(random.integers(len(said)))]
            if number:
                out.open_user()
            question = str(random.choice(phrases.ASK_NUMBER)).format(name)
            out.say(f" {question}" if number == 0 else question)
            out.close_user()
            out.answer(phrases.number_answer(question, name, value), thinking, 1.0, (value, SHARP))
        return self._finished(out, length)

    def talk(self, random: Random, length: int) -> Row:
        """Small questions, one after another, as long as there is room."""
        thinking = bool(random.random() < 0.5)
        out = Writer(self.encoder)
        while True:
            question, answer, sharp = self._small(random)
            turn = Writer(self.encoder)
            turn.open_user()
            turn.say(question)
            turn.close_user()
            turn.answer(answer, thinking, 1.0, sharp)
            if len(out.ids) + len(turn.ids) > length + 1:
                return self._finished(out, length)
            out.ids += turn.ids
            out.weights += turn.weights

    def _small(self, random: Random) -> tuple[str, str, tuple[str, float] | None]:
        pick = random.random()
        if pick < 0.4:
            questions, answer = phrases.TALK[int(random.integers(len(phrases.TALK)))]
            return str(random.choice(questions)), answer, None
        if pick < 0.65:
            ((name, number),) = self.facts(random, 1)
            question = str(random.choice(phrases.ASK_NUMBER)).format(name)
            told = f"{phrases.STATEMENT.format(name)} {number}."
            return f"{told} {question}", phrases.number_answer(question, name, number), (number, SHARP)
        words = [str(word) for word in random.choice(self.words, int(random.integers(2, 9)))]
        listed = " ".join(words)
        if pick < 0.8:
            return str(random.choice(phrases.ASK_COPY)).format(listed), listed, None
        if pick < 0.9:
            return str(random.choice(phrases.ASK_FIRST)).format(listed), words[0], None
        return str(random.choice(phrases.ASK_LAST)).format(listed), words[-1], None

    def copies(self, random: Random, length: int) -> Row:
        """Runs of random tokens, each coming again later; the second time it can be known from its second token on."""
        ids = random.integers(256, len(self.encoder.tokens), length + 1)
        weight = np.zeros(length + 1, np.float32)
        size = int(random.integers(8, 33))
        half = (length + 1) // 2
        slots = (length + 1 - half) // size
        for slot in random.choice(slots, max(1, slots // 2), replace=False):
            source = int(random.integers(0, half - size))
            target = half + int(slot) * size
            ids[target : target + size] = ids[source : source + size]
            weight[target + 2 : target + size] = 1.0
        return Row(ids, weight * 0.5, np.where(weight > 0, ANSWER, NOTHING).astype(np.uint8))

    def picture(self, random: Random, length: int, whole: bool = False) -> Row:
        """A picture and questions about it; whole: only what it is, once."""
        thinking = bool(random.random() < 0.5)
        shown = images.draw(random)
        out = Writer(self.encoder)
        out.open_user()
        before = random.random() < 0.7
        first = self._about(random, shown, whole=bool(random.random() < 0.7) or whole)
        if not before:
            out.say(first[0])
        out.image(images.SIDE, images.SIDE, (images.SIDE // 16) ** 2)
        place = out.ids.index(self.encoder.control["<|media_pad|>"])
        if before:
            out.say(first[0])
        out.close_user()
        out.answer(first[1], thinking, 1.0, (first[1], SHARP))
        while len(out.ids) + TURN <= length + 1 and not whole:
            question, answer = self._about(random, shown, whole=False)
            out.open_user()
            out.say(question)
            out.close_user()
            out.answer(answer, thinking, 1.0, (answer, SHARP))
        row = self._finished(out, length)
        row.kind[row.kind == NUMBER] = PICTURE
        row.pixels, row.place = shown.pixels, place
        return row

    def _about(self, random: Random, shown: images.Picture, whole: bool) -> tuple[str, str]:
        if whole:
            return str(random.choice(phrases.ASK_PICTURE)), shown.answer
        count, colour, shape = shown.answer.split(" ")
        asked = ((phrases.ASK_COUNT, count), (phrases.ASK_COLOUR, colour), (phrases.ASK_SHAPE, shape))
        questions, answer = asked[int(random.integers(3))]
        return str(random.choice(questions)), answer

    def _finished(self, out: Writer, length: int) -> Row:
        lacks = length + 1 - len(out.ids)
        assert lacks >= 0, f"a row of {length} tokens came to {-lacks} more"
        ids = np.array(out.ids + [self.padding] * lacks, np.int64)
        weight = np.array(out.weights + [0.0] * lacks, np.float32)
        kind = np.where(weight >= SHARP, NUMBER, np.where(weight > 0, ANSWER, NOTHING)).astype(np.uint8)
        return Row(ids, weight, kind)


def _holds(event: Writer, encoder: bpe.Encoder, fact: tuple[str, str]) -> bool:
    return encoder.decode(event.ids) == f" {phrases.STATEMENT.format(fact[0])} {fact[1]}."
