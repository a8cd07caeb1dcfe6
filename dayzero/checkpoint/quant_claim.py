"""What a checkpoint claims about how its weights are stored: config.json's claim, or the one beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dayzero.checkpoint.config_json import read_object
from dayzero.checkpoint.quant_config import Fp8Layout, QuantTable, find_quant_config, resolve
from dayzero.checkpoint.source import Source

MODELOPT_CONFIG = "hf_quant_config.json"


class _Entry(Protocol):
    @property
    def dtype(self) -> str: ...


def read_claim(source: Source | None, config: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
    """(where it stands, the claim), None without one. config.json's own comes first."""
    found = find_quant_config(config)
    if found is None and source is not None and not source.config_only and source.exists(MODELOPT_CONFIG):
        return MODELOPT_CONFIG, read_object(source, MODELOPT_CONFIG)[0]
    return found


def fp8_layout(entries: Mapping[str, _Entry]) -> Fp8Layout:
    """How block-FP8 scales are named; no config key tells, so the files do."""
    e8m0 = any(name.endswith(".scale") and entry.dtype == "F8_E8M0" for name, entry in entries.items())
    return "scale" if e8m0 else "scale_inv"


def read_quantization(source: Source | None, config: Mapping[str, Any], entries: Mapping[str, _Entry]) -> QuantTable:
    """The table that the claim resolves to. Errors: ConfigError for what is not supported."""
    found = read_claim(source, config)
    return resolve(None) if found is None else resolve(found[1], found[0], fp8_layout=fp8_layout(entries))
