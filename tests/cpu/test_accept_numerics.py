"""Stage 2 of an acceptance: a sound model passes, and each finding fails for a fault that breaks it, with its layer.

The oracle runs once; what is planted afterwards is put to the traces it left.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from align_support import ORACLES, write_dense, write_recipe
from torch import Tensor

from dayzero.acceptance.accept.stage import Context, StageResult, Subject
from dayzero.acceptance.align import AlignOptions, AlignReport, align_source
from dayzero.acceptance.rounding import predicted_rms
from dayzero.acceptance.stages import numerics, numerics_floor
from dayzero.acceptance.stages.numerics_experts import expert_errors, expert_findings
from dayzero.acceptance.stages.numerics_ladder import choice_findings
from dayzero.acceptance.trace import add_meta
from dayzero.blocks import local_cache
from dayzero.blocks.attention import AttentionBlock
from dayzero.blocks.open import open_model
from dayzero.blocks.residual import PlainBlock
from dayzero.blocks.sparse_index import IndexBlock
from dayzero.blocks.stack import Stack
from dayzero.decl import packed_row
from dayzero.finding import Finding
from dayzero.ops import experts_fp8, moe, records
from dayzero.rehearse.twin import TwinOptions, write_twin

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
ORACLE = f"ORACLE = Oracle(file={str(ORACLES / 'plain_llama.py')!r})\n"


class Stand:
    """A dense checkpoint with real weights, and the folder of a run that passed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = write_dense(folder / "model")
        self.recipe = write_recipe(folder / "sound.py", ORACLE)
        self.first = folder / "first"
        self.first.mkdir()
        self.sound = self.run(self.first, self.recipe)

    def run(self, folder: Path, recipe: str) -> StageResult:
        return numerics.run(Context(Subject(str(self.model), recipe=recipe), None, folder))  # type: ignore[arg-type]

    def again(self, name: str, change: str = "") -> dict[str, Finding]:
        """What fails when the run is repeated on the traces of the first. change: of the recipe."""
        folder = self.folder / name.replace(" ", "_")
        shutil.copytree(self.first, folder)
        recipe = write_recipe(self.folder / f"{folder.name}.py", ORACLE + change)
        return {f.kind: f for f in self.run(folder, recipe).findings if f.verdict == "fail"}


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Stand:
    return Stand(tmp_path_factory.mktemp("numerics"))


def test_a_sound_model_passes_on_twin_and_real_weights(stand: Stand) -> None:
    result = stand.sound
    found = {f.kind: f for f in result.findings}
    assert len(found) == len(result.findings) >= 40, "two findings of one kind"
    assert not [f for f in found.values() if f.verdict not in ("pass", "not applicable")]
    assert found["numerics.scope"].measured == "real weights"
    for side in ("twin", "real"):
        kinds = ("ladder.attention", "first_diverging", "logits", "kl.mean", "top1", "perplexity", "record.kv_fp8")
        assert all(found[f"numerics.{side}.{kind}"].verdict == "pass" for kind in kinds)
        assert found[f"numerics.{side}.sets.experts"].verdict == "not applicable"
    assert found["numerics.real.served.kl.mean"].verdict == "pass"
    assert found["numerics.real.experts_fp8"].verdict == "not applicable"
    assert all(f.measured for f in found.values() if f.verdict == "not applicable")
    assert {figure.kind for figure in result.figures} == {"ladder", "histogram"}
    json.dumps([dict(figure.data) for figure in result.figures] + [dict(result.facts)])


# --- faults of the port, in the recipe --------------------------------------------------------------------------------

