"""Cache record formats by name: what one stored row is, to the byte. Layouts: FlashMLA, DeepGEMM."""

from __future__ import annotations

from dataclasses import dataclass

from dayzero.decl import CacheNeed

ELEMENT_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "e4m3": 1}


@dataclass(frozen=True, slots=True)
class Record:
    """name of a record; fixed_bytes when a row's size does not follow from shape × element; what it is."""

    name: str
    element: str
    fixed_bytes: int | None
    about: str


RECORDS = {
    r.name: r
    for r in (
        Record("kv_bf16", "bf16", None, "K or V heads"),
        Record("kv_fp8", "e4m3", None, "K or V heads, e4m3, one scale for the tensor"),
        Record("mla_bf16", "bf16", None, "latent and shared key"),
        Record("mla_fp8_656", "e4m3", 656, "512 e4m3 in 128-wide tiles, 4 fp32 power-of-two scales, 64 bf16"),
        Record("mla_fp8_tiled", "e4m3", None, "latent e4m3 in 128-wide tiles with fp32 scales, shared key bf16"),
        Record("idx_bf16", "bf16", None, "index key"),
        Record("idx_fp8_128", "e4m3", None, "index key e4m3 in 128-wide tiles with one fp32 scale each"),
        Record("idx_mxfp8_32", "e4m3", None, "index key e4m3 in 32-wide tiles with one e8m0 scale each"),
        Record("state_f32", "f32", None, "recurrent state"),
        Record("conv_bf16", "bf16", None, "last inputs of a short convolution"),
    )
}


def record_bytes(need: CacheNeed, precision: str) -> int:
    """Bytes of one row of ``need`` (a token's, or a sequence's state) when records are kept in ``precision``.

    precision: ``bf16`` or ``fp8``. State is never narrowed: float32 recurrences and bf16 convolution windows stay.
    """
    if need.unit == "state" or precision == "bf16":
        return need.numel * ELEMENT_BYTES[need.element]
    if need.record.startswith("mla"):
        return _mla_fp8_bytes(need)
    if need.record.startswith("idx"):
        return need.numel + 4 * -(-need.numel // 128)
    return need.numel


def _mla_fp8_bytes(need: CacheNeed) -> int:
    # shape is (latent, shared key): e4m3 latent + one fp32 scale per 128-wide tile + the shared key in bf16.
    latent, shared = need.parts
    return latent + 4 * -(-latent // 128) + 2 * shared
