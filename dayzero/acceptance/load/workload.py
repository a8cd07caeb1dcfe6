"""What a load test asks: levels, lengths, arrivals, prompts. All of it follows from the seed. Paper.

The repeats of a level have the same lengths and the same arrivals and differ in nothing but the tokens of their
prompts, so that no repeat finds the prompts of another in a prefix cache.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

from dayzero.chat.tokenizer import Tokenizer
from dayzero.errors import UsageError

Api = Literal["completions", "chat"]
Prompt = list[int] | str

LEAST_REQUESTS = 8
WORDS_KEPT = 1000
WORDS_NEEDED = 8
ATTEMPTS = 30
_WORD = re.compile(r" [A-Za-z]{1,12}|[A-Za-z]")


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens, drawn evenly from ``low`` to ``high``, both included."""

    low: int
    high: int

    @staticmethod
    def parse(option: str, text: str) -> Lengths:
        """``512`` or ``100:600``. UsageError for anything else."""
        low, colon, high = text.partition(":")
        try:
            found = Lengths(int(low), int(high if colon else low))
        except ValueError:
            found = Lengths(0, 0)
        if not 1 <= found.low <= found.high:
            raise UsageError(f"{option} {text}: give a number of tokens such as 512, or a range such as 100:600.")
        return found

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class Level:
    """Closed loop: ``concurrency`` requests are kept running. Open loop: ``rate`` requests a second arrive (Poisson),
    whatever the server does. One of the two is set."""

    concurrency: int | None = None
    rate: float | None = None

    @property
    def name(self) -> str:
        return f"c={self.concurrency}" if self.rate is None else f"rate={self.rate:g}/s"

    @property
    def value(self) -> float:
        """Where the level stands on a plot's axis."""
        return float(self.concurrency or 0) if self.rate is None else self.rate


@dataclass(frozen=True, slots=True)
class Workload:
    """prompt, output: lengths in tokens. shared_prefix: first tokens that all prompts have in common. num_requests: of
    a level; None: twice its concurrency, at least 8."""

    prompt: Lengths
    output: Lengths
    shared_prefix: int = 0
    num_requests: int | None = None
    seed: int = 0
    api: Api = "completions"

    def __post_init__(self) -> None:
        if self.shared_prefix >= self.prompt.low:
            raise UsageError(
                f"--shared-prefix {self.shared_prefix}: it must be shorter than the shortest prompt "
                f"({self.prompt.low} tokens), or requests would be equal."
            )

    def count(self, level: Level) -> int:
        return self.num_requests or max(LEAST_REQUESTS, 2 * (level.concurrency or 0))

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"prompt": str(self.prompt), "output": str(self.output)}


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """prompt_tokens: what the prompt counts, None where the server alone can know (a chat template goes around it).
    at: seconds after the level's start at which it arrives, in an open loop."""

    prompt: Prompt
    prompt_tokens: int | None
    output_tokens: int
    at: float = 0.0


class Prompts(Protocol):
    """Makes prompts of an exact length."""

    kind: str

    def make(self, rng: random.Random, num_tokens: int) -> tuple[Prompt, int | None]:
        """(prompt, what it counts), new at each call but for the shared prefix."""


class IdPrompts:
    """Prompts as token ids, drawn from ``ids``; the first ``shared_prefix`` are always the same."""

    kind = "ids"

    def __init__(self, ids: Sequence[int], shared_prefix: int, seed: int) -> None:
        assert len(ids) > 1, "prompts must be able to differ"
        self._ids = ids
        self._prefix = random.Random(f"prefix {seed}").choices(ids, k=shared_prefix)

    def make(self, rng: random.Random, num_tokens: int) -> tuple[Prompt, int | None]:
        return self._prefix + rng.choices(self._ids, k=num_tokens - len(self._prefix)), num_tokens


class TextPrompts:
    """Prompts as text that counts an exact number of tokens, what the tokenizer puts before a text included.

    bare: the text is what a chat message holds; the template's own tokens are not known here.
    """

    kind = "text"

    def __init__(self, tokenizer: Tokenizer, shared_prefix: int, seed: int, bare: bool = False) -> None:
        self._tokenizer, self._bare = tokenizer, bare
        self._words = _one_token_words(tokenizer, seed)
        self._prefix = random.Random(f"prefix {seed}").choices(self._words, k=shared_prefix)

    def make(self, rng: random.Random, num_tokens: int) -> tuple[Prompt, int | None]:
        """UsageError when the tokenizer gives no text of that length."""
        own = rng.choices(self._words, k=num_tokens - len(self._prefix))
        for _ in range(ATTEMPTS):
            text = "".join(self._prefix + own)
            missing = num_tokens - len(self._tokenizer.encode(text, begin=not self._bare))
            if missing == 0:
                return text, None if self._bare else num_tokens
            own = own[:missing] if missing < 0 else own + rng.choices(self._words, k=missing)
        raise UsageError(
            f"no text of exactly {num_tokens} tokens was found for {self._tokenizer.name}; try another "
            "--prompt-tokens, or --prompts ids."
        )


def _one_token_words(tokenizer: Tokenizer, seed: int) -> list[str]:
    """Texts that stay one token each when they are put one behind the other."""
    added = set(tokenizer.added.values())
    order = [i for i in range(tokenizer.vocab_size) if i not in added]
    random.Random(f"words {seed}").shuffle(order)
    words: list[str] = []
    for token in order:
        text = tokenizer.text_of(token)
        if _WORD.fullmatch(text) and len(tokenizer.encode(text * 3)) == 3:
            words.append(text)
            if len(words) == WORDS_KEPT:
                break
    if len(words) < WORDS_NEEDED:
        raise UsageError(f"the tokenizer of {tokenizer.name} has too few plain words to make prompts of; use ids.")
    return sorted(words)


def requests(workload: Workload, level: Level, repeat: int | str, prompts: Prompts) -> list[LoadRequest]:
    """The requests of one repeat of a level, in the order in which they arrive."""
    shape = random.Random(f"{workload.seed} shape {level.name}")
    tokens = random.Random(f"{workload.seed} tokens {level.name} {repeat}")
    found, at = [], 0.0
    for _ in range(workload.count(level)):
        prompt, counted = prompts.make(tokens, workload.prompt.draw(shape))
        found.append(LoadRequest(prompt, counted, workload.output.draw(shape), at))
        at += 0.0 if level.rate is None else shape.expovariate(level.rate)
    return found
