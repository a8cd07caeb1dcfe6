"""Steps of made-up requests before the first real one, so that no kernel is compiled, tuned or loaded while somebody
waits for its answer, and so that a step of the largest size is known to fit.

Kernels are compiled for a kind of shape: a number of tokens or rows that is 1, a multiple of 16 or neither, and tables
of tiles that go by powers of two. So steps of such sizes are computed, and each way of choosing a token is gone once.
One step has all the tokens that a step may have, of as many prompts as that takes.
Their requests have a scheduler of their own: what serves later neither counts nor finds anything of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LoadedExecutor
from dayzero.engine.media import ImageInfo
from dayzero.engine.request import Image, SamplingParams
from dayzero.engine.step_driver import StepDriver
from dayzero.units import ceil_div

MOST_BY_POWERS = 1024  # tokens: tables of tiles go no further by powers of two
SEED = 41
ROW_TOKENS = 3  # of each prompt where many are computed in one step
FEW_LENGTHS = (2, 17)  # where each expert that is chosen has to be read
DRAWN = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, seed=1, max_tokens=2, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
TOLD = SamplingParams(
    temperature=0.7, presence_penalty=0.5, repetition_penalty=1.1, logit_bias={0: 1.0}, logprobs=1, prompt_logprobs=1,
    max_tokens=2, ignore_eos=True,
)  # fmt: skip
Asked = Sequence[tuple[int, SamplingParams]]  # tokens of each prompt, and how it is answered
ANY = b"\xff\xff\xff\xff"  # a mask's word: all of its tokens are allowed


def warm_up(executor: LoadedExecutor, config: EngineConfig, sparingly: bool = False) -> int:
    """Compute such steps; how many. sparingly: where each expert that is chosen has to be read. Errors: those of a
    step; MachineError where the pool does not hold what it said it would."""
    info = executor.info
    longest = min(config.max_step_tokens, config.chunk_tokens or config.max_step_tokens, info.max_model_len - 2)
    if longest < 1:
        return 0
    draw = random.Random(SEED)

    def prompt(tokens: int) -> list[int]:
        if sparingly:  # tokens that are alike choose alike
            return [1 % info.vocab] * tokens
        return [draw.randrange(info.vocab) for _ in range(tokens)]

    rounds: list[tuple[Asked, tuple[Image, ...]]] = [(requests, ()) for requests in _rounds(config, longest, sparingly)]
    image = None if info.images is None else _blank(info.images)
    if image is not None and image.first + image.tokens < longest:
        rounds.append(([(image.first + image.tokens + 1, GREEDY)], (image,)))
    steps = 0
    for requests, media in rounds:
        driver = StepDriver(executor, config)
        try:
            asked = [driver.ask(prompt(tokens), params, media) for tokens, params in requests]
            if requests[0][1] is DRAWN:
                driver.masks = {asked[0]: ANY * ceil_div(info.vocab, 32)}
            while driver.turn() is not None:
                steps += 1
        finally:
            driver.close()
    return steps


def _rounds(config: EngineConfig, longest: int, sparingly: bool) -> Iterator[Asked]:
    """Requests that come together."""
    for tokens in FEW_LENGTHS if sparingly else lengths(longest):
        if tokens <= longest:
            yield [(tokens, GREEDY)]
    together = min(config.max_running, ceil_div(config.max_step_tokens, longest))
    if together > 1 and not sparingly:  # those that the pool has no room for wait, as they will when served
        yield [(longest, GREEDY)] * together
    few = min(longest, ROW_TOKENS)
    rows = 2 if sparingly else min(config.max_running, config.max_step_tokens // few)
    for number in lengths(rows):
        yield [(few, GREEDY)] * number
    yield [(few, DRAWN)] * min(2, config.max_running)
    yield [(few, TOLD)]
    if config.max_running > 1:  # one answers while the other's prompt is computed
        yield [(1, GREEDY), (few, DRAWN)]


def lengths(longest: int) -> list[int]:
    """Numbers of tokens, or of rows, ascending: powers of two, each also one more, and the longest, also one less."""
    powers = _powers(min(longest, MOST_BY_POWERS))
    found = {*powers, *(n + 1 for n in powers), longest - 1, longest}
    return sorted(n for n in found if 1 <= n <= longest)


def _powers(most: int) -> list[int]:
    """Powers of two up to ``most``, and that itself."""
    return sorted({*(1 << i for i in range(most.bit_length())), most})


def _blank(images: ImageInfo) -> Image:
    """An image of two by two tokens."""
    side = 2 * images.rule.patch * images.rule.merge
    return Image(key=b"warm-up", first=1, rows=2, columns=2, pixels=bytes(3 * side * side))
