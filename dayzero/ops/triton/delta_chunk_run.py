"""The two kernels of the chunked delta rule, launched: for one run, or for packed rows over states in a pool.

T tokens, H value heads, G key heads, K key width, V value width, C tokens of a chunk, N chunks, R rows. Between the
kernels lie 2 (3 K + 2 C) bytes a token and head for bf16 inputs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from dayzero.ops.triton.delta_chunk_local import local_channel, local_head
from dayzero.ops.triton.delta_chunk_rows import norm_gate
from dayzero.ops.triton.delta_chunk_scan import scan
from dayzero.ops.triton.machine import INTERPRETED

LEAST_NARROW = 64  # channels of a head from which on bf16 is multiplied as such: errors average out over a sum
_HEADS_AT_ONCE, _TOKENS_AT_ONCE = 16, 2  # of a program of the output norm
MOST_ROWS = 64  # tokens of a chunk: what one instruction of the matrix unit takes


@dataclass(frozen=True, slots=True)
class Sizes:
    """heads: H; group: H / G; span: tokens after which a chunk ends in any case; narrow: q, k and v
    are multiplied in 16 bits, else in f32."""

    heads: int
    group: int
    key: int
    value: int
    span: int
    narrow: bool

    @staticmethod
    def of(q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, span: int = MOST_ROWS) -> Sizes:
        """ValueError when the shapes do not belong together."""
        heads, key_heads, width = v_THV.shape[1], k_TGK.shape[1], k_TGK.shape[2]
        if heads % key_heads or tuple(g.shape) not in ((v_THV.shape[0], heads), (v_THV.shape[0], heads, width)):
            raise ValueError(f"{heads} value heads, {key_heads} key heads of {width} and g {tuple(g.shape)} do not fit")
        bf16 = all(x.dtype == torch.bfloat16 for x in (q_TGK, k_TGK, v_THV))
        narrow = bf16 and min(width, v_THV.shape[2]) >= LEAST_NARROW and not INTERPRETED
        return Sizes(heads, heads // key_heads, width, v_THV.shape[2], span, narrow)

    @property
    def rows(self) -> int:
        """C: the smallest power of two that holds span, in 16..64."""
        return min(MOST_ROWS, max(16, triton.next_power_of_2(self.span)))

    @property
    def key_padded(self) -> int:
        return max(16, triton.next_power_of_2(self.key))

    def value_slice(self, num_rows: int) -> int:
        """Value columns of one program. 64 is what four warps take at a time; with 128 a multiprocessor holds one
        program of eight warps, and reads everything but the values once instead of twice."""
        most = 128 if self.heads * num_rows >= 66 else 64
        return min(most, max(16, triton.next_power_of_2(self.value)))

    def num_chunks(self, num_tokens: int) -> int:
        """Of one run that is also cut every ``span`` tokens."""
        full, rest = divmod(num_tokens, self.span)
        return full * triton.cdiv(self.span, self.rows) + triton.cdiv(rest, self.rows)


@dataclass(frozen=True, slots=True)
class Scratch:
    """What ``delta_chunk_local`` leaves for ``delta_chunk_scan``; see there."""

    w: Tensor
    qd: Tensor
    kd: Tensor
    t: Tensor
    a: Tensor
    last: Tensor

    @staticmethod
    def of(sizes: Sizes, num_chunks: int, device: torch.device) -> Scratch:
        dtype = torch.bfloat16 if sizes.narrow else torch.float32
        blocks, rows, keys = num_chunks * sizes.heads, sizes.rows, sizes.key_padded
        w, qd, kd = (torch.empty(blocks, rows, keys, dtype=dtype, device=device) for _ in range(3))
        t, a = (torch.empty(blocks, rows, rows, dtype=dtype, device=device) for _ in range(2))
        return Scratch(w, qd, kd, t, a, torch.empty(blocks, keys, dtype=torch.float32, device=device))

    def all(self) -> tuple[Tensor, ...]:
        return self.w, self.qd, self.kd, self.t, self.a, self.last


@dataclass(frozen=True, slots=True)
class Gate:
    """A decay before its gate, and beta before its sigmoid. lower: of the bounded gate, None for softplus."""

    a_log_H: Tensor
    dt_bias: Tensor
    lower: float | None


@dataclass(frozen=True, slots=True)
class Rows:
    """Packed rows: where each begins (starts [R + 1]), its first position (start [R]), its slot in a pool of states
    (slots [R], any stride); the number of its first chunk (chunks [R + 1]), and of each chunk its first token, how many
    it has and its row; all int32. num_chunks: at least as many as there are."""

    starts: Tensor
    start: Tensor
    slots: Tensor
    chunks: Tensor
    first: Tensor
    count: Tensor
    row: Tensor

    @property
    def num(self) -> int:
        return self.start.shape[0]

    @property
    def num_chunks(self) -> int:
        return self.first.shape[0]


@dataclass(frozen=True, slots=True)
class Finish:
    """The gated output norm behind the rule. gate: raw, [T, H*V]; weight: [V], packed; silu: its activation, else the
    sigmoid; first: the first token of the rows."""

    gate_TC: Tensor
    weight_V: Tensor
    eps: float
    silu: bool
    first: int


@functools.cache
def tables(rows: int, narrow: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """(sums [L + 3, C, C], masks [L, C, C]) of zeros and ones (and -1) for L = log2 C, see ``delta_chunk_local``.

    sums[l] @ g is the sum of g between a row and the boundary of level l; sums[L] @ g the running sum, sums[L + 1] @ g
    what lies behind a row, sums[L + 2] @ g that of level L - 2 with its sign turned in the upper half. masks[l] are the
    pairs of level l.
    """
    i, j = torch.arange(rows)[:, None], torch.arange(rows)[None, :]
    sums, masks = [], []
    for level in range(rows.bit_length() - 1):
        boundary = (i >> level | 1) << level  # the first row of the upper half of the block that i is in
        sums.append(((j >= boundary) & (j <= i)) | ((j > i) & (j < boundary)))
        masks.append(((i ^ j) >> level == 1) & (i > j))
    upper = i & rows // 4 != 0
    sums += [j <= i, j > i, torch.where(upper, -1.0, 1.0) * sums[-2]]
    dtype = torch.float16 if narrow else torch.float32
    return torch.stack(sums).to(device, dtype), torch.stack(masks).to(device, torch.float32)


def local(
    q_TGK: Tensor, k_TGK: Tensor, g: Tensor, beta_TH: Tensor, sizes: Sizes, num_chunks: int,
    gate: Gate | None = None, rows: Rows | None = None,
) -> Scratch:  # fmt: skip
    """The first kernel. g: [T, H, K] or [T, H], a log-decay, or with a gate what comes before it."""
    scratch = Scratch.of(sizes, num_chunks, q_TGK.device)
    per_channel = g.dim() == 3
    a_log, bias, lower = (gate.a_log_H, gate.dt_bias, gate.lower) if gate else (None, None, None)
    (local_channel if per_channel else local_head)[(sizes.heads, num_chunks)](
        q_TGK, k_TGK, g, beta_TH, *scratch.all(), *tables(sizes.rows, sizes.narrow, q_TGK.device), a_log, bias,
        rows.first if rows else None, rows.count if rows else None, q_TGK.shape[0],
        *q_TGK.stride(), *k_TGK.stride(), *g.stride(), *(() if per_channel else (1,)), *beta_TH.stride(),
        sizes.key**-0.5, lower or 0.0,
        GROUP=sizes.group, K=sizes.key, KP=sizes.key_padded, C=sizes.rows, LEVELS=sizes.rows.bit_length() - 1,
        SPAN=sizes.span, RAGGED=rows is not None, GATE=0 if gate is None else 1 if lower is None else 2,
        NARROW=sizes.narrow, num_warps=4,
    )  # fmt: skip
    return scratch


def run(
    scratch: Scratch, v_THV: Tensor, old_HKV: Tensor | None, sizes: Sizes, num_chunks: int, keep_states: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The second kernel for one run: (o, new state, states behind each span or nothing)."""
    num_tokens, heads, width = v_THV.shape
    o_THV = torch.empty(num_tokens, heads, width, dtype=v_THV.dtype, device=v_THV.device)
    new = torch.empty(heads, sizes.key, width, dtype=torch.float32, device=v_THV.device)
    states = new.new_empty(triton.cdiv(num_tokens, sizes.span) if keep_states else 0, *new.shape)
    part = sizes.value_slice(1)
    scan[(triton.cdiv(width, part), heads, 1)](
        v_THV, *scratch.all(), old_HKV, new, states, o_THV, None, None, None, None, num_tokens, num_chunks,
        *v_THV.stride(), *o_THV.stride()[:2], 0, 0, RAGGED=False, OLD=old_HKV is not None, STATES=keep_states,
        **_options(sizes, part),
    )  # fmt: skip
    return o_THV, new, states


