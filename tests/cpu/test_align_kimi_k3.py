"""Both twins of the family against its plain forward, images included, and what align does with images and experts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from small_models import write_small

from dayzero.acceptance.align import AlignOptions, AlignReport, align_source
from dayzero.acceptance.pictures import add_pictures, pictures_of, where
from dayzero.acceptance.prompt import Ids
from dayzero.acceptance.trace import Trace
from dayzero.arch.vision import PatchTower
from dayzero.blocks.open import open_model
from dayzero.errors import UsageError
from tests.cpu.faults.edit import drop

TWINS = ("kimi_k3", "kimi_k31")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: write_small(name, tmp_path_factory.mktemp(name)) for name in TWINS}


@pytest.fixture(scope="module")
def records(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, AlignReport]]:
    root = tmp_path_factory.mktemp("traces")
    out = {}
    for name, folder in folders.items():
        trace = root / name
        out[name] = trace, align_source(str(folder), AlignOptions(threads=1, record=str(trace)))
    return out


def tower(folder: Path) -> PatchTower:
    found = open_model(str(folder)).spec.vision
    assert isinstance(found, PatchTower)
    return found


@pytest.mark.parametrize("name", TWINS)
def test_the_twin_is_aligned_with_its_plain_forward(
    name: str, records: dict[str, tuple[Path, AlignReport]], folders: dict[str, Path]
) -> None:
    _, report = records[name]
    assert report.oracle["name"] == "plain forward of Kimi K3 and K3.1"
    assert report.verdict == "pass", [f for f in report.findings if f.verdict != "pass"]
    assert report.first_diverging is None
    choices = {c.site: c.choice for c in report.choices}
    assert all(not choice.differing for choice in choices.values()), "sets are equal, not only up to ties"
    assert len([site for site in choices if site.endswith(".experts")]) == 8
    assert len([site for site in choices if site.endswith(".index")]) == (3 if name == "kimi_k31" else 0)
    sites = {s.site for s in report.sites}
    blocks = {f"vision.blocks.{i}" for i in range(tower(folders[name]).layers)}
    assert {"vision.embed", "vision", "layers.8.carry.bank", "final_norm"} | blocks <= sites
    assert report.num_tokens == 48 and "2 seeded images" in report.text


def test_the_twin_shows_what_the_model_has(folders: dict[str, Path]) -> None:
    """Sizes at which a wrong port differs: padded decay rates, top-k below the length, three blocks of the residual."""
    text = json.loads((folders["kimi_k31"] / "config.json").read_text())["text_config"]
    linear = text["linear_attn_config"]
    assert linear["num_heads"] < linear["head_dim"]
    assert text["dsa_config"]["top_k"] < 48 / 4
    assert text["num_hidden_layers"] > 2 * text["attn_res_block_size"]


def test_a_recorded_trace_holds_its_images(
    records: dict[str, tuple[Path, AlignReport]], folders: dict[str, Path]
) -> None:
    path, report = records["kimi_k31"]
    trace, spec = Trace(path), tower(folders["kimi_k31"])
    pixels = pictures_of(trace)
    assert [tuple(p.shape) for p in pixels] == [(24, 16, 3), (8, 40, 3)]
    at = where(trace.tokens, spec, pixels)
    assert all(trace.tokens[first : first + n] == [spec.pad_id] * n for first, n in at)
    again = align_source(str(folders["kimi_k31"]), AlignOptions(threads=1, trace=str(path), num_tokens=48))
    assert (again.verdict, [s.site for s in again.sites]) == ("pass", [s.site for s in report.sites])


def test_an_index_without_a_key_bias_is_aligned_too(folders: dict[str, Path], tmp_path: Path) -> None:
    """Whether the released files have one is not known."""
    folder = shutil.copytree(folders["kimi_k31"], tmp_path / "bare")
    drop("indexer.k_norm.bias")(folder)
    report = align_source(str(folder), AlignOptions(threads=1, num_tokens=32))
    assert report.verdict == "pass" and report.first_diverging is None, report.findings


def test_few_tokens_and_given_ids_have_no_images_and_say_so(folders: dict[str, Path], tmp_path: Path) -> None:
    """Three tokens leave experts that nobody chose: the oracle spares them, and that is no finding."""
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([7, 300, 12]))
    for more in ({"num_tokens": 3}, {"tokens": str(ids)}):
        report = align_source(str(folders["kimi_k3"]), AlignOptions(threads=1, **more))
        said = {f.kind: f.verdict for f in report.findings}
        assert report.verdict == "note" and said["align.vision"] == "note" and said["align.tensors"] == "pass"
        assert not any(s.site.startswith("vision") for s in report.sites)


def test_images_take_a_share_of_the_tokens(folders: dict[str, Path]) -> None:
    spec = tower(folders["kimi_k3"])
    few = Ids([1] * 21, "ids")
    assert add_pictures(few, spec, 512) == (few, ())
    ids, pixels = add_pictures(Ids([spec.pad_id] * 22, "ids"), spec, 512)
    assert len(ids.tokens) == 22 and ids.tokens.count(spec.pad_id) == 11
    assert [n for _, n in where(ids.tokens, spec, pixels)] == [6, 5]
    assert all(p.dtype == torch.uint8 for p in pixels)
    with pytest.raises(UsageError, match="placeholders"):
        where(ids.tokens[:-1] + [spec.pad_id], spec, pixels)
