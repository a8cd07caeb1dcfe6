"""Attention over depth in one pass: every source of a token is read once, scored, and mixed by an online softmax.

T tokens, H model width, B bank rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.ops.triton.activation import add
from dayzero.ops.triton.machine import check_machine
from dayzero.ops.triton.norm import add_rms, rms_rows
from dayzero.ops.triton.rows import FOLLOWS, follow

__all__ = ["add", "add_rms", "attn_mix", "attn_mix_norm", "check_machine"]

STAGES, WARPS = 3, 8  # measured on an H200


@triton.jit
def _both(a, b, c, d):
    return a + c, b + d


@triton.jit
def _mix_kernel(
    partial, bank, keys, proj, weight, out, partial_t, partial_h, bank_b, bank_t, bank_h, key_h, proj_h, weight_h,
    num_bank, width, eps, norm_eps, NORM: tl.constexpr, OFFSET: tl.constexpr, ROUND: tl.constexpr,
    PACKED: tl.constexpr, STAGES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One token. The running sum is the last source; top, total and mixed are those of the sources so far. Sources
    are on their way to shared memory STAGES - 1 ahead of use. PACKED: rows have no gaps and begin at 16 bytes."""
    follow()
    token = tl.program_id(0).to(tl.int64)
    col_H = tl.arange(0, BLOCK)
    inside_H = col_H < width
    wide_H = col_H.to(tl.int64)
    key_H = tl.load(keys + wide_H * key_h, mask=inside_H, other=0.0).to(tl.float32)
    query_H = key_H * tl.load(proj + wide_H * proj_h, mask=inside_H, other=0.0).to(tl.float32)
    top = float("-inf")
    total = 0.0
    mixed_H = tl.zeros((BLOCK,), tl.float32)
    row, last = bank + token * bank_t, partial + token * partial_t
    for number in tl.range(0, num_bank + 1, num_stages=STAGES):
        source = tl.where(number < num_bank, row, last)
        if PACKED:
            x_H = tl.load(tl.multiple_of(source, 16) + col_H, mask=inside_H, other=0.0).to(tl.float32)
        else:
            hop = tl.where(number < num_bank, bank_h, partial_h)
            x_H = tl.load(source + wide_H * hop, mask=inside_H, other=0.0).to(tl.float32)
        row += bank_b
        square, dot = tl.reduce((x_H * x_H, x_H * query_H), 0, _both)
        score = dot * tl.rsqrt(square / width + eps)
        above = tl.maximum(top, score)
        share, kept = tl.exp(score - above), tl.exp(top - above)
        mixed_H = mixed_H * kept + share * x_H
        total, top = total * kept + share, above
    kind = out.dtype.element_ty
    y_H = (mixed_H / total).to(kind)
    if NORM:
        y_1H = rms_rows(
            y_H.to(tl.float32)[None, :], weight, col_H, width, weight_h, norm_eps, kind, True, OFFSET, ROUND
        )
        y_H = tl.reshape(y_1H, (BLOCK,)).to(kind)
    tl.store(out + token * width + col_H, y_H, mask=inside_H)


def _mix(
    sources: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], eps: float, weight_H: Tensor | None,
    norm: tuple[float, bool, str],
) -> Tensor:  # fmt: skip
    (partial_TH, bank_BTH), (key_H, proj_H) = sources, keys
    if norm[2] not in ("f32", "dtype"):
        raise ValueError(f"scale_in is 'f32' or 'dtype', not {norm[2]!r}")
    if partial_TH.dtype != bank_BTH.dtype:
        raise ValueError(f"sources are of one dtype, not {partial_TH.dtype} and {bank_BTH.dtype}")
    (tokens, width), num_bank = partial_TH.shape, bank_BTH.shape[0]
    out_TH = torch.empty(partial_TH.shape, dtype=partial_TH.dtype, device=partial_TH.device)
    if out_TH.numel() == 0:
        return out_TH
    weight = key_H if weight_H is None else weight_H
    block = triton.next_power_of_2(width)
    packed = all(
        x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(n * x.element_size() % 16 == 0 for n in x.stride()[:-1])
        for x in (sources if num_bank else (partial_TH,))
    )
    _mix_kernel[(tokens,)](
        partial_TH, bank_BTH, key_H, proj_H, weight, out_TH, *partial_TH.stride(), *bank_BTH.stride(),
        key_H.stride(-1), proj_H.stride(-1), weight.stride(-1), num_bank, width, eps, norm[0],
        NORM=weight_H is not None, OFFSET=norm[1], ROUND=norm[2] == "dtype", PACKED=packed, STAGES=STAGES,
        BLOCK=block, num_warps=max(1, min(WARPS, block // 256)), **FOLLOWS,
    )  # fmt: skip
    return out_TH


def attn_mix(
    partial_TH: Tensor, bank_BTH: Tensor, norm_weight_H: Tensor, proj_weight_H: Tensor, *, eps: float
) -> Tensor:
    """``residual.attn_mix``, packed. The bank may lie anywhere, tokens or rows first."""
    return _mix((partial_TH, bank_BTH), (norm_weight_H, proj_weight_H), eps, None, (0.0, False, "f32"))


def attn_mix_norm(
    partial_TH: Tensor,
    bank_BTH: Tensor,
    norm_weight_H: Tensor,
    proj_weight_H: Tensor,
    weight_H: Tensor,
    *,
    eps: float,
    offset: bool = False,
    scale_in: str = "f32",
) -> Tensor:
    """``residual.attn_mix_norm``, packed: the mixture is rounded, as where it would have been stored, then normed."""
    sources, keys = (partial_TH, bank_BTH), (norm_weight_H, proj_weight_H)
    return _mix(sources, keys, eps, weight_H, (eps, offset, scale_in))
