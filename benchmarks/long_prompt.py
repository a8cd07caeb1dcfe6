"""A long prompt through a twin whose latent layer has a sparse index: memory against the plan, index sets and a planted
needle against the plain oracle, and time.

    python benchmarks/long_prompt.py [--tokens 65536] [--top-k 2048] [--no-oracle]

The twin has one layer of each kind: dense, experts, and latent attention with an index. The needle is a run of tokens
whose end the index of the last query likes best of a thousand others.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.live_tensors import LiveTensors
from benchmarks.measure import load_text
from dayzero.blocks.sparse_index import IndexBlock
from dayzero.engine.request import SamplingParams
from dayzero.ops.sparse_index import score
from dayzero.rehearse.twin import TwinOptions, write_twin
from dayzero.view import StepView
from tests.cpu.engine_support import Engine

CONFIG = ROOT / "tests" / "paper" / "configs" / "kimi_k3_1.json"
ORACLES = ROOT / "dayzero" / "oracles"
CHUNK = 2048
INDEXED = 2  # the layer with the index
RUN = 64


def long_twin(out: Path, tokens: int, top_k: int) -> None:
    """Three layers, as the recipe shrinks them, with room for the prompt and its answer."""
    changes = {
        "text_config.num_hidden_layers": 3, "text_config.attn_res_block_size": 2,
        "text_config.max_position_embeddings": tokens + 64, "text_config.linear_attn_config.full_attn_layers": [3],
        "text_config.linear_attn_config.kda_layers": [1, 2], "text_config.dsa_config.dsa_layers": [3],
        "text_config.dsa_config.top_k": top_k,
    }  # fmt: skip
    write_twin(str(CONFIG), str(out), TwinOptions(changes=changes))


@dataclass
class Seen:
    """What the index was given and what it listed: inputs of the last query, and the lists of some positions."""

    positions: tuple[int, ...] = ()
    lists: dict[int, list[int]] = field(default_factory=dict)
    last: tuple[Tensor, Tensor, Tensor] | None = None  # q [1, H, D], weights [1, H], keys [L, D]


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Within it every index block reports to ``seen``."""
    select = IndexBlock.select

    def watching(block: IndexBlock, x_TD: Tensor, query_TR: Tensor, view: StepView) -> Tensor:
        generate = block.generate

        def generating(q_THD: Tensor, weights_TH: Tensor, keys: Any, **given: Any) -> Tensor:
            if not seen.positions:
                seen.last = (q_THD[-1:], weights_TH[-1:], keys.history(view.spans[-1])[0])
            return generate(q_THD, weights_TH, keys, **given)

        block.generate = generating
        try:
            selected_TK = select(block, x_TD, query_TR, view)
        finally:
            block.generate = generate
        for span in view.spans:
            for position in seen.positions:
                if span.start <= position < span.start + span.count:
                    row = selected_TK[span.first + position - span.start]
                    seen.lists[position] = row[row >= 0].tolist()
        return selected_TK

    IndexBlock.select = watching  # type: ignore[method-assign]
    try:
        yield
    finally:
        IndexBlock.select = select  # type: ignore[method-assign]


ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def needle_and_question(engine: Engine, tokens: int) -> tuple[list[int], list[int]]:
    """Two runs of RUN tokens: behind the second, the index likes the end of the first best of a random prompt.

    The recurrences forget within a run, so that each ends in about the same state wherever it stands.
    """
    trial, seen = random_ids(tokens, 11, engine.runner.info.vocab), Seen()
    with watched(seen):
        engine.one(trial, ONE)
    assert seen.last is not None
    q_1HD, weights_1H, keys_LD = seen.last
    scores_L = score.body(q_1HD, keys_LD, weights_1H, start=tokens - 1, scale=1.0)[0]
    end = int(scores_L[RUN : tokens - 2 * RUN].argmax()) + RUN + 1
    return trial[end - RUN : end], trial[-RUN:]


