"""What every recipe reads the same way, and the rules that most checkpoints share.

Reading: vocabulary, ties, stop ids, element type, layer kinds, keys that only repeat what others say. Rules: embedding,
head and layer norms; attention; dense and expert matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dayzero.arch.raw import Raw
from dayzero.arch.spec import Draft, LayerSpec, ModelSpec, Tie
from dayzero.arch.vision import Vision
from dayzero.checkpoint.rules import Alias, Beside, Either, Fuse, Ignore, Narrow, Optional, Rule, RuleLike, Split
from dayzero.errors import ConfigError

LAYERS = "layers."


def read_tie(raw: Raw, outer: Raw | None = None, *, default: bool) -> Tie:
    """Whether the head is the embedding. The flag may stand at the root, in text_config, or in both if both agree."""
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


def read_usual(raw: Raw, outer: Raw | None = None) -> None:
    """Keys that name ids, element types or storage and change no arithmetic; of the inner and the outer config."""
    for part in (raw,) if outer is None else (raw, outer):
        if part.has("torch_dtype") or part.has("dtype"):
            part.one_of("dtype", "torch_dtype", allowed=("bfloat16", "float16", "float32", "auto"))
        part.ignore("dtype", "torch_dtype", why="null")
        part.ignore("bos_token_id", why="the tokenizer's files decide what starts a prompt")
        part.ignore("pad_token_id", why="padding never reaches a forward pass")
        part.ignore("eos_token_id", why="null: the stop ids come from generation_config or the tokenizer")
        for key in ("quantization_config", "compression_config"):
            part.ignore(key, why="how weights are stored; every key in it is read by the quantisation table")


def assemble(
    family: str,
    text: Raw,
    outer: Raw | None,
    layers: Sequence[LayerSpec],
    positions: int,
    vision: Vision | None = None,
    facts: Mapping[str, Any] | None = None,
    extra: Draft | None = None,
) -> ModelSpec:
    """The spec of a model whose final norm is like its layers' and whose head is untied unless the config says so.

    Reads what is left of the usual keys: vocabulary, tie, stop ids, types, ids. positions: trained context in tokens.
    """
    norm = layers[-1].residual.norm
    read_usual(text, outer)
    return ModelSpec(
        family=family,
        dim=norm.dim,
        vocab=text.int("vocab_size", least=1),
        layers=tuple(layers),
        final_norm=norm,
        tie=read_tie(text, outer, default=False),
        max_positions=positions,
        stop_ids=read_stop_ids(text, outer),
        vision=vision,
        extra=extra,
        facts=facts or {},
    )


def text_part(raw: Raw) -> tuple[Raw, Raw | None]:
    """(text model's config, root) of a multimodal config; (root, None) when the text config itself is the root."""
    inner = raw.sub_or_none("text_config") if raw.has("text_config") else None
    return (raw, None) if inner is None else (inner, raw)


def restates(raw: Raw, key: str, value: Any) -> None:
    """A key that repeats what others say or what the family always does: any other value is refused by name.

    Absent and null are fine.
    """
    if raw.has(key):
        raw.one_of(key, allowed=(value,))
    raw.ignore(key, why="null")


def kinds_by_layer(raw: Raw, key: str, words: Mapping[str, str], num_layers: int) -> list[str] | None:
    """The list ``key``, one kind a layer, translated by ``words``; None when absent. Unknown words are refused."""
    if not raw.has(key):
        raw.ignore(key, why="null: the kinds follow from other keys")
        return None
    given = raw.list(key)
    unknown = sorted({str(kind) for kind in given if kind not in words})
    if unknown:
        raise ConfigError(f"config.json: {raw.full(key)} has {unknown[0]!r}; this family knows {', '.join(words)}.")
    if len(given) != num_layers:
        raise ConfigError(f"config.json: {raw.full(key)} names {len(given)} layers, but there are {num_layers}.")
    return [words[kind] for kind in given]


def frame_rules(root: str = "model.", head: str = "lm_head.weight") -> tuple[RuleLike, ...]:
    """Embedding, head, final norm and the two norms of each pre-norm layer. root: prefix of the text model."""
    layer = root + "layers.{i}."
    return (
        Rule(root + "embed_tokens.weight", "embed"),
        Rule(root + "norm.weight", "final_norm"),
        Rule(head, "head"),
        Alias(head, "embed", why="tied: the head is the embedding"),
        Rule(layer + "input_layernorm.weight", "layers.{i}.mixer_norm"),
        Rule(layer + "post_attention_layernorm.weight", "layers.{i}.channel_norm"),
        Ignore("*.rotary_emb.inv_freq", why="recomputed from the config"),
    )


def attention_rules(module: str) -> tuple[RuleLike, ...]:
    """Projections with their biases, norms over q and k. module: ``model.layers.{i}.self_attn.``."""
    return (
        *(Rule(f"{module}{n}_proj.weight", f"layers.{{i}}.mixer.{n}") for n in "qkvo"),
        *(Rule(f"{module}{n}_proj.bias", f"layers.{{i}}.mixer.{n}_bias") for n in "qkvo"),
        *(Rule(f"{module}{n}_norm.weight", f"layers.{{i}}.mixer.{n}_norm") for n in "qk"),
    )


def glu_rules(module: str, param: str = "layers.{i}.channel.") -> tuple[RuleLike, ...]:
    """A dense gated layer. module: ``model.layers.{i}.mlp.``."""
    return tuple(Rule(f"{module}{n}_proj.weight", f"{param}{n}") for n in ("gate", "up", "down"))


def expert_rules(module: str, names: Sequence[str] = ("gate_proj", "up_proj", "down_proj")) -> tuple[RuleLike, ...]:
    """Routed experts, one tensor each. names: of gate, up and down. module: ``model.layers.{i}.mlp.``."""
    pairs = zip(names, ("gate", "up", "down"), strict=True)
    return tuple(
        Rule(f"{module}experts.{{e}}.{name}.weight", f"layers.{{i}}.channel.experts.{part}[{{e}}]")
        for name, part in pairs
    )


def draft_layers(root: str, first: int, count: int) -> tuple[RuleLike, ...]:
    """Layers stored after the last one that predict further tokens, where nothing published tells what is in them."""
    why = "a draft layer (multi-token prediction) of a form that is not known; the plain forward does not run it"
    return tuple(Ignore(f"{root}layers.{first + n}.*", why=why) for n in range(count))


def extra_of(rules: Iterable[RuleLike], old: str = "", new: str = "") -> tuple[RuleLike, ...]:
    """The rules of layers once more, for layers beside the plain forward: parameters below ``extra.`` instead of
    ``layers.``, tensors below ``new`` instead of ``old``. Rules of other things are left out."""
    out: list[RuleLike] = []
    for rule in rules:
        if isinstance(rule, Either):
            out.append(Either(tuple(extra_of(option, old, new) for option in rule.options)))
        elif isinstance(rule, Beside):
            out.append(Beside(_extra(rule.param), extra_of(rule.rules, old, new)))
        elif isinstance(rule, Split) and rule.params[0].startswith(LAYERS):
            params = tuple(_extra(param) for param in rule.params)
            out.append(replace(rule, tensor=new + rule.tensor.removeprefix(old), params=params))
        elif isinstance(rule, Fuse) and rule.param.startswith(LAYERS):
            tensors = tuple(new + tensor.removeprefix(old) for tensor in rule.tensors)
            out.append(replace(rule, tensors=tensors, param=_extra(rule.param)))
        elif isinstance(rule, Rule | Narrow | Optional) and rule.param.startswith(LAYERS):
            out.append(replace(rule, tensor=new + rule.tensor.removeprefix(old), param=_extra(rule.param)))
    return tuple(out)


def _extra(param: str) -> str:
    return "extra." + param.removeprefix(LAYERS)


TwinSizes = Callable[[Mapping[str, Any]], dict[str, Any]]


def twin(sizes: Mapping[str, Any]) -> TwinSizes:
    """A recipe's ``TWIN``: config -> sizes of a small copy, by dotted key from the root.

    sizes: keys of the text config, dotted below it. ``?`` before a key: only where the config has it (a spelling among
    several). ``/`` first: from the root. Token ids beyond the small vocabulary move to 256 and up, equal ids alike, but
    for those that ``sizes`` gives.
    """

    def small(config: Mapping[str, Any]) -> dict[str, Any]:
        inner = config.get("text_config")
        text = inner if isinstance(inner, Mapping) else config
        out: dict[str, Any] = {}
        for key, value in sizes.items():
            start = config if key.startswith("/") else text
            name = key.lstrip("/?")
            if "?" in key and not _has(start, name):
                continue
            nested = "." in name and start is not config
            if "." not in name or _has(start, name.rpartition(".")[0]):
                out[f"text_config.{name}" if nested else name] = value
        vocab = sizes.get("vocab_size")
        moved: dict[int, int] = {}
        for part in (config, text):
            for key, value in part.items():
                if vocab and key.endswith("_token_id") and value is not None and key not in out:
                    out[key] = _moved(value, vocab, moved)
        return out

    return small


def _has(config: Any, dotted: str) -> bool:
    for part in dotted.split("."):
        if not isinstance(config, Mapping) or config.get(part) is None:
            return False
        config = config[part]
    return True


def _moved(value: Any, vocab: int, moved: dict[int, int]) -> Any:
    if isinstance(value, list):
        return [_moved(item, vocab, moved) for item in value]
    return value if not isinstance(value, int) or value < vocab else moved.setdefault(value, 256 + len(moved))
