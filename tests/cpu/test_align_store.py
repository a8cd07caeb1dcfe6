"""Alignment of a checkpoint in an object store: against a stored trace; an oracle of this machine needs a folder."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from align_support import ORACLES, write_dense

from dayzero.acceptance.align import AlignOptions, align_source
from dayzero.blocks.moe import stacked_experts
from dayzero.blocks.open import open_model
from dayzero.errors import UsageError
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.paper.store import s3_server, upload

CONFIGS = Path(__file__).parent.parent / "paper" / "configs"
PLAIN = str(ORACLES / "plain_llama.py")


@pytest.fixture(scope="module", autouse=True)
def _server() -> Iterator[None]:
    with s3_server():
        yield


def test_a_stored_trace_aligns_what_is_in_a_store(tmp_path: Path) -> None:
    folder, trace = write_dense(tmp_path / "m"), str(tmp_path / "trace")
    near = align_source(str(folder), AlignOptions(oracle=PLAIN, record=trace, threads=1, num_tokens=20))
    store = upload(folder, "dense")
    far = align_source(store, AlignOptions(trace=trace, threads=1))
    assert far.verdict == "pass" and far.source == store and far.fingerprint == near.fingerprint
    assert [s.distance for s in far.sites] == [s.distance for s in near.sites] and far.logits == near.logits
    for oracle in (None, PLAIN):
        record = str(tmp_path / "other")
        with pytest.raises(UsageError, match=r"s3://releases/dense is remote; copy the checkpoint here, or .*--trace"):
            align_source(store, AlignOptions(oracle=oracle, record=record, num_tokens=20))
    assert not list(tmp_path.glob("other*"))


def test_single_experts_come_out_of_a_store(tmp_path: Path) -> None:
    shutil.copy(CONFIGS / "gpt_oss_20b.json", tmp_path / "config.json")
    write_twin(str(tmp_path / "config.json"), str(tmp_path / "twin"), TwinOptions())
    near, far = open_model(str(tmp_path / "twin")), open_model(upload(tmp_path / "twin", "experts"))
    before = far.source.bytes_read
    lazy = far.loader.load("layers.1", stacked_experts(far.spec))
    resident_bytes = far.source.bytes_read - before
    whole = near.loader.load("layers.1")
    for matrix in ("gate", "up", "down"):
        name = f"layers.1.channel.experts.{matrix}"
        assert torch.equal(lazy[name][3], whole[name][3])
    read = far.source.bytes_read - before - resident_bytes
    assert 0 < read == (near.loader.bytes_read - resident_bytes) / whole[name].shape[0]