LAYERS = """
def spec(raw):
    def change(x): return {change}
    return change_layers(base.spec(raw), change)
"""
WHOLE = "\ndef spec(raw):\n    return replace(base.spec(raw), {change})\n"
RECIPES: Mapping[str, tuple[str, set[str]]] = {
    "gate for up": (
        """
RULES = tuple(r for r in base.RULES if "channel.gate" not in str(r) and "channel.up" not in str(r)) + (
    Rule("model.layers.{i}.mlp.gate_proj.weight", "layers.{i}.channel.up"),
    Rule("model.layers.{i}.mlp.up_proj.weight", "layers.{i}.channel.gate"))""",
        {"ladder.glu_56", "first_diverging", "logits", "kl.mean", "kl.p99", "kl.max", "perplexity"},
    ),
    "rope style": (
        LAYERS.format(change="replace(x, mixer=replace(x.mixer, rope=replace(x.mixer.rope, style='interleaved')))"),
        {"ladder.attention", "first_diverging", "logits"},
    ),
    "embedding scale": (WHOLE.format(change="embed_scale=1.5"), {"ladder.embedding"}),
    "final norm": (
        "\ndef spec(raw):\n    made = base.spec(raw)\n"
        "    return replace(made, final_norm=replace(made.final_norm, offset=True))\n",
        {"ladder.final_norm", "top1"},
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_a_fault_of_the_port_fails_the_module_and_what_is_behind(name: str, stand: Stand) -> None:
    change, kinds = RECIPES[name]
    failed = stand.again(name, change)
    assert {f"numerics.real.{kind}" for kind in kinds} <= set(failed), set(failed)
    assert {failed[f"numerics.real.{kind}"].layer for kind in kinds} == {"operator"}
    assert all(f.remedy for f in failed.values())


# --- faults of code ---------------------------------------------------------------------------------------------------


def positions_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = AttentionBlock.forward

    def changed(self: AttentionBlock, x_TD: Tensor, view: Any) -> Tensor:
        return forward(self, x_TD, replace(view, positions=view.positions - view.positions.min()))

    monkeypatch.setattr(AttentionBlock, "forward", changed)


def lost_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = PlainBlock.leave
    monkeypatch.setattr(PlainBlock, "leave", lambda self, carry, site, out: leave(self, carry, site, out * 1.01))


def wrong_head(monkeypatch: pytest.MonkeyPatch) -> None:
    head = Stack.head
    monkeypatch.setattr(Stack, "head", lambda self, hidden: head(self, hidden) * 1.01)


def narrow_service(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong in bfloat16 alone is wrong in the service, and nowhere else."""
    close = Stack.close

    def changed(self: Stack, carry: Any) -> Tensor:
        hidden = close(self, carry)
        return hidden.roll(3, -1) if hidden.dtype == torch.bfloat16 else hidden

    monkeypatch.setattr(Stack, "close", changed)


def wrong_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read with scales that are 6 % too large."""
    decode = records.decode
    monkeypatch.setattr(records, "decode", lambda parts, row: decode(parts, row) * 1.06)


def half_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = records.decode
    monkeypatch.setattr(records, "decode", lambda parts, row: decode(parts, row) * 0.25)


def unused_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows lie plain though the plan says otherwise."""
    made = local_cache.LocalTokens.__init__
    monkeypatch.setattr(
        local_cache.LocalTokens, "__init__", lambda self, need, dtype: made(self, replace(need, packed=None), dtype)
    )


CODE: Mapping[str, tuple[Callable[[pytest.MonkeyPatch], None], Mapping[str, str], bool]] = {
    # fault: (plant, findings that fail -> layer, whether these are all of real weights)
    "positions of a chunk": (positions_of_a_chunk, {"chunks": "operator"}, False),
    "lost sum": (lost_sum, {"ladder.stream_behind_a_layer": "operator"}, False),
    "wrong head": (wrong_head, {"ladder.head": "operator"}, False),
    "narrow service": (
        narrow_service,
        {
            "served.kl.mean": "operator", "served.kl.p99": "operator", "served.kl.max": "operator",
            "served.perplexity": "operator", "served.top1": "operator",
        },
        True,
    ),
    "wrong scale": (wrong_scale, {"record.kv_fp8": "cache", "quantised.module": "cache"}, False),
    "half scale": (
        half_scale, {"record.kv_fp8": "cache", "quantised.module": "cache", "quantised.rounding": "cache"}, False,
    ),
    "unused record": (unused_record, {"record.kv_fp8": "cache"}, True),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CODE)
def test_a_fault_of_code_fails_its_finding(name: str, stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, kinds, alone = CODE[name]
    plant(monkeypatch)
    failed = {k.removeprefix("numerics.real."): f for k, f in stand.again(name).items() if ".real." in k}
    assert {kind: failed[kind].layer for kind in kinds if kind in failed} == dict(kinds), set(failed)
    assert not alone or set(failed) == set(kinds), set(failed)
    assert all(failed[kind].remedy for kind in kinds)


def test_a_tensor_that_only_the_port_uses(stand: Stand, tmp_path: Path) -> None:
    shutil.copytree(stand.first, tmp_path / "run")
    add_meta(tmp_path / "run" / "real.trace", {"unused": ["model.layers.1.mlp.up_proj.weight"]})
    found = {f.kind: f for f in stand.run(tmp_path / "run", stand.recipe).findings}
    assert found["numerics.real.tensors"].verdict == "fail" and found["numerics.real.tensors"].layer == "weights"


def test_without_an_oracle_the_record_says_so(stand: Stand, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "bare.py", "ORACLE = None")
    found = {f.kind: f for f in stand.run(tmp_path, recipe).findings}
    assert found["numerics.scope"].verdict == "note" and "names no oracle" in found["numerics.scope"].evidence[0]
    assert found["numerics.twin.oracle"].verdict == "not applicable"
    assert found["numerics.twin.served.kl.mean"].verdict == "pass", "the service is held to our reference all the same"


# --- choices that rounding turns over ---------------------------------------------------------------------------------


class Choosing:
    """A twin of four of eight experts in groups, several of whose choices bfloat16 turns over."""

    def __init__(self, folder: Path) -> None:
        source = folder / "source" / "config.json"
        source.parent.mkdir()
        source.write_bytes((CONFIGS / "deepseek_v3.json").read_bytes())
        write_twin(str(source), str(folder / "twin"), TwinOptions(changes={"moe_intermediate_size": 160}))
        self.folder, self.where = folder, str(folder / "twin")
        (folder / "first").mkdir()
        self.sound = numerics.run(Context(Subject(self.where), None, folder / "first"))  # type: ignore[arg-type]

    def again(self, name: str) -> dict[str, str]:
        """Kinds that fail, on the oracle's trace of the first run -> their layers."""
        shutil.copytree(self.folder / "first", self.folder / name)
        found = numerics.run(Context(Subject(self.where), None, self.folder / name))  # type: ignore[arg-type]
        return {f.kind.removeprefix("numerics.twin."): f.layer for f in found.findings if f.verdict == "fail"}


@pytest.fixture(scope="module")
def choosing(tmp_path_factory: pytest.TempPathFactory) -> Choosing:
    return Choosing(tmp_path_factory.mktemp("choosing"))


def test_choices_that_bfloat16_turns_over_fail_nothing(choosing: Choosing, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single run of the floor, in which by chance none turned over, is not what another run is held to."""
    assert not [f for f in choosing.sound.findings if f.verdict == "fail"]
    said = {f.kind: f for f in choosing.sound.findings}["numerics.twin.served.kl.mean"]
    assert said.verdict == "pass" and "in 16 runs" in str(said.bound)
    monkeypatch.setattr(numerics_floor, "RUNS_OF_FEW", 1)
    assert set(choosing.again("single")) >= {"served.kl.mean"}, "the twin shows nothing any more: find another"


def narrow_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 alone, what a layer adds is too large by a quarter: 2.4 times the bound on this twin.

    A tenth lies at the bound, 0.93 to 1.03 of it, as the floor is made of random draws."""
    leave = PlainBlock.leave

    def changed(self: PlainBlock, carry: Any, site: str, out: Tensor) -> Any:
        return leave(self, carry, site, out * 1.25 if out.dtype == torch.bfloat16 else out)

    monkeypatch.setattr(PlainBlock, "leave", changed)


@pytest.mark.slow
@pytest.mark.parametrize("plant", [narrow_service, narrow_sums])
def test_a_service_that_is_wrong_in_bfloat16_still_fails_where_choices_turn_over(
    plant: Callable[[pytest.MonkeyPatch], None], choosing: Choosing, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    failed = choosing.again(plant.__name__)
    assert failed.get("served.kl.mean") == "operator" and all(kind.startswith("served.") for kind in failed), failed


def test_runs_of_the_floor_differ_in_what_they_turn_over_and_not_in_size(stand: Stand, choosing: Choosing) -> None:
    """Within half a step at random is as much as rounding to the nearest: where nothing is chosen, runs are alike."""
    tokens = list(range(3, 51))
    dense, of_experts = open_model(str(stand.model), recipe=stand.recipe), open_model(choosing.where)
    assert not numerics_floor.chooses(dense.spec) and numerics_floor.chooses(of_experts.spec)
    assert not numerics_floor.noise_floors(dense, tokens, ["bf16"], 1 << 28)[0].further
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics_floor, "chooses", lambda spec: True)
        (floor,) = numerics_floor.noise_floors(dense, tokens, ["bf16"], 1 << 28)
    first, *others = [float(run.kl_T.mean()) for run in floor.runs]
    assert len(others) == 15 and all(0.5 < other / first < 2 for other in others), (first, others)
    assert numerics_floor.size_of_runs([first]) == first
    assert numerics_floor.size_of_runs([1.0, 1.0, 10.0]) == 5.0 and numerics_floor.size_of_runs([2.0, 4.0]) == 3.0


# --- experts and indexes ----------------------------------------------------------------------------------------------


class Sparse:
    """A twin with every trait, and the oracle's trace of it."""

    def __init__(self, folder: Path) -> None:
        write_twin(str(CONFIGS / "kimi_k3_1.json"), str(folder / "twin"))
        self.where, self.trace = str(folder / "twin"), str(folder / "trace")
        align_source(self.where, AlignOptions(record=self.trace, num_tokens=24))

    def report(self, cache: str = "bf16") -> AlignReport:
        return align_source(self.where, AlignOptions(trace=self.trace, cache=cache))


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Sparse:
    return Sparse(tmp_path_factory.mktemp("sparse"))


def other_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        moe, "_best", lambda values, count: values.sort(-1, descending=True).indices[..., 1 : count + 1]
    )


def other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    select = IndexBlock.select
    monkeypatch.setattr(IndexBlock, "select", lambda self, *given: (select(self, *given) - 1).clamp_min(-1))


@pytest.mark.parametrize(("plant", "kind"), [(other_experts, "experts"), (other_rows, "index")])
def test_other_sets_fail(
    plant: Callable[[pytest.MonkeyPatch], None], kind: str, sparse: Sparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    found = {f.kind: f for f in choice_findings("x", sparse.report())}
    assert found[f"x.sets.{kind}"].verdict == "fail" and found[f"x.sets.{kind}"].layer == "operator"
    assert found[f"x.sets.{kind}"].remedy


def test_quantised_rows_of_a_sparse_model_align(sparse: Sparse) -> None:
    """What their rounding costs is no failure: it lies within what the formats predict, sets included."""
    report = sparse.report("fp8")
    assert report.verdict == "pass", [f for f in report.findings if f.verdict != "pass"]
    assert {r.record for r in report.records} == {"mla_fp8_tiled", "idx_fp8_128"}
    assert all(0.8 < r.ratio < 1.25 for r in report.records)
    kinds = [f.kind for f in report.findings]
    assert kinds.count("align.records") == 2 and "align.rounding" in kinds


@pytest.mark.parametrize(("fault", "passes"), [("none", True), ("scale", False), ("unused", False)])
def test_experts_with_fp8_inputs(fault: str, passes: bool, sparse: Sparse, monkeypatch: pytest.MonkeyPatch) -> None:
    rounded = experts_fp8.rounded_to_fp8_128
    if fault == "scale":
        monkeypatch.setattr(experts_fp8, "rounded_to_fp8_128", lambda x, dtype: rounded(x, dtype) * 1.06)
    if fault == "unused":
        monkeypatch.setattr(experts_fp8, "rounded_to_fp8_128", lambda x, dtype: x.to(dtype))
    errors = expert_errors(open_model(sparse.where), list(range(3, 27)), 1, 1 << 28)
    (found,) = expert_findings("x", errors)
    assert (found.verdict == "pass") == passes and found.layer == "operator"
    assert (0.8 < errors[0].ratio < 1.25) == passes


@pytest.mark.parametrize(
    ("record", "shape", "parts"),
    [
        ("mla_fp8_656", (576,), (512, 64)), ("idx_fp8_128", (150,), ()), ("idx_mxfp8_32", (40,), ()),
        ("kv_fp8", (2, 24), ()),
    ],
)  # fmt: skip
def test_the_error_of_every_record_is_predicted_from_its_format(
    record: str, shape: tuple[int, ...], parts: tuple[int, ...]
) -> None:
    """Over values of different sizes."""
    row = packed_row(record, shape, parts)
    assert row is not None
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(200, *shape, generator=draw) * torch.exp(torch.randn(200, *shape, generator=draw))
    lost = records.decode(records.encode(x, row), row) - x
    assert float(lost.norm() / x.norm()) == pytest.approx(predicted_rms(x, row), rel=0.1)
