"""Steps captured as CUDA graphs. Called again instead of replayed, the same work gives the same bits; launched eagerly,
at other shapes and with tables of other widths, it gives the same tokens, except where the two best nearly tie."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
import msgspec
import torch
from safetensors.torch import load_file, save_file
from small_models import NAMES, write_small
from test_engine_variants import BOUNDS, parted

from dayzero.engine import buckets
from dayzero.engine.graphs import Captured, Memory, capturing
from dayzero.engine.request import NewRequest, SamplingParams
from dayzero.engine.step import Step
from tests.cpu.engine_support import Answer, Engine, ask, prompt_ids

pytestmark = pytest.mark.gpu
PAGE = 16
EDGES = (1, 2, 3, 4, 5, 8, 9)  # rows; sizes are 1, 2, 4, 8, 9
LENGTHS = (5, 14, 15, 16, 7, 63, 8, 64, 33)  # windows and top-k are 8, pages 16
GREEDY = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
SAMPLED = SamplingParams(temperature=5.0, top_p=0.99, top_k=200, seed=11, max_tokens=8, ignore_eos=True)
MOST_PARTED = 0.2
LATENT = 32  # width of latent rows: the kernels take powers of two
ROOT = Path(__file__).parents[2]
START = """
import sys
from pathlib import Path
from dayzero.engine.build import engine_loop
from dayzero.engine.config import EngineConfig
from dayzero.engine.events import Submit
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.request import NewRequest, SamplingParams
from dayzero.engine.runner import LocalRunner
config = EngineConfig(
    dtype="bfloat16", page_tokens=16, pool_bytes=4 << 20, max_running=4, max_step_tokens=100, prefix_cache=False
)
launch = LaunchSpec(source=sys.argv[1], device="cuda", config=config)
runner = LocalRunner(launch)
runner.load()
row = dict(runner.info.table)["graphs"]
assert not row.startswith("off"), row
folders = Path(sys.argv[2]) / "triton", Path.home() / ".cache"
before = {path for folder in folders for path in folder.rglob("*.cubin")}
loop = engine_loop(launch, runner)
words = bytes([255] * 4 * -(-runner.info.vocab // 32))
loop._grammars.mask = lambda name: words if name == "masked" else None
greedy = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
drawn = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=3, ignore_eos=True)
told = SamplingParams(presence_penalty=0.5, logprobs=2, prompt_logprobs=1, max_tokens=3, ignore_eos=True)
asked = [[(n, f"greedy-{n}", greedy)] for n in (1, 2, 15, 16, 37, 64, 99, 100, 170)]
asked += [[(9, "drawn", drawn)], [(9, "masked", drawn)], [(9, "told", told)], [(1, "one", greedy), (9, "two", drawn)]]
asked.append([(n, f"many-{n}", drawn) for n in (40, 41, 42, 43, 44, 45)])
for some in asked:
    loop.take(Submit([NewRequest(id=name, prompt=list(range(3, 3 + n)), params=given) for n, name, given in some]))
    while loop.busy:
        loop.turn(wait=True)
later = {path for folder in folders for path in folder.rglob("*.cubin")} - before
assert not later, sorted(path.name for path in later)
"""


@pytest.fixture(scope="module", params=NAMES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp(request.param, numbered=False), LATENT)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small("llama", tmp_path_factory.mktemp("llama"))


def engine(folder: Path, graphs: str, **options: Any) -> Engine:
    given = {"dtype": "bfloat16", "bindings": (), "page_tokens": PAGE, "max_running": 9, "debug": False, "record": True}
    return Engine(folder, device="cuda", graphs=graphs, prefix_cache=False, **{**given, **options})


def captured(folder: Path, **options: Any) -> Engine:
    """Skips where operators keep the family's plan from graphs; the start table has to say which."""
    made = engine(folder, "auto", **options)
    row = dict(made.runner.info.table)["graphs"]
    if row.startswith("off"):
        assert "which" in row, row
        pytest.skip(row)
    assert made.loop._run_ahead, "on a GPU steps are one ahead of their results"
    return made


def many(rows: int, params: SamplingParams = GREEDY) -> list[NewRequest]:
    return [ask(str(i), prompt_ids(LENGTHS[i], i), msgspec.structs.replace(params, seed=i)) for i in range(rows)]


def watched(made: Engine) -> list[Step]:
    steps, submit = [], made.runner.submit

    def keeping(step: Step) -> int:
        steps.append(step)
        return submit(step)

    made.runner.submit = keeping  # type: ignore[method-assign]
    return steps


def assert_same_bits(got: dict[str, Answer], want: dict[str, Answer], what: object = "") -> None:
    for name, answer in want.items():
        assert got[name].tokens == answer.tokens and got[name].error == answer.error, (what, name)
        for one, other in zip(got[name].logits, answer.logits, strict=True):
            assert torch.equal(one, other), (what, name)


def test_graphs_give_what_the_same_work_and_what_eager_steps_give(folder: Path) -> None:
    graph = captured(folder)
    static, eager = engine(folder, "static"), engine(folder, "off")
    steps, apart = watched(graph), 0
    for rows in EDGES:
        for params in (GREEDY, SAMPLED):
            got = graph.run(many(rows, params))
            assert_same_bits(got, static.run(many(rows, params)), (rows, params.temperature))
            if params is GREEDY and folder.name in ("llama", "qwen3"):  # routers of the others turn: see test_engine
                want = eager.run(many(rows, params))
                apart += sum(parted(got[name], want[name], BOUNDS["bfloat16"]) for name in want)
    assert apart <= MOST_PARTED * sum(EDGES)
    single = [len(step.rows) for step in steps if all(row.count == 1 for row in step.rows)]
    found = graph.loop.progress().counters
    assert set(EDGES) <= set(single) and found["graph_steps"] == found["graph_replays"] == len(single)
    assert found["padded_rows"] == sum(buckets.bucket_of(n, buckets.sizes(9)) - n for n in single)
    assert found["eager_steps_chunk"] == len(steps) - len(single)
    assert not any(found[f"eager_steps_{why}"] for why in ("off", "image", "logprobs", "wide"))
    assert found["host_sampled_rows"] == 0, "tokens are drawn where the logits are"


def test_prompts_token_by_token_are_graphs_too(folder: Path) -> None:
    graph = captured(folder, chunk_tokens=1)
    static = engine(folder, "static", chunk_tokens=1)
    requests = [ask(str(n), prompt_ids(n, n), GREEDY) for n in (3, 18, 9)]
    for _ in range(2):
        assert_same_bits(graph.run(requests), static.run(requests))
    assert graph.loop.progress().counters["eager_steps_chunk"] == 0


@contextmanager
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_host_waits_for_nothing_between_submission_and_result(folder: Path) -> None:
    """Submitting a recorded step and asking for its tokens, greedy and drawn."""
    torch.use_deterministic_algorithms(False)  # filling fresh memory and deterministic scatters are not the engine's
    graph = captured(folder, record=False)  # to keep logits on the CPU is to wait for them
    runner, single = graph.runner, set()
    submit, sample = runner.submit, runner.sample

    def submitting(step: Step) -> int:
        if any(row.count != 1 for row in step.rows):
            return submit(step)
        single.add(step.number)
        with no_waiting():
            return submit(step)

    def sampling(handle: int, late: Any) -> None:
        if handle not in single:
            return sample(handle, late)
        with no_waiting():
            return sample(handle, late)

    graph.run(many(9, SAMPLED))  # kernels that the sampling of drawn rows takes are there now
    runner.submit, runner.sample = submitting, sampling  # type: ignore[method-assign]
    for params in (GREEDY, SAMPLED):
        graph.run(many(9, params))
    assert len(single) >= 8


def test_padding_may_be_anything(tmp_path: Path) -> None:
    cursed = 511
    folder = write_small("kimi_linear", tmp_path, LATENT)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][cursed] = torch.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    graph = captured(folder)
    want = graph.run(many(5))
    assert graph.runner._recorded is not None
    graph.runner._recorded.inputs.pad_id = cursed
    assert_same_bits(graph.run(many(5)), want)
    assert graph.loop.progress().counters["padded_rows"] > 0


