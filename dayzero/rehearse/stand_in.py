"""A stand-in tokenizer for twins whose source has none: bytes, plus the special ids the config names."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.json", "merges.txt",
    "tokenizer.model", "tiktoken.model", "chat_template.jinja", "chat_template.json", "added_tokens.json",
)  # fmt: skip


def write_stand_in(folder: Path, vocab: int, stop_ids: Iterable[int]) -> None:
    """tokenizer.json: byte-level, ids 0..255 are bytes; one added token for each stop id. Needs vocab >= 260."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {char: i for i, char in enumerate(alphabet)}
    stops = sorted(i for i in set(stop_ids) if len(words) <= i < vocab)
    filler = max([len(words), *(i + 1 for i in stops)])
    for i in range(len(words), filler):
        words["<|end|>" if stops and i == stops[0] else f"<|unused_{i}|>"] = i
    tokenizer = Tokenizer(models.BPE(vocab=words, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [w for w, i in words.items() if i >= len(alphabet)]
    tokenizer.add_special_tokens([AddedToken(w, special=True) for w in special])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": TEMPLATE,
        "model_max_length": 1 << 20,
    }
    if stops:
        config["eos_token"] = "<|end|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
