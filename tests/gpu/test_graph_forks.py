"""Recorded steps that use two streams give, to the bit, what one stream and the same work called again give, whatever
lies in the memory of the graphs before each replay; kernels that begin early wait for all that they come behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
import torch
from small_models import write_small
from torch import Tensor

from dayzero.engine.buckets import plan_recording
from dayzero.engine.graphs import Captured, Memory, capturing
from dayzero.ops.cuda import linear, linear_fused
from dayzero.view import in_turn
from tests.cpu.engine_support import Engine
from tests.cpu.two_streams import forks
from tests.gpu.test_graphs import GREEDY, LATENT, SAMPLED, assert_same_bits, captured, engine, many

pytestmark = pytest.mark.gpu
FAMILIES = (
    "qwen3_moe", "deepseek_v3", "deepseek_v32", "glm5", "kimi_linear", "kimi_k3", "kimi_k31", "gpt_oss", "qwen3_5_moe",
)  # fmt: skip
ROUNDS = 4


@pytest.fixture(autouse=True)
def as_it_is_served(poisoned_memory: None) -> None:
    """Fills of fresh memory would stand between kernels that otherwise follow each other."""
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small(request.param, tmp_path_factory.mktemp(request.param, numbered=False), LATENT)


@pytest.fixture
def one_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    with monkeypatch.context() as patched:
        patched.setattr("dayzero.engine.load.plan_recording", lambda *given: replace(plan_recording(*given), streams=1))
        yield patched


def spoil(made: Engine) -> None:
    """Before each replay, all memory that graphs took for themselves holds NaN, on both streams."""
    recorded = made.runner._recorded
    assert recorded is not None and recorded._memory is not None

    def fill() -> None:
        held = [torch.full((1 << n,), torch.nan, device="cuda") for n in range(7, 23) for _ in range(4)]
        held.clear()

    def work(spans: object, on_host: object, beside: Any) -> None:
        beside(fill, fill)

    with torch.inference_mode(), capturing(recorded._memory):
        filling = Captured(work, (), recorded._memory)
    for replay in recorded._replays.values():
        run = replay.run
        replay.run = lambda spans, run=run: (filling.run(()), run(spans))[1]  # type: ignore[method-assign]


def test_two_streams_are_one_to_the_bit(folder: Path, one_stream: pytest.MonkeyPatch) -> None:
    single = captured(folder)
    one_stream.undo()
    double, static = captured(folder), engine(folder, "static")
    spoil(double)
    for number in range(ROUNDS):
        for rows in (1, 3, 9):
            params = SAMPLED if number % 2 else GREEDY
            want = static.run(many(rows, params))
            assert_same_bits(double.run(many(rows, params)), want, (number, rows))
            assert_same_bits(single.run(many(rows, params)), want, (number, rows, "one stream"))
    found, number = double.loop.progress().counters, forks(double.runner.stack.spec)
    assert found["graph_steps"] > 0 and found["graph_forks"] == number * found["graph_steps"]
    row = dict(double.runner.info.table)["graphs"]
    assert (f"two streams at {number}" in row) == (number > 0)
    assert single.loop.progress().counters["graph_forks"] == static.loop.progress().counters["graph_forks"] == 0


def test_in_pieces_around_the_host_too(tmp_path: Path) -> None:
    """Experts that are fetched, where a shared expert is beside them up to the end of a piece."""
    folder, options = write_small("kimi_k31", tmp_path, LATENT), {"expert_bytes": 1 << 20, "max_running": 4}
    double, static = captured(folder, **options), engine(folder, "static", **options)
    spoil(double)
    for rows in (1, 3, 4):
        assert_same_bits(double.run(many(rows)), static.run(many(rows)), rows)
    found = double.loop.progress().counters
    assert found["graph_forks"] == forks(double.runner.stack.spec) * found["graph_steps"] > 0


@pytest.mark.parametrize("slow", ["ahead", "first", "second"])
@torch.inference_mode()
def test_kernels_that_begin_early_wait_for_both_sides(slow: str) -> None:
    """A product of few rows lets the next kernel begin at once. The last columns of a long one, which are written last,
    are read behind a fork and behind a join: by a kernel that may have begun while they were not there yet."""
    wide, draw = 128, torch.Generator("cuda").manual_seed(3)

    def weight(name: str) -> Tensor:
        rows = 1 << 20 if name == slow else wide
        return torch.randn(rows, wide, generator=draw, device="cuda", dtype=torch.bfloat16) * wide**-0.5

    weights = {name: weight(name) for name in ("ahead", "first", "second", "last")}
    x_TK, out_TN = (torch.zeros(1, wide, device="cuda", dtype=torch.bfloat16) for _ in range(2))

    def times(name: str, x: Tensor) -> Tensor:
        return linear.matmul(x, weights[name])[:, -wide:]

    def work(spans: object, on_host: object, beside: Any) -> None:
        ahead = times("ahead", x_TK)
        mine, aside = beside(lambda: times("first", ahead), lambda: times("second", ahead))
        out_TN.copy_(linear_fused.matmul_add(mine, weights["last"], aside))

    memory = Memory()
    with capturing(memory):
        recording = Captured(work, (), memory)
    assert recording.num_forks == 1
    for _ in range(50):
        x_TK.normal_(generator=draw)
        recording.run(())
        got = out_TN.clone()
        work((), None, in_turn)
        assert torch.equal(got, out_TN) and got.isfinite().all()
