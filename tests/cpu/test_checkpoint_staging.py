"""Bytes on their way to a device: the same parameters to the bit, each byte once, host memory that does not grow.

A CPU stands for the device here: what the pieces, their buffers and the threads do is the same there.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dayzero.checkpoint import staging
from dayzero.checkpoint.rules import Fuse, Narrow, Rule
from dayzero.checkpoint.source import LocalSource
from dayzero.checkpoint.staging import Staging
from dayzero.checkpoint.stream import Loader
from dayzero.decl import ParamDecl
from dayzero.errors import CheckpointError
from tests.cpu.test_checkpoint_stream import FP8, make_loader, seeded, stored_fp8

CPU = torch.device("cpu")


def staged(loader: Loader, piece: int = 1000, buffers: int = 3) -> Loader:
    loader._staging = Staging(CPU, piece, buffers)
    return loader


@pytest.mark.parametrize("piece", [1, 7, 4096])
def test_parameters_are_the_same_and_every_byte_is_read_once(piece: int, tmp_path: Path) -> None:
    decls = [ParamDecl("a", (33, 5)), ParamDecl("b", (4, 6)), ParamDecl("c", (140, 64)), ParamDecl("d", (6, 8))]
    rules = [Rule("a", "a"), Fuse(("x", "y"), "b"), Rule("c.weight", "c"), Narrow("d", "d", 8)]
    tensors: dict[str, Tensor] = {
        "a": seeded(33, 5).bfloat16(), "x": seeded(2, 6), "y": seeded(2, 6, seed=1),
        **stored_fp8("c.weight", seeded(140, 64)), "d": torch.cat((seeded(6, 8), torch.zeros(2, 8))),
    }  # fmt: skip
    plain = make_loader(tmp_path, tensors, decls, rules, claim=FP8)
    loader = staged(make_loader(tmp_path, tensors, decls, rules, claim=FP8), piece)
    begun = loader.source.bytes_read  # headers
    for decl in decls:
        want, got = plain.load(decl.name)[decl.name], loader.load(decl.name)[decl.name]
        assert torch.equal(want, got) and want.dtype == got.dtype and want.stride() == got.stride()
    assert loader.bytes_read == plain.bytes_read == loader.source.bytes_read - begun
    assert loader.findings == plain.findings


def test_more_threads_than_buffers_wait_for_one(tmp_path: Path) -> None:
    """Each range through the one buffer, whoever comes first; nobody finds another's bytes."""
    data = torch.arange(20_000, dtype=torch.int32).view(torch.uint8)
    (tmp_path / "f").write_bytes(data.numpy().tobytes())
    source, stage, got = LocalSource(tmp_path), Staging(CPU, 64, 1), {}
    stage.begin()

    def read(number: int) -> None:
        got[number] = stage.bring(source, "f", 1000 * number, 1000)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert all(torch.equal(got[i], data[1000 * i : 1000 * (i + 1)]) for i in range(8))


def test_a_file_that_shrinks_gives_its_buffer_back(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(100))
    source, stage = LocalSource(tmp_path), Staging(CPU, 16, 1)
    source.files()
    (tmp_path / "f").write_bytes(bytes(40))
    for _ in range(3):  # a lost buffer would be waited for without end
        with pytest.raises(CheckpointError, match="became shorter while it was being read"):
            stage.bring(source, "f", 0, 100)
    assert torch.equal(stage.bring(source, "f", 8, 20), torch.zeros(20, dtype=torch.uint8))


def test_reading_into_memory_is_reading(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(200)))
    source = LocalSource(tmp_path)
    into = bytearray(50)
    source.read_into("f", 30, memoryview(into))
    assert bytes(into) == source.read("f", 30, 50) and (source.bytes_read, source.num_reads) == (100, 2)
    source.read_into("f", 30, memoryview(bytearray()))
    assert source.num_reads == 2
    with pytest.raises(CheckpointError, match="200 bytes, but bytes 190 to 240 are needed"):
        source.read_into("f", 190, memoryview(into))


