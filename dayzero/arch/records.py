"""Cache record formats by name: what one stored row is, to the byte. Layouts: FlashMLA, DeepGEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dayzero.decl import CacheNeed

ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "e4m3": 1}

Kind = Literal["latent", "index", "kv"]


@dataclass(frozen=True, slots=True)
class Record:
    """name of a record; its element; what it is. kind: which rows a plan may keep in it, None: no choice."""

    name: str
    element: str
    about: str
    kind: Kind | None = None


RECORDS = {
    r.name: r
    for r in (
        Record("kv_bf16", "bf16", "K or V heads", "kv"),
        Record("kv_fp8", "e4m3", "K or V heads, e4m3, one fp32 scale a token and head", "kv"),
        Record("mla_bf16", "bf16", "latent and shared key", "latent"),
        Record("mla_fp8_656", "e4m3", "512 e4m3 in 128-wide tiles, 4 fp32 power-of-two scales, 64 bf16", "latent"),
        Record(
            "mla_fp8_tiled", "e4m3", "latent e4m3 in 128-wide tiles with power-of-two scales, shared key bf16", "latent"
        ),
        Record("idx_bf16", "bf16", "index key", "index"),
        Record("idx_fp8_128", "e4m3", "index key e4m3 in 128-wide tiles with one fp32 scale each", "index"),
        Record("idx_mxfp8_32", "e4m3", "index key e4m3 in 32-wide tiles with one e8m0 scale each", "index"),
        Record("gate_bf16", "bf16", "what weighs a pool's index keys"),
        Record("state_f32", "f32", "recurrent state"),
        Record("conv_bf16", "bf16", "last inputs of a short convolution"),
    )
}


def record_trait(record: str) -> tuple[tuple[str, object], ...]:
    """What a use of an operator on such rows states: nothing for plain ones, which every variant has."""
    return (("record", record),) if RECORDS[record].element == "e4m3" else ()


def record_bytes(need: CacheNeed) -> int:
    """Bytes of one row of ``need``: a token's, or a sequence's state."""
    return need.numel * ELEMENT_BYTES[need.element] if need.packed is None else need.packed.num_bytes
