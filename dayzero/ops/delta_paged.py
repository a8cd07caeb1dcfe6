"""A layer of the gated delta rule between its projections, for all rows of a step, over the states where they lie.

T tokens of the step, R rows, N block numbers, H value heads, G key heads, K key width, V value width, C channels, W
taps. The bodies go row by row through the parts: short convolutions, decay gate, rule, gated output norm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dayzero.ops import conv, norm, recurrence
from dayzero.ops.bounds import RECURRENCE
from dayzero.ops.contract import contract
from dayzero.view import Span

TRAITS: dict[str, tuple[object, ...]] = {
    "decay": ("channel", "head"),
    "gate": ("softplus", "bounded"),
    "act": ("silu", "sigmoid"),
    "grouped": (False, True),
    "key_width": ("int",),
    "value_width": ("int",),
    "taps": ("int",),
}


@dataclass(frozen=True, slots=True)
class Raw:
    """What the projections of a step gave, all in one dtype, the last dimension contiguous or not.

    q, k: [T, G*K]; v: [T, H*V]; z: raw decay, [T, H, K] per channel or [T, H] per head; beta: [T, H], before its
    sigmoid; gate: raw output gate [T, H*V].
    """

    q_TC: Tensor
    k_TC: Tensor
    v_TC: Tensor
    z: Tensor
    beta_TH: Tensor
    gate_TC: Tensor


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of one layer. taps of q and k [G*K, W], of v [H*V, W], the last tap meets the newest token; a_log
    [H]; dt_bias as one token of z; norm [V]. float32 unless a checkpoint says otherwise."""

    q_taps_CW: Tensor
    k_taps_CW: Tensor
    v_taps_CW: Tensor
    a_log_H: Tensor
    dt_bias: Tensor
    norm_V: Tensor


@dataclass(frozen=True, slots=True)
class Kept:
    """What one layer keeps between steps, for all rows of a step, where it lies.

    state [N, H, K, V] f32; windows of q, k [N, G*K, W-1] and v [N, H*V, W-1], the last inputs of each convolution,
    oldest first. Within a block each is contiguous; ``stride(0)`` is how far block numbers lie apart, which may be less
    than a block. table: [R] int32, any stride: the block number of each row, all different; a negative one belongs to
    a row that pads the step: it starts from zeros, and nothing of it is kept. query_start: [R+1] int32, where each
    row's tokens begin in the packed step. start: [R] int32, position of each row's first token; where it is 0, state
    and windows are zeros, whatever lies in the pool. spans: query_start and start as the host knows them.

    settled: the caller answers for it that behind the last kernel that wrote any of these tensors stands one in the
    stream that was launched in the ordinary way, to begin when all ahead of it have ended; so that an implementation
    may read them before the kernels just ahead of it have ended.
    """

    state_NHKV: Tensor
    q_NCS: Tensor
    k_NCS: Tensor
    v_NCS: Tensor
    table_R: Tensor
    query_start: Tensor
    start: Tensor
    spans: tuple[Span, ...]
    settled: bool = False

    @property
    def num_single(self) -> int:
        """Rows of one token, which come first."""
        return next((i for i, s in enumerate(self.spans) if s.count != 1), len(self.spans))


@dataclass(frozen=True, slots=True)
class Parts:
    """The operators that a row goes through, each as the contract it is named after."""

    convolve: Callable[..., tuple[Tensor, Tensor]] = conv.causal.body
    gate_softplus: Callable[..., Tensor] = recurrence.gate_softplus.body
    gate_bounded: Callable[..., Tensor] = recurrence.gate_bounded.body
    recur: Callable[..., tuple[Tensor, Tensor]] = recurrence.delta_recurrent.body
    norm: Callable[..., Tensor] = norm.rms_gated.body


PARTS = Parts()


