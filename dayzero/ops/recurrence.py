"""The gated delta rule and its gates (Gated DeltaNet; Kimi Delta Attention, arXiv 2510.26692).

T tokens, H value heads, G key heads (H a multiple of G; value head h uses key head h // (H/G)), K key width, V value
width, C tokens of a chunk. The state S is [H, K, V] f32: K first.

One token, per head:  S <- e^g S;  u = beta (v - S^T k);  S <- S + k u^T;  o = S^T q.
q and k enter as they leave the convolution: both forms divide them by sqrt(sum x^2 + 1e-6) and scale q by K^-0.5
inside, in f64, with no rounding in between. g is the log-decay, <= 0: [T, H, K] per channel or [T, H] per head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.ops.bounds import ELEMENTWISE, RECURRENCE
from dayzero.ops.contract import contract

L2_EPS = 1e-6
TRAITS = {"decay": ("channel", "head"), "grouped": (False, True)}
LONG_CHUNK = 16  # tokens of a chunk of long runs: of 16, 32 and 64 the fastest on a CPU, in the log under its date
_PAIRS_AT_ONCE = 2**22  # f64 elements of [heads, C, C, K] held at once, 32 MiB


@contract("recurrence.gate_softplus", bound=ELEMENTWISE, traits={"decay": ("channel", "head")})
def gate_softplus(z: Tensor, a_log_H: Tensor, dt_bias: Tensor) -> Tensor:
    """g = -exp(A_log) * softplus(z + dt_bias), f32, unbounded below.

    z: [T, H, K] with dt_bias [H, K] (Kimi-Linear), or [T, H] with dt_bias [H] (Gated DeltaNet). A_log: [H].
    """
    return (-_rate(z, a_log_H, dt_bias) * F.softplus(z.double() + dt_bias.double())).float()


@contract("recurrence.gate_bounded", bound=ELEMENTWISE, traits={"decay": ("channel", "head")})
def gate_bounded(z: Tensor, a_log_H: Tensor, dt_bias: Tensor, *, lower: float) -> Tensor:
    """g = lower * sigmoid(exp(A_log) * (z + dt_bias)), f32, in (lower, 0) (Kimi K3: lower = -5). Shapes as above.

    A function of its own, not the softplus gate clamped.
    """
    if lower >= 0:
        raise ValueError(f"the lower bound of a log-decay is negative, not {lower}")
    return (lower * torch.sigmoid(_rate(z, a_log_H, dt_bias) * (z.double() + dt_bias.double()))).float()


def _rate(z: Tensor, a_log_H: Tensor, dt_bias: Tensor) -> Tensor:
    """exp(A_log) shaped to multiply z; refuses padded or transposed parameters, which broadcasting would hide."""
    if tuple(a_log_H.shape) != (z.shape[1],) or tuple(dt_bias.shape) != tuple(z.shape[1:]):
        raise ValueError(f"z {tuple(z.shape)} needs A_log {(z.shape[1],)} and dt_bias {tuple(z.shape[1:])}, "
                         f"got {tuple(a_log_H.shape)} and {tuple(dt_bias.shape)}")  # fmt: skip
    return a_log_H.double().exp().reshape(-1, *[1] * (z.dim() - 2))


def _prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, ...]:
    """All in f64 and head first: q, k [H, T, K], v [H, T, V], g [H, T, K or 1], beta [H, T, 1]."""
    heads, key_heads, width = v.shape[1], k.shape[1], k.shape[2]
    if heads % key_heads or tuple(g.shape) not in ((v.shape[0], heads), (v.shape[0], heads, width)):
        raise ValueError(f"{heads} value heads, {key_heads} key heads of {width} and g {tuple(g.shape)} do not fit")
    q, k = (
        (x.double() * torch.rsqrt(x.double().square().sum(-1, keepdim=True) + L2_EPS)).repeat_interleave(
            heads // key_heads, dim=1
        )
        for x in (q, k)
    )
    g = g.double() if g.dim() == 3 else g.double()[..., None]
    parts = (q * width**-0.5, k, v.double(), g, beta.double()[..., None])
    return tuple(x.transpose(0, 1) for x in parts)


def _first_state(state_HKV: Tensor | None, k_HTK: Tensor, v_HTV: Tensor) -> Tensor:
    shape = (v_HTV.shape[0], k_HTK.shape[2], v_HTV.shape[2])
    if state_HKV is None:
        return torch.zeros(shape, dtype=torch.float32, device=v_HTV.device)
    if tuple(state_HKV.shape) != shape or state_HKV.dtype != torch.float32:
        raise ValueError(f"the state is {tuple(state_HKV.shape)} {state_HKV.dtype}, not {shape} (K before V) float32")
    return state_HKV.clone()


@contract("recurrence.delta", bound=RECURRENCE, traits=TRAITS)
def delta_recurrent(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state_HKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(o [T, H, V] in v's dtype, state [H, K, V] f32 after the last token); the given state is not written to.

    One token at a time; the state is rounded to f32 after each, so a run may be split anywhere without a change.
    """
    q, k, v, g, beta = _prepare(q_TGK, k_TGK, v_THV, g, beta_TH)
    state = _first_state(state_HKV, k, v)
    o_HTV = torch.empty_like(v)
    for t in range(v.shape[1]):
        s = state.double() * g[:, t, :, None].exp()
        update_HV = beta[:, t] * (v[:, t] - (s * k[:, t, :, None]).sum(1))
        s = s + k[:, t, :, None] * update_HV[:, None]
        o_HTV[:, t] = (s * q[:, t, :, None]).sum(1)
        state = s.float()
    return o_HTV.transpose(0, 1).to(v_THV.dtype), state


