"""transformers' own generate against ours on one model and device: random weights of the same config, the same prompts.

    python benchmarks/generate.py tests/paper/configs/qwen3_8b.json --batch 16 --prompt 1024 --tokens 128

Greedy answers of a fixed length to prompts of random ids. transformers runs in bfloat16 with its own attention and
cache, as ``generate`` comes (dynamic), and with its static cache, which it compiles (static); what a checkpoint stores
in 4 bits it has in bfloat16. Ours reads what the config says, from a seed. Decode is the whole less a run of one token.
GOAL: ours over the best of theirs, in decode.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

GOAL = 5.0
ROUNDS = 3
POOL_BYTES = 8 << 30

Run = Callable[[int], None]  # answer all prompts with so many tokens


@dataclass(frozen=True)
class Rates:
    """Tokens a second of all answers: from the first prompt to the last token, and behind the prompts."""

    whole: float
    decode: float


def rates(run: Run, batch: int, tokens: int) -> Rates:
    """Medians of some rounds behind one that warms up."""
    run(tokens)
    whole: list[float] = []
    first: list[float] = []
    for _ in range(ROUNDS):
        for seconds, count in ((first, 1), (whole, tokens)):
            began = time.perf_counter()
            run(count)
            seconds.append(time.perf_counter() - began)
    total, prompt = statistics.median(whole), statistics.median(first)
    return Rates(batch * tokens / total, batch * (tokens - 1) / (total - prompt))


def theirs(config: dict[str, Any], prompts: list[list[int]], device: str) -> dict[str, Run]:
    """transformers' ways. The model is made on the device, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    plain = {key: value for key, value in config.items() if key not in ("quantization_config", "auto_map")}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(plain))
        read = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(read, dtype=torch.bfloat16).eval()
    print(f"transformers: {type(model).__name__}, attention {model.config._attn_implementation}", flush=True)
    ids = torch.tensor(prompts, device=device)
    mask = torch.ones_like(ids)

    def way(**options: Any) -> Run:
        def run(count: int) -> None:
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0,
                **options,
            )  # fmt: skip
            assert out.shape[1] == ids.shape[1] + count
            out.cpu()

        return run

    return {"dynamic": way(), "static": way(cache_implementation="static")}


def ours(source: str, prompts: list[list[int]], tokens: int, device: str) -> Run:
    """tokens: the most that a run asks for."""
    from dayzero import LLM, SamplingParams

    llm = LLM(
        f"seeded:{source}", device=device, dtype="bfloat16", max_running=len(prompts), prefix_cache=False,
        max_step_tokens=8192, max_model_len=len(prompts[0]) + tokens, pool_bytes=POOL_BYTES,
    )  # fmt: skip
    for key in ("graphs", "device"):
        print(f"dayzero: {key}: {dict(llm.info.table).get(key)}", flush=True)

    def run(count: int) -> None:
        found = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True))
        assert all(len(one.token_ids) == count for one in found)

    return run


def answer_tokens(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(
            f"{text} is no number of at least 2: decode is a run of so many less one of a single token"
        )
    return int(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--tokens", type=answer_tokens, default=128)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--ways", default="dynamic,static")
    given = parser.parse_args()
    config = json.loads(given.config.read_text())
    draw = random.Random(5)
    vocab = config["vocab_size"]
    prompts = [[draw.randrange(vocab) for _ in range(given.prompt)] for _ in range(given.batch)]
    mine = rates(ours(str(given.config), prompts, given.tokens, given.device), given.batch, given.tokens)
    print(f"dayzero: {mine.decode:,.0f} tok/s decode, {mine.whole:,.0f} with prompts", flush=True)
    gc.collect()
    torch.cuda.empty_cache()
    best = 0.0
    ways = theirs(config, prompts, given.device)
    for name in given.ways.split(","):
        found = rates(ways[name], given.batch, given.tokens)
        best = max(best, found.decode)
        print(
            f"transformers, {name}: {found.decode:,.0f} tok/s decode, {found.whole:,.0f} with prompts; ours "
            f"{mine.decode / found.decode:.2f} x decode, {mine.whole / found.whole:.2f} x with prompts (goal {GOAL})",
            flush=True,
        )
    return 0 if mine.decode >= GOAL * best else 1


if __name__ == "__main__":
    sys.exit(main())
