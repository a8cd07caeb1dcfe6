"""What a checkpoint of the rehearsal model can do, measured through dayzero's offline API: greedy answers only.

    python examples/rehearsal/evaluate.py --model MODEL --out evaluation.json

Needles: a number said at some depth of held-out text (or of one sentence over and over), asked for by the beginning of
the same sentence and in a conversation. Pictures: all three of count, colour and shape must be named. Perplexity: of
``held_out.txt``, which was not trained on, in runs of 2,048 tokens. Every share comes with its 95 % interval (Wilson);
``bound`` is the interval's lower end, what a test may ask of this model.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import bpe
import images
import numpy as np
import phrases
import tasks
from measure import LENGTHS, RUN, SEED, needles, share
from PIL import Image

from dayzero import LLM
from dayzero.engine.request import SamplingParams

HELD_OUT = Path(__file__).with_name("held_out.txt")
FIRST_RUNS = 4  # what a test measures again
PROMPTS = ("In the beginning God created", "And the king said unto", "To be, or not to be", "What light through")


def maker_of(model: Path) -> tasks.Tasks:
    """Over held-out text, in the tokens of a checkpoint."""
    encoder = bpe.read(model / "tiktoken.model")
    return tasks.Tasks(encoder, np.array(encoder.encode(HELD_OUT.read_text(encoding="ascii")), np.uint16))


def needle_grid(llm: LLM, maker: tasks.Tasks, lengths: list[int], depths: int, repeats: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=10)
    out: dict[str, Any] = {}
    for length in lengths:
        asked = list(needles(maker, length, depths, repeats))
        answers = llm.generate([needle.ids for needle in asked], params)
        right = [_number(answer.text) == needle.number for needle, answer in zip(asked, answers, strict=True)]
        by_depth = [sum(right[i * repeats : (i + 1) * repeats]) for i in range(depths)]
        out[str(length)] = share(sum(right), len(right)) | {"by_depth": by_depth}
    return out


def asked_needles(llm: LLM, maker: tasks.Tasks, lengths: list[int], depths: int) -> dict[str, Any]:
    """The same in conversations, every other one with thinking switched off."""
    params = SamplingParams(temperature=0, max_tokens=40)
    out: dict[str, Any] = {}
    for length in lengths:
        right = 0
        # Words in no order come back from their text as more tokens than they were; brackets and answer need room.
        asked = list(needles(maker, length * 15 // 16 - 60, depths, 1))
        for number, needle in enumerate(asked):
            question = phrases.ASK_NUMBER[number % len(phrases.ASK_NUMBER)].format(needle.name)
            message = {"role": "user", "content": f"{needle.text} {question}"}
            answer = llm.chat([message], params, thinking=number % 2 == 0)
            right += _number(answer.message.content or "") == needle.number
        out[str(length)] = share(right, len(asked))
    return out


def _number(text: str) -> str:
    """The first number in a text."""
    found = re.search(r"\d+", text)
    return found.group() if found else ""


def pictures(llm: LLM, count: int) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=40)
    right = dict.fromkeys(("all", "count", "colour", "shape"), 0)
    for number in range(count):
        shown = images.draw(np.random.default_rng((SEED, 1, number)))
        question = phrases.ASK_PICTURE[number % len(phrases.ASK_PICTURE)]
        content = [{"image": Image.fromarray(shown.pixels)}, {"type": "text", "text": question}]
        answer = llm.chat([{"role": "user", "content": content}], params, thinking=number % 2 == 0)
        said = (answer.message.content or "").split()
        right["all"] += said == shown.answer.split()
        for place, (name, word) in enumerate(zip(("count", "colour", "shape"), shown.answer.split(), strict=True)):
            right[name] += said[place : place + 1] == [word]
    return {name: share(value, count) for name, value in right.items()}


def perplexity(llm: LLM, ids: list[int], runs: int) -> dict[str, Any]:
    losses: list[float] = []
    for first in range(0, min(len(ids) - RUN, runs * RUN), RUN):
        (answer,) = llm.generate([ids[first : first + RUN]], SamplingParams(max_tokens=1, prompt_logprobs=0))
        losses += [-one.logprob for one in answer.prompt_logprobs or ()]
    mean = sum(losses) / len(losses)
    return {"tokens": len(losses), "loss": round(mean, 4), "perplexity": round(math.exp(mean), 2)}


def samples(llm: LLM) -> dict[str, str]:
    """To be looked at."""
    params = SamplingParams(temperature=0, max_tokens=40)
    out = {text: llm.generate(text, params)[0].text for text in PROMPTS}
    for questions, _ in phrases.TALK[:6]:
        out[questions[0]] = llm.chat([{"role": "user", "content": questions[0]}], params).message.content or ""
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure a checkpoint of the rehearsal model.")
    parser.add_argument("--model", required=True, help="folder that export.py wrote")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--lengths", default=",".join(map(str, LENGTHS)))
    parser.add_argument("--depths", type=int, default=9)
    parser.add_argument("--repeats", type=int, default=12, help="needles at each depth")
    parser.add_argument("--pictures", type=int, default=400)
    parser.add_argument("--runs", type=int, default=16, help="of held-out text")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--device", default=None)
    asked = parser.parse_args()
    begun = time.monotonic()
    maker = maker_of(Path(asked.model))
    lengths = [int(length) for length in asked.lengths.split(",")]
    options = {name: value for name in ("threads", "device") if (value := getattr(asked, name)) is not None}
    with LLM(asked.model, **options) as llm:
        found: dict[str, Any] = {
            "needles": needle_grid(llm, maker, lengths, asked.depths, asked.repeats),
            "asked_needles": asked_needles(llm, maker, lengths, asked.depths),
            "pictures": pictures(llm, asked.pictures),
            "held_out": perplexity(llm, maker.text.tolist(), asked.runs),
            "held_out_first": perplexity(llm, maker.text.tolist(), FIRST_RUNS),
            "samples": samples(llm),
            "device": str(asked.device or "cpu"),
        }
    found["seconds"] = round(time.monotonic() - begun)
    text = json.dumps(found, indent=1)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