def test_memory_stays_and_is_told(llama: Path) -> None:
    graph = captured(llama)
    row = dict(graph.runner.info.table)["graphs"]
    assert row.startswith("5 sizes up to 9 rows, ") and "reserved" in row
    graph.run(many(9, SAMPLED))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        graph.run(many(9, SAMPLED))
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


def test_a_recording_in_pieces() -> None:
    """Work of the host between graphs: replayed with what the device holds then."""
    with torch.inference_mode():
        x, y = torch.ones(4, device="cuda"), torch.zeros(4, device="cuda")
        looked: list[float] = []

        def host(value: torch.Tensor) -> torch.Tensor:
            looked.append(float(value.sum()))
            return torch.full_like(value, looked[-1])

        def work(spans: object, on_host: Any, beside: object) -> None:
            twice = x * 2
            summed = on_host(lambda: host(twice), twice)
            again = on_host(lambda: host(summed + 1), summed)
            y.copy_(again + twice)

        memory = Memory()
        with capturing(memory):
            recording = Captured(work, (), memory)
        assert recording.num_pieces == 3 and looked == [], "nothing of the host's runs while it is captured"
        for value in (1.0, 5.0):
            x.fill_(value)
            recording.run(())
            assert y.tolist() == [4 * (8 * value + 1) + 2 * value] * 4
        assert looked == [8.0, 36.0, 40.0, 164.0]


def test_a_second_start_compiles_nothing_and_neither_does_a_request(llama: Path, tmp_path: Path) -> None:
    """In processes of their own, with caches of kernels of their own. Once an engine is ready it has compiled what
    chunks of any length, drawn and masked tokens, penalties and log-probabilities take."""
    environment = {
        **os.environ, "HOME": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "triton"),
        "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", ""))),
    }  # fmt: skip
    seen = []
    for _ in range(2):
        command = [sys.executable, "-c", START, str(llama), str(tmp_path)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        kept = [*(tmp_path / "triton").rglob("*.cubin"), *(tmp_path / ".cache").rglob("*.cubin")]
        seen.append({(path, path.stat().st_mtime_ns) for path in kept})
    assert seen[0] and seen[1] == seen[0]
