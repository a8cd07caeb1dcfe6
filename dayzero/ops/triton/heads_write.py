"""Heads of attention in one launch, from the joint projection to where attention reads them: norm, turn, stores.

T tokens, H query heads, K key heads, D head width, F frequencies, N heads of a program, P and R dimensions that are
turned as first of a pair and that are only copied. A program takes some heads of one token, all of queries, of keys or
of values. Sums, cosines and roundings are those of ``triton/norm``, ``triton/rope`` and ``triton/cache_write`` in turn,
by the same lanes, so that the numbers are theirs but for what the compiler joins into one rounding in either: some bits
of f32 before a rounding. A token's are the same however many there are.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import cdiv, next_power_of_2

from dayzero.ops.heads_write import HeadNorms, Kept
from dayzero.ops.latent_write import Turn
from dayzero.ops.records import RowCodec
from dayzero.ops.triton.cache_write import e4m3_code, tile_codes, tile_scale
from dayzero.ops.triton.latent_write import rounded
from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.rope import cos_sin
from dayzero.ops.triton.rows import FOLLOWS, follow

__all__ = ["check_machine", "norm_rope_write"]

ELEMENTS = 512  # that one warp holds: as in triton/norm, by which a head is summed by the same lanes
MANY, WARPS = 1024, 2  # from so many tokens on a program has so many warps: cosines are made once for more heads


@triton.jit
def _normed(x_NC, factor_N1, w_C, like, NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr):
    """f32 numbers x times their heads' factors and the weight of their columns, rounded as ``norm.rms`` rounds."""
    x_NC = x_NC.to(tl.float32)
    if NORM:
        x_NC = x_NC * factor_N1
        if ROUND:
            x_NC = rounded(x_NC, like)
        w_C = w_C.to(tl.float32)
        x_NC = rounded(x_NC * (w_C + 1.0 if OFFSET else w_C)[None, :], like)
    return x_NC


@triton.jit
def _largest(x_NC):
    """[N] largest magnitude of each row, NaN left out."""
    size_NC = tl.abs(x_NC)
    return tl.max(tl.where(size_NC == size_NC, size_NC, 0.0), axis=1)


@triton.jit
def _store(rows_N1, col_C, x_NC, there_NC, inverse_N, CODES: tl.constexpr):
    """To elements ``col`` behind each row's begin; CODES: as e4m3 codes of x times ``inverse``."""
    if CODES:
        tl.store(rows_N1 + col_C[None, :], e4m3_code(x_NC * inverse_N[:, None]), mask=there_NC)
    else:
        tl.store(rows_N1 + col_C[None, :], rounded(x_NC, rows_N1).to(rows_N1.dtype.element_ty), mask=there_NC)


