"""Routed experts in a plan: bytes in 4 bits, the ring, and what holding some of them costs, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dayzero.commands.engine_options import EngineArguments, launch_of
from dayzero.console import Console
from dayzero.errors import UsageError
from dayzero.ops.experts_sizes import SLICES, e4m3_expert_bytes, e4m3_row_bytes, ring_bytes
from dayzero.planner.experts import HOST_LINK, with_expert_inputs
from dayzero.planner.plan_report import PlanOptions, PlanReport
from dayzero.planner.plan_show import show_plan
from tests.paper.model_configs import real
from tests.paper.test_planner_plan import plan

IN_A_RING: Any = {"expert_inputs": "fp8_128", "bindings": {"moe.experts_fp8_128": "ring"}}
K3_EXPERT = 17_547_264  # bytes of one expert as published: nibbles, and a scale for each 32 of them


@pytest.mark.parametrize("mesh", [{"tp": 16, "ep": 16}, {"tp": 16, "ep": 1}, {"tp": 8, "pp": 2, "ep": 4}])
def test_4_bit_bytes_and_the_ring_of_a_rank(tmp_path: Path, mesh: dict[str, int]) -> None:
    report = plan(tmp_path, "kimi_k3", PlanOptions("h200x16", **mesh, **IN_A_RING))
    plain = plan(tmp_path, "kimi_k3", PlanOptions("h200x16", **mesh)).layouts[0].ranks
    layout = report.layouts[0]
    ways = max(1, mesh["tp"] // mesh["ep"])
    inner, width = 3072 // ways, 3584
    for rank in layout.ranks:
        experts = 896 * K3_EXPERT // (mesh["ep"] * ways)
        assert rank.experts % experts == 0 and rank.experts <= rank.weights
        assert rank.ring == SLICES * max(inner * (width + 4 * 28), width * e4m3_row_bytes(inner)) <= rank.workspace
        assert rank.ring < 2 * 3 * inner * width < 2 * e4m3_expert_bytes(inner, width)
    for rank, other in zip(layout.ranks, plain, strict=True):  # where no binding asks for a ring there is none
        assert other.ring == 0 and rank.workspace - other.workspace == rank.ring
    stages = {rank.stage: rank.experts for rank in layout.ranks}
    assert sum(stages.values()) == 82_432 * K3_EXPERT // (mesh["ep"] * ways)


def test_models_without_experts_or_4_bits_have_no_ring(tmp_path: Path) -> None:
    dense = plan(tmp_path, "qwen3_8b", PlanOptions("h100")).layouts[0].ranks[0]
    assert dense.experts == dense.ring == 0
    wide = plan(tmp_path, "qwen3_30b_a3b", PlanOptions("h200")).layouts[0].ranks[0]
    assert wide.experts == 48 * 128 * 3 * 768 * 2048 * 2 and wide.ring == 0


def test_sizes_of_an_expert_in_e4m3_by_hand() -> None:
    assert e4m3_row_bytes(3584) == 3584 + 4 * 28 and e4m3_row_bytes(129) == 129 + 8
    assert e4m3_expert_bytes(96, 160) == 2 * 96 * (160 + 8) + 160 * (96 + 4)
    assert ring_bytes(96, 160) == 4 * 96 * 168


def test_holding_some_experts_makes_room_and_costs_time(tmp_path: Path) -> None:
    whole = plan(tmp_path, "gpt_oss_20b", PlanOptions("h100", tp=1))
    rank = whole.layouts[0].ranks[0]
    number, chosen, one = 24 * 32, 24 * 4, rank.experts // (24 * 32)
    # As stored: 3 matrices of 2880 x 2880 in 17 / 32 of a byte an element, and biases in two.
    assert one == 3 * 2880 * 2880 * 17 // 32 + (2 * 2880 + 2880) * 2
    for held in (2, chosen - 7, number // 2):
        part = plan(tmp_path, "gpt_oss_20b", PlanOptions("h100", tp=1, expert_bytes=held * one + 5))
        swapped = part.layouts[0].ranks[0]
        swap = swapped.swapping
        assert swap is not None and swapped.experts == rank.experts
        assert (swap.num_held, swap.held, swap.num_experts, swap.chosen) == (held, held * one, number, chosen)
        assert swapped.weights == rank.weights - rank.experts + held * one
        assert swapped.cache_bytes - rank.cache_bytes == rank.experts - held * one
        assert swap.least_misses == max(0, chosen - held)
        assert swap.usual_misses == pytest.approx(chosen * (1 - held / number))
        assert swap.seconds(swap.least_misses) == swap.least_misses * one / HOST_LINK
        told = json.loads(json.dumps(part.to_json()))["ranks"][0]
        assert told["expert_bytes"] == rank.experts and told["experts_held"]["experts"] == held
    everything = plan(tmp_path, "gpt_oss_20b", PlanOptions("h100", tp=1, expert_bytes=rank.experts))
    assert everything.layouts[0].ranks[0].swapping is None
    assert everything.layouts[0].ranks[0].weights == rank.weights


def test_eight_devices_hold_the_large_model_with_half_of_its_experts(tmp_path: Path) -> None:
    mesh = {"tp": 8, "ep": 8}
    assert plan(tmp_path, "kimi_k3", PlanOptions("h200x8", **mesh)).chosen is None
    part = plan(tmp_path, "kimi_k3", PlanOptions("h200x8", **mesh, expert_bytes=80 << 30))
    assert part.chosen is not None and part.verdict != "fail"
    swap = part.chosen.ranks[0].swapping
    assert swap is not None and swap.num_experts == 82_432 // 8 and swap.num_held == (80 << 30) // K3_EXPERT
    assert swap.chosen == 92 * 16 / 8


def test_what_a_person_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    show(plan(tmp_path, "gpt_oss_20b", PlanOptions("h100", tp=1, **IN_A_RING)))
    told = capsys.readouterr().out
    assert "experts: 9.47 GiB a rank, in 4 bits as stored + a ring of 32.65 MiB" in told and "held:" not in told
    show(plan(tmp_path, "gpt_oss_20b", PlanOptions("h100", tp=1, expert_bytes=1 << 30)))
    told = " ".join(capsys.readouterr().out.split())
    assert "of 768 experts a rank; a step of one token chooses 96 and brings up" in told and "64 GB/s" in told
    show(plan(tmp_path, "qwen3_8b", PlanOptions("h100", tp=1)))
    assert "experts:" not in capsys.readouterr().out


def show(report: PlanReport) -> None:
    show_plan(report, Console())


@pytest.mark.parametrize(
    ("name", "size", "said"),
    [("gpt_oss_20b", 1000, "--expert-memory 1000 is too little: two experts of a rank take"),
     ("qwen3_8b", 1 << 30, "has no experts")],
)  # fmt: skip
def test_wrong_calls(tmp_path: Path, name: str, size: int, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plan(tmp_path, name, PlanOptions("h100", tp=1, expert_bytes=size))


def test_one_format_of_inputs_for_all_layers() -> None:
    spec = real("gpt_oss_20b").spec
    rounded = with_expert_inputs(spec, "fp8_128")
    uses = [use.contract for use in rounded.contracts() if use.contract.startswith("moe.experts")]
    assert uses == ["moe.experts_fp8_128"] * len(spec.layers)
    assert [use for use in spec.contracts() if use.contract == "moe.experts_fp8_128"] == []
    assert rounded.params() == spec.params() and with_expert_inputs(rounded, "bf16") == spec
    dense = real("qwen3_8b").spec
    assert with_expert_inputs(dense, "bf16") == dense
    with pytest.raises(UsageError, match="--expert-inputs fp8_128: qwen3 has no experts; leave the option out"):
        with_expert_inputs(dense, "fp8_128")


def test_options_reach_the_engine() -> None:
    given = EngineArguments(source="x", expert_memory="2GiB", expert_inputs="fp8_128")
    config = launch_of(given).config
    assert (config.expert_bytes, config.expert_inputs) == (2 << 30, "fp8_128")
    plain = launch_of(EngineArguments(source="x")).config
    assert (plain.expert_bytes, plain.expert_inputs) == (None, "bf16")


@pytest.mark.parametrize(
    ("options", "said"),
    [({"expert_memory": "0"}, "--expert-memory 0: a size must be above zero"),
     ({"expert_memory": "much"}, "--expert-memory much: give a size"),
     ({"expert_inputs": "fp4"}, "expert_inputs is 'fp4'; it must be one of bf16, fp8_128"),
     ({"expert_memory": "1GiB", "upstream": True}, "need a recipe"),
     ({"expert_inputs": "fp8_128", "upstream": True}, "need a recipe")],
)  # fmt: skip
def test_wrong_options_are_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        launch_of(EngineArguments(source="x", **options))
