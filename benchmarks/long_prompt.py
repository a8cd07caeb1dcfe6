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
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.live_tensors import LiveTensors
from benchmarks.measure import load_text
from dayzero.blocks.sparse_index import IndexBlock
from dayzero.engine.request import SamplingParams
from dayzero.ops.sparse_index import score, top_k
from dayzero.planner.step_memory import activation_bytes
from dayzero.rehearse.twin import TwinOptions, write_twin
from dayzero.view import StepView
from tests.cpu.engine_support import Engine

ROOT = Path(__file__).parents[1]
CONFIG = ROOT / "tests" / "paper" / "configs" / "kimi_k3_1.json"
ORACLES = ROOT / "dayzero" / "oracles"
CHUNK = 2048
INDEXED = 2  # the layer with the index
RUN = 512  # tokens of the needle and of the question


def long_twin(out: Path, tokens: int, listed: int) -> None:
    """Three layers, as the recipe shrinks them, with room for the prompt and its answer."""
    changes = {
        "text_config.num_hidden_layers": 3, "text_config.attn_res_block_size": 2,
        "text_config.max_position_embeddings": tokens + 64, "text_config.linear_attn_config.full_attn_layers": [3],
        "text_config.linear_attn_config.kda_layers": [1, 2], "text_config.dsa_config.dsa_layers": [3],
        "text_config.dsa_config.top_k": listed,
    }  # fmt: skip
    write_twin(str(CONFIG), str(out), TwinOptions(changes=changes))


@dataclass
class Seen:
    """What the index was asked and what it listed, for some positions and for the last query."""

    positions: tuple[int, ...] = ()
    lists: dict[int, list[int]] = field(default_factory=dict)
    asked: dict[int, tuple[Tensor, Tensor, float]] = field(default_factory=dict)  # q [1, H, D], weights [1, H], scale
    keys: Tensor = field(default_factory=lambda: torch.zeros(0))  # [L, D] of the last step

    def scores(self, position: int) -> Tensor:
        """[position + 1] f32: how the query scores what it may see, by the reference."""
        q_1HD, weights_1H, scale = self.asked[position]
        return score.body(q_1HD, self.keys[: position + 1], weights_1H, start=position, scale=scale)[0]

    def reference(self, position: int, k: int) -> list[int]:
        """The list by the references, of what the query was given."""
        return [at for at in top_k.body(self.scores(position)[None], k, start=position)[0].tolist() if at >= 0]


@contextmanager
def watched(seen: Seen) -> Iterator[None]:
    """Within it every index block reports to ``seen``."""
    select = IndexBlock.select

    def watching(block: IndexBlock, x_TD: Tensor, query_TR: Tensor, view: StepView) -> Tensor:
        generate = block.generate

        def generating(q_THD: Tensor, weights_TH: Tensor, keys: Any, **given: Any) -> Tensor:
            selected_TK = generate(q_THD, weights_TH, keys, **given)
            with _disable_current_modes():  # what is kept here is no memory of the step
                (span,) = view.spans
                for position in seen.positions:
                    if span.start <= position < span.start + span.count:
                        row = slice(position - span.start, position - span.start + 1)
                        seen.asked[position] = q_THD[row].clone(), weights_TH[row].clone(), given["scale"]
                        seen.lists[position] = [at for at in selected_TK[row][0].tolist() if at >= 0]
                        seen.keys = keys.part(span, 0, position + 1)
            return selected_TK

        block.generate = generating
        try:
            return select(block, x_TD, query_TR, view)
        finally:
            block.generate = generate

    IndexBlock.select = watching  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        IndexBlock.select = select  # type: ignore[method-assign]


ONE = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)


def needle_and_question(engine: Engine, tokens: int) -> tuple[list[int], list[int]]:
    """Two runs of RUN tokens: behind the second, the index likes the end of the first best of a random prompt.

    The recurrences forget most within a run, so that each ends in about the same state wherever it stands.
    """
    trial, seen = random_ids(tokens, 11, engine.runner.info.vocab), Seen((tokens - 1,))
    with watched(seen):
        engine.one(trial, ONE)
    end = int(seen.scores(tokens - 1)[RUN : tokens - 2 * RUN].argmax()) + RUN + 1
    return trial[end - RUN : end], trial[-RUN:]


