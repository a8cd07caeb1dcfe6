"""Layers that read an earlier layer's keys and values, through the engine: against a plain forward over all tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dayzero.engine.request import SamplingParams
from tests.cpu.cli_support import run_json
from tests.cpu.engine_support import Engine, ask, prompt_ids
from tests.cpu.path_recipe import make_twin, plain_forward

HERE = Path(__file__).resolve().parents[1] / "data" / "shared_kv"
RECIPE, ORACLE, CONFIG = HERE / "lean.py", HERE / "oracle.py", HERE / "config.json"
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
WINDOW = 24


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_twin(CONFIG, RECIPE, tmp_path_factory.mktemp("lean") / "twin")


@pytest.fixture(scope="module")
def oracle(twin: Path) -> Callable[[list[int]], Tensor]:
    return plain_forward(ORACLE, twin)


def greedy(oracle: Callable[[list[int]], Tensor], prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    for _ in range(GREEDY.max_tokens or 0):
        tokens.append(int(oracle(tokens)[-1].argmax()))
    return tokens[len(prompt) :]


def engine(twin: Path, **options: Any) -> Engine:
    return Engine(twin, recipe=str(RECIPE), page_tokens=16, pool_bytes=2 << 20, record=True, **options)


@pytest.mark.parametrize("options", [{}, {"chunk_tokens": 7}, {"max_step_tokens": 40, "max_running": 4}], ids=str)
def test_tokens_equal_the_plain_forward(
    twin: Path, oracle: Callable[[list[int]], Tensor], options: dict[str, Any]
) -> None:
    """Shorter and longer than the window of 24; together, in chunks, and again from the prefix cache."""
    made = engine(twin, **options)
    trunk = prompt_ids(48, 1)
    prompts = {"short": prompt_ids(11, 2), "trunk": trunk, "branch": trunk[:37] + prompt_ids(20, 3)}
    want = {name: greedy(oracle, prompt) for name, prompt in prompts.items()}
    for number in range(2):
        answers = made.run([ask(name, prompt, GREEDY) for name, prompt in prompts.items()])
        for name, answer in answers.items():
            assert answer.tokens == want[name], (number, name)
            logits_V = oracle(prompts[name])[-1]
            spread = float(logits_V.max() - logits_V.min())
            assert float((answer.logits[0] - logits_V).abs().max()) <= 1e-5 * spread, (number, name)
    assert answers["trunk"].cached == 32 and answers["branch"].cached == 48


def test_windows_free_what_falls_out_and_shared_layers_take_no_bytes(twin: Path) -> None:
    made = engine(twin, prefix_cache=False, max_running=1)
    layout = made.runner.layout
    held: dict[str, int] = {}
    step = made.loop._scheduler.schedule

    def watched() -> Any:
        planned = step()
        for request in made.manager._open:
            for group, blocks in made.manager.inventory(request).items():
                held[group] = max(held.get(group, 0), len(blocks))
        return planned

    made.loop._scheduler.schedule = watched  # type: ignore[method-assign]
    made.run([ask("long", prompt_ids(150, 5), SamplingParams(temperature=0, max_tokens=42, ignore_eos=True))])
    full, window = layout.token_groups
    assert held[full.name] == 12  # 191 tokens in pages of 16
    assert window.window == WINDOW and held[window.name] == 10  # the prompt's one chunk, and nothing on top
    short = engine(twin, prefix_cache=False, chunk_tokens=16, max_running=1)
    held.clear()
    made, step = short, short.loop._scheduler.schedule
    made.loop._scheduler.schedule = watched  # type: ignore[method-assign]
    made.run([ask("long", prompt_ids(150, 5), GREEDY)])
    assert held[window.name] <= 2 + 2  # what 24 tokens can lie in, a chunk's page, and the one scheduled ahead


def test_the_pool_takes_the_bytes_of_the_plan(twin: Path) -> None:
    code, said = run_json("plan", str(twin), "--recipe", str(RECIPE), "--hardware", "cpu")
    assert code == 0
    planned = said["chosen"]["tightest_rank"]  # bfloat16
    made = engine(twin, dtype="bfloat16", debug=False)
    layout = made.runner.layout
    assert layout.token_bytes == planned["bytes_per_token"] == 2 * 2 * 16 * 2  # K and V of one layer of the six
    assert layout.window_bytes + layout.sequence_bytes == planned["bytes_per_sequence"]
    full, window = layout.token_groups
    per_page = (full.block_bytes, window.block_bytes)
    assert per_page == (16 * layout.token_bytes, 16 * layout.window_bytes // WINDOW), "no page holds anything else"
    views = made.runner._views
    assert views.pool.nbytes == made.runner.num_slabs * layout.slab_bytes
    for reader, owner in layout.aliases.items():
        assert views.stores[reader] is views.stores[owner]
