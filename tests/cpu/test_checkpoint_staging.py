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


def test_an_expert_is_read_to_the_host(tmp_path: Path) -> None:
    decl = ParamDecl("e", (3, 4, 5), "linear")
    tensors = {f"x.{i}": seeded(4, 5, seed=i) for i in range(3)}
    loader = make_loader(tmp_path, tensors, [decl], [Rule("x.{e}", "e[{e}]")])
    loader.place("meta")
    got = loader.expert(["e"], 1)["e"]
    assert isinstance(got, Tensor) and got.device == CPU and torch.equal(got, tensors["x.1"])