def test_a_loader_reads_ahead_of_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several ranges are under way while one is decoded; their results come in the files' order."""
    num = 9
    decls = [ParamDecl(f"p.{i}", (64, 8)) for i in range(num)]
    tensors = {f"t{i}": seeded(64, 8, seed=i) for i in range(num)}
    loader = staged(make_loader(tmp_path, tensors, decls, [Rule(f"t{i}", f"p.{i}") for i in range(num)]), 256, 6)
    under_way, most, lock, bring = 0, 0, threading.Lock(), Staging.bring
    together = threading.Barrier(2)

    def slow(self: Staging, *given: object) -> Tensor:
        nonlocal under_way, most
        with lock:
            under_way += 1
            most = max(most, under_way)
        try:
            together.wait(5)
        except threading.BrokenBarrierError:  # the last one has no other to wait for
            pass
        value = bring(self, *given)  # type: ignore[arg-type]
        with lock:
            under_way -= 1
        return value

    monkeypatch.setattr(Staging, "bring", slow)
    loaded = loader.load("p")
    assert 2 <= most <= staging.NUM_READERS
    assert all(torch.equal(loaded[f"p.{i}"], tensors[f"t{i}"]) for i in range(num))


def experts_of(tmp_path: Path) -> tuple[Loader, dict[str, Tensor]]:
    """Three experts of one matrix, behind a tensor whose odd size leaves nothing aligned."""
    decls = [ParamDecl("e", (3, 4, 5), "linear"), ParamDecl("a", (7,))]
    tensors = {"a0": seeded(7).bfloat16(), **{f"x.{i}": seeded(4, 5, seed=i).bfloat16() for i in range(3)}}
    return make_loader(tmp_path, tensors, decls, [Rule("x.{e}", "e[{e}]"), Rule("a0", "a")]), tensors


def test_an_expert_comes_to_the_device_in_pieces(tmp_path: Path) -> None:
    loader, tensors = experts_of(tmp_path)
    staged(loader, 16)
    begun, reads = loader.source.bytes_read, loader.source.num_reads
    got = loader.expert(["e"], 1)["e"]
    assert isinstance(got, Tensor) and torch.equal(got, tensors["x.1"].to(got.dtype))
    assert loader.source.bytes_read - begun == 40 and loader.source.num_reads - reads == 3
    loader.place("meta")
    elsewhere = loader.expert(["e"], 1)["e"]
    assert isinstance(elsewhere, Tensor) and elsewhere.is_meta


def test_ranges_that_touch_come_with_one_read_and_are_aligned(tmp_path: Path) -> None:
    data = torch.arange(250, dtype=torch.uint8)
    (tmp_path / "f").write_bytes(data.numpy().tobytes())
    source, stage = LocalSource(tmp_path), Staging(CPU, 1000, 2)
    extents = [("f", 103, 8), ("f", 10, 6), ("f", 100, 3), ("f", 20, 0), ("f", 111, 16)]
    got = stage.bring_together(source, extents)
    assert [part.tolist() for part in got] == [data[first : first + size].tolist() for _, first, size in extents]
    assert source.num_reads == 2
    assert all(part.storage_offset() % 8 == 0 for part in got), "a view as numbers of eight bytes is possible"
    assert got[4].view(torch.int64).shape == (2,)


def test_buffers_are_let_go_and_made_again(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(bytes(range(200)))
    source, stage = LocalSource(tmp_path), Staging(CPU, 16, 3)
    assert held(stage) == 0, "none before the first read"
    for _ in range(2):
        stage.bring(source, "f", 0, 100)
        assert held(stage) >= 1
        stage.free()
        assert held(stage) == 0
    assert stage.bring(source, "f", 7, 20).tolist() == list(range(7, 27))


def held(stage: Staging) -> int:
    """Buffers there are."""
    found = [stage._free.get() for _ in range(stage._num)]
    for one in found:
        stage._free.put(one)
    return sum(one is not None for one in found)