@contract("recurrence.delta_chunked", bound=RECURRENCE, traits=TRAITS)
def delta_chunked(
    q_TGK: Tensor,
    k_TGK: Tensor,
    v_THV: Tensor,
    g: Tensor,
    beta_TH: Tensor,
    state_HKV: Tensor | None = None,
    *,
    chunk: int = 64,
    return_transition: bool = False,
) -> tuple[Tensor, Tensor, Tensor] | tuple[Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """(o [T, H, V] in v's dtype, state [H, K, V] f32, chunk_states [ceil(T/chunk), H, K, V] f32).

    chunk_states[i] is the state after token min((i+1) * chunk, T); the last one equals state. The state is rounded to
    f32 at every chunk end, so going on from a chunk state gives the same bits as going through. With
    return_transition a fourth item (A [H, K, K], B [H, K, V]) f32: whatever the state at the start, the state at the
    end is A @ state + B.
    """
    q, k, v, g, beta = _prepare(q_TGK, k_TGK, v_THV, g, beta_TH)
    state = _first_state(state_HKV, k, v)
    outs, states = [v[:, :0]], []
    for first in range(0, v.shape[1], chunk):
        part = tuple(x[:, first : first + chunk] for x in (q, k, v, g, beta))
        o_HCV, state = _chunk(part, state.double())
        outs.append(o_HCV)
        states.append(state)
    o_THV = torch.cat(outs, dim=1).transpose(0, 1).to(v_THV.dtype)
    chunk_states = torch.stack(states) if states else state.new_empty(0, *state.shape)
    if not return_transition:
        return o_THV, state, chunk_states
    # The rule is affine in the state: run it from the identity without values, and from zero with them.
    eye_HKK = torch.eye(k.shape[2], dtype=torch.float64, device=v.device).expand(v.shape[0], -1, -1)
    shift_HKV = torch.zeros_like(state, dtype=torch.float64)
    for first in range(0, v.shape[1], chunk):
        q_, k_, v_, g_, beta_ = (x[:, first : first + chunk] for x in (q, k, v, g, beta))
        none = torch.zeros(*v_.shape[:2], k.shape[2], dtype=torch.float64, device=v.device)
        eye_HKK = _chunk((q_, k_, none, g_, beta_), eye_HKK)[1].double()
        shift_HKV = _chunk((q_, k_, v_, g_, beta_), shift_HKV)[1].double()
    return o_THV, state, chunk_states, (eye_HKK.float(), shift_HKV.float())


def delta_by_length(
    q_TGK: Tensor, k_TGK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor, state_HKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``recurrence.delta``: chunks of LONG_CHUNK tokens where a run has that many, else one token at a time.

    A run may be split behind any whole number of chunks without a change; a split elsewhere differs in the last bits.
    """
    if q_TGK.shape[0] < LONG_CHUNK:
        return delta_recurrent.body(q_TGK, k_TGK, v_THV, g, beta_TH, state_HKV)
    inputs = _prepare(q_TGK, k_TGK, v_THV, g, beta_TH)
    state = _first_state(state_HKV, inputs[1], inputs[2])
    o_THV = torch.empty_like(v_THV)
    for first in range(0, v_THV.shape[0], LONG_CHUNK):
        some = slice(first, first + LONG_CHUNK)
        o_HCV, state = _chunk(tuple(x[:, some] for x in inputs), state.double())
        o_THV[some] = o_HCV.transpose(0, 1)
    return o_THV, state


def _chunk(part: tuple[Tensor, ...], state_HKV: Tensor) -> tuple[Tensor, Tensor]:
    """One chunk: (o [H, C, V] f64, state [H, K, V] f32).

    With G the running sum of g: A_ij = beta_i sum_c k_ic k_jc e^(G_ic - G_jc) for j < i,
    (I + A) U = beta (V - (e^G K) S), O = (e^G Q) S + tril(QK) U, S <- e^G_last S + (e^(G_last - G) K)^T U. Every
    exponent is of a later sum minus an earlier one, so none is positive and no decay rate can overflow.
    """
    q, k, v, g, beta = part
    total = g.cumsum(1)
    kk_HCC, qk_HCC = _pair_products(q, k, total)
    seen_k = torch.einsum("hck,hkv->hcv", k * total.exp(), state_HKV)
    u_HCV = torch.linalg.solve_triangular(
        (beta * kk_HCC).tril(-1), beta * (v - seen_k), upper=False, unitriangular=True
    )
    o_HCV = torch.einsum("hck,hkv->hcv", q * total.exp(), state_HKV) + qk_HCC.tril() @ u_HCV
    last = total[:, -1:]
    state = state_HKV * last.exp().transpose(1, 2) + (k * (last - total).exp()).transpose(1, 2) @ u_HCV
    return o_HCV, state.float()


def _pair_products(q: Tensor, k: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    """[H, C, C]: sum_c x_ic k_jc e^(total_ic - total_jc) for x = k and x = q, right for j <= i."""
    num_tokens, width = k.shape[1:]
    heads_at_once = max(1, _PAIRS_AT_ONCE // (num_tokens**2 * width))
    pairs_k, pairs_q = [], []
    for some in torch.arange(k.shape[0]).split(heads_at_once):
        heads = slice(int(some[0]), int(some[-1]) + 1)
        difference = total[heads, :, None] - total[heads, None]
        # Only pairs that tril cuts off afterwards have a positive exponent; clamped so that no infinity arises.
        decay = difference.clamp(max=0).exp()
        kept = k[heads, None] * decay
        pairs_k.append((k[heads, :, None] * kept).sum(-1))
        pairs_q.append((q[heads, :, None] * kept).sum(-1))
    return torch.cat(pairs_k), torch.cat(pairs_q)
