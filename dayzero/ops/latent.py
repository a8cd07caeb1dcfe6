"""Multi-head latent attention (DeepSeek V2 onwards): keys and values of all heads come from one cached row a token.

T queries, L cached rows, H heads, N key width from the latent ("nope"), P shared rotated or raw key width (may be 0),
D = N + P query width, R latent width, C = R + P cached width, V value width, A listed rows.
A cached row is [latent R | shared key P]; a query head is [N | P]; kv_b [H*(N+V), R] holds per head N key rows, then
V value rows. ``start`` as in ``ops/attention``. Both forms keep f64 to the end and round once, so that they agree in
every dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dayzero.ops.attention import NEGATIVE_INFINITY, listed, softmax_f64, visible
from dayzero.ops.bounds import ATTENTION, EXACT, MATMUL
from dayzero.ops.contract import contract

TRAITS = {
    "window": (False, True, "int"), "sinks": (False, True), "index": (False, True), "shared_key": (True, False),
}  # fmt: skip
_QUERIES_AT_ONCE = 16  # bounds the gathered rows [queries, A, C]


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


def _seen(q_THD: Tensor, num_keys: int, start: int, window: int | None, allowed_TA: Tensor | None) -> Tensor:
    seen_TL = visible(q_THD.shape[0], num_keys, start, window, q_THD.device)
    return seen_TL if allowed_TA is None else seen_TL & listed(allowed_TA, num_keys)


@contract("latent.attend_expanded", bound=ATTENTION, traits=TRAITS)
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

    allowed: [T, A] int64 rows each query may attend (-1 = none), applied as a mask over dense scores; None means all
    rows that causality and the window leave. sinks as in ``attention.causal``.
    """
    nope, w_uk_HNR, w_uv_HVR = _split(q_THD, cache_LC, kv_b)
    rank = kv_b.shape[1]
    latent_LR, shared_LP = cache_LC[:, :rank].double(), cache_LC[:, rank:].double()
    seen_TL = _seen(q_THD, cache_LC.shape[0], start, window, allowed_TA)
    outs, lses = [], []
    for head in range(q_THD.shape[1]):
        key_LD = torch.cat([latent_LR @ w_uk_HNR[head].T, shared_LP], dim=-1)
        s_TL = (q_THD[:, head].double() @ key_LD.T * scale).masked_fill(~seen_TL, NEGATIVE_INFINITY)
        p_TL, lse_T = softmax_f64(s_TL, None if sinks_H is None else sinks_H[head])
        outs.append(p_TL @ (latent_LR @ w_uv_HVR[head].T))
        lses.append(lse_T)
    return torch.stack(outs, 1).to(q_THD.dtype), torch.stack(lses, 1).float()


@contract("latent.attend_absorbed", bound=ATTENTION, traits=TRAITS)
def attend_absorbed(
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
    """The same as ``latent.attend_expanded`` with W_UK moved to the query and W_UV behind the softmax.

    With ``allowed`` only the named rows are read (gather); a row may be named once only.
    """
    nope, w_uk_HNR, w_uv_HVR = _split(q_THD, cache_LC, kv_b)
    rank = kv_b.shape[1]
    q_64 = q_THD.double()
    q_THC = torch.cat([torch.einsum("thn,hnr->thr", q_64[..., :nope], w_uk_HNR), q_64[..., nope:]], dim=-1)
    seen_TL = visible(q_THD.shape[0], cache_LC.shape[0], start, window, q_THD.device)
    outs, lses = [], []
    for first in range(0, max(q_THD.shape[0], 1), _QUERIES_AT_ONCE):
        some = slice(first, first + _QUERIES_AT_ONCE)
        if allowed_TA is None:
            rows_TAC, seen_TA = cache_LC.double().expand(1, -1, -1), seen_TL[some]
        else:
            rows = allowed_TA[some]
            rows_TAC = cache_LC[rows.clamp(min=0)].double()
            seen_TA = (rows >= 0) & seen_TL[some].gather(1, rows.clamp(min=0))
        s_THA = (q_THC[some] @ rows_TAC.transpose(1, 2) * scale).masked_fill(~seen_TA[:, None], NEGATIVE_INFINITY)
        p_THA, lse_TH = softmax_f64(s_THA, sinks_H)
        outs.append(torch.einsum("thr,hvr->thv", p_THA @ rows_TAC[..., :rank], w_uv_HVR))
        lses.append(lse_TH)
    return torch.cat(outs).to(q_THD.dtype), torch.cat(lses).float()
