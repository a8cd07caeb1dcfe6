"""The token ids that both sides read: from a file, a given text, the shipped text, or seeded without a tokenizer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayzero.blocks.open import LoadedModel
from dayzero.chat.tokenizer import open_tokenizer
from dayzero.errors import CheckpointError, UsageError

TEXT = Path(__file__).with_name("text.txt")  # King James Version, Genesis 1: public domain
TWIN_MARK = "dayzero_twin.json"
TWIN_TOKENS, REAL_TOKENS = 48, 64
SEED = 20261129


@dataclass(frozen=True, slots=True)
class Ids:
    """tokens, and where they come from in words."""

    tokens: list[int]
    source: str


def is_twin(model: LoadedModel) -> bool:
    return model.source.exists(TWIN_MARK)


def is_paper(model: LoadedModel) -> bool:
    """A twin whose files are holes."""
    if not is_twin(model):
        return False
    try:
        mark: Any = json.loads(model.source.text(TWIN_MARK))
    except ValueError:
        return False
    return isinstance(mark, dict) and mark.get("paper") is True


def token_ids(model: LoadedModel, ids_file: str | None, prompt: str | None, num_tokens: int | None) -> Ids:
    """Ids to align on. num_tokens: default 48 for a twin, 64 for real weights; a given text is cut, never repeated.

    UsageError for a file that is no JSON list of ids of this vocabulary, or a text without a tokenizer.
    """
    if ids_file is not None and prompt is not None:
        raise UsageError("--token-ids and --prompt both say what to read; give one.")
    vocab, longest = model.spec.vocab, model.spec.max_positions
    if num_tokens is not None and num_tokens > longest:
        raise UsageError(f"--tokens {num_tokens} is beyond the model's context of {longest}; give fewer.")
    wanted = num_tokens or (TWIN_TOKENS if is_twin(model) else REAL_TOKENS)
    if ids_file is not None:
        tokens = _read(ids_file, vocab)
        return Ids(tokens[:num_tokens], f"ids of {ids_file}")
    encode = _tokenizer(model)
    if prompt is not None:
        if encode is None:
            raise UsageError(f"--prompt needs a tokenizer, and {model.source.name} has no tokenizer.json; give ids.")
        tokens = encode(prompt)[:num_tokens]
        if len(tokens) < 2 or max(tokens) >= vocab:
            raise UsageError(f"--prompt gives {len(tokens)} ids, at least 2 below {vocab} are needed; change it.")
        return Ids(tokens, "the prompt")
    if encode is not None:
        text = TEXT.read_text(encoding="utf-8")
        tokens = encode(text)
        while 0 < len(tokens) < wanted:
            text += text
            tokens = encode(text)
        if tokens and max(tokens[:wanted]) < vocab:
            return Ids(tokens[:wanted], "Genesis 1, King James Version")
    draw = random.Random(SEED)
    return Ids([draw.randrange(vocab) for _ in range(wanted)], f"seeded ids (seed {SEED})")


def _read(where: str, vocab: int) -> list[int]:
    path = Path(where)
    if not path.is_file():
        raise UsageError(f"--token-ids {where} is no file; give a JSON list of token ids.")
    try:
        ids: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"--token-ids {where} is no JSON: {error}.") from error
    good = isinstance(ids, list) and len(ids) >= 2 and all(type(i) is int and 0 <= i < vocab for i in ids)
    if not good:
        raise UsageError(f"--token-ids {where} must be a JSON list of two or more ids in [0, {vocab}).")
    return list(ids)


def _tokenizer(model: LoadedModel) -> Any:
    """text -> ids, or None when the folder has no tokenizer. A twin's vocabulary that is no tokenizer.json does not
    count: it is made up, and random ids reach more of its embedding."""
    if not model.source.exists("tokenizer.json"):
        found = None if is_twin(model) else open_tokenizer(model.source)[0]
        return None if found is None else found.encode
    from tokenizers import Tokenizer

    text = model.source.text("tokenizer.json")
    try:
        whole = isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"tokenizer.json of {model.source.name} holds no JSON object; download it again.")
    made = Tokenizer.from_str(text)
    return lambda given: list(made.encode(given).ids)
