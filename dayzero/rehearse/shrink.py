"""Making a config small without losing a trait.

A twin keeps the layer pattern, the formats and every ratio that decides which code runs (top-k below length, window
below length, fewer KV heads than ranks); only sizes shrink. A recipe says how (``TWIN``); for a recipe that does not,
the usual size keys are cut by the table here. ``lost_traits`` proves afterwards that nothing was lost.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from dayzero.arch.mixers import MLA, Mixer
from dayzero.arch.spec import ModelSpec
from dayzero.checkpoint.config_cut import put
from dayzero.errors import ModelError, UsageError

# Sizes for configs whose recipe names none. Keys that are absent stay absent.
USUAL = {
    "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "num_experts": 8, "n_routed_experts": 8,
    "num_local_experts": 8, "num_experts_per_tok": 2, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8, "v_head_dim": 16, "index_topk": 8, "index_n_heads": 8, "index_head_dim": 16,
    "sliding_window": 8, "max_position_embeddings": 1024,
}  # fmt: skip

Overrides = Mapping[str, Any]
Twin = Overrides | Callable[[Mapping[str, Any]], Overrides]


def shrink(config: Mapping[str, Any], twin: Twin, *, keep_vocab: bool, changes: Overrides) -> dict[str, Any]:
    """A small copy of ``config``. twin: the recipe's sizes by key, or a function that computes them from the config.

    A plain key applies wherever the config has it, at the root and in text_config; a dotted one to that place alone.
    keep_vocab: leave vocab_size (the tokenizer is copied). changes: the caller's own, applied last.
    """
    out: dict[str, Any] = copy.deepcopy(dict(config))
    sizes = twin(config) if callable(twin) else twin
    for key, value in (sizes or USUAL).items():
        if keep_vocab and (key == "vocab_size" or key.endswith("_token_id")):
            continue
        put(out, key, value, create=bool(sizes))
    return apply_changes(out, changes)


def apply_changes(config: Mapping[str, Any], changes: Overrides) -> dict[str, Any]:
    """A copy of ``config`` with the caller's keys changed; UsageError for a key that it does not have."""
    out: dict[str, Any] = copy.deepcopy(dict(config))
    for key, value in changes.items():
        if not put(out, key, value, create=False):
            raise UsageError(f"--set {key}: the twin's config has no such key.")
    return out


def traits_of(spec: ModelSpec) -> set[tuple[str, tuple[tuple[str, object], ...]]]:
    """(contract, options) of every operator use; widths in numbers are left out, which a twin has smaller."""
    return {
        (use.contract, tuple((option, value) for option, value in use.traits if not _is_width(option, value)))
        for use in spec.contracts()
    }


def _is_width(option: str, value: object) -> bool:
    return option.endswith("_width") and isinstance(value, int)


def lost_traits(real: ModelSpec, twin: ModelSpec) -> list[str]:
    """Sentences on what the twin lost; empty when it is a faithful one."""
    out = [f"{name} {dict(options)}" for name, options in sorted(traits_of(real) - traits_of(twin), key=repr)]
    for what, get in (("cache record", _records), ("layer kind", _kinds)):
        out += [f"{what} {k}" for k in sorted(get(real) - get(twin))]
    if real.tie.tied != twin.tie.tied:
        out.append("tied head")
    if (real.vision is None) != (twin.vision is None):
        out.append("vision tower")
    return out


def _records(spec: ModelSpec) -> set[str]:
    return {f"{need.record} {need.unit}" for need in spec.cache()}


def _kinds(spec: ModelSpec) -> set[str]:
    return {f"{_mixer_kind(layer.mixer)} + {layer.channel.kind} + {layer.residual.kind}" for layer in spec.layers}


def _mixer_kind(mixer: Mixer) -> str:
    """A layer that reuses another's index runs other code than one that owns it, and uses fewer operators, not more."""
    if isinstance(mixer, MLA) and mixer.index is not None:
        return f"{mixer.kind} with {'a shared' if mixer.index.shared else 'an'} index of {mixer.index.generator}"
    return mixer.kind


def refuse_lost(real: ModelSpec, twin: ModelSpec) -> None:
    """ModelError when the twin would prove less than the model needs."""
    lost = lost_traits(real, twin)
    if lost:
        raise ModelError(
            f"a twin of this size loses {len(lost)} traits of the model ({'; '.join(lost[:6])}); "
            "keep them in the recipe's TWIN or with --set."
        )
