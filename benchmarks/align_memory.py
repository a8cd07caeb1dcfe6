"""Peak memory of align on a twin of at least 6 GB: both sides stream, so neither holds more than a layer or a few
thousand rows of the vocabulary.

    python benchmarks/align_memory.py [--layers N]

Writes the twin into a temporary folder (about 8 GB of disk), aligns 16 tokens, prints both processes' peak RSS.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.measure import dayzero, load_text

CONFIG = Path(__file__).parents[1] / "tests" / "paper" / "configs" / "qwen3_8b.json"
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,  # embedding and head of 1.2 GB each in float32: neither may be held whole
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=64)
    layers = parser.parse_args().layers
    print(load_text())
    folder = Path(tempfile.mkdtemp(prefix="dayzero-align-"))
    try:
        shutil.copy(CONFIG, folder / "config.json")
        twin = str(folder / "twin")
        changes = [f"--set={key}={value}" for key, value in {**SIZES, "num_hidden_layers": layers}.items()]
        made = dayzero("twin", str(folder / "config.json"), twin, "--json", *changes)
        print("twin:", made.text(), json.loads(made.out)["total_bytes"], "bytes")
        done = dayzero("align", twin, "--tokens", "16", "--json")
        print("align:", done.text())
        report = json.loads(done.out)
        for side, peak in report["peak_rss_bytes"].items():
            print(f"  {side}: {peak / 2**20:.0f} MiB   goal: ≤ 2048 MiB")
        print("  verdict:", report["verdict"])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
