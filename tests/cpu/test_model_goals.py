"""The rule by which whole models are held to their goals (``benchmarks/models.py``), by hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from test_profile import bench_spec

import dayzero
from benchmarks import generate, models
from benchmarks.models import MODELS, Cell, Model, by_kind, cell_of, cut, launch_of
from dayzero.acceptance.profile.report import PhaseReport, Row
from dayzero.engine.profiling.measure import Measured, Phase
from dayzero.engine.profiling.work import Work

CEILINGS = {"copy": 1e12, "bf16": 1e14, "f32": 1e14}
MODEL = Model("any", "any.json", 1, {1: 100.0, 16: 950.0}, {1000: 60_000.0}, goal=None)


def cell(model: Model, phase: Phase, tokens: int, seconds: float, floor: float, flops: float = 0.0) -> Cell:
    measured = Measured(phase, tokens, 3, seconds, seconds, seconds, {}, {}, 1, 1.0, None, "kernels", 0.75 * seconds)
    row = Row("linear.matmul", "s", 1, "v", 1, seconds, floor, "memory", flops, 0.0, 1.0)
    return cell_of(model, PhaseReport(measured, (row,), flops), CEILINGS)


def test_ahead_of_a_peer_that_is_far_from_the_floor() -> None:
    found = cell(MODEL, Phase(True, 1, 1024), 1, 0.0101, 0.002)
    assert (found.ceiling, found.peer, found.peer_share, found.need) == (500.0, 100.0, 0.2, 100.0)
    assert found.share == pytest.approx(0.002 / 0.0101) and found.idle == pytest.approx(0.25)
    assert found.verdict == "missed: 0.99 x"
    assert cell(MODEL, Phase(True, 1, 1024), 1, 0.0099, 0.002).verdict == "met"


def test_as_fast_as_a_peer_that_is_near_the_floor() -> None:
    found = cell(MODEL, Phase(True, 16, 1024), 16, 0.0172, 0.016)
    assert found.peer_share == pytest.approx(0.95) and found.need == pytest.approx(0.97 * 950)
    assert found.verdict == "met", "930 tokens a second lie within the spread"
    assert cell(MODEL, Phase(True, 16, 1024), 16, 0.0175, 0.016).verdict.startswith("missed")


def test_prefill_is_held_to_the_product_rate() -> None:
    found = cell(MODEL, Phase(False, 1, 1000), 1000, 0.02, 0.001, flops=1e12)
    assert found.peer_share == pytest.approx(0.6), "100,000 tokens a second by 1e9 FLOPs a token"
    assert found.need == 60_000 and found.verdict == "missed: 0.83 x"


def test_a_goal_of_its_own_and_no_peer() -> None:
    model = replace(MODEL, goal=150.0)
    assert cell(model, Phase(True, 1, 1024), 1, 0.008, 0.002).verdict == "missed: 0.83 x"
    assert cell(model, Phase(True, 16, 1024), 16, 0.0172, 0.016).need == pytest.approx(0.97 * 950), "batch 1 alone"
    assert cell(MODEL, Phase(True, 64, 1024), 64, 1.0, 0.5).verdict == "no peer"


def test_cuts_have_no_goals_and_phases_fit_their_engine() -> None:
    made = cut(MODELS["deepseek_v32_4"], {"layers": "3", "experts": "32"})
    assert made.config == "deepseek_v32.json?layers=3&first_k_dense_replace=1&experts=32"
    assert not made.decode and not made.prefill and made.goal is None
    launch = launch_of(made, [Phase(True, 16, 1024), Phase(False, 1, 32768)])
    config = launch.config
    assert config.max_running == 16 and config.max_step_tokens == made.step_tokens < 32768
    assert config.max_model_len is not None and config.max_model_len > 32768 and not config.prefix_cache


@pytest.mark.parametrize(("rows", "context"), [(64, 32768), (256, 1024), (1, 131072)])
def test_answers_fit_behind_the_context(rows: int, context: int) -> None:
    """Rows whose prompts are done first decode on while the last of the prompts are still computed."""
    config = launch_of(MODELS["qwen3_8b"], [phase := Phase(True, rows, context)]).config
    steps = -(-rows * context // (config.max_step_tokens - rows))  # at least so many until all rows decode
    assert config.max_model_len is not None
    assert config.max_model_len >= context + phase.answer_tokens(config.max_step_tokens) > context + steps + rows


@pytest.mark.parametrize(
    ("script", "given", "said"),
    [
        (models, ["--only", "qwen3_8b,typo"], "there is no model 'typo'; known are kimi_linear_48b"),
        (models, ["--set", "layers"], "'layers' is no change; write KEY=VALUE"),
        (models, ["--set", "layers=4&=3"], "'=3' is no change; write KEY=VALUE"),
        (generate, ["any.json", "--tokens", "1"], "1 is no number of at least 2"),
        (generate, ["any.json", "--tokens", "many"], "many is no number of at least 2"),
    ],
)
def test_a_wrong_call_is_told_in_a_sentence(
    script: Any, given: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [script.__name__, *given])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_options_of_models_are_read() -> None:
    assert models.models_of("gpt_oss_20b, qwen3_8b") == [MODELS["gpt_oss_20b"], MODELS["qwen3_8b"]]
    assert models.changes_of("layers=4&name=a=b") == {"layers": "4", "name": "a=b"}


def test_answers_that_are_asked_for_fit_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    class Made:
        info = SimpleNamespace(table=[])

        def __init__(self, source: str, **options: Any) -> None:
            asked.update(options)

    monkeypatch.setattr(dayzero, "LLM", Made)
    generate.ours("any.json", [[1] * 10], generate.answer_tokens("2000"), "cpu")
    assert asked["max_model_len"] == 2010


def test_time_and_floor_of_each_kind_of_layer() -> None:
    times = {("norm.rms", "layers.0.mixer_norm"): (1e-3, 1), ("linear.matmul", "layers.0.mixer.q"): (4e-3, 1)}
    times |= {("linear.matmul", "layers.0.channel.down"): (2e-3, 1), ("linear.matmul_f32", "head"): (8e-3, 1)}
    works = {key: [Work(0.0, 1e9, "bf16")] for key in times}  # 1 ms each
    measured = Measured(Phase(True, 1, 8), 1, 3, 0.02, 0.02, 0.02, times, works, None, 0.0, None)
    rows = by_kind(bench_spec(), measured, CEILINGS)
    assert [row[1:] for row in rows] == [
        ["1", "8.000", "1.000", "12%"], ["1", "4.000", "1.000", "25%"], ["1", "2.000", "1.000", "50%"],
        ["1", "1.000", "1.000", "100%"],
    ]  # fmt: skip
    assert rows[0][0] == "outside the layers" and len({row[0] for row in rows}) == 4
