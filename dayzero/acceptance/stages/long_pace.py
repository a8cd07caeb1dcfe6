"""How much fits into the time that a profile gives a stage."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

Result = TypeVar("Result")
LONGER = 1.2  # attention makes a long prompt's token dearer than a short one's


@dataclass
class Speed:
    """What a token of a prompt and one of an answer take, in seconds, as first measured; told and spent: seconds
    foreseen and needed since, which correct it."""

    prompt: float = 0.0
    answer: float = 0.0
    told: float = 0.0
    spent: float = 0.0

    def seconds(self, prompt_tokens: float, answer_tokens: float) -> float:
        return self._plain(prompt_tokens, answer_tokens) * (self.spent / self.told if self.told else 1.0)

    def add(self, prompt_tokens: float, answer_tokens: float, seconds: float) -> None:
        self.told += self._plain(prompt_tokens, answer_tokens)
        self.spent += seconds

    def _plain(self, prompt_tokens: float, answer_tokens: float) -> float:
        return LONGER * prompt_tokens * self.prompt + answer_tokens * self.answer


def speed_of(ask: Callable[[int, int], float], short: int, long: int, answer: int) -> Speed:
    """From two requests. ask: seconds of a new one with so many tokens of prompt and of answer. short, long: tokens of
    the two prompts."""
    few, many = ask(short, answer), ask(long, answer)
    each = max(many - few, 0.05 * many) / max(1, long - short)
    return Speed(each, max(few - short * each, 0.2 * few) / answer)


class Pace:
    """A budget of seconds. Parts of it share one speed. clock: seconds."""

    def __init__(self, seconds: float, speed: Speed, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._seconds, self.speed = clock, seconds, speed
        self._began = clock()

    @property
    def left(self) -> float:
        return self._seconds - (self._clock() - self._began)

    def affords(self, prompt_tokens: float, answer_tokens: float) -> bool:
        return self.speed.seconds(prompt_tokens, answer_tokens) <= self.left

    def why_not(self, prompt_tokens: float, answer_tokens: float) -> str:
        """For a finding."""
        needed = self.speed.seconds(prompt_tokens, answer_tokens)
        return (
            f"{prompt_tokens:,.0f} tokens take about {needed:,.0f} seconds, and {max(0.0, self.left):.0f} of "
            f"{self._seconds:.0f} are left in this profile"
        )

    def timed(self, prompt_tokens: float, answer_tokens: float, work: Callable[[], Result]) -> Result:
        """``work``, which computes about so many tokens, with a look at the clock."""
        began = self._clock()
        result = work()
        self.speed.add(prompt_tokens, answer_tokens, self._clock() - began)
        return result

    def part(self, share: float) -> Pace:
        """A budget of its own within what is left."""
        return Pace(share * max(0.0, self.left), self.speed, self._clock)
