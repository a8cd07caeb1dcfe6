"""What every recipe reads the same way: vocabulary, ties, stop ids, element type, context."""

from __future__ import annotations

from dayzero.arch.raw import Raw
from dayzero.arch.spec import Tie
from dayzero.errors import ConfigError


def read_tie(raw: Raw, outer: Raw | None = None, *, default: bool) -> Tie:
    """Whether the head is the embedding. The flag may stand at the root, in text_config, or in both; both must agree."""
    places = [r for r in (raw, outer) if r is not None and r.has("tie_word_embeddings")]
    said = {r.full("tie_word_embeddings"): r.bool("tie_word_embeddings") for r in places}
    if len(set(said.values())) > 1:
        raise ConfigError(f"config.json contradicts itself: {', '.join(f'{k} = {v}' for k, v in said.items())}.")
    if said:
        name, value = next(iter(said.items()))
        return Tie(value, name)
    value = raw.bool("tie_word_embeddings", default=default)
    return Tie(value, "class default")


def read_stop_ids(raw: Raw, outer: Raw | None = None) -> tuple[int, ...]:
    """eos_token_id of the config, one or several; the inner config's and the outer one's are united."""
    out: list[int] = []
    for part in (raw, outer):
        if part is not None and part.has("eos_token_id"):
            out += [i for i in part.ints("eos_token_id") if i not in out]
    return tuple(out)


def read_usual(raw: Raw) -> None:
    """Keys that name ids or element types and change no arithmetic."""
    if raw.has("torch_dtype") or raw.has("dtype"):
        raw.one_of("dtype", "torch_dtype", allowed=("bfloat16", "float16", "float32", "auto"))
    raw.ignore("bos_token_id", why="the tokenizer's files decide what starts a prompt")
    raw.ignore("pad_token_id", why="padding never reaches a forward pass")
    raw.ignore("eos_token_id", why="null: the stop ids come from generation_config or the tokenizer")
