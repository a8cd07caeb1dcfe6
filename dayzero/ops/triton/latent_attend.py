"""``latent.attend`` with the expanded form of chunks (``ops/latent_steps``) in a kernel here, and the operators of the
absorbed form in Triton.

T tokens, H heads, N key width from the latent, P shared key width, V value width, X = N + V, L keys of a scratch,
M queries of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.latent_forms import Widths
from dayzero.ops.latent_steps import Absorbed, Expanded, Sums, attend_by
from dayzero.ops.triton.latent import queries_into_latent, values_out_of_latent
from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.paged_decode import LOG2_E, product
from dayzero.ops.triton.paged_prefill import Tuning, paged
from dayzero.view import Paged

__all__ = ["attend", "check_machine", "chunk"]


@triton.jit
def _steps(
    top, total, acc, q1, q2, own_M, kv_h, shared, from_key, to_key, num_keys, kv_row, shared_row, scale,
    N: tl.constexpr, N1: tl.constexpr, P: tl.constexpr, P1: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
    TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tiles of keys from one to another, both a tile's beginning. MASKED: some may not be seen by all."""
    n, v = tl.arange(0, N1), tl.arange(0, V1)
    element = q1.dtype
    for tile in range(from_key, to_key, TILE):
        at_L = tile + tl.arange(0, TILE)
        key_L = kv_h + at_L.to(tl.int64) * kv_row
        # The scratch behind the last key may hold anything, and 0 * NaN is NaN.
        if MASKED:
            k1 = tl.load(key_L[:, None] + n[None], mask=(at_L < num_keys)[:, None] & (n[None] < N), other=0)
        elif N1 > N:
            k1 = tl.load(key_L[:, None] + n[None], mask=n[None] < N, other=0)
        else:
            k1 = tl.load(key_L[:, None] + n[None])
        s = product(q1, tl.trans(k1))
        if P > 0:
            p = tl.arange(0, P1)
            shared_L = shared + at_L.to(tl.int64) * shared_row
            if MASKED:
                k2 = tl.load(shared_L[:, None] + p[None], mask=(at_L < num_keys)[:, None] & (p[None] < P), other=0)
            elif P1 > P:
                k2 = tl.load(shared_L[:, None] + p[None], mask=p[None] < P, other=0)
            else:
                k2 = tl.load(shared_L[:, None] + p[None])
            s += product(q2, tl.trans(k2))
        s = s * (scale * LOG2_E)
        if MASKED:
            s = tl.where((at_L[None] <= own_M[:, None]) & (at_L < num_keys)[None], s, float("-inf"))
        higher = tl.maximum(top, tl.max(s, 1))
        safe = higher
        if MASKED:
            safe = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(s - safe[:, None])
        shrink = tl.exp2(top - safe)
        total = total * shrink + tl.sum(weights, 1)
        top = higher
        value_L = key_L + N
        if MASKED:
            v1 = tl.load(value_L[:, None] + v[None], mask=(at_L < num_keys)[:, None] & (v[None] < V), other=0)
        elif V1 > V:
            v1 = tl.load(value_L[:, None] + v[None], mask=v[None] < V, other=0)
        else:
            v1 = tl.load(value_L[:, None] + v[None])
        acc = acc * shrink[:, None] + product(weights.to(element), v1)
    return top, total, acc