def random_ids(count: int, seed: int, vocabulary: int) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def long_prompt(engine: Engine, tokens: int) -> tuple[list[int], int]:
    """(a random prompt that ends in the question, with the needle a fifth of the way in; position of its end)."""
    needle, question = needle_and_question(engine, 1024)
    prompt, end = random_ids(tokens, 5, engine.runner.info.vocab), tokens // 5 + 3
    prompt[end + 1 - RUN : end + 1], prompt[-RUN:] = needle, question
    return prompt, end


@dataclass(frozen=True)
class Ran:
    """peak_bytes, largest: of tensors that the steps made, the pool and the weights aside."""

    seconds: float
    tokens: list[int]
    lists: dict[int, list[int]]
    memory: LiveTensors


def run(engine: Engine, prompt: list[int], positions: tuple[int, ...], answer: int = 4) -> Ran:
    """The prompt in chunks and a few tokens of an answer."""
    seen, memory = Seen(positions), LiveTensors(engine.runner._views.pool, keep_shapes=True)
    began = time.perf_counter()
    with watched(seen), memory:
        got = engine.one(prompt, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    return Ran(time.perf_counter() - began, got.tokens, seen.lists, memory)


def long_engine(twin: Path, tokens: int) -> Engine:
    """An engine with the variants a plan binds, one request at a time, a pool as large as the prompt needs."""
    options = {"bindings": (), "debug": False, "prefix_cache": False, "max_running": 1, "max_step_tokens": CHUNK}
    small = Engine(twin, pool_bytes=8 << 20, **options)
    layout = small.runner.layout
    size = (tokens + 64) * layout.token_bytes + 4 * layout.slab_bytes + 2 * layout.state_footprint
    return Engine(twin, pool_bytes=size, **options)


def oracle_lists(twin: Path, tokens: list[int], positions: tuple[int, ...]) -> dict[int, list[int]]:
    """The oracle's index sets of some positions, by the plain forward over the whole prompt."""
    sys.path.insert(0, str(ORACLES))
    oracle, wire = importlib.import_module("kimi_k3"), importlib.import_module("decode")
    found: dict[int, list[int]] = {}

    def emit(site: str, value: Tensor) -> None:
        if site == f"layers.{INDEXED}.index":
            found.update({p: value[p][value[p] >= 0].tolist() for p in positions})

    with torch.inference_mode():
        oracle.forward(wire.Reader(twin), json.loads((twin / "config.json").read_text()), tokens, emit)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--oracle", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    print(load_text(), f"{torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder) / "twin", given.tokens, given.top_k, given.oracle)


def report(twin: Path, tokens: int, top_k: int, with_oracle: bool) -> None:
    long_twin(twin, tokens, top_k)
    engine = long_engine(twin, tokens)
    prompt, place = long_prompt(engine, tokens)
    positions = tuple(sorted({tokens - 1, *(int(tokens * x) for x in (0.01, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95))}))
    ran = run(engine, prompt, positions)
    layout, memory = engine.runner.layout, ran.memory
    print(f"{tokens} tokens, top {top_k}: {ran.seconds:.1f} s, {tokens / ran.seconds:.0f} tokens/s; answer {ran.tokens}")
    print(f"needle at {place}: {'in' if place in ran.lists[tokens - 1] else 'NOT in'} the last query's set")
    print(f"cache {layout.token_bytes} B a token, {tokens * layout.token_bytes / 2**20:.1f} MiB")
    print(f"peak of steps {memory.peak_bytes / 2**20:.2f} MiB; largest {memory.largest}")
    for size, shape, name in memory.peak_shapes[:14]:
        print(f"    {size / 2**20:8.2f} MiB {shape} {name}")
    if with_oracle:
        began = time.perf_counter()
        want = oracle_lists(twin, prompt, positions)
        print(f"oracle: {time.perf_counter() - began:.1f} s; needle {'in' if place in want[tokens - 1] else 'NOT in'} its set")
        for p in positions:
            apart = set(want[p]) ^ set(ran.lists[p])
            print(f"    query {p}: {len(want[p])} rows, {len(apart) // 2} apart")
        assert math.isfinite(ran.seconds)


if __name__ == "__main__":
    main()
