"""The radar: entries that hold together, standings that follow the catalog, a config placed among families."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as Tree
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from dayzero.hardware import HARDWARE
from dayzero.ops.catalog import CATALOG, Catalog
from dayzero.planner.inspect import inspect_source
from dayzero.planner.radar import Trait, carried, radar_from, read_radar, report_on, standing
from dayzero.planner.radar_show import radar_svg

CONFIGS = Path(__file__).parent / "configs"
RADAR = read_radar()
H200, CPU = HARDWARE["h200"], HARDWARE["cpu"]


def by_name(name: str) -> Trait:
    return next(trait for trait in RADAR.traits if trait.name == name)


def test_entries_hold_together() -> None:
    assert len(RADAR.families) >= 49 and len({f.name for f in RADAR.families}) == len(RADAR.families)
    assert all(f.date.endswith("2026") or "2026" in f.date or "Nov" in f.date for f in RADAR.families)
    counts = RADAR.recurrence()
    assert list(counts.values()) == sorted(counts.values(), reverse=True) and min(counts.values()) > 0
    for trait in RADAR.traits:
        assert sum(map(bool, (trait.contract, trait.format, trait.part, trait.needs))) == 1, trait


def test_what_a_trait_needs_is_not_there_already() -> None:
    """An entry that says that nothing exists must go when something does."""
    contracts = set(CATALOG.contracts())
    for trait in RADAR.traits:
        assert trait.needs not in contracts, trait
        assert not trait.contract or trait.contract in contracts, trait
        assert not trait.part or standing(trait, H200) == "wiring", trait


@pytest.mark.parametrize(
    ("name", "on_h200", "on_cpu"),
    [
        ("gated_delta_channel", "fast", "fast"), ("latent_attention", "fast", "fast"),
        ("stream_residual", "reference", "reference"), ("mxfp4", "fast", "fast"),
        ("fp8_block", "fast", "reference"),
        ("no_position", "wiring", "wiring"), ("state_space", "missing", "missing"),
    ],
)  # fmt: skip
def test_standings_follow_the_catalog(name: str, on_h200: str, on_cpu: str) -> None:
    assert (standing(by_name(name), H200), standing(by_name(name), CPU)) == (on_h200, on_cpu)


def test_a_variant_that_goes_takes_the_standing_with_it() -> None:
    lines = {key: line for key, line in CATALOG.lines.items() if line.target != "cuda"}
    assert standing(by_name("gated_delta_channel"), H200, Catalog(lines)) == "reference"
    assert standing(by_name("gated_delta_channel"), H200, Catalog({})) == "missing"


def test_entries_that_name_no_trait_are_refused() -> None:
    data: dict[str, Any] = tomllib.loads((files("dayzero.models") / "radar.toml").read_text("utf-8"))
    for traits in (["levitation"], ["experts", "experts"]):
        wrong = copy.deepcopy(data)
        wrong["family"][0]["traits"] = traits
        with pytest.raises(ValueError, match=wrong["family"][0]["name"]):
            radar_from(wrong)


def test_a_width_is_a_window() -> None:
    uses = [("attention.paged", {"window": 512, "sinks": False})]
    assert carried(uses, (), RADAR.traits) == ["window"]


@pytest.mark.parametrize(
    ("config", "has", "has_not", "nearest"),
    [
        ("kimi_k3_1", {"gated_delta_channel", "bounded_decay", "token_index", "attention_residual", "experts"},
         {"window", "softmax_router"}, "Kimi K3.1 Pro"),
        ("gpt_oss_20b", {"window", "sinks", "experts"}, {"latent_attention", "token_index"}, None),
    ],
)  # fmt: skip
def test_a_config_is_placed_among_the_families(
    config: str, has: set[str], has_not: set[str], nearest: str | None
) -> None:
    report = report_on(RADAR, H200, CATALOG, inspect_source(str(CONFIGS / f"{config}.json")))
    assert has <= set(report.carries) and not has_not & set(report.carries)
    assert nearest is None or report.nearest[0][0] == nearest
    told = json.loads(json.dumps(report.to_json()))
    assert told["carries"] == list(report.carries) and told["operators"]["extend"] == []


def test_the_picture_has_a_mark_for_every_trait_of_every_family() -> None:
    report = report_on(RADAR, H200, CATALOG)
    root = Tree.fromstring(radar_svg(report))
    space = "{http://www.w3.org/2000/svg}"
    marks = len(root.findall(f"{space}circle")) + len(root.findall(f"{space}path"))
    marks += len([r for r in root.findall(f"{space}rect") if r.get("width") == "7"])
    assert marks == sum(len(f.traits) for f in RADAR.families) + 4, "and one of each kind in the legend"


def test_the_command_needs_no_torch_and_writes_the_picture(tmp_path: Path) -> None:
    picture = tmp_path / "radar.svg"
    program = "import sys; sys.modules['torch'] = None; from dayzero.cli import main; sys.exit(main())"
    call = [sys.executable, "-c", program, "radar", str(CONFIGS / "qwen3_8b.json"), "--json", "--picture", str(picture)]
    done = subprocess.run(call, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"].endswith("qwen3_8b.json") and picture.read_text().startswith("<svg")
    done = subprocess.run([*call[:-1], str(tmp_path / "radar.bmp")], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "ends in .svg" in done.stderr
