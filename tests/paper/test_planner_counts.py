"""What a plan counts for a kind of parameter, once, is what placing every byte of every rank gives."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dayzero.parallel.cut import why_not
from dayzero.parallel.mesh import Mesh
from dayzero.planner import placement
from dayzero.planner.placement import PaperModel, plan_of, read_model, stage_bytes, stages_of, weight_bytes
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.planner import plan_source

CONFIGS = Path(__file__).parent / "configs"
NAMES = ("deepseek_v3", "gpt_oss_20b", "kimi_linear_48b_a3b", "qwen3_5_35b_a3b", "smollm2_135m")
MESHES = (
    Mesh(), Mesh(tp=4, ep=4), Mesh(tp=2, ep=1, pp=3), Mesh(tp=4, ep=2, dp=2), Mesh(ep=4, dp=4), Mesh(tp=2, ep=4, cp=2),
    Mesh(tp=3, pp=2),
)  # fmt: skip


def model(name: str, folder: Path) -> PaperModel:
    shutil.copy(CONFIGS / f"{name}.json", folder / "config.json")
    return read_model(str(folder / "config.json"), None)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_a_stage_are_those_of_each_of_its_ranks(name: str, tmp_path: Path) -> None:
    made = model(name, tmp_path)
    legal = 0
    for mesh in MESHES:
        if mesh.why_not() or any(why_not(d, mesh, made.by_param.get(d.name)) for d in made.decls):
            continue
        legal += 1
        bounds = stages_of(made, mesh)
        counted = stage_bytes(made, mesh, bounds)
        for place in mesh.places():
            assert plan_of(made, mesh, place, bounds).bytes_read == counted[place.stage], (mesh, place)
    assert legal >= 3
    whole = Mesh()
    assert plan_of(made, whole, whole.place(0), stages_of(made, whole)).bytes_read == weight_bytes(made).total


@pytest.mark.parametrize("name", NAMES)
def test_one_of_each_kind_is_refused_as_the_first_of_all_is(name: str, tmp_path: Path) -> None:
    made = model(name, tmp_path)
    assert len(made.one_of_each) < len(made.decls) / 4
    refused = 0
    for mesh in (Mesh(tp=3), Mesh(tp=5), Mesh(tp=7, ep=7), Mesh(tp=64), Mesh(ep=48, dp=48), Mesh(tp=24, ep=2)):
        every = next((w for d in made.decls if (w := why_not(d, mesh, made.by_param.get(d.name)))), None)
        one = next((w for d, fmt in made.one_of_each if (w := why_not(d, mesh, fmt))), None)
        assert one == every
        refused += every is not None
    assert refused >= 3


def test_bytes_are_placed_for_the_chosen_layout_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trying a layout must not cost what placing it does: on 64 devices there are seventy to try."""
    placed: list[int] = []
    place: Callable[..., Any] = placement.plan_rank

    def counting(groups: Any, formats: Any, rank: int, *more: Any) -> Any:
        placed.append(rank)
        return place(groups, formats, rank, *more)

    monkeypatch.setattr(placement, "plan_rank", counting)
    shutil.copy(CONFIGS / "qwen3_30b_a3b.json", tmp_path / "config.json")
    report = plan_source(str(tmp_path / "config.json"), PlanOptions("h200x8"))
    assert len(report.layouts) > 8 and report.proof is not None and report.proof.holds
    assert placed == list(range(8))
