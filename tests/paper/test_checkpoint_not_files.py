"""Names of weights with no file behind them (a link to nothing, a folder, a pipe): a fault, not absent weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dayzero.checkpoint.source import open_source
from dayzero.errors import CheckpointError
from dayzero.planner.inspect import inspect_source
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.planner import plan_source
from tests.paper.inspect_checkpoints import table_of, write_folder
from tests.paper.test_inspect_findings import fails, small_dense

KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "link to nothing": (lambda path: path.symlink_to("blobs/gone"), "a link to nothing"),
    "link to itself": (lambda path: path.symlink_to(path.name), "a link that leads to itself"),
    "folder": (lambda path: path.mkdir(), "a folder"),
    "pipe": (os.mkfifo, "a device or a pipe"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, small_dense(), table_of(small_dense()))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_that_are_no_file(kind: str, folder: Path) -> None:
    """The hub's cache leaves such a link behind when a download breaks off: it passed as a config alone."""
    make, said = KINDS[kind]
    (folder / "model.safetensors").unlink()
    make(folder / "model.safetensors")
    found = fails(inspect_source(str(folder)))
    assert list(found) == ["integrity.not_a_file"] and said in found["integrity.not_a_file"].claim
    with pytest.raises(CheckpointError, match=said):
        plan_source(str(folder), PlanOptions("h100"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_config_that_is_no_file(kind: str, folder: Path) -> None:
    make, said = KINDS[kind]
    (folder / "config.json").unlink()
    make(folder / "config.json")
    for command in (inspect_source, lambda where: plan_source(where, PlanOptions("h100"))):
        with pytest.raises(CheckpointError, match=f"config.json of .* is {said}"):
            command(str(folder))


def test_a_sharded_checkpoint_names_the_shard_and_what_it_is(tmp_path: Path) -> None:
    write_folder(tmp_path, small_dense(), table_of(small_dense()), num_shards=3)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to("gone")
    claims = [f.claim for f in inspect_source(str(tmp_path)).findings if f.kind == "integrity.not_a_file"]
    assert claims == [f"{shard.name} is a link to nothing, not a file of weights"]


def test_links_to_other_things_are_nobodys_fault(folder: Path) -> None:
    (folder / "README.md").symlink_to("gone")
    assert open_source(str(folder)).not_files == {} and fails(inspect_source(str(folder))) == {}


def test_plan_refuses_damaged_files(folder: Path) -> None:
    """A cut file has every header entry; a plan over it would promise what cannot be loaded."""
    size = (folder / "model.safetensors").stat().st_size
    os.truncate(folder / "model.safetensors", size - 100)
    with pytest.raises(CheckpointError, match="damaged") as caught:
        plan_source(str(folder), PlanOptions("h100"))
    assert "model.safetensors" in str(caught.value) and caught.value.exit_code == 1
