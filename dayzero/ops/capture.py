"""Which variants may be a part of a CUDA graph of steps whose rows have one token, and what keeps others out. Paper.

A graph repeats launches with the arguments they had when it was captured. So what is launched may follow from shapes,
from the tables' width and from how many tokens rows have, and from nothing that is another number at each step: no
position, no length, no id, nothing read back.
"""

from __future__ import annotations

from collections.abc import Mapping

BY_ROW = "goes from row to row on the host, by lengths that only the host knows"
READS = "looks at numbers of the device on the host"
PROMPTS = "is made for prompts, from positions that the host knows"
OF_CPU = "runs on the processor"

# Bodies and variants for any device that launch by shapes alone; held to it by a test.
_BY_SHAPES = frozenset({
    "norm.rms", "norm.layer", "norm.rms_gated", "norm.l2", "rope.apply", "linear.matmul", "linear.matmul_f32",
    "linear.matmul_glu", "linear.matmul_add", "linear.matmul_fp8_128", "linear.grouped", "attention.gate",
    "attention.merge", "attention.norm_rope_write", "latent.absorb", "latent.queries", "latent.values",
    "sparse_index.window", "activation.glu", "activation.gelu", "cache.write", "cache.write_latent", "moe.route",
    "moe.matmul_route",
    "residual.add", "residual.add_norm", "residual.attn_mix", "residual.attn_mix_norm", "residual.streams_leave",
    "residual.streams_close", "recurrence.gate_softplus", "recurrence.gate_bounded", "sample.greedy", "sample.shape",
})  # fmt: skip
_BODIES: Mapping[str, str] = {
    "embed.lookup": READS, "moe.experts": READS, "moe.experts_fp8_128": READS, "sample.draw": READS,
    "attention.paged": BY_ROW, "latent.attend": BY_ROW, "attention.sparse": BY_ROW, "recurrence.paged": BY_ROW,
    "sparse_index.tokens": BY_ROW, "sparse_index.pool": BY_ROW,
    "residual.streams_enter": "copies numbers from the host at each call",
    "vision.patches": PROMPTS, "vision.positions": PROMPTS, "rope.grid": PROMPTS, "attention.full": PROMPTS,
}  # fmt: skip
# Of the variants for GPUs, those that a step of one token a row does not run.
_CUDA: Mapping[tuple[str, str], str] = {
    ("recurrence.delta_chunked", "triton"): PROMPTS, ("recurrence.delta_chunked", "cuda"): PROMPTS,
    ("sparse_index.top_k", "cuda"): PROMPTS, ("attention.full", "torch_cuda"): PROMPTS,
}  # fmt: skip


def eager_reason(contract: str, variant: str, target: str) -> str:
    """Why a variant of ours keeps a step from being captured; empty where it does not."""
    if target == "cpu":
        return OF_CPU
    if target == "cuda":
        return _CUDA.get((contract, variant), "")
    return "" if variant == "reference" and contract in _BY_SHAPES else _BODIES.get(contract, PROMPTS)
