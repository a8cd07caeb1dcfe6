"""What a checkpoint's config claims about quantisation: which module is stored in which format, and by which rule.

The claim is a plain dict: ``quantization_config`` of config.json (root or text_config), ``compression_config``, or
the content of ``hf_quant_config.json``. ``resolve`` reads every key or reports it as unread; ``QuantTable.scheme``
answers per module and counts which rule was hit, so that a rule that hits nothing can become a finding.

Names are matched as the library that wrote the config matches them, always anchored on whole dotted names:
compressed-tensors compares whole names and ``re:`` patterns from the start of the name; modelopt uses globs on whole
names; fp8 and mxfp4 lists name a module by a leading or trailing run of whole segments, with ``*`` allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from dayzero.checkpoint.name_rules import Entry, NameRules, Style
from dayzero.decl import (
    FP8_BLOCK,
    FP8_BLOCK_E8M0,
    FP8_BLOCK_WEIGHT_SCALE,
    INT4_PACK,
    MXFP4_INTERLEAVED,
    MXFP4_PACK,
    NVFP4_MODELOPT,
    NVFP4_PACK,
    Format,
)
from dayzero.errors import ConfigError

Fp8Layout = Literal["scale_inv", "scale"]

METHODS = ("fp8", "mxfp4", "compressed-tensors", "modelopt")

_NOTE_KEYS = {
    "quantization_status": "a state of the tool that wrote the files",
    "version": "version of the tool that wrote the files",
    "global_compression_ratio": "informational",
    "producer": "name of the tool that wrote the files",
    "observer": "used while quantising only",
    "observer_kwargs": "used while quantising only",
}


@dataclass
class QuantTable:
    """Module name to storage format, and how often each rule of the config was hit.

    method: the config's quant_method, ``none`` without one. unread: keys of the config that nothing read.
    ignored: (key, why) of keys that do not change storage. facts: values read that do not change how weights are
    stored, such as ``activation_scheme``, ``scale_fmt`` and the cache's claims.
    Asking for a module is remembered: each module counts once per rule however often it is asked for.
    """

    method: str
    unread: list[str] = field(default_factory=list)
    ignored: list[tuple[str, str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    _rules: NameRules = field(default_factory=lambda: NameRules([], ()), repr=False)
    _formats: list[Format | None] = field(default_factory=list, repr=False)
    _known: dict[str, Format | None] = field(default_factory=dict, repr=False)

    def scheme(self, module: str, role: str = "linear") -> Format | None:
        """Format the config claims for ``module``; None when it claims none.

        module: dotted name without ``.weight``. Only role ``linear`` can be quantised: these configs speak of Linear
        layers, and leave embeddings, heads, norms and routers alone whether or not they list them. Ask for those too,
        with their role, so that rules that name them count as hit.
        """
        if module not in self._known:
            hit = self._rules.hits(module)
            self._known[module] = self._formats[hit[0]] if hit else None
        return self._known[module] if role == "linear" else None

    @property
    def numbered(self) -> bool:
        """Whether an entry's text holds a digit, so that two experts of one layer may be claimed differently."""
        return any(char.isdigit() for entry in self._rules.entries for char in entry.text)

    def entries(self) -> list[tuple[str, str, int]]:
        """(entry as written, its key, number of distinct modules asked for that it hit), in the config's order."""
        return [(e.text, e.kind, n) for e, n in zip(self._rules.entries, self._rules.counts, strict=True)]


class _Keys:
    """A dict that remembers which of its keys were read."""

    def __init__(self, values: Any, where: str) -> None:
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} is {values!r}, expected an object")
        self.values, self.where = values, where
        self.read: set[str] = set()
        self.children: list[_Keys] = []

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return self.values.get(key, default)

    def sub(self, key: str) -> _Keys:
        child = _Keys(self.get(key), f"{self.where}.{key}")
        self.children.append(child)
        return child

    def one_of(self, key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self.get(key, default)
        # True equals 1 in Python; a config's 1 is not a true.
        if not any(type(value) is type(a) and value == a for a in allowed):
            raise self.refusal(key, value, ", ".join(repr(a) for a in allowed))
        return value

    def names(self, key: str) -> list[str]:
        value = self.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"{self.where}.{key} is {value!r}, expected a list of names")
        return value

    def refusal(self, key: str, value: Any, supported: str) -> ConfigError:
        return ConfigError(f"{self.where}.{key} is {value!r}, which is not supported; supported: {supported}")

    def unread(self) -> list[str]:
        own = [f"{self.where}.{k}" for k in self.values if k not in self.read]
        return own + [path for child in self.children for path in child.unread()]

    def noted(self) -> list[tuple[str, str]]:
        """Marks keys that never change storage as read, and lists them with the reason."""
        found = [(f"{self.where}.{k}", why) for k, why in _NOTE_KEYS.items() if k in self.values and k not in self.read]
        self.read.update(k for k in _NOTE_KEYS if k in self.values)
        return found + [note for child in self.children for note in child.noted()]


