"""Small tokenizers and folders for the chat tests: byte-level BPE with merges, and the control tokens of a format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "The weather in Paris and in New York is fine today, said the assistant to the user. get_weather city days",
    "北京的天气很好。🦊🦊 naïve café — ça va? ÀÉÎ Ελληνικά русский язык",
    '{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}} <tool_call> </tool_call> <think> </think>',
]
CHATML = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>", "<|call|>")


@cache
def byte_level(special: tuple[str, ...] = CHATML, plain: tuple[str, ...] = ()) -> str:
    """tokenizer.json of a byte-level BPE: special tokens, and added ones that are not marked special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=sorted(alphabet), show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in plain])
    return tokenizer.to_str()


@cache
def sentencepiece() -> str:
    """tokenizer.json as converted sentencepiece models have it: ▁ for a space, bytes for what is unknown."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", *"abcdehilnortuw", "▁h", "▁w", "el"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "h"), ("▁", "w"), ("e", "l")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in words[:3]])
    out = json.loads(tokenizer.to_str())
    out["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "▁"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        ],
    }
    out["decoder"] = {
        "type": "Sequence",
        "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0},
        ],
    }
    return json.dumps(out)


def folder(path: Path, tokenizer: str | None = None, template: str | None = None, **files: Mapping[str, Any]) -> Path:
    """A folder as a publisher ships one. files: further JSON files, without their ending."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(files.pop("config", {"model_type": "x"})))
    if tokenizer is not None:
        (path / "tokenizer.json").write_text(tokenizer)
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def spelled(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The tokens of a prompt as texts."""
    return [tokenizer.text_of(i) for i in ids]
