"""A byte-level tokenizer of 270 ids, made by hand: every byte, ten merges, four special tokens."""

from __future__ import annotations

import json
from functools import lru_cache

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

PAD, END, THINK, THOUGHT = range(4)
SPECIAL = ("<|pad|>", "<|end|>", "<think>", "</think>")
MERGES = [("{", '"'), ('"', ":"), ("a", "b"), ("t", "h"), ("th", "e"), ('"', ","), ("1", "2"), ("Ġ", "the"), ('"', "}"),
          ("Ċ", "Ġ")]  # fmt: skip


@lru_cache(maxsize=1)
def small_tokenizer() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*SPECIAL, *letters, *("".join(pair) for pair in MERGES)]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, MERGES))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    return tokenizer


@lru_cache(maxsize=1)
def small_tokenizer_json() -> str:
    text = small_tokenizer().to_str()
    assert len(json.loads(text)["model"]["vocab"]) == 270
    return text