def by_span(
    parts: Parts, raw: Raw, weights: Weights, kept: Kept, *, eps: float, act: str, lower: float | None = None
) -> Tensor:
    """``recurrence.paged``, made of ``parts``."""
    _, heads, _, value_width = kept.state_NHKV.shape
    if lower is None:
        g = parts.gate_softplus(raw.z, weights.a_log_H, weights.dt_bias)
    else:
        g = parts.gate_bounded(raw.z, weights.a_log_H, weights.dt_bias, lower=lower)
    beta_TH = torch.sigmoid(raw.beta_TH.double()).float()
    out_THV = raw.v_TC.new_empty(raw.v_TC.shape[0], heads, value_width)
    for span in kept.spans:
        block = int(kept.table_R[span.row])
        q, k, v = _convolved(parts, raw, weights, kept, span, block)
        old_HKV = _read(kept.state_NHKV, span, block)
        out_THV[span.rows], new_HKV = parts.recur(q, k, v, g[span.rows], beta_TH[span.rows], old_HKV)
        if block >= 0:
            kept.state_NHKV[block] = new_HKV
    return parts.norm(out_THV, raw.gate_TC.unflatten(-1, (heads, value_width)), weights.norm_V, eps=eps, act=act)


def _convolved(
    parts: Parts, raw: Raw, weights: Weights, kept: Kept, span: Span, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [T, G, K] and v [T, H, V] of a span behind their convolutions; replaces the windows in the pool."""
    key_width, value_width = kept.state_NHKV.shape[2:]
    out = []
    for x_TC, taps_CW, windows_NCS, width in (
        (raw.q_TC, weights.q_taps_CW, kept.q_NCS, key_width),
        (raw.k_TC, weights.k_taps_CW, kept.k_NCS, key_width),
        (raw.v_TC, weights.v_taps_CW, kept.v_NCS, value_width),
    ):
        old_CS = _read(windows_NCS, span, block)
        y_TC, new_SC = parts.convolve(x_TC[span.rows], taps_CW, old_CS.T, act="silu")
        if block >= 0:
            windows_NCS[block] = new_SC.T.to(windows_NCS.dtype)
        out.append(y_TC.unflatten(-1, (-1, width)))
    return out[0], out[1], out[2]


def _read(pool: Tensor, span: Span, block: int) -> Tensor:
    """A copy of a row's block; zeros at the start of a sequence and for a row that pads the step."""
    return pool.new_zeros(pool.shape[1:]) if span.start == 0 or block < 0 else pool[block].clone()


@contract("recurrence.paged", bound=RECURRENCE, traits=TRAITS, mutates=("kept",))
def paged(raw: Raw, weights: Weights, kept: Kept, *, eps: float, act: str, lower: float | None = None) -> Tensor:
    """[T, H, V] in the dtype of the projections: the layer's input to its output projection. ``kept`` is written to:
    states and windows of the step's rows are replaced by those after each row's last token.

    Per row: q, k, v go through ``conv.causal`` with silu (rounded to their dtype behind it); the log-decay is
    ``recurrence.gate_softplus`` of z, or ``gate_bounded`` with ``lower``; beta = sigmoid; then ``recurrence.delta``
    (o rounded to the dtype), then ``norm.rms_gated`` with ``act`` and ``eps``.
    """
    return by_span(PARTS, raw, weights, kept, eps=eps, act=act, lower=lower)


def paged_by_length(raw: Raw, weights: Weights, kept: Kept, **options: Any) -> Tensor:
    """``recurrence.paged`` with the rule in chunks where a row has enough tokens (``recurrence.delta_by_length``)."""
    return by_span(replace(PARTS, recur=recurrence.delta_by_length), raw, weights, kept, **options)


def paged_chunked(raw: Raw, weights: Weights, kept: Kept, **options: Any) -> Tensor:
    """``recurrence.paged`` with the rule in chunks of 64 tokens (``recurrence.delta_chunked``)."""

    def recur(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return recurrence.delta_chunked.body(*inputs)[:2]

    return by_span(replace(PARTS, recur=recur), raw, weights, kept, **options)