# Else compiled anew for 1 and for multiples of 16.
@triton.jit(do_not_specialize=["num_tokens", "first_own", "num_keys", "first_block", "joins", "last"])
def _chunk(
    q, kv, shared, out, sums, lse, q_token, q_head, kv_row, shared_row, num_heads, num_tokens, first_own, num_keys,
    first_block, joins, last, scale,
    N: tl.constexpr, N1: tl.constexpr, P: tl.constexpr, P1: tl.constexpr, V: tl.constexpr, V1: tl.constexpr,
    BLOCK_M: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head over the keys of the scratch. first_own: which of these keys is the first query's
    own; a query may lie before all of them, or behind. joins: queries behind all of them have sums over later keys.
    last: no keys come before these. One kernel for all of it, so that none is compiled for the first long prompt."""
    h = tl.program_id(1)  # from head to head: programs at work read the keys of few
    block = first_block + tl.num_programs(0) - 1 - tl.program_id(0)  # late blocks see the most keys; they begin first
    token_M = block * BLOCK_M + tl.arange(0, BLOCK_M)
    real_M = token_M < num_tokens
    own_M = first_own + token_M
    lowest = first_own + block * BLOCK_M
    seen = tl.minimum(tl.minimum(lowest + BLOCK_M, first_own + num_tokens), num_keys)  # by some query
    by_all = tl.maximum(tl.minimum(lowest + 1, num_keys), 0) // TILE * TILE
    q_row = q + token_M.to(tl.int64)[:, None] * q_token + h * q_head
    n = tl.arange(0, N1)
    q1 = tl.load(q_row + n[None], mask=real_M[:, None] & (n[None] < N), other=0)
    q2 = q1
    if P > 0:
        p = tl.arange(0, P1)
        q2 = tl.load(q_row + (N + p)[None], mask=real_M[:, None] & (p[None] < P), other=0)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V1], tl.float32)
    kv_h = kv + h * (N + V)
    top, total, acc = _steps(
        top, total, acc, q1, q2, own_M, kv_h, shared, 0, by_all, num_keys, kv_row, shared_row, scale,
        N, N1, P, P1, V, V1, TILE, False,
    )  # fmt: skip
    top, total, acc = _steps(
        top, total, acc, q1, q2, own_M, kv_h, shared, by_all, seen, num_keys, kv_row, shared_row, scale,
        N, N1, P, P1, V, V1, TILE, True,
    )  # fmt: skip
    v = tl.arange(0, V1)
    at_M = token_M.to(tl.int64) * num_heads + h
    place = at_M[:, None] * V + v[None]
    joins_M = real_M & (own_M >= num_keys) & (joins != 0)
    later_M = tl.load(lse + at_M, mask=joins_M, other=float("-inf"))
    higher = tl.maximum(top, later_M)
    safe = tl.where(higher == float("-inf"), 0.0, higher)
    shrink, weight = tl.exp2(top - safe), tl.exp2(later_M - safe)
    later = tl.load(sums + place, mask=joins_M[:, None] & (v[None] < V), other=0.0)
    total = total * shrink + weight
    by = 1.0 / tl.where(total == 0, 1.0, total)
    result = acc * (shrink * by)[:, None] + later * (weight * by)[:, None]
    tl.debug_barrier()  # a thread may store what another one has loaded
    has_M = real_M & (own_M >= 0)
    to_out = (has_M & (last != 0))[:, None] & (v[None] < V)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=to_out)
    has_M = has_M & (last == 0)
    tl.store(sums + place, result, mask=has_M[:, None] & (v[None] < V))
    tl.store(lse + at_M, higher + tl.log2(total), mask=has_M)


def tuning_of(widths: Widths) -> Tuning:
    """By widths alone: a row's result must not depend on the rows beside it."""
    if max(widths.nope, widths.value) > 128:
        return Tuning(block=64, tile=32, warps=4, stages=2)
    return Tuning(block=128, tile=64, warps=8, stages=3)


def chunk(
    q_THD: Tensor, keys: Expanded, sums: Sums, out_THV: Tensor, widths: Widths, scale: float,
    tuning: Tuning | None = None,
) -> None:  # fmt: skip
    """``Chunk`` in Triton."""
    heads, nope, shared, _, value = widths
    tuning = tuning or tuning_of(widths)
    tokens, num_keys = q_THD.shape[0], keys.kv_LX.shape[0]
    first_block = max(0, -keys.first_own) // tuning.block  # those before it see no key
    padded = [max(16, triton.next_power_of_2(max(width, 1))) for width in (nope, shared, value)]
    _chunk[(triton.cdiv(tokens, tuning.block) - first_block, heads)](
        q_THD, keys.kv_LX, keys.shared_LP, out_THV, sums.out_THV, sums.lse_TH, *q_THD.stride()[:2],
        keys.kv_LX.stride(0), keys.shared_LP.stride(0), heads, tokens, keys.first_own, num_keys, first_block,
        int(keys.joins), int(keys.last), scale,
        N=nope, N1=padded[0], P=shared, P1=padded[1], V=value, V1=padded[2], BLOCK_M=tuning.block, TILE=tuning.tile,
        num_warps=tuning.warps, num_stages=tuning.stages,
    )  # fmt: skip


ABSORBED = Absorbed(queries_into_latent, paged, values_out_of_latent)


def attend(q_THD: Tensor, rows: Paged, kv_b: Tensor, *, scale: float) -> Tensor:
    """``latent.attend`` of bf16 rows. Where every row has one token, only shapes decide what is launched: such a step
    can be captured in a graph."""
    return attend_by(ABSORBED, chunk, q_THD, rows, kv_b, scale)
