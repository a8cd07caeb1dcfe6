"""Multi-head latent attention (DeepSeek V2 onwards): keys and values of all heads come from one cached row a token.

T queries, L cached rows, H heads, N key width from the latent ("nope"), P shared rotated or raw key width (may be 0),
D = N + P query width, R latent width, C = R + P cached width, V value width, A listed rows.
A cached row is [latent R | shared key P]; a query head is [N | P]; kv_b [H*(N+V), R] holds per head N key rows, then
V value rows. ``start`` as in ``ops/attention``. Both forms keep f64 to the end and round once, so that they agree in
every dtype.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from dayzero.ops.attention import NEGATIVE_INFINITY, softmax_f64, visible
from dayzero.ops.bounds import ATTENTION, EXACT, LATENT, MATMUL
from dayzero.ops.contract import contract
from dayzero.ops.line import LATENT_RECORDS
from dayzero.ops.paged import paged
from dayzero.ops.sparse_attention import Merged, within
from dayzero.view import Paged

TRAITS = {"window": (False, True, "int"), "sinks": (False, True), "shared_key": (True, False), "record": LATENT_RECORDS}
_QUERIES_AT_ONCE = 16  # bounds the scores [queries, H, L] of the absorbed form
_TILE_QUERIES, _TILE_KEYS = 64, 256  # of the expanded form over listed rows


@contract("latent.absorb", bound=EXACT)
def absorb(kv_b: Tensor, heads: int, nope: int, value: int) -> tuple[Tensor, Tensor]:
    """(W_UK [H, N, R], W_UV [H, V, R]): views of kv_b [H*(N+V), R], which must be plain numbers, not stored codes.

    A head's rows may straddle the scale blocks of the stored weight; that is why dequantisation comes first.
    """
    if kv_b.shape[0] != heads * (nope + value):
        raise ValueError(f"kv_b has {kv_b.shape[0]} rows, not {heads} heads of {nope}+{value}")
    w_HNR = kv_b.unflatten(0, (heads, nope + value))
    return w_HNR[:, :nope], w_HNR[:, nope:]


@contract("latent.expand", bound=MATMUL)
def expand(latent_LR: Tensor, kv_b: Tensor, heads: int, nope: int, value: int) -> tuple[Tensor, Tensor]:
    """(k_nope [L, H, N], v [L, H, V]) in the latent's dtype."""
    w_uk_HNR, w_uv_HVR = absorb.body(kv_b.double(), heads, nope, value)
    keys = torch.einsum("lr,hnr->lhn", latent_LR.double(), w_uk_HNR)
    values = torch.einsum("lr,hvr->lhv", latent_LR.double(), w_uv_HVR)
    return keys.to(latent_LR.dtype), values.to(latent_LR.dtype)


