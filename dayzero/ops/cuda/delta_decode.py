"""Rows of one token of ``recurrence.paged`` in one kernel: ``delta_decode.cu``.

R rows of one token, H value heads, G key heads, C channels. K = V = 128, four taps, bf16 projections and windows.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dayzero.ops.cuda.build import Kernel, check_machine, load
from dayzero.ops.delta_paged import Kept, Raw, Weights

__all__ = ["LARGEST_GROUP", "check_machine", "decode"]

WIDTH, TAPS = 128, 4
LARGEST_GROUP = 8  # value heads of a key head: their blocks of threads are a cluster, and clusters end there
TRIED = {"RULE_WARPS": 8, "STREAM": 0}  # see delta_decode.cu
_ARGUMENTS = (
    "q", "k", "v", "z", "beta", "gate", "|q_row", "|k_row", "|v_row", "|z_row", "|beta_row", "|gate_row", "q_taps",
    "k_taps", "v_taps", "a_log", "dt_bias", "norm", "state", "q_window", "k_window", "v_window", "|state_block",
    "|q_block", "|k_block", "|v_block", "table", "start", "|table_row", "out",
)  # fmt: skip


class _Args(ctypes.Structure):
    """``Args`` of the source; names behind a bar are numbers of elements."""

    _fields_ = [
        *((name.strip("|"), ctypes.c_int64 if name.startswith("|") else ctypes.c_void_p) for name in _ARGUMENTS),
        *((name, ctypes.c_int32) for name in ("heads", "group")),
        *((name, ctypes.c_float) for name in ("lower", "eps")),
        ("settled", ctypes.c_int32),
    ]


def decode(
    out_THV: Tensor, raw: Raw, weights: Weights, kept: Kept, *, eps: float, act: str, lower: float | None = None
) -> None:
    """The rows of ``kept`` that have one token and come first: out [T, H, V] of them is written, states and windows are
    replaced. One launch; what is settled is read before the kernels ahead of it in the stream have ended."""
    rows = kept.num_single
    if rows == 0:
        return
    per_head = raw.z.dim() == 2
    packed = Raw(*(_packed(getattr(raw, name)) for name in Raw.__slots__))
    _check(packed, weights, kept)
    heads = kept.state_NHKV.shape[1]
    group = heads // (packed.q_TC.shape[1] // WIDTH)
    arguments = _arguments(out_THV, packed, weights, kept)
    arguments.heads, arguments.group, arguments.settled = heads, group, int(kept.settled)
    arguments.lower, arguments.eps = lower or 0.0, eps
    kernel = _kernel(group > 1, per_head, lower is not None, act == "silu")
    kernel((heads, rows), 32 * TRIED["RULE_WARPS"] + WIDTH, [arguments], cluster=group, overlap=True)


def _kernel(clustered: bool, per_head: bool, bounded: bool, silu: bool) -> Kernel:
    given = {"CLUSTERED": clustered, "PER_HEAD": per_head, "BOUNDED": bounded, "SILU": silu, **TRIED}
    return load("delta_decode.cu", "delta_decode", defines={name: int(value) for name, value in given.items()})


def _packed(x: Tensor) -> Tensor:
    """x with its values of one token beside one another."""
    flat = x.flatten(1)
    return flat if flat.stride(-1) == 1 else flat.contiguous()


def _check(raw: Raw, weights: Weights, kept: Kept) -> None:
    assert kept.state_NHKV.shape[2:] == (WIDTH, WIDTH) and kept.state_NHKV.dtype == torch.float32
    assert weights.q_taps_CW.shape[1] == TAPS, "the kernel has four taps"
    halves = (*(getattr(raw, name) for name in Raw.__slots__), kept.q_NCS, kept.k_NCS, kept.v_NCS)
    assert all(x.dtype == torch.bfloat16 for x in halves), "projections and windows are bf16"
    floats = [getattr(weights, name) for name in Weights.__slots__]
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in floats), "parameters are packed f32"
    assert kept.table_R.dtype == torch.int32 and kept.start.dtype == torch.int32 and kept.start.is_contiguous()
    places = [x.data_ptr() for x in (kept.state_NHKV, *floats[:3])]
    assert all(n % 16 == 0 for n in (*places, kept.state_NHKV.stride(0) * 4)), "states and taps are read by 16 bytes"


def _arguments(out_THV: Tensor, raw: Raw, weights: Weights, kept: Kept) -> _Args:
    inputs = [getattr(raw, name) for name in Raw.__slots__]
    pools = (kept.state_NHKV, kept.q_NCS, kept.k_NCS, kept.v_NCS)
    return _Args(
        *(x.data_ptr() for x in inputs), *(x.stride(0) for x in inputs),
        *(getattr(weights, name).data_ptr() for name in Weights.__slots__),
        *(x.data_ptr() for x in pools), *(x.stride(0) for x in pools),
        kept.table_R.data_ptr(), kept.start.data_ptr(), kept.table_R.stride(0), out_THV.data_ptr(),
    )  # fmt: skip
