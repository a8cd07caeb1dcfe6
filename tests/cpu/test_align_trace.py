"""Traces: what is written is read, and what does not belong to the checkpoint is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from align_support import script, write_dense
from hypothesis import given
from hypothesis import strategies as st

from dayzero.acceptance.trace import KEY, Trace, add_meta, fingerprint
from dayzero.blocks.open import open_model
from dayzero.errors import UsageError

wire = script("wire")


def write(path: Path, tokens: list[int] | None = None, room: int = 1 << 15) -> Path:
    with wire.TraceWriter(path, room) as writer:
        writer.put("embed", torch.arange(6.0).reshape(2, 3))
        writer.put("layers.0.experts", torch.tensor([[3, 1], [0, 2]], dtype=torch.int16))
        writer.close(wire.base_meta(tokens or [5, 7], {"name": "x"}, [f"t{i}" for i in range(1000)]))
    return path


def test_round_trip_and_added_meta(tmp_path: Path) -> None:
    path = write(tmp_path / "a.trace")
    add_meta(path, {"model": {"fingerprint": "f" * 64, "source": "s", "aligned": "real weights"}})
    trace = Trace(path)
    assert trace.sites() == ["embed", "layers.0.experts"] and trace.tokens == [5, 7]
    assert torch.equal(trace.get("embed"), torch.arange(6.0).reshape(2, 3))
    assert trace.get("layers.0.experts").tolist() == [[3, 1], [0, 2]]
    assert trace.meta["num_unused"] == 1000 and len(trace.meta["unused"]) < 1000
    assert trace.meta["peak_rss_bytes"] > 1 << 20
    trace.check("f" * 64, [5, 7])


def test_a_trace_is_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    assert set(load_file(write(tmp_path / "a.trace"))) == {"embed", "layers.0.experts"}


def test_a_site_is_written_once_and_the_header_fits(tmp_path: Path) -> None:
    with wire.TraceWriter(tmp_path / "a", 1 << 15) as writer:
        writer.put("embed", torch.zeros(1))
        with pytest.raises(ValueError, match="came twice"):
            writer.put("embed", torch.zeros(1))
    with pytest.raises(ValueError, match="reserved"):
        write(tmp_path / "b", room=64)


def test_foreign_traces_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.trace")
    add_meta(path, {"model": {"fingerprint": "f" * 64}})
    with pytest.raises(UsageError, match="another checkpoint"):
        Trace(path).check("e" * 64, None)
    with pytest.raises(UsageError, match="other token ids"):
        Trace(path).check("f" * 64, [5, 8])
    with pytest.raises(UsageError, match=r"no values for layers\.7"):
        Trace(path).get("layers.7")
    with pytest.raises(UsageError, match="is no file"):
        Trace(tmp_path / "none")


def test_a_cut_trace_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.trace")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UsageError, match="cut short"):
        Trace(path).get("layers.0.experts")


def test_other_versions_are_refused(tmp_path: Path) -> None:
    header = json.dumps({"__metadata__": {KEY: json.dumps({"version": 99, "tokens": []})}}).encode()
    path = tmp_path / "a"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(UsageError, match="version 99"):
        Trace(path)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_sentence_and_never_a_traceback(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "x"
    path.write_bytes(data)
    with pytest.raises(UsageError):
        Trace(path)


def test_fingerprints_follow_config_names_and_bytes(tmp_path: Path) -> None:
    def mark(name: str, changes: dict[str, float] | None = None, seed: int = 0) -> str:
        model = open_model(str(write_dense(tmp_path / name, changes, seed)))
        return fingerprint(model.source, model.index, model.config)

    same = mark("a")
    assert mark("b") == same
    assert len({same, mark("c", seed=1), mark("d", {"rope_theta": 500.0})}) == 3
