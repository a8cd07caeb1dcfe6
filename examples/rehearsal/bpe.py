"""Byte-pair encoding: learning a small vocabulary, and encoding with it, in plain Python.

The vocabulary is written in the family's own form (``tiktoken.model``), and texts are cut into words as the family's
tokenizer cuts them, so that ids made here are those of the service. That holds for ASCII, all that the corpus has; the
expression below is the publisher's, reduced to it. Digits stand alone: no text that is learnt from has two in a row.
"""

from __future__ import annotations

import base64
import heapq
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

NUM_ADDED = 256  # ids behind the ranks that the form keeps for control tokens
WORDS = re.compile(
    r"[^\r\nA-Za-z0-9]?[A-Z]*[a-z]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\nA-Za-z0-9]?[A-Z]+[a-z]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[0-9]{1,3}| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    re.ASCII,
)
# Offset behind the ranks -> (text, whether it is marked special), as in the release.
CONTROL: Mapping[int, tuple[str, bool]] = {
    0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|end_of_msg|>", True), 3: ("<|open|>", False),
    4: ("<|close|>", False), 5: ("<|sep|>", False), 18: ("<|media_begin|>", True), 19: ("<|media_content|>", True),
    20: ("<|media_end|>", True), 21: ("<|media_pad|>", True), 254: ("[UNK]", True), 255: ("[PAD]", True),
}  # fmt: skip

Pair = tuple[int, int]


def learn(text: str, num_ranks: int) -> list[bytes]:
    """Tokens by rank: every byte, then ``num_ranks - 256`` merges, the most frequent pair first.

    Of pairs as frequent as each other the one with the smaller ids is taken, so the result is a function of the text.
    """
    counts = Counter(WORDS.findall(text))
    words = [(list(word.encode()), count) for word, count in sorted(counts.items())]
    tokens = [bytes((byte,)) for byte in range(256)]
    totals: Counter[Pair] = Counter()
    holders: dict[Pair, set[int]] = defaultdict(set)
    for number, (ids, count) in enumerate(words):
        for pair in pairwise(ids):
            totals[pair] += count
            holders[pair].add(number)
    heap = [(-total, pair) for pair, total in totals.items()]
    heapq.heapify(heap)
    while len(tokens) < num_ranks and heap:
        total, pair = heapq.heappop(heap)
        if -total != totals[pair] or not totals[pair]:
            continue  # an older count of this pair
        new = len(tokens)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        changed: set[Pair] = set()
        for number in holders.pop(pair):
            ids, count = words[number]
            for old in pairwise(ids):
                totals[old] -= count
                changed.add(old)
            ids[:] = merged(ids, pair, new)
            for fresh in pairwise(ids):
                totals[fresh] += count
                holders[fresh].add(number)
                changed.add(fresh)
        for one in changed - {pair}:
            heapq.heappush(heap, (-totals[one], one))
        del totals[pair]
    return tokens


def merged(ids: Sequence[int], pair: Pair, new: int) -> list[int]:
    out: list[int] = []
    at = 0
    while at < len(ids):
        if at + 1 < len(ids) and (ids[at], ids[at + 1]) == pair:
            out.append(new)
            at += 2
        else:
            out.append(ids[at])
            at += 1
    return out


class Encoder:
    """Text to ids. tokens: by rank. Control tokens are never made from text; ``control`` gives their ids."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self.tokens = list(tokens)
        self._ranks = {token: rank for rank, token in enumerate(tokens)}
        self._known: dict[str, list[int]] = {}
        self.control = {text: len(tokens) + offset for offset, (text, _) in CONTROL.items()}

    @property
    def vocab_size(self) -> int:
        return len(self.tokens) + NUM_ADDED

    def encode(self, text: str) -> list[int]:
        out: list[int] = []
        for word in WORDS.findall(text):
            ids = self._known.get(word)
            if ids is None:
                ids = self._known[word] = self._word(word)
            out += ids
        return out

    def decode(self, ids: Iterable[int]) -> str:
        """Control tokens are left out."""
        return b"".join(self.tokens[i] for i in ids if i < len(self.tokens)).decode(errors="replace")

    def _word(self, word: str) -> list[int]:
        """Of neighbours that make a token, those of the lowest rank are joined first."""
        parts = [bytes((byte,)) for byte in word.encode()]
        while len(parts) > 1:
            ranks = [self._ranks.get(a + b, len(self.tokens)) for a, b in pairwise(parts)]
            rank = min(ranks)
            if rank == len(self.tokens):
                break
            at = ranks.index(rank)
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return [self._ranks[part] for part in parts]


def read(path: Path) -> Encoder:
    """The encoder of a ``tiktoken.model``."""
    lines = path.read_text(encoding="ascii").split("\n")
    return Encoder([base64.b64decode(line.split(" ")[0]) for line in lines if line])


def write(folder: Path, encoder: Encoder) -> None:
    """``tiktoken.model`` and ``tokenizer_config.json``, as a release has them."""
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(encoder.tokens)]
    (folder / "tiktoken.model").write_text("".join(lines), encoding="ascii")
    first = len(encoder.tokens)
    listed = {
        str(first + offset): {"content": text, "special": special, "lstrip": False, "rstrip": False,
                              "single_word": False, "normalized": False}
        for offset, (text, special) in CONTROL.items()
    }  # fmt: skip
    config = {
        "added_tokens_decoder": listed,
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "model_max_length": 8192,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