def _split(q_THD: Tensor, cache_LC: Tensor, kv_b: Tensor) -> tuple[int, Tensor, Tensor]:
    """(N, W_UK, W_UV in f64) from the shapes alone."""
    heads, rank = q_THD.shape[1], kv_b.shape[1]
    nope = q_THD.shape[2] - (cache_LC.shape[1] - rank)
    return nope, *absorb.body(kv_b.double(), heads, nope, kv_b.shape[0] // heads - nope)


@contract("latent.attend_expanded", bound=ATTENTION, traits={**TRAITS, "index": (False, True)})
def attend_expanded(
    q_THD: Tensor,
    cache_LC: Tensor,
    kv_b: Tensor,
    *,
    start: int,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    allowed_TA: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(out [T, H, V] in q's dtype, lse [T, H] f32), keys and values expanded head by head.

    allowed: [T, A] int64 rows each query may attend (-1 = none), applied as a mask over a tile of rows at a time; None
    means all rows that causality and the window leave. sinks as in ``attention.causal``.
    """
    nope, w_uk_HNR, w_uv_HVR = _split(q_THD, cache_LC, kv_b)
    if allowed_TA is not None:
        seen = _Seen(start, window, allowed_TA)
        return _expanded_by_tiles(q_THD, cache_LC, w_uk_HNR, w_uv_HVR, seen, scale, sinks_H)
    rank = kv_b.shape[1]
    latent_LR, shared_LP = cache_LC[:, :rank].double(), cache_LC[:, rank:].double()
    seen_TL = visible(q_THD.shape[0], cache_LC.shape[0], start, window, q_THD.device)
    outs, lses = [], []
    for head in range(q_THD.shape[1]):
        key_LD = torch.cat([latent_LR @ w_uk_HNR[head].T, shared_LP], dim=-1)
        s_TL = (q_THD[:, head].double() @ key_LD.T * scale).masked_fill(~seen_TL, NEGATIVE_INFINITY)
        p_TL, lse_T = softmax_f64(s_TL, None if sinks_H is None else sinks_H[head])
        outs.append(p_TL @ (latent_LR @ w_uv_HVR[head].T))
        lses.append(lse_T)
    return torch.stack(outs, 1).to(q_THD.dtype), torch.stack(lses, 1).float()


class _Seen(NamedTuple):
    start: int
    window: int | None
    allowed_TA: Tensor

    def mask(self, queries: slice, keys: slice) -> Tensor:
        """[T, L] bool for some queries over some rows."""
        allowed = self.allowed_TA[queries]
        start = self.start + queries.start - keys.start
        seen_TL = visible(allowed.shape[0], keys.stop - keys.start, start, self.window, allowed.device)
        return seen_TL & within(allowed, keys.start, keys.stop)


def _expanded_by_tiles(
    q_THD: Tensor, cache_LC: Tensor, w_uk_HNR: Tensor, w_uv_HVR: Tensor, seen: _Seen, scale: float,
    sinks_H: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Keys and values of one tile at a time, merged by log-sum-exp."""
    (num_queries, heads), num_keys, rank = q_THD.shape[:2], cache_LC.shape[0], w_uk_HNR.shape[2]
    blocks = [slice(i, min(i + _TILE_QUERIES, num_queries)) for i in range(0, num_queries, _TILE_QUERIES)]
    q_HTD = q_THD.double().transpose(0, 1)
    parts = []
    for block in blocks:
        top_HT = q_HTD.new_full((heads, block.stop - block.start), NEGATIVE_INFINITY)
        total_HT = torch.zeros_like(top_HT)
        if sinks_H is not None:
            top_HT, total_HT = sinks_H.double()[:, None].expand_as(top_HT), total_HT + 1
        parts.append(Merged(top_HT, total_HT, w_uv_HVR.shape[1]))
    for first in range(0, num_keys, _TILE_KEYS):
        rows = slice(first, min(first + _TILE_KEYS, num_keys))
        latent_LR, shared_LP = cache_LC[rows, :rank].double(), cache_LC[rows, rank:].double()
        keys_HLD = torch.cat((latent_LR @ w_uk_HNR.transpose(1, 2), shared_LP.expand(heads, -1, -1)), dim=-1)
        values_HLV = latent_LR @ w_uv_HVR.transpose(1, 2)
        for block, merged in zip(blocks, parts, strict=True):
            s_HTL = (q_HTD[:, block] @ keys_HLD.transpose(1, 2)).mul_(scale)
            merged.sum += merged.weights(s_HTL.masked_fill_(~seen.mask(block, rows), NEGATIVE_INFINITY)) @ values_HLV
    done = [merged.result() for merged in parts]
    if not done:
        return q_THD.new_zeros(0, heads, w_uv_HVR.shape[1]), q_THD.new_zeros(0, heads).float()
    out_HTV, lse_HT = torch.cat([out for out, _ in done], dim=1), torch.cat([lse for _, lse in done], dim=1)
    return out_HTV.transpose(0, 1).to(q_THD.dtype), lse_HT.T.float()


def twice(dtype: torch.dtype) -> torch.dtype:
    """What numbers are kept in between the projections of the absorbed form, so that they are rounded once."""
    return torch.float64 if dtype in (torch.float32, torch.float64) else torch.float32


@contract("latent.queries", bound=MATMUL)
def queries_into_latent(q_THD: Tensor, w_uk_HNR: Tensor) -> Tensor:
    """[T, H, R + P] in twice q's width: W_UK moved to the query; what is shared by all heads stays as it is.

    With ``attention.paged`` or ``attention.sparse`` over latent rows (``value_dim`` R) and ``latent.values`` behind it:
    the same as ``latent.attend_expanded``.
    """
    nope = w_uk_HNR.shape[1]
    q_THR = torch.einsum("thn,hnr->thr", q_THD[..., :nope].double(), w_uk_HNR.double())
    return torch.cat((q_THR, q_THD[..., nope:].double()), dim=-1).to(twice(q_THD.dtype))


@contract("latent.values", bound=MATMUL)
def values_out_of_latent(out_THR: Tensor, w_uv_HVR: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, H, V] in ``dtype``: W_UV behind the softmax."""
    return torch.einsum("thr,hvr->thv", out_THR.double(), w_uv_HVR.double()).to(dtype)


@contract("latent.attend", bound=LATENT, traits={"record": LATENT_RECORDS, "latent_width": ("int",)}, composed=True)
def attend(q_THD: Tensor, rows: Paged, kv_b: Tensor, *, scale: float) -> Tensor:
    """[T, H, V] in q's dtype: ``latent.queries``, ``attention.paged`` over the cached rows [C], ``latent.values``.

    Each row of the step sees its whole sequence, from position 0 on. V follows from kv_b [H*(N+V), R].
    """
    heads, rank = q_THD.shape[1], kv_b.shape[1]
    nope = q_THD.shape[2] - (rows.shape[-1] - rank)
    w_uk_HNR, w_uv_HVR = absorb.body(kv_b, heads, nope, kv_b.shape[0] // heads - nope)
    q_THC = queries_into_latent.body(q_THD, w_uk_HNR)
    out_THR, _ = paged.body(q_THC, rows.headed(), None, scale=scale, value_dim=rank)
    return values_out_of_latent.body(out_THR, w_uv_HVR, q_THD.dtype)