def find_quant_config(config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """(where, claim) from config.json's content, None without one. Two claims that differ are a ConfigError."""
    found = [
        (f"{prefix}{key}", holder[key])
        for prefix, holder in (("", config), ("text_config.", config.get("text_config")))
        for key in ("quantization_config", "compression_config")
        if isinstance(holder, Mapping) and holder.get(key) is not None
    ]
    for where, claim in found[1:]:
        if claim != found[0][1]:
            raise ConfigError(f"config.json has {found[0][0]} and {where}, and they differ; keep the true one")
    return found[0] if found else None


def resolve(
    claim: Mapping[str, Any] | None,
    where: str = "quantization_config",
    roots: tuple[str, ...] = (),
    fp8_layout: Fp8Layout = "scale_inv",
) -> QuantTable:
    """The quantisation table of a claim; ``None`` gives a table that quantises nothing.

    where: the claim's place, for messages. roots: name prefixes such as ``language_model.`` that the config's author
    may have left out; rules are tried with and without them. fp8_layout: how block-FP8 scales are named in the files,
    which no key tells (``weight_scale_inv`` in f32, or ``scale`` in e8m0).
    Errors: ConfigError naming key, value and what is supported.
    """
    if claim is None:
        return QuantTable("none")
    keys = _Keys(claim, where)
    method = keys.get("quant_method")
    if method is None and ("quantization" in claim or "quant_algo" in claim):
        method = "modelopt"
    if isinstance(method, str) and method.startswith("modelopt"):
        groups, facts = _modelopt(keys)
        method = "modelopt"
    elif method == "compressed-tensors":
        groups, facts = _compressed_tensors(keys)
    elif method == "fp8":
        groups, facts = _fp8(keys, fp8_layout)
    elif method == "mxfp4":
        keys.one_of("dequantize", (False, None))
        groups, facts = _all_but(keys, ("modules_to_not_convert",), MXFP4_INTERLEAVED), {}
    else:
        raise keys.refusal("quant_method", method, ", ".join(METHODS))
    rules = NameRules([entry for entry, _ in groups], roots)
    noted = keys.noted()
    return QuantTable(method, keys.unread(), noted, facts, rules, [fmt for _, fmt in groups])


_Groups = list[tuple[Entry, Format | None]]


def _all_but(keys: _Keys, lists: tuple[str, ...], fmt: Format) -> _Groups:
    groups: _Groups = [(Entry(text, key, Style.RUN), None) for key in lists for text in keys.names(key)]
    return [*groups, (Entry("Linear", "quant_method", Style.ALL), fmt)]


def _fp8(keys: _Keys, layout: Fp8Layout) -> tuple[_Groups, dict[str, Any]]:
    keys.one_of("fmt", ("e4m3", "float8_e4m3fn", None))
    keys.one_of("dequantize", (False, None))
    keys.one_of("expert_dtype", ("fp8", None))
    keys.one_of("modules_to_convert", (None, []))
    block = _block(keys, "weight_block_size")
    facts = {
        "activation_scheme": keys.one_of("activation_scheme", ("dynamic",), "dynamic"),
        "scale_fmt": keys.one_of("scale_fmt", ("float", "ue8m0", None)),
    }
    fmt = _with_block(FP8_BLOCK if layout == "scale_inv" else FP8_BLOCK_E8M0, block)
    return _all_but(keys, ("modules_to_not_convert", "ignored_layers", "unconverted"), fmt), facts


def _block(keys: _Keys, key: str) -> tuple[int, int]:
    value = keys.get(key)
    sizes = value if isinstance(value, list | tuple) else ()
    if len(sizes) != 2 or not all(type(v) is int and v > 0 for v in sizes):
        raise keys.refusal(key, value, "two block sizes such as [128, 128]")
    return sizes[0], sizes[1]


def _with_block(fmt: Format, block: tuple[int, int]) -> Format:
    return fmt if fmt.block == block else replace(fmt, name=f"{fmt.name}[{block[0]},{block[1]}]", block=block)


def _compressed_tensors(keys: _Keys) -> tuple[_Groups, dict[str, Any]]:
    groups: _Groups = [(Entry(text, "ignore", Style.WHOLE), None) for text in keys.names("ignore")]
    facts: dict[str, Any] = {"kv_cache_scheme": keys.get("kv_cache_scheme"), "activations": {}}
    for empty in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        keys.one_of(empty, (None, {}))
    root_format = keys.get("format")
    group_keys = keys.sub("config_groups")
    targets: list[tuple[int, Entry, Format]] = []
    for name in group_keys.values:
        group = group_keys.sub(name)
        facts["activations"][name] = group.get("input_activations")
        group.one_of("output_activations", (None,))
        own_format = group.get("format")
        fmt = _group_format(group, own_format or root_format)
        for text in group.names("targets"):
            rank = 2 if text == "Linear" else 1 if text.startswith("re:") else 0
            style = Style.ALL if text == "Linear" else Style.WHOLE
            targets.append((rank, Entry(text, f"config_groups.{name}.targets", style), fmt))
    # The most specific target decides, as in the library: a whole name, then a pattern, then the class.
    targets.sort(key=lambda item: item[0])
    return groups + [(entry, fmt) for _, entry, fmt in targets], facts


def _group_format(group: _Keys, name: Any) -> Format:
    weights = group.sub("weights")
    weights.one_of("symmetric", (True,), True)
    weights.one_of("dynamic", (False,), False)
    # "weight" only orders the calibration; the stored columns keep their order. "group" would permute them.
    weights.one_of("actorder", (None, False, "weight", "static"))
    strategy = weights.get("strategy")
    readers: dict[str, Callable[[], Format]] = {
        "mxfp4-pack-quantized": lambda: _fixed(weights, ("float", 4, "group", 32), MXFP4_PACK),
        "nvfp4-pack-quantized": lambda: _fixed(weights, ("float", 4, "tensor_group", 16), NVFP4_PACK),
        "pack-quantized": lambda: _fixed(weights, ("int", 4, "group", (32, 64, 128)), INT4_PACK),
        "float-quantized": lambda: _float_block(weights, strategy),
    }
    if not isinstance(name, str) or name not in readers:
        raise group.refusal("format", name, ", ".join(readers))
    return readers[name]()


def _fixed(weights: _Keys, expected: tuple[Any, ...], fmt: Format) -> Format:
    kind, bits, strategy, group_size = expected
    weights.one_of("type", (kind,))
    weights.one_of("num_bits", (bits,))
    weights.one_of("strategy", (strategy, None))
    weights.one_of("block_structure", (None,))
    weights.one_of("zp_dtype", (None,))
    weights.one_of("scale_dtype", _SCALE_DTYPES[fmt.name])
    columns = weights.one_of("group_size", group_size if isinstance(group_size, tuple) else (group_size,))
    return _with_block(fmt, (1, columns))


_SCALE_DTYPES = {
    MXFP4_PACK.name: ("torch.uint8", "torch.float8_e8m0fnu", None),
    NVFP4_PACK.name: ("torch.float8_e4m3fn", None),
    INT4_PACK.name: ("torch.bfloat16", "torch.float16", "torch.float32", None),
}


def _float_block(weights: _Keys, strategy: Any) -> Format:
    if strategy != "block":
        raise weights.refusal("strategy", strategy, "'block'")
    weights.one_of("type", ("float",))
    weights.one_of("num_bits", (8,))
    weights.one_of("group_size", (None,))
    weights.one_of("zp_dtype", (None,))
    weights.one_of("scale_dtype", ("torch.bfloat16", "torch.float32", None))
    return _with_block(FP8_BLOCK_WEIGHT_SCALE, _block(weights, "block_structure"))


def _modelopt(keys: _Keys) -> tuple[_Groups, dict[str, Any]]:
    body = keys.sub("quantization") if "quantization" in keys.values else keys
    facts = {key: body.get(key) for key in ("kv_cache_quant_algo", "kv_cache_scheme") if key in body.values}
    groups: _Groups = [
        (Entry(text, key, Style.GLOB), None) for key in ("exclude_modules", "ignore") for text in body.names(key)
    ]
    algo = body.one_of("quant_algo", ("NVFP4", "MIXED_PRECISION"))
    if algo == "NVFP4":
        body.one_of("group_size", (16, None))
        body.one_of("quantized_layers", (None, {}))
        if "config_groups" in body.values:
            _check_modelopt_groups(body.sub("config_groups"))
        return [*groups, (Entry("Linear", "quant_algo", Style.ALL), NVFP4_MODELOPT)], facts
    layers = body.sub("quantized_layers")
    for module in layers.values:
        layer = layers.sub(module)
        layer.one_of("quant_algo", ("NVFP4",))
        layer.one_of("group_size", (16, None))
        groups.append((Entry(module, "quantized_layers", Style.BELOW), NVFP4_MODELOPT))
    return groups, facts


def _check_modelopt_groups(group_keys: _Keys) -> None:
    for name in group_keys.values:
        group = group_keys.sub(name)
        group.get("input_activations")
        group.one_of("targets", (["Linear"], None))
        weights = group.sub("weights")
        weights.one_of("num_bits", (4,))
        weights.one_of("type", ("float",))
        weights.one_of("group_size", (16,))
        weights.one_of("dynamic", (False, None))
