"""What follows from a spec alone: layer map, parameter counts, cache bytes, effective values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dayzero.arch.cost import active_params, cache_cost, extra_params, total_params
from dayzero.arch.record_choice import with_records
from dayzero.arch.records import record_bytes
from dayzero.arch.spec import ModelSpec
from dayzero.planner.effective import effective_values
from dayzero.planner.layer_text import layer_json

NO_CACHE: dict[str, Any] = {
    "per_token_bytes": {"bf16": None, "fp8": None},
    "per_sequence_bytes": None,
    "window_bytes": {"bf16": None, "fp8": None},
    "by_record": [],
}


def spec_facts(spec: ModelSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """layers, parameters, cache, effective, context_tokens, modality, as the report has them. ConfigError when a
    value is none that a model can have."""
    bf16, fp8 = cache_cost(spec, "bf16"), cache_cost(spec, "fp8")
    return {
        "layers": layer_json(spec),
        "parameters": {"total": total_params(spec), "active": active_params(spec), "extra": extra_params(spec)},
        "cache": {
            "per_token_bytes": {"bf16": bf16.per_token, "fp8": fp8.per_token},
            "per_sequence_bytes": bf16.per_sequence,
            "window_bytes": {"bf16": bf16.window, "fp8": fp8.window},
            "by_record": _cache_records(spec),
        },
        "effective": effective_values(spec, config),
        "context_tokens": spec.max_positions,
        "modality": spec.modality,
    }


def _cache_records(spec: ModelSpec) -> list[dict[str, Any]]:
    """One row for each (layer kind, record kind): how many layers keep it, and their bytes together."""
    rows: dict[tuple[str, str, str, int | None], list[int]] = {}
    for need, narrow in zip(spec.cache(), with_records(spec, "fp8").cache(), strict=True):
        number = int(need.name.split(".")[1]) if need.name.startswith("layers.") else -1
        kind = spec.layers[number].mixer.kind if number >= 0 else "other"
        entry = rows.setdefault((kind, need.record, need.unit, need.window), [0, 0, 0])
        if need.shares is None:
            entry[0] += 1
            entry[1] += record_bytes(need)
            entry[2] += record_bytes(narrow)
    return [
        {
            "layer_kind": kind, "record": record, "unit": unit, "window": window, "count": count,
            "bytes": {"bf16": bf16, "fp8": fp8},
        }
        for (kind, record, unit, window), (count, bf16, fp8) in rows.items()
    ]  # fmt: skip
