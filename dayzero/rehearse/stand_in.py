"""A stand-in tokenizer for twins whose source has none: bytes, plus the special ids the config names; for a family
whose chat format needs more tokens than that, a vocabulary in the family's own form.

Run as a program it writes the latter in full size, with the real special ids: ``python -m dayzero.rehearse.stand_in``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from dayzero.chat.stand_ins import REAL_RANKS, stand_in_files, xtml_files

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "tokenizer.model", "tiktoken.model", "chat_template.jinja", "chat_template.json", "added_tokens.json",
)  # fmt: skip


VOCABULARIES = ("tokenizer.json", "tiktoken.model")  # of FILES, those that hold the vocabulary itself


def write_stand_in(folder: Path, family: str, vocab: int, stop_ids: Iterable[int]) -> None:
    """Write the files of ``stand_in_texts``, without gaps among the ids. Needs vocab >= 260."""
    for file, text in stand_in_texts(family, vocab, stop_ids, filled=True).items():
        (folder / file).write_text(text, encoding="utf-8")


def stand_in_texts(family: str, vocab: int, stop_ids: Iterable[int], *, filled: bool = False) -> dict[str, str]:
    """Name -> text of tokenizer.json and its config: byte-level, ids 0..255 are bytes; an added token for each stop id.

    Where the family's chat format needs tokens of its own: the files of ``stand_in_files`` instead. filled: the ids
    between are tokens too, which no text has.
    """
    stop_ids = tuple(stop_ids)
    return stand_in_files(family, vocab, stop_ids) or _bytes_alone(vocab, stop_ids, filled)


def _bytes_alone(vocab: int, stop_ids: tuple[int, ...], filled: bool) -> dict[str, str]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {char: i for i, char in enumerate(alphabet)}
    stops = sorted(i for i in set(stop_ids) if len(words) <= i < vocab)
    for i in range(len(alphabet), max([len(alphabet), *(i + 1 for i in stops)])) if filled else stops:
        words["<|end|>" if stops and i == stops[0] else f"<|unused_{i}|>"] = i
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [w for w, i in words.items() if i >= len(alphabet)]
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in special])
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "model_max_length": 1 << 20,
    }
    if stops:
        config["eos_token"] = "<|end|>"
    return {"tokenizer.json": tokenizer.to_str(pretty=True), "tokenizer_config.json": json.dumps(config, indent=1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the tokenizer files of a family at their real ids, into a folder that is made where there is none."""
    parser = argparse.ArgumentParser(prog="python -m dayzero.rehearse.stand_in", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--ranks", type=int, default=REAL_RANKS, help="tokens below the added ones (default: %(default)s)"
    )
    asked = parser.parse_args(arguments)
    if not 256 <= asked.ranks <= 1 << 24:
        parser.error(f"--ranks {asked.ranks} is outside 256 to {1 << 24}; every byte needs one")
    asked.folder.mkdir(parents=True, exist_ok=True)
    for file, text in xtml_files(asked.ranks).items():
        (asked.folder / file).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