def random_ids(count: int, seed: int, vocabulary: int) -> list[int]:
    return torch.randint(3, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def long_prompt(engine: Engine, tokens: int) -> tuple[list[int], int]:
    """(a random prompt that ends in the question, with the needle a fifth of the way in; position of its end)."""
    needle, question = needle_and_question(engine, 2048)
    prompt, end = random_ids(tokens, 5, engine.runner.info.vocab), tokens // 5 + 3
    prompt[end + 1 - RUN : end + 1], prompt[-RUN:] = needle, question
    return prompt, end


@dataclass(frozen=True)
class Ran:
    """A prompt and a few tokens of its answer. memory: tensors that the steps made, the pool and the weights aside."""

    seconds: float
    tokens: list[int]
    seen: Seen
    memory: LiveTensors


def run(engine: Engine, prompt: list[int], positions: tuple[int, ...], answer: int = 4) -> Ran:
    seen, memory = Seen(positions), LiveTensors(engine.runner._views.pool, keep_shapes=True)
    began = time.perf_counter()
    with watched(seen), memory:
        got = engine.one(prompt, SamplingParams(temperature=0, max_tokens=answer, ignore_eos=True))
    assert got.error is None, got.error
    return Ran(time.perf_counter() - began, got.tokens, seen, memory)


def planned_bytes(engine: Engine, context: int) -> int:
    """What the plan's arithmetic gives for a step of CHUNK tokens in float32: carry and widest activations."""
    spec = engine.runner._ready.model.spec
    parts = sum(math.prod(part.shape) * 4 for part in spec.layers[0].residual.carry())
    return CHUNK * parts + activation_bytes(spec, CHUNK, context, element=4)


def apart(want: list[int], got: list[int], exact_L: Tensor, ours_L: Tensor) -> tuple[int, float, float]:
    """(rows that only one of two sets has, how far the oracle's scores of them are from its cut at most, how far our
    scores and the oracle's differ at most over all rows); both of the spread of the oracle's scores.

    Sets that differ by rounding alone have the second at most twice the third. Takes two rows or more.
    """
    differ, spread = sorted(set(want) ^ set(got)), exact_L.std()
    error = float((exact_L - ours_L.double()).abs().max() / spread)
    if not differ:
        return 0, 0.0, error
    cut = exact_L[want].min()
    return len(differ), float((exact_L[differ] - cut).abs().max() / spread), error


def long_engine(twin: Path, tokens: int) -> Engine:
    """An engine with the variants a plan binds, one request at a time, a pool as large as the prompt needs."""
    options: dict[str, Any] = {
        "bindings": (),
        "debug": False,
        "prefix_cache": False,
        "max_running": 1,
        "max_step_tokens": CHUNK,
    }
    small = Engine(twin, pool_bytes=8 << 20, **options)
    layout = small.runner.layout
    size = (tokens + 64) * layout.token_bytes + 4 * layout.slab_bytes + 2 * layout.state_footprint
    return Engine(twin, pool_bytes=size, **options)


def oracle_lists(twin: Path, tokens: list[int], positions: tuple[int, ...]) -> dict[int, list[int]]:
    """The oracle's index sets of some positions, by its whole forward, in which every token selects and attends."""
    oracle, reader, config = _oracle(twin)
    found: dict[int, list[int]] = {}

    def emit(site: str, value: Tensor) -> None:
        if site == f"layers.{INDEXED}.index":
            found.update({p: value[p][value[p] >= 0].tolist() for p in positions})

    with torch.inference_mode():
        oracle.forward(reader, config, tokens, emit)
    return found


def oracle_scores(twin: Path, tokens: list[int], positions: tuple[int, ...]) -> dict[int, tuple[list[int], Tensor]]:
    """The oracle's index set of some positions, and its scores [position + 1] f64, by its own functions alone.

    The layers before the index run whole; of the last one only what those queries ask. No query's set depends on what
    another one selects in the same layer, so that these are the sets of the whole forward.
    """
    oracle, reader, config = _oracle(twin)
    text = config["text_config"]
    at, eps = f"language_model.model.layers.{INDEXED}.", oracle.eps_of(text)

    def weight(name: str) -> Tensor:
        return oracle.matrix(reader, at + name)

    with torch.inference_mode():
        p_TD = oracle.table_rows(reader, "language_model.model.embed_tokens.weight", torch.tensor(tokens))
        bank: list[Tensor] = []
        for number in range(INDEXED):
            before = f"language_model.model.layers.{number}."
            p_TD, bank = oracle.layer(reader, before, text, number, p_TD, bank, lambda site, value: None)
        h_TD = oracle.mix(p_TD, bank, oracle.mix_query(reader, f"{at}self_attention_res"), eps)
        x_TD = oracle.rms(h_TD, weight("input_layernorm"), eps)
        latent_TR = x_TD @ weight("self_attn.q_a_proj").T
        q_TR = oracle.rms(latent_TR, weight("self_attn.q_a_layernorm"), oracle.RANK_EPS)
        index = oracle.indexed(text, INDEXED)
        scores = oracle.index_scores(x_TD, q_TR, weight, reader, at, text, index)
        exact = {p: scores(p, p + 1) for p in positions}
        return {p: (oracle.largest(s, int(index["top_k"]))[0].nonzero()[:, 0].tolist(), s[0]) for p, s in exact.items()}


def _oracle(twin: Path) -> tuple[Any, Any, dict[str, Any]]:
    """The plain forward's module, a reader of the twin's tensors, its config."""
    if str(ORACLES) not in sys.path:
        sys.path.insert(0, str(ORACLES))
    oracle, wire = importlib.import_module("kimi_k3"), importlib.import_module("decode")
    return oracle, wire.Reader(twin), json.loads((twin / "config.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=65536)
    parser.add_argument("--top-k", type=int, default=2048)
    parser.add_argument("--oracle", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    if given.tokens < 6 * RUN:
        parser.error(f"--tokens: needle and question take {RUN} each and must stand apart; give {6 * RUN} or more")
    print(load_text(), f"{torch.get_num_threads()} threads")
    with tempfile.TemporaryDirectory() as folder:
        report(Path(folder) / "twin", given.tokens, given.top_k, given.oracle)


def report(twin: Path, tokens: int, listed: int, with_oracle: bool) -> None:
    long_twin(twin, tokens, listed)
    engine = long_engine(twin, tokens)
    prompt, place = long_prompt(engine, tokens)
    positions = tuple(sorted({tokens - 1, *(int(tokens * x) for x in (0.01, 0.05, 0.2, 0.4, 0.6, 0.8, 0.95))}))
    ran = run(engine, prompt, positions)
    layout, memory, last = engine.runner.layout, ran.memory, tokens - 1
    print(
        f"{tokens} tokens, top {listed}: {ran.seconds:.1f} s, {tokens / ran.seconds:.0f} tokens/s; answer {ran.tokens}"
    )
    rank = int((ran.seen.scores(last) > ran.seen.scores(last)[place]).sum())
    print(f"needle at {place}, rank {rank}: {_inside(place, ran.seen.lists[last])} the last query's set")
    cache, planned = tokens * layout.token_bytes + layout.sequence_bytes, planned_bytes(engine, tokens)
    print(f"cache {layout.token_bytes} B a token + {layout.sequence_bytes} B: {cache / 2**20:.2f} MiB")
    print(
        f"steps: peak {memory.peak_bytes / 2**20:.2f} MiB, planned {planned / 2**20:.2f} MiB; "
        f"with the cache {100 * ((cache + memory.peak_bytes) / (cache + planned) - 1):+.2f} % of the plan"
    )
    print(f"largest tensor {memory.largest}; at the peak:")
    for size, shape, name in memory.peak_shapes[:14]:
        print(f"    {size / 2**20:8.2f} MiB {shape} {name}")
    same = [ran.seen.lists[p] == ran.seen.reference(p, listed) for p in positions]
    print(f"lists equal to the reference's on the same queries and keys: {sum(same)} of {len(same)}", flush=True)
    if with_oracle:
        began = time.perf_counter()
        wanted = oracle_scores(twin, prompt, positions)
        print(f"oracle: {time.perf_counter() - began:.1f} s; needle {_inside(place, wanted[last][0])} its set")
        for p, (want, exact_L) in wanted.items():
            count, margin, error = apart(want, ran.seen.lists[p], exact_L, ran.seen.scores(p))
            print(
                f"    query {p}: {len(want)} rows; {count} in one set only, within {margin:.1e} of the cut; "
                f"scores differ by {error:.1e} of their spread at most"
            )


def _inside(row: int, rows: list[int]) -> str:
    return "in" if row in rows else "NOT in"


if __name__ == "__main__":
    main()
