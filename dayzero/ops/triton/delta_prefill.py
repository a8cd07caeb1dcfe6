"""The gated delta rule over runs of many tokens, 64 at a time, in Triton.

T tokens, H value heads, G key heads, K key width, V value width, R rows. Two kernels: what a chunk computes without
the state (``delta_chunk_local``), for all chunks at once; then the state from chunk to chunk (``delta_chunk_scan``),
for all heads and slices of the values at once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.triton.delta_chunk_rows import convolve, keep_windows, norm_gate, plan
from dayzero.ops.triton.delta_chunk_run import MOST_ROWS, TRITON, Gate, Kernels, Rows, Sizes
from dayzero.ops.triton.machine import check_machine

__all__ = ["check_machine", "chunked", "delta_chunked", "prefill"]
_CHANNELS_AT_ONCE = 64  # of a convolution's program


def delta_chunked(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor | None = None,
    *,
    chunk: int = MOST_ROWS,
    return_transition: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """``recurrence.delta_chunked``; see there. bf16 inputs are multiplied as f16 and bf16, others as f32.

    The transition costs two more passes over the state, with as many value columns as keys for A.
    """
    sizes = Sizes.of(q_TGK, k_TGK, v_THV, g, chunk)
    return chunked(TRITON, sizes, (q_TGK, k_TGK, v_THV, g, beta_TH), state_HKV, return_transition)


def chunked(
    kernels: Kernels, sizes: Sizes, inputs: tuple[Tensor, ...], state_HKV: Tensor | None, return_transition: bool
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """``recurrence.delta_chunked`` of inputs q, k, v, g, beta by these kernels."""
    q_TGK, k_TGK, v_THV, g, beta_TH = inputs
    shape = (sizes.heads, sizes.key, sizes.value)
    if state_HKV is not None and (tuple(state_HKV.shape) != shape or state_HKV.dtype != torch.float32):
        raise ValueError(f"the state is {tuple(state_HKV.shape)} {state_HKV.dtype}, not {shape} (K before V) float32")
    old = None if state_HKV is None else state_HKV.contiguous()
    eye = torch.eye(sizes.key, dtype=torch.float32, device=v_THV.device).repeat(sizes.heads, 1, 1)
    num_tokens = v_THV.shape[0]
    if num_tokens == 0:
        new = eye.new_zeros(shape) if old is None else old.clone()
        out = (torch.empty_like(v_THV), new, new.new_empty(0, *shape))
        return (*out, (eye, torch.zeros_like(new))) if return_transition else out
    num_chunks = sizes.num_chunks(num_tokens)
    scratch = kernels.local(q_TGK, k_TGK, g, beta_TH, sizes, num_chunks)
    out = kernels.run(scratch, v_THV, old, sizes, num_chunks, True)
    if not return_transition:
        return out
    none = v_THV.new_zeros(num_tokens, sizes.heads, sizes.key)
    a_HKK = kernels.run(scratch, none, eye, replace(sizes, value=sizes.key), num_chunks, False)[1]
    b_HKV = kernels.run(scratch, v_THV, None, sizes, num_chunks, False)[1]
    return (*out, (a_HKK, b_HKV))


def prefill(out_THV: Tensor, raw: Raw, weights: Weights, kept: Kept, first_row: int, **options: Any) -> None:
    """``recurrence.paged`` for the rows from ``first_row`` on: writes their tokens of ``out_THV`` [T, H, V], and their
    states and windows in the pools of ``kept``. options: eps, act and lower.

    A fixed number of launches. How many chunks there are is read from ``kept.spans``, nothing from the device.
    """
    prefill_by(lambda sizes: TRITON, out_THV, raw, weights, kept, first_row, **options)


def prefill_by(
    kernels: Callable[[Sizes], Kernels], out_THV: Tensor, raw: Raw, weights: Weights, kept: Kept, first_row: int,
    **options: Any,
) -> None:  # fmt: skip
    """``prefill`` by the kernels that ``kernels`` has for such sizes."""
    eps, act, lower = options["eps"], options["act"], options.get("lower")
    _, heads, width, value_width = kept.state_NHKV.shape
    rows = _rows_of(kept, first_row)
    first = kept.spans[first_row].first
    parts = (
        (raw.q_TC, weights.q_taps_CW, kept.q_NCS, width),
        (raw.k_TC, weights.k_taps_CW, kept.k_NCS, width),
        (raw.v_TC, weights.v_taps_CW, kept.v_NCS, value_width),
    )
    q, k, v = (_convolved(*part, rows) for part in parts)
    sizes = Sizes.of(q, k, v, raw.z)
    gate = Gate(weights.a_log_H.contiguous(), weights.dt_bias.contiguous(), lower)
    rule = kernels(sizes)
    scratch = rule.local(q, k, raw.z, raw.beta_TH, sizes, rows.num_chunks, gate, rows)
    rule.run_rows(scratch, v, out_THV, kept.state_NHKV, sizes, rows)
    num_pairs = (out_THV.shape[0] - first) * heads
    at_once = 16
    norm_gate[(triton.cdiv(num_pairs, at_once),)](
        out_THV[first:], raw.gate_TC[first:], weights.norm_V.contiguous(), num_pairs, *raw.gate_TC.stride(), eps,
        HEADS=heads, V=value_width, VP=triton.next_power_of_2(value_width), BM=at_once, SILU=act == "silu",
        num_warps=4,
    )  # fmt: skip


def _rows_of(kept: Kept, first_row: int) -> Rows:
    """The rows from ``first_row`` on, and where their chunks lie, worked out on the device."""
    num = len(kept.spans) - first_row
    num_chunks = sum(triton.cdiv(span.count, MOST_ROWS) for span in kept.spans[first_row:])
    starts = kept.query_start[first_row:]
    ints: dict[str, Any] = {"dtype": torch.int32, "device": starts.device}
    chunks = torch.empty(num + 1, **ints)
    first, count, row = (torch.empty(num_chunks, **ints) for _ in range(3))
    plan[(num,)](
        starts, chunks, first, count, row, num, ROWS=triton.next_power_of_2(num), C=MOST_ROWS, STEP=128, num_warps=1
    )
    places = slice(first_row, len(kept.spans))  # a view may have room for more rows than the step has
    return Rows(starts, kept.start[places], kept.table_R[places], chunks, first, count, row)


def _convolved(x_TC: Tensor, taps_CW: Tensor, windows_NCS: Tensor, width: int, rows: Rows) -> Tensor:
    """[T, heads, width] behind the convolution; replaces the windows of the rows in the pool."""
    num_tokens, channels = x_TC.shape
    y_TC = torch.empty(num_tokens, channels, dtype=x_TC.dtype, device=x_TC.device)
    num_taps, slices = taps_CW.shape[1], triton.cdiv(channels, _CHANNELS_AT_ONCE)
    places = (rows.starts, rows.start, rows.slots)
    strides = (*x_TC.stride(), windows_NCS.stride(0), rows.slots.stride(0))
    convolve[(slices, rows.num_chunks)](
        x_TC, taps_CW.contiguous(), windows_NCS, y_TC, rows.first, rows.count, rows.row, *places, *strides, channels,
        W=num_taps, C=MOST_ROWS, BC=_CHANNELS_AT_ONCE, num_warps=4,
    )  # fmt: skip
    if num_taps > 1:
        keep_windows[(slices, rows.num)](
            x_TC, windows_NCS, *places, *strides, channels, W=num_taps, BC=_CHANNELS_AT_ONCE, num_warps=2
        )
    return y_TC.unflatten(-1, (-1, width))
