"""The catalog's lines for NVIDIA GPUs. Data only, no torch: see ``ops/catalog``.

needs: ``sm90`` is a Hopper; ``triton`` and ``cuda_bindings`` are packages that run kernels in Triton and in CUDA C++.
"""

from __future__ import annotations

from dayzero.ops.line import INDEX_RECORDS, KV_RECORDS, LATENT_RECORDS, MOST_DRAWN, Line, Traits

_TRITON = "dayzero.ops.triton"
_CUDA = "dayzero.ops.cuda"
_VENDOR = "dayzero.ops.vendor"

_BIAS: Traits = {"bias": (False, True)}
_GLU: Traits = {"kind": ("silu", "gelu_tanh", "clamped", "silu_clamped", "situ")}
_NORM: Traits = {"offset": (False, True), "scale_in": ("f32", "dtype")}

# --- norms, rope, activations, residuals, sampling, plain products ---------------------------------------------------
_PLAIN: tuple[Line, ...] = (
    *(
        Line(contract, "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.{place}", traits, rank=20)
        for contract, place, traits in (
            ("norm.rms", "norm:rms", {"weight": (True, False), **_NORM}),
            ("norm.layer", "norm:layer", {"weight": (True, False), "bias": (True, False)}),
            ("norm.rms_gated", "norm:rms_gated", {"act": ("silu", "sigmoid")}),
            ("norm.l2", "norm:l2", {}),
            (
                "rope.apply", "rope:apply",
                {
                    "style": ("half", "interleaved"), "place": ("first", "last"), "mrope": (False, True),
                    "inverse": (False, True),
                },
            ),
            ("rope.grid", "rope:grid", {"style": ("half", "interleaved"), "first": ("row", "column")}),
            ("activation.glu", "activation:glu", _GLU),
            ("activation.gelu", "activation:gelu", {"form": ("erf", "tanh")}),
            ("attention.gate", "activation:gate", {"per": ("channel", "head")}),
            ("attention.merge", "activation:merge", {}),
            ("residual.add", "activation:add", {}),
            ("residual.add_norm", "residual:add_rms", _NORM),
            ("residual.attn_mix", "residual:attn_mix", {}),
            ("residual.attn_mix_norm", "residual:attn_mix_norm", _NORM),
            ("embed.lookup", "embed:lookup", {}),
            ("sample.greedy", "sample:greedy", {}),
        )
    ),
    Line(
        "sample.draw", "block_per_row", "cuda", ("sm90", "cuda_bindings"), f"{_CUDA}.sample:draw", rank=20,
        most=MOST_DRAWN,
    ),
    Line(
        "linear.matmul_fp8_128", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.linear_rounded:matmul", _BIAS,
        prepack=f"{_TRITON}.linear_rounded:pack", rank=20, dtypes=("bf16",), packed=("fp8_block",),
    ),
    Line(
        "linear.matmul_fp8_128", "few_rows", "cuda", ("sm90", "triton", "cuda_bindings"),
        f"{_CUDA}.linear_rounded:matmul", _BIAS, prepack=f"{_CUDA}.linear_rounded:pack", rank=30, dtypes=("bf16",),
        packed=("fp8_block",),
    ),
    Line("linear.matmul", "torch_cuda", "cuda", (), f"{_VENDOR}.torch_cuda:matmul", _BIAS, rank=10),
    Line("linear.matmul_f32", "torch_cuda", "cuda", (), f"{_VENDOR}.torch_cuda:matmul_f32", _BIAS, rank=10),
    Line("linear.grouped", "torch_cuda", "cuda", (), f"{_VENDOR}.torch_cuda:grouped", rank=10),
    Line(
        "attention.full", "torch_cuda", "cuda", (), f"{_VENDOR}.torch_cuda:attention_full", rank=10, dtypes=("bf16",)
    ),
    *(
        Line(
            f"linear.{word}", "few_rows", "cuda", ("sm90", "triton", "cuda_bindings"), f"{_CUDA}.{place}:{word}",
            traits, prepack=f"{_CUDA}.{place}:pack", rank=20, dtypes=("bf16",), packed=("fp8_block",),
        )
        for word, place, traits in (
            ("matmul", "linear", _BIAS), ("matmul_f32", "linear", _BIAS), ("matmul_glu", "linear_fused", _GLU),
            ("matmul_add", "linear_fused", {}),
        )
    ),
)  # fmt: skip
# --- paged attention, dense: grouped heads and latent rows -----------------------------------------------------------
_LATENT_WIDTHS = (16, 32, 64, 128, 256, 512, 1024)  # a tile of values is a power of two wide
_DENSE: Traits = {
    "window": (False, True, "int"), "sinks": (False, True), "softcap": (False, True),
    "value_width": ("same", "other"), "grouped": (False, True), "latent": (False, True),
    "latent_width": _LATENT_WIDTHS,
}  # fmt: skip
_ATTENTION: tuple[Line, ...] = (
    Line(
        "attention.paged", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.paged_prefill:paged",
        {**_DENSE, "record": KV_RECORDS}, rank=20, dtypes=("bf16",),
    ),
    Line(
        "attention.paged", "cuda", "cuda", ("sm90", "triton", "cuda_bindings"), f"{_CUDA}.paged:paged",
        {**_DENSE, "record": ("mla_fp8_656",)}, rank=30, dtypes=("bf16",),
    ),
    Line(
        "attention.norm_rope_write", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.heads_write:norm_rope_write",
        {
            "norm": (False, True), "style": ("half", "interleaved", None), "mrope": (False, True),
            "record": KV_RECORDS,
        },
        rank=20,
    ),
    Line(
        "latent.attend", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.latent_attend:attend",
        {"latent_width": _LATENT_WIDTHS}, rank=20, dtypes=("bf16",),
    ),
    *(
        Line(
            "latent.attend", variant, "cuda", ("sm90", "triton", "cuda_bindings"), f"{_CUDA}.latent_attend:{place}",
            {"latent_width": _LATENT_WIDTHS, "record": ("mla_fp8_656",)}, rank=rank, dtypes=("bf16",),
        )  # chunks in CUDA C++ have not been measured yet: to be asked for
        for variant, place, rank in (("cuda", "attend", 30), ("cuda_chunks", "attend_chunks", 0))
    ),
    Line(
        "latent.queries", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.latent:queries_into_latent", rank=20,
        dtypes=("bf16",),
    ),
    Line(
        "latent.values", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.latent:values_out_of_latent", rank=20,
        dtypes=("bf16",),
    ),
)  # fmt: skip
# --- the delta rule --------------------------------------------------------------------------------------------------
DELTA_PAGED: Traits = {
    "decay": ("channel", "head"), "gate": ("softplus", "bounded"), "act": ("silu", "sigmoid"),
    "grouped": (False, True), "key_width": ("int",), "value_width": ("int",), "taps": ("int",),
}  # fmt: skip
_DELTA: tuple[Line, ...] = (
    Line(
        "recurrence.paged", "triton", "cuda", ("triton",), f"{_TRITON}.delta_paged:paged", DELTA_PAGED, rank=20,
        dtypes=("bf16", "f16", "f32"),
    ),
    Line(
        "recurrence.paged", "cuda", "cuda", ("sm90", "triton", "cuda_bindings"), f"{_CUDA}.delta_paged:paged",
        {**DELTA_PAGED, "key_width": (128,), "value_width": (128,), "taps": (4,)}, rank=30, dtypes=("bf16",),
    ),
    Line(
        "recurrence.delta_chunked", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.delta_prefill:delta_chunked",
        {"decay": ("channel", "head"), "grouped": (False, True)}, rank=20, dtypes=("bf16", "f32"),
    ),
    Line(
        "recurrence.delta_chunked", "cuda", "cuda", ("sm90", "triton", "cuda_bindings"),
        f"{_CUDA}.delta_chunk:delta_chunked", {"decay": ("channel", "head"), "grouped": (False, True)}, rank=30,
        dtypes=("bf16",),
    ),
)  # fmt: skip
# --- the sparse index and attention to what it lists -----------------------------------------------------------------
_TOKENS: Traits = {"sinks": (False, True), "window": (False, True), "record": INDEX_RECORDS}
_POOLS: Traits = {
    "how": ("max",), "local": (False, True), "tail": ("always", "never", "scored"), "record": INDEX_RECORDS,
}  # fmt: skip
_BOTH = ("sm90", "triton", "cuda_bindings")
_INDEX: tuple[Line, ...] = (
    Line(
        "sparse_index.top_k", "cuda", "cuda", ("sm90", "cuda_bindings"), f"{_CUDA}.top_k:top_k",
        {"order": ("position", "score"), "sinks": ("int",), "window": ("int",), "tail": ("int",)}, rank=20,
    ),
    Line("sparse_index.tokens", "triton", "cuda", _BOTH[:2], f"{_TRITON}.sparse_index:tokens", _TOKENS, rank=20),
    Line("sparse_index.tokens", "cuda", "cuda", _BOTH, f"{_CUDA}.sparse_index:tokens", _TOKENS, rank=30),
    Line("sparse_index.pool", "triton", "cuda", _BOTH[:2], f"{_TRITON}.sparse_index:pool", _POOLS, rank=20),
    Line("sparse_index.pool", "cuda", "cuda", _BOTH, f"{_CUDA}.sparse_index:pool", _POOLS, rank=30),
)  # fmt: skip
_LISTED: Traits = {
    "sinks": (False, True), "softcap": (False, True), "value_width": ("same", "other"), "grouped": (False, True),
    "latent": (False, True),
}  # fmt: skip
_SPARSE: tuple[Line, ...] = (
    Line(
        "attention.sparse", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.sparse_attention:sparse_listed", _LISTED,
        rank=20,
    ),
    Line(
        "attention.sparse", "triton_masked", "cuda", ("sm90", "triton"),
        f"{_TRITON}.sparse_attention:sparse_masked", _LISTED,
    ),
    Line(
        "attention.sparse", "cuda", "cuda", ("sm90", "triton", "cuda_bindings"),
        f"{_CUDA}.sparse_attention:sparse_listed", {**_LISTED, "record": ("mla_fp8_656",)}, rank=30,
    ),
    Line(
        "attention.sparse", "cuda_by_load", "cuda", ("sm90", "triton", "cuda_bindings"),
        f"{_CUDA}.sparse_attention:sparse_by_load", {**_LISTED, "record": ("mla_fp8_656",)}, rank=25,
    ),
)  # fmt: skip
# --- routed experts --------------------------------------------------------------------------------------------------
_EXPERTS: tuple[Line, ...] = (
    *(
        Line(
            contract, "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.{place}",
            {
                "score": ("sigmoid", "softmax", "softmax_topk"), "bias": (None, "select", "logit"),
                "groups": (False, True), "renormalise": (False, True),
            },
            rank=20, dtypes=dtypes,
        )
        for contract, place, dtypes in (
            ("moe.route", "route:route", ()), ("moe.matmul_route", "router:matmul_route", ("bf16",)),
        )
    ),
    *(
        Line(
            "moe.experts", variant, "cuda", needs, f"{place}:experts",
            {
                "act": ("silu", "gelu_tanh", "clamped", "silu_clamped", "situ"), "bias": (False, True),
                "activation": ("bf16",),
            },
            prepack=f"{_TRITON}.experts:pack", rank=rank, dtypes=("bf16",), packed=("mxfp4", "fp8_block"),
        )
        for variant, needs, place, rank in (
            ("triton", ("sm90", "triton"), f"{_TRITON}.experts", 20),
            ("cuda", ("sm90", "triton", "cuda_bindings"), f"{_CUDA}.experts_few", 30),
        )
    ),
    Line(
        "moe.experts_fp8_128", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.experts_fp8:experts",
        {
            "act": ("silu", "gelu_tanh", "clamped", "silu_clamped", "situ"), "bias": (False, True),
            "activation": ("fp8_128",),
        },
        prepack=f"{_TRITON}.experts_fp8:pack", rank=20, dtypes=("bf16",), packed=("mxfp4", "fp8_block"),
    ),
)  # fmt: skip
# --- writing cache records -------------------------------------------------------------------------------------------
_CACHE: tuple[Line, ...] = (
    Line(
        "cache.write", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.cache_write:write",
        {"record": (*LATENT_RECORDS, *INDEX_RECORDS, *KV_RECORDS)}, rank=20,
    ),
    Line(
        "cache.write_latent", "triton", "cuda", ("sm90", "triton"), f"{_TRITON}.latent_write:write_latent",
        {"record": LATENT_RECORDS, "style": ("half", "interleaved", None), "mrope": (False, True)}, rank=20,
    ),
)  # fmt: skip

LINES: tuple[Line, ...] = (*_PLAIN, *_ATTENTION, *_DELTA, *_INDEX, *_SPARSE, *_EXPERTS, *_CACHE)
