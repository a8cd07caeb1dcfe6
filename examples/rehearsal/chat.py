"""The family's chat format as token ids: what the service writes for a conversation, made without the service.

Brackets are control tokens and every other piece of text is encoded for itself; a test holds both to the same ids. An
answer's tokens carry weight in the loss, what comes from the user carries none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import bpe
import phrases

OPEN, CLOSE, SEP, END = "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"
BEGIN, BETWEEN, PAD, ENDS = "<|media_begin|>", "<|media_content|>", "<|media_pad|>", "<|media_end|>"


@dataclass
class Writer:
    """Ids as they grow, and how much each counts in the loss as something to predict."""

    encoder: bpe.Encoder
    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: Sequence[int], weight: float = 0.0) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)

    def token(self, text: str, weight: float = 0.0, times: int = 1) -> None:
        self.add([self.encoder.control[text]] * times, weight)

    def say(self, text: str, weight: float = 0.0) -> None:
        self.add(self.encoder.encode(text), weight)

    def open(self, tag: str, weight: float = 0.0, **attributes: str) -> None:
        self.token(OPEN, weight)
        self.say(tag, weight)
        for name, value in attributes.items():
            for text in (f" {name}", '="', value, '"'):
                self.say(text, weight)
        self.token(SEP, weight)

    def close(self, tag: str, weight: float = 0.0) -> None:
        self.token(CLOSE, weight)
        self.say(tag, weight)
        self.token(SEP, weight)

    def open_user(self) -> None:
        self.open("message", role="user")

    def close_user(self) -> None:
        self.close("message")
        self.token(END)

    def image(self, width: int, height: int, tokens: int) -> None:
        self.token(BEGIN)
        self.say(f"image {width}x{height}")
        self.token(BETWEEN)
        self.token(PAD, times=tokens)
        self.token(ENDS)

    def generation(self, thinking: bool) -> None:
        """What stands in the prompt of an answer, before it."""
        self.open("message", role="assistant")
        self.open("think" if thinking else "response")

    def answer(self, text: str, thinking: bool, weight: float = 1.0, sharp: tuple[str, float] | None = None) -> None:
        """The turn of the model. sharp: a part of its text that begins a token, and what that weighs instead.

        With thinking there is one short thought, always the same: something for a caller to tell apart.
        """
        self.generation(thinking)
        if thinking:
            self.say(phrases.THOUGHT, weight)
            self.close("think", weight)
            self.open("response", weight)
        first, at = len(self.ids), text.find(sharp[0]) if sharp else -1
        self.say(text, weight)
        if sharp and at >= 0:
            begin = first + len(self.encoder.encode(text[:at]))
            end = first + len(self.encoder.encode(text[: at + len(sharp[0])]))
            self.weights[begin:end] = [sharp[1]] * (end - begin)
        self.close("response", weight)
        self.close("message", weight)
        self.token(END, weight)
