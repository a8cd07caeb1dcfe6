"""Vocabularies for the tests of the tiktoken form and of XTML: one with the real ids, and the small one of twins."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dayzero.chat.stand_ins import REAL_RANKS, xtml_files
from dayzero.chat.tiktoken_form import TiktokenTokenizer, Vocabulary, read_vocabulary
from dayzero.checkpoint.source import open_source

SMALL_RANKS = 256


def write_files(folder: Path, num_ranks: int = SMALL_RANKS) -> Path:
    """A folder as a publisher ships one, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text('{"model_type": "x"}')
    for name, text in xtml_files(num_ranks).items():
        (folder / name).write_text(text)
    return folder


@cache
def vocabulary(num_ranks: int = SMALL_RANKS) -> Vocabulary:
    with TemporaryDirectory() as folder:
        return read_vocabulary(open_source(str(write_files(Path(folder), num_ranks))))


@cache
def tokens(num_ranks: int = SMALL_RANKS) -> TiktokenTokenizer:
    return TiktokenTokenizer(vocabulary(num_ranks))


def real_size() -> TiktokenTokenizer:
    """Special ids as published; what letters come to is made up."""
    return tokens(REAL_RANKS)
