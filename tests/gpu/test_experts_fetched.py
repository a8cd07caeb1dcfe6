"""Experts that are read when they are chosen, to the device: what they give is what held ones give within the bound of
the operator, the host keeps none of them, and rows that pad a recorded step ask for none."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[1] / "cpu"))
import torch
from test_experts_engine import write

from dayzero.blocks.moe import MoEBlock
from dayzero.ops.contract import CONTRACTS
from tests.cpu.engine_support import Answer, Engine, ask, prompt_ids
from tests.parity import close

pytestmark = pytest.mark.gpu
FORMS = {"gpt_oss_20b": "Tiles", "qwen3_30b_a3b": "Tensor", "deepseek_v3": "ByteTiles"}  # in 4 bits; plain; in 8 bits


@pytest.fixture(scope="module", params=FORMS)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp(request.param, numbered=False))


def engine(folder: Path, **options: Any) -> Engine:
    given = {"dtype": "bfloat16", "bindings": (), "page_tokens": 16, "max_running": 4, "debug": False, **options}
    return Engine(folder, device="cuda", record=True, prefix_cache=False, **given)


def blocks_of(made: Engine) -> list[MoEBlock]:
    return [one.channel for one in made.runner.stack._layers.values() if isinstance(one.channel, MoEBlock)]


def few(folder: Path) -> int:
    """Bytes of three experts as they are held."""
    experts = engine(folder, expert_bytes=1 << 30, graphs="off").runner._ready.experts
    return 3 * max(tier.expert_bytes for tier in experts.tiers.values())


def run(made: Engine, rows: int = 3) -> dict[str, Answer]:
    return made.run([ask(str(n), prompt_ids(5 + 9 * n, n)) for n in range(rows)])


@torch.inference_mode()
def test_one_after_another_is_what_all_at_once_is(twin: Path) -> None:
    held, fetched = engine(twin, graphs="off"), engine(twin, graphs="off", expert_bytes=few(twin))
    residency = fetched.runner._ready.experts.residency
    assert residency is not None
    for mine, other in zip(blocks_of(fetched), blocks_of(held), strict=True):
        router, width = mine.spec.router, mine.spec.latent or mine.spec.dim
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(37, width, generator=generator).bfloat16().cuda()
        ids = torch.rand(37, router.experts, generator=generator).argsort(1)[:, : router.top_k].cuda()
        ids[3] = -1
        weights = torch.rand(37, router.top_k, generator=generator).cuda()
        found = [
            block.experts(x, ids, weights, *block.weights, block.act_args, biases=block.biases)
            for block in (mine, other)
        ]
        bound = CONTRACTS[mine.spec.contract].bound["bf16"].value
        close(*found, 2 * bound)  # each lies within the bound of the reference
        assert not found[0][3].any(), "an id of -1 is no expert"
    assert residency.most_bytes <= residency.capacity_bytes
    values = [value for one in residency._held.values() for value in one.value.result().values()]
    assert values and {type(value).__name__ for value in values} == {FORMS[twin.parent.name]}
    assert all(value.device.type == "cuda" for value in values), "the host keeps none of them"


def test_recorded_in_pieces_is_the_same_work(twin: Path) -> None:
    options = {"expert_bytes": few(twin)}
    graph, static, eager = (engine(twin, graphs=how, **options) for how in ("auto", "static", "off"))
    layers = len(blocks_of(graph))
    assert f"{layers + 1} pieces each" in dict(graph.runner.info.table)["graphs"]
    got, want = run(graph), run(static)
    for name, answer in want.items():
        assert got[name].tokens == answer.tokens and got[name].error is answer.error is None
        assert all(torch.equal(a, b) for a, b in zip(got[name].logits, answer.logits, strict=True))
    run(eager)
    asked = [sum(e.loop.progress().counters[f"expert_{w}"] for w in ("hits", "misses")) for e in (graph, static)]
    assert asked[0] == asked[1] and graph.loop.progress().counters["padded_rows"] > 0
    assert graph.loop.progress().counters["expert_evictions"] > 0
