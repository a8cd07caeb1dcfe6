"""The gated delta rule over runs of many tokens, 64 at a time, in Triton.

T tokens, H value heads, G key heads, K key width, V value width, R rows. Two kernels: what a chunk computes without
the state (``delta_chunk_local``), for all chunks at once; then the state from chunk to chunk (``delta_chunk_scan``),
for all heads and slices of the values at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from dayzero.ops.delta_paged import Kept, Raw, Weights
from dayzero.ops.triton.delta_chunk_rows import convolve, plan
from dayzero.ops.triton.delta_chunk_run import MOST_ROWS, TRITON, Finish, Gate, Kernels, Rows, Sizes, row_unit
from dayzero.ops.triton.machine import check_machine

__all__ = ["check_machine", "chunked", "delta_chunked", "prefill"]
_CHANNELS_AT_ONCE = 512  # of a convolution's program, 4 a thread: twice as many would leave room for half the warps
_CONVOLVE_REGISTERS = 80  # in bf16 nothing is spilled, and 24 warps have a multiprocessor


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
    rows = _rows_of(kept, first_row)
    q_TGK, k_TGK, v_THV = _convolved(raw, weights, kept, rows)
    sizes = Sizes.of(q_TGK, k_TGK, v_THV, raw.z)
    gate = Gate(weights.a_log_H.contiguous(), weights.dt_bias.contiguous(), lower)
    rule = kernels(sizes)
    scratch = rule.local(q_TGK, k_TGK, raw.z, raw.beta_TH, sizes, rows.num_chunks, gate, rows)
    finish = Finish(raw.gate_TC, weights.norm_V.contiguous(), eps, act == "silu", kept.spans[first_row].first)
    rule.run_rows(scratch, v_THV, out_THV, kept.state_NHKV, sizes, rows, finish)


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


def _convolved(raw: Raw, weights: Weights, kept: Kept, rows: Rows) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, G, K] and v [T, H, V] behind their convolutions, packed; replaces the rows' windows in the pool."""
    inputs = (raw.q_TC, raw.k_TC, raw.v_TC)
    taps = [x.contiguous() for x in (weights.q_taps_CW, weights.k_taps_CW, weights.v_taps_CW)]
    windows = (kept.q_NCS, kept.k_NCS, kept.v_NCS)
    made = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs]
    keys, values, num_taps = raw.k_TC.shape[1], raw.v_TC.shape[1], taps[0].shape[1]
    if num_taps > MOST_ROWS:
        raise ValueError(f"{num_taps} taps reach over more than a chunk of {MOST_ROWS} tokens; bind the reference here")
    at_once = _channels_at_once(keys, values)
    parts, unit = 2 * triton.cdiv(keys, at_once) + triton.cdiv(values, at_once), row_unit(*inputs)
    steps = [step for x in inputs for step in (x.stride(0) // unit, x.stride(1))]
    convolve[(parts, rows.num_chunks)](
        *inputs, *taps, *windows, *made, rows.first, rows.count, rows.row, rows.starts, rows.start, rows.slots,
        *steps, *(x.stride(0) for x in windows), rows.slots.stride(0), keys, values, W=num_taps, BC=at_once,
        EVEN=keys % at_once == values % at_once == 0, UNIT=unit, num_warps=max(1, at_once // 128),
        maxnreg=_CONVOLVE_REGISTERS,
    )  # fmt: skip
    widths = (kept.state_NHKV.shape[2], kept.state_NHKV.shape[2], kept.state_NHKV.shape[3])
    q, k, v = (y.unflatten(-1, (-1, width)) for y, width in zip(made, widths, strict=True))
    return q, k, v


def _channels_at_once(keys: int, values: int) -> int:
    """Of a convolution's program: what divides both numbers, or, where that is less than a warp's, all with a mask."""
    even = math.gcd(keys, values, _CHANNELS_AT_ONCE)
    return even if even >= 128 else min(_CHANNELS_AT_ONCE, triton.next_power_of_2(max(keys, values)))
