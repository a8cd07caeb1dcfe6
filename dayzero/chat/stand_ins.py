"""Made-up vocabularies for twins whose chat format needs tokens of its own: real forms, real control tokens, no words.

The ids of a full-size one are the real ones, so counts and control tokens of a prompt are those of the publisher; what
letters come to is not, since the merges are made up.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import product

from dayzero.chat.encoding import OWN_ENCODERS
from dayzero.chat.tiktoken_form import CODE, CONFIG, FILE, NUM_ADDED, file_text

# Named added tokens of the family whose answers are XTML, counted from the first one; False: not marked special.
XTML_TOKENS: Mapping[int, tuple[str, bool]] = {
    0: ("[BOS]", True), 1: ("[EOS]", True), 2: ("<|end_of_msg|>", True), 3: ("<|open|>", False),
    4: ("<|close|>", False), 5: ("<|sep|>", False), 18: ("<|media_begin|>", True), 19: ("<|media_content|>", True),
    20: ("<|media_end|>", True), 21: ("<|media_pad|>", True), 254: ("[UNK]", True), 255: ("[PAD]", True),
}  # fmt: skip
END = 2  # the one that config.json names as the stop id
REAL_RANKS = 163_584


def stand_in_files(family: str, vocab: int, stop_ids: Iterable[int]) -> dict[str, str]:
    """Name -> text of the tokenizer files for a twin of ``family``; none where any vocabulary does.

    vocab: rows of the head. stop_ids: of its config, which place the added tokens.
    """
    if OWN_ENCODERS.get(family) != "xtml" or vocab < 256 + NUM_ADDED:
        return {}
    placed = [i - END for i in stop_ids if 256 <= i - END <= vocab - NUM_ADDED]
    return xtml_files(placed[0] if placed else vocab - NUM_ADDED)


def xtml_files(num_ranks: int) -> dict[str, str]:
    """The files with so many made-up ranks below the added tokens."""
    listed = {
        str(num_ranks + offset): {"content": text, "special": special, "lstrip": False, "rstrip": False,
                                  "single_word": False, "normalized": False}
        for offset, (text, special) in XTML_TOKENS.items()
    }  # fmt: skip
    config = {
        "added_tokens_decoder": listed,
        "auto_map": {"AutoTokenizer": [f"{CODE}.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "model_max_length": 1 << 20,
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    return {FILE: file_text(made_up_ranks(num_ranks)), CONFIG: json.dumps(config, indent=1) + "\n"}


def made_up_ranks(num_ranks: int) -> dict[bytes, int]:
    """Every byte under its own number, then pairs and triples of bytes, printable ones first."""
    order = sorted(range(256), key=lambda byte: (not 0x20 <= byte < 0x7F, byte))
    ranks = {bytes((byte,)): byte for byte in range(256)}
    for length in (2, 3):
        for letters in product(order, repeat=length):
            if len(ranks) == num_ranks:
                return ranks
            ranks[bytes(letters)] = len(ranks)
    return ranks
