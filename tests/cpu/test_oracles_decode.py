"""The oracle's own reader: shards, raw bytes, damage, independence, memory."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from dayzero.oracles.decode import open_checkpoint


def test_reader_lists_shards_and_reads_raw(tmp_path):
    a, b = torch.arange(6).reshape(2, 3), torch.randn(4).bfloat16()
    save_file({"a": a}, tmp_path / "x-1.safetensors")
    save_file({"b": b, "empty": torch.empty(0, 3)}, tmp_path / "x-2.safetensors")
    reader = open_checkpoint(tmp_path)
    assert reader.names() == ["a", "b", "empty"]
    assert torch.equal(reader.raw("a"), a)
    assert torch.equal(reader.raw("b"), b)
    assert reader.raw("empty").shape == (0, 3)
    index = {"weight_map": {"a": "x-1.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_checkpoint(tmp_path).names() == ["a"]


def test_reader_refuses_damage(tmp_path):
    save_file({"a": torch.ones(8)}, tmp_path / "x.safetensors")
    whole = (tmp_path / "x.safetensors").read_bytes()
    for damaged in (b"", whole[:4], whole[:20], whole[:-1], b"\xff" * 8 + whole[8:]):
        (tmp_path / "x.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match="x.safetensors"):
            open_checkpoint(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(whole)
    with pytest.raises(KeyError, match="b.weight"):
        open_checkpoint(tmp_path).tensor("b.weight")


def test_reader_imports_nothing_of_the_package():
    code = (
        "import sys, dayzero.oracles.decode\n"
        "mine = {m for m in sys.modules if m.startswith('dayzero')}\n"
        "sys.exit(mine != {'dayzero', 'dayzero.oracles', 'dayzero.oracles.decode'})"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_reader_holds_one_tensor_not_the_file(tmp_path):
    # 128 MiB of file, 1 MiB a tensor: reading one after another must not keep them.
    save_file({f"t{i}": torch.zeros(1 << 18) for i in range(128)}, tmp_path / "x.safetensors")
    code = (
        "import resource, sys\nfrom dayzero.oracles.decode import open_checkpoint\n"
        "reader = open_checkpoint(sys.argv[1])\nreader.tensor('t0')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for name in reader.names():\n    reader.tensor(name)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, capture_output=True, text=True)
    assert int(done.stdout) < 16 * 1024  # KiB
