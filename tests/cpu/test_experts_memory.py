"""What experts take: the process's own peak is their 4 bits and the ring; from an object store; in a process of its
own, where a shard that vanishes ends requests with one sentence."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dayzero.engine.client import AsyncEngine
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.request import SamplingParams
from tests.cpu.engine_support import ask, prompt_ids
from tests.cpu.test_experts_engine import answers, assert_same, engine, expert_bytes, write
from tests.paper.store import s3_server, upload

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = """
import gc, sys, torch
from dayzero.blocks.local_cache import LocalCache
from dayzero.engine.config import EngineConfig
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.load import load_model
from dayzero.planner.memory import peak_rss_bytes

torch.set_num_threads(1)
how, options = sys.argv[2], {"pool_bytes": 1 << 20, "dtype": "float32"}
if how == "ring":
    options |= {"expert_inputs": "fp8_128", "bindings": (("moe.experts_fp8_128", "ring"),)}
if how == "two":
    options |= {"expert_bytes": int(sys.argv[3])}
before = peak_rss_bytes()
loaded = load_model(LaunchSpec(source=sys.argv[1], config=EngineConfig(**options)))
if how == "decoded":
    kept = loaded.model.loader.load("layers.1")
with torch.inference_mode():
    view = LocalCache(loaded.stack.spec, torch.float32).view(list(range(3, 40)))
    loaded.stack.forward(view)
print(peak_rss_bytes() - before)
"""
SIZES = {
    "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 1440, "hidden_size": 1440,
    "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
ELEMENTS = 3 * 1440 * 1440  # of one expert


def grown(twin: Path, *how: object) -> int:
    command = [sys.executable, "-c", PROGRAM, str(twin), *map(str, how)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=300)
    return int(done.stdout)


@pytest.mark.slow
def test_the_peak_is_4_bits_and_the_ring(tmp_path: Path) -> None:
    """64 experts of 6 M elements: 211 MB in 4 bits, 1.6 GB decoded to f32; a ring of 4/3 of an expert. Beside them the
    process holds attention, embeddings, one stored tensor while it is read, and tiles."""
    twin = write("gpt_oss_20b", tmp_path, **SIZES)
    packed = 64 * ELEMENTS * 17 // 32
    largest_stored = 32 * 2 * 1440 * 1440 // 2
    kept, ring = grown(twin, "kept"), grown(twin, "ring")
    two = grown(twin, "two", 2 * ELEMENTS * 17 // 32 + 100_000)
    decoded = grown(twin, "decoded")
    beside = two - 2 * ELEMENTS * 17 // 32  # all that is not experts, and what two of them need
    assert decoded - kept > 0.9 * 32 * ELEMENTS * 4, "the measure sees decoded experts"
    assert kept <= packed + largest_stored + beside
    assert ring <= packed + largest_stored + beside + 2 * ELEMENTS, "less than two experts in FP8 for the ring"
    assert beside < 0.5 * packed


def test_experts_from_an_object_store(tmp_path: Path) -> None:
    twin = write("kimi_k3", tmp_path)
    want = answers(engine(twin))
    with s3_server():
        where = upload(twin, "experts")
        served = engine(where, expert_bytes=3 * expert_bytes(twin))
        assert_same(answers(served), want)
        assert served.loop.progress().counters["expert_misses"] > 0


def test_a_shard_that_vanishes_ends_requests_of_an_engine_process(tmp_path: Path) -> None:
    """Each gets an error that says what is missing; nobody waits."""
    twin = write("gpt_oss_20b", tmp_path)
    config = EngineConfig(
        dtype="float32", bindings=(("*", "reference"),), pool_bytes=4 << 20, expert_bytes=2 * expert_bytes(twin)
    )

    async def run() -> list[tuple[str, str] | None]:
        client = AsyncEngine(LaunchSpec(source=str(twin), config=config, threads=1))
        await client.start()
        await client.wait_ready()
        gone = tmp_path / "gone"
        gone.mkdir()
        for shard in twin.glob("*.safetensors"):
            shutil.move(shard, gone / shard.name)

        async def one(number: int) -> tuple[str, str] | None:
            params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            last = None
            async for output in client.generate(ask(str(number), prompt_ids(9, number), params)):
                last = output.error
            return last

        try:
            return await asyncio.wait_for(asyncio.gather(one(0), one(1)), timeout=60)
        finally:
            await client.close()

    for error in asyncio.run(run()):
        assert error is not None and "disappeared while it was being read" in error[1]
