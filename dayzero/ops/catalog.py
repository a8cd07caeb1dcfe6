"""Every operator variant there is, one line each, the references included. No torch: the planner reads this.

What a line says: ``ops/line``. Lines for NVIDIA GPUs: ``ops/catalog_cuda``.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dayzero.decl import Form
from dayzero.errors import UsageError
from dayzero.ops.capture import eager_reason
from dayzero.ops.catalog_cuda import DELTA_PAGED
from dayzero.ops.catalog_cuda import LINES as CUDA_LINES
from dayzero.ops.line import INDEX_RECORDS, KV_RECORDS, LATENT_RECORDS, REFERENCE, SIZES, Line, Traits

__all__ = ["CATALOG", "REFERENCE", "Catalog", "Line", "Traits", "builtin", "lacking", "lookup", "supports"]


@dataclass(slots=True)
class Catalog:
    """Lines by (contract, variant), each once."""

    lines: dict[tuple[str, str], Line] = field(default_factory=dict)

    def add(self, line: Line) -> None:
        """Raises UsageError when the variant exists already, or is a variant of nothing."""
        key = (line.contract, line.variant)
        if key in self.lines:
            raise UsageError(f"operator {line.contract} has two variants named {line.variant!r}; rename one of them")
        if line.variant != REFERENCE and (line.contract, REFERENCE) not in self.lines:
            raise UsageError(
                f"variant {line.variant!r} is of {line.contract!r}, which has no reference; add that first"
            )
        self.lines[key] = line

    def copy(self) -> Catalog:
        return Catalog(dict(self.lines))

    def contracts(self) -> list[str]:
        return sorted({contract for contract, _ in self.lines})

    def lookup(self, contract: str) -> list[Line]:
        """All variants of a contract, the reference first; empty when there is no such contract."""
        found = [line for line in self.lines.values() if line.contract == contract]
        return sorted(found, key=lambda line: line.variant != REFERENCE)

    def nearest(self, contract: str) -> list[str]:
        """Up to three contracts whose names are closest."""
        return difflib.get_close_matches(contract, self.contracts(), n=3, cutoff=0.4)

    def supports(self, contract: str, traits: Mapping[str, object]) -> tuple[bool, list[str]]:
        """Whether some variant has all the traits; else what the best one lacks, one sentence an option.

        Unknown contract: (False, [one sentence]). The planner's three-way list is: supported = reuse, contract known =
        extend, contract unknown = build new.
        """
        lines = self.lookup(contract)
        if not lines:
            near = ", ".join(self.nearest(contract)) or "none"
            return False, [f"there is no operator contract {contract!r} (nearest: {near})"]
        missing = min((lacking(line, traits) for line in lines), key=len)
        return not missing, missing


def _matches(value: object, allowed: Iterable[object]) -> bool:
    if isinstance(value, int) and not isinstance(value, bool) and "int" in allowed:
        return True
    if isinstance(value, float) and "float" in allowed:
        return True
    # 1 == True and 0 == False in Python; a trait must match in type as well.
    return any(type(value) is type(one) and value == one for one in allowed)


def lacking(line: Line, traits: Mapping[str, object]) -> list[str]:
    """What a line lacks for the traits, one sentence an option."""
    missing = []
    for option, value in sorted(traits.items()):
        allowed = line.traits.get(option)
        if allowed is None and option in SIZES:
            continue
        if allowed is None:
            missing.append(f"{line.contract} ({line.variant}) has no option {option!r} (wanted {value!r})")
        elif not _matches(value, allowed):
            missing.append(f"{line.contract} ({line.variant}) has {option} of {list(allowed)}, not {value!r}")
    return missing


_DECAY: Traits = {"decay": ("channel", "head")}
_DELTA: Traits = {**_DECAY, "grouped": (False, True)}
_YES_OR_WIDTH: tuple[object, ...] = (False, True, "int")  # whether there is one, or its width in tokens
_GLU_KINDS = ("silu", "gelu_tanh", "clamped", "silu_clamped", "situ")
_SOFTMAX: Traits = {
    "sinks": (False, True), "softcap": (False, True), "value_width": ("same", "other"), "grouped": (False, True),
}  # fmt: skip
_CAUSAL: Traits = {"window": _YES_OR_WIDTH, **_SOFTMAX}
_PAGED: Traits = {
    **_CAUSAL, "latent": (False, True), "latent_width": ("int",), "record": (*LATENT_RECORDS, *KV_RECORDS),
}  # fmt: skip
_SPARSE: Traits = {**_SOFTMAX, "latent": (False, True), "record": (*LATENT_RECORDS, *KV_RECORDS)}
_LATENT: Traits = {
    "window": _YES_OR_WIDTH,
    "sinks": (False, True),
    "shared_key": (True, False),
    "record": LATENT_RECORDS,
}
_TOKENS: Traits = {"sinks": (False, True), "window": (False, True), "record": INDEX_RECORDS}
_POOL: Traits = {
    "how": ("max", "gated"),
    "local": (False, True),
    "tail": ("always", "never", "scored"),
    "record": INDEX_RECORDS,
}
_BIAS: Traits = {"bias": (False, True)}
_NORM: Traits = {"offset": (False, True), "scale_in": ("f32", "dtype")}
_EXPERTS_FP8: Traits = {"act": _GLU_KINDS, **_BIAS, "activation": ("fp8_128",)}

# contract -> (module:function below dayzero.ops, traits)
_REFERENCES: Mapping[str, tuple[str, Traits]] = {
    "norm.rms": ("norm:rms", {"weight": (True, False), **_NORM}),
    "norm.layer": ("norm:layer", {"weight": (True, False), "bias": (True, False)}),
    "norm.rms_gated": ("norm:rms_gated", {"act": ("silu", "sigmoid")}),
    "norm.l2": ("norm:l2", {}),
    "rope.apply": (
        "rope:apply",
        {
            "style": ("half", "interleaved"), "place": ("first", "last"), "mrope": (False, True),
            "inverse": (False, True),
        },
    ),
    "embed.lookup": ("embed:lookup", {}),
    "linear.matmul": ("linear:matmul", _BIAS),
    "linear.matmul_f32": ("linear:matmul_f32", _BIAS),
    "linear.matmul_glu": ("linear:matmul_glu", {"kind": _GLU_KINDS}),
    "linear.matmul_add": ("linear:matmul_add", {}),
    "linear.matmul_fp8_128": ("linear_rounded:matmul_fp8_128", _BIAS),
    "linear.grouped": ("linear:grouped", {}),
    "attention.causal": ("attention:causal", _CAUSAL),
    "attention.paged": ("paged:paged", _PAGED),
    "attention.sparse": ("sparse_attention:sparse", _SPARSE),
    "cache.write": ("records:write", {"record": (*LATENT_RECORDS, *INDEX_RECORDS, *KV_RECORDS)}),
    "cache.write_latent": (
        "latent_write:write_latent",
        {"record": LATENT_RECORDS, "style": ("half", "interleaved", None), "mrope": (False, True)},
    ),
    "attention.norm_rope_write": (
        "heads_write:norm_rope_write",
        {
            "norm": (False, True), "style": ("half", "interleaved", None), "mrope": (False, True),
            "record": KV_RECORDS,
        },
    ),
    "attention.merge": ("attention:merge", {}),
    "attention.gate": ("attention:gate", {"per": ("channel", "head")}),
    "latent.absorb": ("latent:absorb", {}),
    "latent.expand": ("latent:expand", {}),
    "latent.attend_expanded": ("latent:attend_expanded", {**_LATENT, "index": (False, True)}),
    "latent.attend": ("latent:attend", {"record": LATENT_RECORDS, "latent_width": ("int",)}),
    "latent.queries": ("latent:queries_into_latent", {}),
    "latent.values": ("latent:values_out_of_latent", {}),
    "sparse_index.score": ("sparse_index:score", {}),
    "sparse_index.top_k": (
        "sparse_index:top_k",
        {"order": ("position", "score"), "sinks": ("int",), "window": ("int",), "tail": ("int",)},
    ),
    "sparse_index.tokens": ("sparse_index:tokens", _TOKENS),
    "sparse_index.pool": ("sparse_index:pool", _POOL),
    "sparse_index.window": ("sparse_index:window", {"sinks": (False, True)}),
    "sparse_index.grid": ("sparse_index:grid", {"reach": ("block", "near")}),
    "recurrence.gate_softplus": ("recurrence:gate_softplus", _DECAY),
    "recurrence.gate_bounded": ("recurrence:gate_bounded", _DECAY),
    "recurrence.delta": ("recurrence:delta_recurrent", _DELTA),
    "recurrence.delta_chunked": ("recurrence:delta_chunked", _DELTA),
    "recurrence.paged": ("delta_paged:paged", DELTA_PAGED),
    "conv.causal": ("conv:causal", {"act": ("silu", None), **_BIAS}),
    "activation.glu": ("activation:glu", {"kind": _GLU_KINDS}),
    "activation.gelu": ("activation:gelu", {"form": ("erf", "tanh")}),
    "vision.patches": ("vision:patches", {"bias": (False, True), "frames": ("int",)}),
    "vision.positions": ("vision:positions", {"corners": (False, True)}),
    "rope.grid": ("vision:grid", {"style": ("half", "interleaved"), "first": ("row", "column")}),
    "attention.full": ("vision:full", {}),
    "moe.route": (
        "moe:route",
        {
            "score": ("sigmoid", "softmax", "softmax_topk"), "bias": (None, "select", "logit"), "groups": (False, True),
            "renormalise": (False, True),
        },
    ),
    "moe.matmul_route": (
        "router:matmul_route",
        {
            "score": ("sigmoid", "softmax", "softmax_topk"), "bias": (None, "select", "logit"), "groups": (False, True),
            "renormalise": (False, True),
        },
    ),
    "moe.experts": ("moe:experts", {"act": _GLU_KINDS, "bias": (False, True), "activation": ("bf16",)}),
    "moe.experts_fp8_128": ("experts_fp8:experts_fp8_128", _EXPERTS_FP8),
    "residual.add": ("residual:add", {}),
    "residual.add_norm": ("residual:add_norm", _NORM),
    "residual.attn_mix": ("residual:attn_mix", {}),
    "residual.attn_mix_norm": ("residual:attn_mix_norm", _NORM),
    "residual.streams_enter": ("residual:streams_enter", {}),
    "residual.streams_leave": ("residual:streams_leave", {}),
    "residual.streams_close": ("residual:streams_close", {"collapse": ("sigmoid", "mean")}),
    "sample.greedy": ("sample:greedy", {}),
    "sample.draw": ("sample:draw", {}),
    "sample.shape": ("sample:shape", {}),
}  # fmt: skip

_NATIVE, _ONEDNN = "dayzero.ops.native.calls", "dayzero.ops.vendor.onednn"
_VARIANTS = (
    Line("attention.causal", "tiled", "any", (), "dayzero.ops.attention:causal_tiled", _CAUSAL),
    Line("attention.paged", "tiled", "any", (), "dayzero.ops.paged:paged_tiled", _PAGED, rank=5),
    Line("attention.sparse", "gather", "any", (), "dayzero.ops.sparse_attention:sparse_gather", _SPARSE),
    Line("attention.sparse", "masked", "any", (), "dayzero.ops.sparse_attention:sparse_masked", _SPARSE),
    Line("attention.sparse", "by_length", "any", (), "dayzero.ops.sparse_attention:sparse_by_length", _SPARSE, rank=10),
    Line("sparse_index.tokens", "tiled", "any", (), "dayzero.ops.sparse_select:tokens_tiled", _TOKENS, rank=10),
    Line("sparse_index.pool", "tiled", "any", (), "dayzero.ops.sparse_select:pool_tiled", _POOL, rank=10),
    # Where a run is split shows in the last bits; a bf16 model rounds them into other choices of experts.
    Line(
        "recurrence.paged", "by_length", "any", (), "dayzero.ops.delta_paged:paged_by_length", DELTA_PAGED, rank=10,
        dtypes=("f32",),
    ),
    Line("recurrence.paged", "chunked", "any", (), "dayzero.ops.delta_paged:paged_chunked", DELTA_PAGED),
    Line("linear.matmul", "torch_cpu", "cpu", (), "dayzero.ops.vendor.torch_cpu:matmul", _BIAS, rank=10),
    Line("linear.matmul_f32", "torch_cpu", "cpu", (), "dayzero.ops.vendor.torch_cpu:matmul_f32", _BIAS, rank=10),
    Line("residual.add", "torch_cpu", "cpu", (), "dayzero.ops.vendor.torch_cpu:add", rank=10),
    Line(
        "attention.causal", "torch_cpu", "cpu", (), "dayzero.ops.vendor.torch_cpu:attention_causal",
        {**_CAUSAL, "sinks": (False,), "softcap": (False,)}, rank=10,
    ),
    Line(
        "attention.paged", "torch_cpu", "cpu", (), "dayzero.ops.vendor.torch_cpu:attention_paged",
        {**_CAUSAL, "sinks": (False,), "softcap": (False,), "latent": (False,)}, rank=10,
    ),
    Line("attention.full", "torch_cpu", "cpu", (), "dayzero.ops.vendor.torch_cpu:attention_full", rank=10),
    Line(
        "moe.experts", "torch_cpu", "cpu", (), "dayzero.ops.vendor.torch_cpu:moe_experts",
        {"act": _GLU_KINDS, "bias": (False, True), "activation": ("bf16",)}, rank=10, packed=("mxfp4",),
    ),
    Line(
        "moe.experts_fp8_128", "widen", "any", (), "dayzero.ops.experts_fp8:widening", _EXPERTS_FP8, rank=10,
        packed=("mxfp4",),
    ),
    Line(
        "moe.experts_fp8_128", "ring", "any", (), "dayzero.ops.experts_fp8:ring", _EXPERTS_FP8,
        packed=("mxfp4",), ring=True,
    ),
    # oneDNN multiplies bf16 at speed only where the processor does, as native_cpu does as well, with one call less in
    # between; tiles (AMX) are oneDNN's alone. Its f32 products need nothing.
    Line(
        "linear.matmul", "onednn", "cpu", ("onednn", "avx512_bf16"), f"{_ONEDNN}:matmul", _BIAS,
        prepack=f"{_ONEDNN}:pack", rank=15, dtypes=("bf16",),
    ),
    Line(
        "linear.matmul", "onednn_amx", "cpu", ("onednn", "amx_bf16"), f"{_ONEDNN}:matmul", _BIAS,
        prepack=f"{_ONEDNN}:pack", rank=30, dtypes=("bf16",),
    ),
    Line(
        "linear.matmul", "onednn_f32", "cpu", ("onednn",), f"{_ONEDNN}:matmul", _BIAS,
        prepack=f"{_ONEDNN}:pack", rank=20, dtypes=("f32",),
    ),
    Line(
        "linear.matmul_f32", "onednn_f32", "cpu", ("onednn",), f"{_ONEDNN}:matmul", _BIAS,
        prepack=f"{_ONEDNN}:pack", rank=20, dtypes=("f32",),
    ),
    Line(
        "linear.matmul", "native_cpu", "cpu", ("cxx",), f"{_NATIVE}:matmul", _BIAS,
        prepack=f"{_NATIVE}:pack", rank=20, dtypes=("bf16",),
    ),
    Line(
        "linear.matmul_f32", "native_cpu", "cpu", ("cxx",), f"{_NATIVE}:matmul_f32", _BIAS,
        prepack=f"{_NATIVE}:pack", rank=20, dtypes=("bf16",),
    ),
    Line(
        "attention.paged", "native_cpu", "cpu", ("cxx",), f"{_NATIVE}:paged", {**_CAUSAL, "latent": (False,)}, rank=20,
        dtypes=("bf16", "f32"),
    ),
    Line(
        "norm.rms", "native_cpu", "cpu", ("cxx",), f"{_NATIVE}:rms", _REFERENCES["norm.rms"][1], rank=20,
        dtypes=("bf16", "f32"),
    ),
    Line(
        "rope.apply", "native_cpu", "cpu", ("cxx",), f"{_NATIVE}:apply_rope", _REFERENCES["rope.apply"][1], rank=20,
        dtypes=("bf16", "f32"),
    ),
    Line(
        "activation.glu", "native_cpu", "cpu", ("cxx",), f"{_NATIVE}:silu_glu", {"kind": ("silu",)}, rank=20,
        dtypes=("bf16", "f32"),
    ),
)  # fmt: skip


def builtin() -> Catalog:
    """A fresh catalog of the variants that ship with this package."""
    catalog = Catalog()
    for contract, (place, traits) in _REFERENCES.items():
        packed: tuple[Form, ...] = ("mxfp4", "fp8_block") if contract.startswith("moe.experts") else ()
        eager = eager_reason(contract, REFERENCE, "any")
        line = Line(contract, REFERENCE, "any", (), f"dayzero.ops.{place}", traits, packed=packed, eager=eager)
        catalog.add(line)
    for line in (*_VARIANTS, *CUDA_LINES):
        catalog.add(replace(line, eager=eager_reason(line.contract, line.variant, line.target)))
    return catalog


CATALOG = builtin()


def lookup(contract: str) -> list[Line]:
    """``Catalog.lookup`` in the built-in catalog."""
    return CATALOG.lookup(contract)


def supports(contract: str, traits: Mapping[str, object]) -> tuple[bool, list[str]]:
    """``Catalog.supports`` in the built-in catalog."""
    return CATALOG.supports(contract, traits)
