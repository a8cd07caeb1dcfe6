"""Plans from configs alone: legal layouts, refusals in sentences, bytes, and what fits where."""

import itertools
import json
from pathlib import Path

import pytest

from dayzero.errors import UsageError
from dayzero.planner.budget import CHUNK_TOKENS, stage_bounds
from dayzero.planner.plan_report import PlanOptions, PlanReport
from dayzero.planner.planner import plan_source

CONFIGS = Path(__file__).parent / "configs"


def plan(tmp_path: Path, name: str, options: PlanOptions) -> PlanReport:
    folder = tmp_path / name
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text((CONFIGS / f"{name}.json").read_text())
    return plan_source(str(folder / "config.json"), options)


def test_a_trillion_parameters_need_sixteen_devices(tmp_path: Path) -> None:
    few = plan(tmp_path, "kimi_k3", PlanOptions("h200x8", tp=8))
    assert few.verdict == "fail" and few.chosen is None
    assert few.weight_bytes == 1_560_860_324_864 - 69 * 32 * 4  # the padding of 69 decay vectors is not loaded
    assert "lacks" in few.findings[0].evidence[0]
    enough = plan(tmp_path, "kimi_k3", PlanOptions("h200x16", tp=16, ep=16))
    assert enough.chosen is not None and enough.proof is not None and enough.proof.holds
    assert enough.proof.elements == enough.parameters[0]
    rank = enough.chosen.ranks[0]
    assert rank.token_bytes == 27_648  # the latent is the same for all heads, so tp does not shrink it
    assert rank.sequence_bytes == 449_372_160 // 16


def test_the_bank_of_block_sums_is_counted_for_each_token_of_a_chunk(tmp_path: Path) -> None:
    """Eight rows of 7,168 in bf16 beside the running sum: activation, not cache, and more than all else of a layer."""
    report = plan(tmp_path, "kimi_k3", PlanOptions("h200x16", tp=16, ep=16))
    assert report.to_json()["carry_bytes_per_token"] == {"partial": 14_336, "bank": 114_688}
    assert report.chosen is not None
    assert report.chosen.ranks[0].carry == CHUNK_TOKENS * (14_336 + 114_688 + 6 * 14_336)
    plain = plan(tmp_path, "qwen3_8b", PlanOptions("h100x1"))
    assert plain.to_json()["carry_bytes_per_token"] == {"h": 2 * 4096}


def test_heads_and_scale_blocks_are_named_in_refusals(tmp_path: Path) -> None:
    heads = plan(tmp_path, "smollm2_135m", PlanOptions("h100x2", tp=2))
    assert "9 units of 64" in str(heads.layouts[0].refusal)
    blocks = plan(tmp_path, "deepseek_v3", PlanOptions("h200x32", tp=32, ep=1))
    assert "scale blocks" in str(blocks.layouts[0].refusal)


def test_kv_heads_are_replicated_beyond_their_number(tmp_path: Path) -> None:
    report = plan(tmp_path, "qwen3_8b", PlanOptions("h100x16", tp=16))
    assert report.chosen is not None
    assert report.chosen.ranks[0].token_bytes == 36 * 2 * 128 * 2  # one of 8 KV heads on each rank


def test_pipeline_stages_hold_their_layers_only(tmp_path: Path) -> None:
    report = plan(tmp_path, "qwen3_8b", PlanOptions("h100x4", pp=4, tp=1))
    assert report.chosen is not None and report.proof is not None and report.proof.holds
    layers = [r.layers for r in report.chosen.ranks]
    assert layers[0][0] == 0 and layers[-1][1] == 36 and all(a[1] == b[0] for a, b in itertools.pairwise(layers))
    assert sum(p.bytes_read for p in report.weight_plans) == report.weight_bytes


def test_context_parallel_ranks_share_the_tokens(tmp_path: Path) -> None:
    one = plan(tmp_path, "qwen3_8b", PlanOptions("h100x1", tp=1))
    four = plan(tmp_path, "qwen3_8b", PlanOptions("h100x4", tp=1, cp=4))
    assert one.chosen and four.chosen
    assert four.chosen.ranks[0].max_context(1, 4) > 3.9 * one.chosen.ranks[0].max_context(1, 1)