def run_rows(
    scratch: Scratch, v_THV: Tensor, out_THV: Tensor, states_NHKV: Tensor, sizes: Sizes, rows: Rows, finish: Finish
) -> None:
    """The second kernel for packed rows, and the output norm: writes their tokens of ``out_THV``, and their states in
    the pool."""
    part = sizes.value_slice(rows.num)
    scan[(triton.cdiv(sizes.value, part), sizes.heads, rows.num)](
        v_THV, *scratch.all(), states_NHKV, states_NHKV, None, out_THV, rows.starts, rows.chunks, rows.slots,
        rows.start, v_THV.shape[0], rows.num_chunks, *v_THV.stride(), *out_THV.stride()[:2], states_NHKV.stride(0),
        rows.slots.stride(0), RAGGED=True, OLD=True, STATES=False, **_options(sizes, part),
    )  # fmt: skip
    normed(out_THV, finish)


def normed(out_THV: Tensor, finish: Finish) -> None:
    """The output norm of all tokens from the first on, in place."""
    out_THV, gate_TC = out_THV[finish.first :], finish.gate_TC[finish.first :]
    num_tokens, heads, width = out_THV.shape
    padded, tokens = triton.next_power_of_2(width), _TOKENS_AT_ONCE
    at_once, unit = min(_HEADS_AT_ONCE, triton.next_power_of_2(heads)), row_unit(gate_TC)
    norm_gate[(triton.cdiv(heads, at_once) * triton.cdiv(num_tokens, tokens),)](
        out_THV, gate_TC, finish.weight_V, num_tokens, gate_TC.stride(0) // unit, gate_TC.stride(1), finish.eps,
        HEADS=heads, V=width, VP=padded, BH=at_once, BT=tokens, SILU=finish.silu, UNIT=unit, num_warps=4,
    )  # fmt: skip


def row_unit(*inputs_TC: Tensor) -> int:
    """What divides the distances of their tokens, 16 at most. The compiler itself only asks whether 16 does. With 12
    heads a joint product's rows may be multiples of 4, and one number at a time would take several times as long."""
    return math.gcd(16, *(x.stride(0) for x in inputs_TC))


def _options(sizes: Sizes, part: int) -> dict[str, int | bool]:
    return {
        "HEADS": sizes.heads, "K": sizes.key, "KP": sizes.key_padded, "V": sizes.value, "BV": part, "C": sizes.rows,
        "SPAN": sizes.span, "NARROW": sizes.narrow, "STAGES": 2 if sizes.narrow else 1,
        "num_warps": 8 if part > 64 else 4,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kernels:
    """One pair of kernels: ``local``, ``run`` and ``run_rows`` of this file, or others that compute the same; what the
    first gives is only taken by the others of its own pair."""

    local: Callable[..., Any]
    run: Callable[..., tuple[Tensor, Tensor, Tensor]]
    run_rows: Callable[..., None]


TRITON = Kernels(local, run, run_rows)