@triton.jit
def _heads(
    x_N1, weight, rows_N1, scales_N, there_N, place, frequencies, axis_stride, width, begin, num, factor, eps, height,
    breadth, NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, HALF: tl.constexpr, AXES: tl.constexpr,
    BLOCK: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Norm and turn of some heads. x_N1, rows_N1: where they begin; place: the token's position. CODES: rows are bytes,
    whose scales go to scales_N."""
    # All that is read is asked for before anything is made of it: threads meet in between.
    like = x_N1
    if NORM:
        col_D = tl.arange(0, BLOCK)
        x_ND = tl.load(x_N1 + col_D[None, :], mask=there_N[:, None] & (col_D < width)[None, :], other=0.0)
    w_P, w_Q, w_R = weight, weight, weight  # replaced where there is a norm
    if PAIRS > 0:
        f_P = tl.arange(0, PAIRS)
        turned_P = f_P < num
        one_P = begin + (f_P if HALF else 2 * f_P)
        two_P = one_P + (num if HALF else 1)
        there_NP = there_N[:, None] & turned_P[None, :]
        a_NP = tl.load(x_N1 + one_P[None, :], mask=there_NP, other=0.0)
        b_NP = tl.load(x_N1 + two_P[None, :], mask=there_NP, other=0.0)
        freq_P = tl.load(frequencies + f_P, mask=turned_P, other=0.0)
        if AXES == 3:
            tall, broad = (f_P % 3 == 1) & (f_P < 3 * height), (f_P % 3 == 2) & (f_P < 3 * breadth)
            place_P = tl.load(place + tl.where(tall, 1, tl.where(broad, 2, 0)).to(tl.int64) * axis_stride)
        else:
            place_P = tl.load(place)
        if NORM:
            w_P = tl.load(weight + one_P, mask=turned_P, other=0.0)
            w_Q = tl.load(weight + two_P, mask=turned_P, other=0.0)
    if REST > 0:
        at_R = tl.arange(0, REST)
        rest_R = at_R < width - 2 * num
        col_R = tl.where(begin > 0, at_R, 2 * num + at_R)  # what is turned lies at one end
        there_NR = there_N[:, None] & rest_R[None, :]
        x_NR = tl.load(x_N1 + col_R[None, :], mask=there_NR, other=0.0)
        if NORM:
            w_R = tl.load(weight + col_R, mask=rest_R, other=0.0)
    factor_N1 = tl.zeros((x_N1.shape[0], 1), tl.float32)
    if NORM:
        x_ND = x_ND.to(tl.float32)
        factor_N1 = tl.rsqrt(tl.sum(x_ND * x_ND, axis=1) / width + eps)[:, None]
    most_N = tl.zeros((x_N1.shape[0],), tl.float32)
    if PAIRS > 0:
        cos_P, sin_P = cos_sin(place_P.to(tl.float32) * freq_P)
        cos_P, sin_P = cos_P * factor, sin_P * factor
        a_NP = _normed(a_NP, factor_N1, w_P, like, NORM, OFFSET, ROUND)
        b_NP = _normed(b_NP, factor_N1, w_Q, like, NORM, OFFSET, ROUND)
        c_NP = rounded(a_NP * cos_P[None, :] - b_NP * sin_P[None, :], like)
        d_NP = rounded(b_NP * cos_P[None, :] + a_NP * sin_P[None, :], like)
        if CODES:
            most_N = tl.maximum(_largest(c_NP), _largest(d_NP))
    if REST > 0:
        x_NR = _normed(x_NR, factor_N1, w_R, like, NORM, OFFSET, ROUND)
        if CODES:
            most_N = tl.maximum(most_N, _largest(x_NR))
    inverse_N = most_N
    if CODES:
        scale_N = tile_scale(most_N, "f32")
        tl.store(scales_N, scale_N, mask=there_N)
        inverse_N = tl.div_rn(1.0, scale_N)
    if PAIRS > 0:
        _store(rows_N1, one_P, c_NP, there_NP, inverse_N, CODES)
        _store(rows_N1, two_P, d_NP, there_NP, inverse_N, CODES)
    if REST > 0:
        _store(rows_N1, col_R, x_NR, there_NR, inverse_N, CODES)


@triton.jit
def _begin_of_rows(rows, block, offset, head_N, heads, width, stride, PAGE: tl.constexpr, CODES: tl.constexpr):
    """(where each head's row begins [N, 1], where its scale does [N]); CODES: pages of codes and then of scales."""
    row_N = block * stride + (offset * heads + head_N) * width
    scales_N = rows
    if CODES:
        at_N = (block * stride + PAGE * heads * width) // 4 + offset * heads + head_N
        scales_N = rows.to(tl.pointer_type(tl.float32), bitcast=True) + at_N
    return (rows + row_N)[:, None], scales_N


@triton.jit
def _kernel(
    q, k, v, q_weight, k_weight, positions, frequencies, out, keys, values, blocks, offsets, q_t, q_h, k_t, k_h, v_t,
    v_h, axis_stride, keys_stride, values_stride, q_heads, heads, q_groups, groups, width, begin, num, factor, eps,
    height, breadth, NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr, HALF: tl.constexpr,
    AXES: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, PAGE: tl.constexpr,
    CODES: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Of a token's programs the first ``q_groups`` have queries, then ``groups`` have keys and as many values."""
    follow()
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head_N = tl.arange(0, N)
    if group < q_groups:
        head_N += group * N
        at_N1 = (head_N.to(tl.int64) * q_h)[:, None]
        out_N1 = (out + (token * q_heads + head_N) * width)[:, None]
        _heads(
            q + token * q_t + at_N1, q_weight, out_N1, out, head_N < q_heads, positions + token, frequencies,
            axis_stride, width, begin, num, factor, eps, height, breadth, NORM, OFFSET, ROUND, HALF, AXES, BLOCK,
            PAIRS, REST, False,
        )  # fmt: skip
    elif group < q_groups + groups:
        head_N += (group - q_groups) * N
        block, offset = tl.load(blocks + token), tl.load(offsets + token)
        rows_N1, scales_N = _begin_of_rows(keys, block, offset, head_N, heads, width, keys_stride, PAGE, CODES)
        at_N1 = (head_N.to(tl.int64) * k_h)[:, None]
        _heads(
            k + token * k_t + at_N1, k_weight, rows_N1, scales_N, head_N < heads, positions + token, frequencies,
            axis_stride, width, begin, num, factor, eps, height, breadth, NORM, OFFSET, ROUND, HALF, AXES, BLOCK,
            PAIRS, REST, CODES,
        )  # fmt: skip
    else:
        head_N += (group - q_groups - groups) * N
        block, offset = tl.load(blocks + token), tl.load(offsets + token)
        rows_N1, scales_N = _begin_of_rows(values, block, offset, head_N, heads, width, values_stride, PAGE, CODES)
        col_D = tl.arange(0, BLOCK)
        there_ND = (head_N < heads)[:, None] & (col_D < width)[None, :]
        x_N1 = v + token * v_t + (head_N.to(tl.int64) * v_h)[:, None]
        x_ND = tl.load(x_N1 + col_D[None, :], mask=there_ND, other=0.0).to(tl.float32)
        if CODES:
            codes_ND, scale_N = tile_codes(x_ND, "f32")
            tl.store(scales_N, scale_N, mask=head_N < heads)
            tl.store(rows_N1 + col_D[None, :], codes_ND, mask=there_ND)
        else:
            _store(rows_N1, col_D, x_ND, there_ND, head_N, False)


def norm_rope_write(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kept: Kept,
    codec: RowCodec | None = None,
    norms: HeadNorms | None = None,
    turn: Turn | None = None,
) -> Tensor:
    """``attention.norm_rope_write`` in one launch, none without tokens; queries packed, or as they are where nothing is
    done to them."""
    (tokens, q_heads, width), heads = q_THD.shape, k_TKD.shape[1]
    same = norms is None and turn is None
    out_THD = q_THD if same else torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
    if tokens == 0:
        return out_THD
    given = [x if x.stride(2) == 1 else x.contiguous() for x in (q_THD, k_TKD, v_TKD)]
    assert kept.blocks_T.is_contiguous() and kept.offsets_T.is_contiguous(), "places are packed numbers"
    block, warps = next_power_of_2(width), WARPS if tokens >= MANY else 1
    at_once = max(1, warps * ELEMENTS // block)
    groups = cdiv(heads, at_once)
    q_groups = 0 if same else cdiv(q_heads, at_once)
    places, turning = _turning(turn, given[0], width)
    weights, norming = _norming(norms, given[0])
    _kernel[tokens, q_groups + 2 * groups](
        *given, *weights, *places, out_THD, kept.keys, kept.values, kept.blocks_T, kept.offsets_T,
        *(step for x in given for step in x.stride()[:2]), 0 if turn is None else turn.positions.stride(0),
        kept.keys.stride(0), kept.values.stride(0), q_heads, heads, q_groups, groups, width, **turning, **norming,
        BLOCK=block, **_rows(kept, codec, heads, width), N=at_once, num_warps=max(1, at_once * block // ELEMENTS),
        **FOLLOWS,
    )  # fmt: skip
    return out_THD


def _rows(kept: Kept, codec: RowCodec | None, heads: int, width: int) -> dict[str, Any]:
    """How rows lie, for the kernel."""
    for rows in (kept.keys, kept.values):
        if codec is None:
            packed = rows.shape[2:] == (heads, width) and rows.stride()[1:] == (heads * width, width, 1)
        else:
            row = codec.row
            packed = row.planar and row.tile == width and row.scale == "f32" and rows.dtype == torch.uint8
            packed &= rows.stride()[1:] == (row.num_bytes, 1) and rows.stride(0) % 4 == 0
            packed &= rows.shape[1] * row.num_codes % 4 == 0
        assert packed, f"rows of {rows.dtype} with strides {rows.stride()} are none of {heads} heads of {width}"
    return {"PAGE": kept.keys.shape[1], "CODES": codec is not None}


def _norming(norms: HeadNorms | None, unused: Tensor) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """(weights, the rest); without norms anything that is a tensor, which is not read."""
    if norms is None:
        return (unused, unused), {"eps": 0.0, "NORM": False, "OFFSET": False, "ROUND": False}
    if norms.scale_in not in ("f32", "dtype"):
        raise ValueError(f"scale_in is 'f32' or 'dtype', not {norms.scale_in!r}")
    assert norms.q_D.is_contiguous() and norms.k_D.is_contiguous(), "weights are packed"
    round_first = norms.scale_in == "dtype"
    return (norms.q_D, norms.k_D), {"eps": norms.eps, "NORM": True, "OFFSET": norms.offset, "ROUND": round_first}


def _turning(turn: Turn | None, unused: Tensor, width: int) -> tuple[tuple[Tensor, Tensor], dict[str, Any]]:
    """((positions, frequencies), the rest); without a turn anything that is a tensor, which is not read."""
    if turn is None:
        whole = {"begin": 0, "num": 0, "factor": 1.0, "height": 0, "breadth": 0, "HALF": True, "AXES": 1, "PAIRS": 0}
        return (unused, unused), {**whole, "REST": next_power_of_2(width)}
    at, freq_F = turn.positions, turn.inv_freq_F
    if turn.style not in ("half", "interleaved") or turn.part not in ("first", "last"):
        raise ValueError(f"style is 'half' or 'interleaved' and part 'first' or 'last', not {turn.style, turn.part}")
    if at.dim() == 2 and turn.sections is None:
        raise ValueError("positions [3, T] need sections, the number of frequencies of time, height and width")
    num = freq_F.shape[0]
    if 2 * num > width:
        raise ValueError(f"{2 * num} dimensions cannot be rotated in a head of {width}")
    assert at.stride(-1) == 1 and freq_F.is_contiguous() and freq_F.dtype == torch.float32
    _, height, breadth = turn.sections or (0, 0, 0)
    rest = width - 2 * num
    return (at, freq_F), {
        "begin": 0 if turn.part == "first" else rest, "num": num, "factor": turn.factor, "height": height,
        "breadth": breadth, "HALF": turn.style == "half", "AXES": 3 if at.dim() == 2 else 1,
        "PAIRS": next_power_of_2(num), "REST": next_power_of_2(rest) if rest else 0,
    }  # fmt: skip
