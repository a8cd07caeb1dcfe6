"""A config that remembers which keys were read.

Every key of ``config.json`` must end up read, or ignored with a reason. What is left over is ``unread`` and fails.
Defaults that were used because a key is absent are remembered too: a class default is a claim nobody made.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dayzero.errors import ConfigError

_MISSING = object()

GENERATION_DEFAULTS = (
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "output_scores", "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "decoder_start_token_id", "prefix", "sep_token_id", "tf_legacy_loss", "use_bfloat16",
)  # fmt: skip

# Keys a library writes into every config.json; none of them changes what a forward pass computes.
BOOKKEEPING: Mapping[str, str] = {
    "architectures": "used to recognise the family",
    "model_type": "used to recognise the family",
    "auto_map": "names remote code, which is never run without a flag",
    "transformers_version": "bookkeeping",
    "_name_or_path": "bookkeeping",
    "_commit_hash": "bookkeeping",
    "license": "bookkeeping",
    "library_name": "bookkeeping",
    "tags": "bookkeeping",
    "base_model": "bookkeeping",
    "unsloth_version": "bookkeeping",
    "transformers_weights": "bookkeeping",
    "num_labels": "classification only",
    "keys_to_ignore_at_inference": "library option",
    "use_cache": "an engine always caches",
    "return_dict": "library option",
    "output_attentions": "library option",
    "output_hidden_states": "library option",
    "torchscript": "library option",
    "problem_type": "library option",
    "id2label": "classification only",
    "label2id": "classification only",
    "is_decoder": "library option",
    "chunk_size_feed_forward": "library option, same result",
    "finetuning_task": "training only",
    "task_specific_params": "library option",
    "tokenizer_class": "read from the tokenizer's own files",
    "initializer_range": "training only",
    "initializer_factor": "training only",
    "attention_dropout": "training only",
    "hidden_dropout": "training only",
    "resid_pdrop": "training only",
    "embd_pdrop": "training only",
    "router_aux_loss_coef": "training only",
    "aux_loss_alpha": "training only",
    "seq_aux": "training only",
    "output_router_logits": "training only",
    "pretraining_tp": "numerically a reordering of the same sum",
    "ignore_index": "training only",
    "_attn_implementation": "library option",
    "_attn_implementation_autoset": "library option",
    "is_llama_config": "bookkeeping",
    # Generation defaults that PretrainedConfig once wrote out; generation_config.json is what counts.
    **dict.fromkeys(GENERATION_DEFAULTS, "a generation default written out; generation_config.json decides"),
}  # fmt: skip


# Library options that are harmless at one value only: any other one describes a model of another kind.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, []),
    "tie_encoder_decoder": (False,),
}


@dataclass
class Ledger:
    """What happened to the keys of one file, by dotted path. Filled by Raw, read by inspect."""

    read: set[str] = field(default_factory=set)
    ignored: dict[str, str] = field(default_factory=dict)
    defaulted: dict[str, Any] = field(default_factory=dict)


class Raw:
    """A mapping from config.json whose reads are recorded. ``file`` and ``path`` name it in errors.

    Several names in one call are spellings of the same key (old and new); when more than one is present they must
    agree. A missing key without ``default`` is a ConfigError; a used default is recorded.
    """

    def __init__(
        self,
        data: Mapping[builtins.str, Any],
        *,
        file: builtins.str = "config.json",
        path: builtins.str = "",
        ledger: Ledger | None = None,
    ) -> None:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{file}: {path or 'the file'} must be an object, not {type(data).__name__}.")
        self._data = data
        self._file = file
        self._path = path
        self._opened: dict[str, Raw] = {}
        self.ledger = ledger if ledger is not None else Ledger()

    def full(self, name: builtins.str) -> builtins.str:
        return f"{self._path}.{name}" if self._path else name

    def has(self, name: builtins.str) -> builtins.bool:
        """Whether the key is there and not null. Does not count as reading it."""
        return self._data.get(name) is not None

    def keys(self) -> tuple[builtins.str, ...]:
        return tuple(self._data)

    def peek(self, name: builtins.str, default: Any = None) -> Any:
        """The value without counting it as read: for recognition only."""
        return self._data.get(name, default)

    def _take(self, names: tuple[builtins.str, ...], default: Any) -> tuple[builtins.str, Any]:
        found = [(n, self._data[n]) for n in names if n in self._data and self._data[n] is not None]
        for name in names:
            if name in self._data:
                self.ledger.read.add(self.full(name))
                if self._data[name] is not None:
                    self.ledger.ignored.pop(self.full(name), None)
        if len(found) > 1 and any(value != found[0][1] for _, value in found[1:]):
            said = ", ".join(f"{self.full(n)} = {v!r}" for n, v in found)
            raise ConfigError(f"{self._file} contradicts itself: {said}; these are spellings of one key.")
        if found:
            return found[0]
        if default is _MISSING:
            spelled = " or ".join(self.full(n) for n in names)
            raise ConfigError(f"{self._file} has no {spelled}, which this family needs.")
        stated = [n for n in names if n in self._data]  # as null
        if not stated or default is not None:  # where null is itself the default, it was stated and nothing was assumed
            self.ledger.defaulted[self.full((stated or names)[0])] = default
        return names[0], default

    def _typed(self, names: tuple[builtins.str, ...], default: Any, kinds: tuple[type, ...], word: builtins.str) -> Any:
        name, value = self._take(names, default)
        if value is default and not isinstance(value, kinds):
            return value
        good = isinstance(value, kinds) and not (isinstance(value, bool) and bool not in kinds)
        if not good:
            raise ConfigError(f"{self._file}: {self.full(name)} must be {word}, but is {value!r}.")
        return value

    def int(self, *names: builtins.str, default: Any = _MISSING, least: builtins.int = 0) -> builtins.int:
        """A whole number >= least. 3.0 counts as 3."""
        name, value = self._take(names, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"{self._file}: {self.full(name)} must be a whole number >= {least}, but is {value!r}.")
        return value

    def int_or_none(
        self, *names: builtins.str, default: builtins.int | None = None, least: builtins.int = 0
    ) -> builtins.int | None:
        """A whole number >= least, or None where the key is absent or null."""
        if not any(self.has(n) for n in names):
            self._take(names, default)
            return default
        return self.int(*names, least=least)

    def float(self, *names: builtins.str, default: Any = _MISSING) -> builtins.float:
        value = self._typed(names, default, (int, float), "a number")
        if value != value or value in (float("inf"), float("-inf")):
            raise ConfigError(f"{self._file}: {self.full(names[0])} must be a finite number, but is {value!r}.")
        return float(value)

    def bool(self, *names: builtins.str, default: Any = _MISSING) -> builtins.bool:
        for name in names:
            # To the publishers' code null is false; a default of true would be the opposite of what the file says.
            if default is True and name in self._data and self._data[name] is None:
                raise ConfigError(f"{self._file}: {self.full(name)} is null, but its default is true; state which.")
        return bool(self._typed(names, default, (bool,), "true or false"))

    def str(self, *names: builtins.str, default: Any = _MISSING) -> builtins.str:
        return str(self._typed(names, default, (str,), "a string"))

    def list(self, *names: builtins.str, default: Any = _MISSING) -> builtins.list[Any]:
        return list(self._typed(names, default, (list, tuple), "a list"))

    def ints(self, *names: builtins.str, default: Any = _MISSING) -> tuple[builtins.int, ...]:
        """A list of whole numbers; a single number counts as a list of one."""
        name, value = self._take(names, default)
        items = [value] if isinstance(value, int) and not isinstance(value, bool) else value
        if not isinstance(items, (list, tuple)) or any(isinstance(v, bool) or not isinstance(v, int) for v in items):
            raise ConfigError(f"{self._file}: {self.full(name)} must be a list of whole numbers, but is {value!r}.")
        return tuple(items)

    def one_of(self, *names: builtins.str, allowed: Iterable[Any], default: Any = _MISSING) -> Any:
        """A value out of ``allowed``; anything else is refused by name, never approximated."""
        name, value = self._take(names, default)
        choices = list(allowed)
        if not any(value == c and isinstance(value, bool) == isinstance(c, bool) for c in choices):
            raise ConfigError(
                f"{self._file}: {self.full(name)} is {value!r}, but this family's recipe knows only "
                f"{', '.join(repr(c) for c in choices)}."
            )
        return value

    def sub(self, name: builtins.str) -> Raw:
        """The object under ``name``; its keys join the same ledger."""
        if name not in self._opened:
            _, value = self._take((name,), _MISSING)
            if not isinstance(value, Mapping):
                raise ConfigError(f"{self._file}: {self.full(name)} must be an object, but is {value!r}.")
            self._opened[name] = Raw(value, file=self._file, path=self.full(name), ledger=self.ledger)
        return self._opened[name]

    def sub_or_none(self, name: builtins.str) -> Raw | None:
        if self.has(name):
            return self.sub(name)
        self._take((name,), None)
        return None

    def whole(self, name: builtins.str, default: Any = None) -> Any:
        """The value as it is, counted as read with all below it."""
        return self._take((name,), default)[1]

    @property
    def _of_model(self) -> builtins.bool:
        # Below the configs of whole models these words mean something: a top_k inside an index's object is no sampling.
        return self._path in ("", "text_config") or "model_type" in self._data

    def ignore(self, *names: builtins.str, why: builtins.str) -> None:
        """Declare keys that do not change what is computed, with the reason. Absent keys are fine.

        A key whose value was read stays read: a reason not to read it would be untrue.
        """
        for name in names:
            if name in self._data and not (self._data[name] is not None and self.full(name) in self.ledger.read):
                self.ledger.ignored[self.full(name)] = why

    def unread(self) -> builtins.list[builtins.str]:
        """Dotted names of keys that were neither read nor ignored; bookkeeping keys become ignored here."""
        left = []
        for name in self._data:
            full = self.full(name)
            if name in self._opened:
                left += self._opened[name].unread()
            elif full in self.ledger.read or full in self.ledger.ignored:
                continue
            elif name in NEUTRAL and self._of_model:
                if self._data[name] is not None and self._data[name] not in NEUTRAL[name]:
                    left.append(full)
                else:
                    self.ledger.ignored[full] = "a library option at its neutral value"
            elif name in BOOKKEEPING and self._of_model:
                self.ledger.ignored[full] = BOOKKEEPING[name]
            else:
                left.append(full)
        return left
