"""Loading weights against reading the same bytes: from disk and from the page cache, to a device.

    python benchmarks/load.py CONFIG FOLDER --device cuda --set num_hidden_layers=12

FOLDER gets a checkpoint of full width (deleted afterwards). Rounds are interleaved: a plain sequential read of all
shards, then a load into parameters, each with the files in the page cache and without. What a load is held to: 1.3
times the read.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import torch

from dayzero.blocks.open import open_model
from dayzero.console import duration_text
from dayzero.planner.memory import peak_rss_bytes
from dayzero.rehearse.twin import TwinOptions, write_twin
from dayzero.units import bytes_text

PATTERN_BYTES = 64 * 2**20
READ_BYTES = 16 * 2**20
GOAL = 1.3


def fill(shard: Path) -> None:
    """Random bf16 values behind the header of a sparse shard: what a disk or a file system cannot make small."""
    pattern = torch.randn(PATTERN_BYTES // 2).mul_(0.02).bfloat16().view(torch.uint8).numpy().tobytes()
    with open(shard, "r+b") as handle:
        at = 8 + int.from_bytes(handle.read(8), "little")
        size = shard.stat().st_size
        while at < size:
            handle.seek(at)
            at += handle.write(pattern[: size - at])
        os.fsync(handle.fileno())


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def forget(folder: Path) -> None:
    """Drop the shards from the page cache."""
    for shard in shards(folder):
        with open(shard, "rb") as handle:
            os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def plain_read(folder: Path) -> float:
    """Seconds of one thread that reads everything, in order, into one buffer."""
    buffer, began = bytearray(READ_BYTES), time.perf_counter()
    for shard in shards(folder):
        with open(shard, "rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass
    return time.perf_counter() - began


def load(folder: Path, device: str) -> tuple[float, int]:
    """(seconds, bytes read) from a model that is opened to parameters that are on the device, a layer at a time."""
    model = open_model(str(folder), dtype=torch.bfloat16)
    model.loader.place(device)
    prefixes = sorted(
        {".".join(name.split(".")[:2]) if name.startswith("layers.") else name for name in model.loader.names()}
    )
    began = time.perf_counter()
    kept = [model.loader.load(prefix) for prefix in prefixes]
    if device == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    del kept
    return seconds, model.loader.bytes_read


def measure(folder: Path, device: str, rounds: int) -> bool:
    size = sum(shard.stat().st_size for shard in shards(folder))
    within = True
    for word in ("page cache", "disk"):
        reads, loads = [], []
        for _ in range(rounds):
            for times, one in ((reads, lambda: plain_read(folder)), (loads, lambda: load(folder, device)[0])):
                forget(folder) if word == "disk" else plain_read(folder)
                times.append(one())
        ratio = statistics.median(b / a for a, b in zip(reads, loads, strict=True))
        read, loaded = statistics.median(reads), statistics.median(loads)
        within &= ratio <= GOAL
        print(
            f"{word}: {bytes_text(size)} read in {read:.2f} s ({size / read / 1e9:.1f} GB/s), loaded in {loaded:.2f} s "
            f"({size / loaded / 1e9:.1f} GB/s): {ratio:.2f} x (goal {GOAL})"
        )
    print(f"peak host memory {bytes_text(peak_rss_bytes())}")
    return within


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("folder")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    given = parser.parse_args()
    if given.device == "cuda":
        torch.zeros(1, device="cuda")
    changes = {key: json.loads(value) for key, value in (one.split("=", 1) for one in given.set)}
    folder, began = Path(given.folder), time.perf_counter()
    write_twin(given.config, str(folder), TwinOptions(paper=True, changes=changes))
    try:
        for shard in shards(folder):
            fill(shard)
        print(f"written in {duration_text(time.perf_counter() - began)}")
        return 0 if measure(folder, given.device, given.rounds) else 1
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