def test_fp8_records_make_room(tmp_path: Path) -> None:
    wide = plan(tmp_path, "deepseek_v32", PlanOptions("h200x8", tp=8, ep=8))
    narrow = plan(tmp_path, "deepseek_v32", PlanOptions("h200x8", tp=8, ep=8, cache="fp8"))
    assert wide.cache.per_token == 61 * 1408 and narrow.cache.per_token == 61 * 788


def test_a_context_that_does_not_fit_is_a_failure_with_numbers(tmp_path: Path) -> None:
    report = plan(tmp_path, "qwen3_8b", PlanOptions("h100", tp=1, context=40960, concurrency=64))
    assert report.verdict == "fail"
    assert "64" in report.findings[0].evidence[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (PlanOptions("h900"), "h900 is not known"),
        (PlanOptions("h200x8", tp=3), "makes no mesh of 8 devices"),
        (PlanOptions("h200x8", ep=3), "--ep 3 makes no mesh of 8 devices: ep 3 does not divide"),
        (PlanOptions("h200", context=-1), "--context"),
        (PlanOptions("h200", context=40961), "--context 40961 is beyond the model's context of 40960"),
        (PlanOptions("h200", cache="int3"), "--cache int3"),
        (PlanOptions("missing.toml"), "there is no such file"),
    ],
)
def test_wrong_calls_are_one_sentence(tmp_path: Path, options: PlanOptions, said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        plan(tmp_path, "qwen3_8b", options)


def test_hardware_from_toml(tmp_path: Path) -> None:
    chip = tmp_path / "chip.toml"
    chip.write_text("memory_bytes = 64e9\nbandwidth = 1e12\nlink = 1e11\n[flops]\nbf16 = 2e14\n")
    report = plan(tmp_path, "qwen3_8b", PlanOptions(f"{chip}x2", tp=2))
    assert report.hardware.name == "chip" and report.num_devices == 2 and report.chosen
    chip.write_text("memory_bytes = 64e9\nspeed = 3\n")
    with pytest.raises(UsageError, match="unknown field speed"):
        plan(tmp_path, "qwen3_8b", PlanOptions(str(chip)))


def test_the_report_is_json_and_names_every_refusal(tmp_path: Path) -> None:
    report = plan(tmp_path, "gpt_oss_20b", PlanOptions("h100x8"))
    data = json.loads(json.dumps(report.to_json()))
    assert data["chosen"]["fits"] and data["exactly_once"]["holds"]
    assert all(layout["refusal"] for layout in data["layouts"] if not layout["fits"])


def test_stages_balance_bytes_and_leave_none_empty() -> None:
    assert stage_bounds([1, 1, 1, 9], 0, 0, 2) == [(0, 3), (3, 4)]
    assert stage_bounds([5, 1, 1, 1], 3, 3, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    bounds = stage_bounds([7] * 10, 20, 20, 3)
    assert bounds[0][0] == 0 and bounds[-1][1] == 10 and len(bounds) == 3


def test_floors_by_hand(tmp_path: Path) -> None:
    """Expert ranks share the experts whatever tp is: ep8 dp8 reads 1/8 of the touched experts, all of the rest."""
    wide = plan(tmp_path, "deepseek_v32", PlanOptions("h200x8", tp=1, ep=8, dp=8, context=4096))
    deep = plan(tmp_path, "deepseek_v32", PlanOptions("h200x8", tp=8, ep=8, context=4096))
    moe = 58 * 256 * 3 * 2048 * 7168
    scales = moe // (128 * 128) * 4
    table = 129280 * 7168 * 2
    rest = wide.weight_bytes - moe - scales - table
    touched = (moe + scales) * 8 / 256
    row = 61 * 1408 * 2048  # a row of the cache for each of top-k tokens
    assert wide.layouts[0].floors and deep.layouts[0].floors
    assert wide.layouts[0].floors.tpot_memory == pytest.approx((rest + touched / 8 + row) / 4.8e12, rel=1e-3)
    assert deep.layouts[0].floors.tpot_memory == pytest.approx((rest + touched + row) / 8 / 4.8e12, rel=1e-3)
