"""What the values of a loaded parameter give away: never loaded, damaged, or in another convention than declared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from dayzero.checkpoint.dequant import dequantize
from dayzero.decl import FP8_BLOCK, FP8_SIZE, MXFP4_PACK, Fp8Blocks, Mxfp4, Packed, ParamDecl
from dayzero.finding import Finding

# Norm weights start at 1 (plain) or 0 (1 + w) and training moves them about these points. A plain norm whose mean is
# near 0 because channels are damped keeps its signs; only weights that are centred on 0 have many of both.
NEAR = 0.35
BOTH_SIGNS = 0.2
CODES_AT_ONCE = 1 << 26  # of e4m3 that are looked through for NaN
MATRIX_ROLES = ("linear", "embed", "router", "conv")


def statistics(decl: ParamDecl, tensor: Tensor) -> Finding | None:
    """The finding a parameter deserves, None when nothing is odd. Reads ``tensor`` [*decl.shape] once or twice.

    fail: NaN or Inf anywhere; a matrix (or one expert of a stack) that is all zero or constant; a norm weight of zeros
    where 1 is declared as its center. note: a norm weight centred where the other convention has its center. Trained
    models have single norms like that, so ``judge_norms`` decides over all of them.
    """
    if tensor.numel() == 0:
        return None
    low, high = (float(v) for v in extremes(tensor))
    if not (math.isfinite(low) and math.isfinite(high)):
        bad = "NaN" if math.isnan(low) or math.isnan(high) else "infinite"
        return _finding(
            decl, "weights.not_finite", f"{decl.name} holds {bad} values", f"{low} to {high}", "finite",
            "the file or its scales are damaged, or the value overflows the dtype it is loaded in: download it again",
        )  # fmt: skip
    if decl.role in MATRIX_ROLES and tensor.numel() > 1:
        return _constant(decl, tensor, low, high)
    if decl.role == "norm" and decl.center is not None:
        return _convention(decl, tensor.float(), offset=decl.center == 0)
    return None


def packed_statistics(decl: ParamDecl, value: Packed) -> Finding | None:
    """``statistics`` of a packed matrix or stack: a NaN, which 4 bits cannot hold; else its first matrix that is all
    zero or constant, if any. One whose first row varies is not decoded further."""
    if min(value.shape) == 0:
        return None
    if isinstance(value, Fp8Blocks) and _holds_nan(value.codes):
        return statistics(decl, torch.full((1,), torch.nan))
    if math.prod(value.shape[-2:]) == 1:
        return None
    stacked = len(value.shape) == 3
    stack = value if stacked else type(value)(value.codes[None], value.scales[None])
    low_E, high_E = torch.aminmax(_first_rows(stack), dim=-1)
    for number in (low_E == high_E).nonzero()[:, 0].tolist():
        values = _decoded(stack[number])
        if bool(values.amin() == values.amax()):
            one = replace(decl, name=f"{decl.name}[{number}]", shape=decl.shape[1:]) if stacked else decl
            return statistics(one, values)
    return None


def _holds_nan(codes: Tensor) -> bool:
    """Whether one of the codes of e4m3 is NaN. Some are looked at at a time."""
    some = max(1, CODES_AT_ONCE // max(1, codes[0].numel()))
    found = [((part.view(torch.uint8) & 0x7F) == 0x7F).any() for part in codes.split(some)]
    return bool(torch.stack(found).any())


def _first_rows(stack: Packed) -> Tensor:
    """f32 [E, C], of all matrices at once."""
    if isinstance(stack, Mxfp4):
        return _decoded(Mxfp4(stack.codes[:, 0], stack.scales[:, 0]))
    scales_EC = stack.scales[:, 0].repeat_interleave(FP8_SIZE, dim=-1)[:, : stack.shape[-1]]
    return stack.codes[:, 0].float() * scales_EC


def _decoded(matrix: Packed) -> Tensor:
    fmt = MXFP4_PACK if isinstance(matrix, Mxfp4) else FP8_BLOCK
    return dequantize(fmt, {"weight": matrix.codes, "scale": matrix.scales}, matrix.shape)


def extremes(tensor: Tensor) -> Tensor:
    """[smallest, largest] of a tensor that is not empty; NaN where it holds one."""
    return torch.stack(torch.aminmax(tensor.float() if tensor.dtype is torch.float16 else tensor))


def judge_norms(notes: Sequence[Finding], num_norms: int) -> list[Finding]:
    """One finding out of the ``norm_mean`` notes of a model with num_norms checked norms: fail when most contradict
    the declared convention (the files hold the other one), a note when a few do (training damped them)."""
    if not notes:
        return []
    most = 2 * len(notes) > num_norms
    names = tuple(name for note in notes for name in note.evidence)
    remedy = "the files hold the other convention than the recipe says: correct offset in the recipe's Norm"
    return [
        replace(
            notes[0],
            verdict="fail" if most else "note",
            claim=f"{len(notes)} of {num_norms} norms: " + notes[0].claim.split(": ", 1)[1],
            evidence=names,
            remedy=remedy if most else "nothing to do unless the first diverging module is one of these",
        )
    ]


def _constant(decl: ParamDecl, tensor: Tensor, low: float, high: float) -> Finding | None:
    where = ""
    if tensor.dim() == 3 and low != high:
        flat = tensor.flatten(1)
        lows, highs = torch.aminmax(flat, dim=1)
        same = (lows == highs).nonzero()[:, 0].tolist() if flat.shape[1] > 1 else []
        if not same:
            return None
        where = f"expert {same[0]} of "
        low = float(lows[same[0]])
    elif low != high:
        return None
    word = "all zero" if low == 0 else f"constant ({low:g})"
    return _finding(
        decl, "weights.constant", f"{where}{decl.name} is {word}", low, "a matrix with differing values",
        "it was never loaded or never trained: check tie_word_embeddings and the rule that fills it",
    )  # fmt: skip


def _convention(decl: ParamDecl, weight: Tensor, offset: bool) -> Finding | None:
    mean = float(weight.double().mean())
    negative = float((weight < 0).double().mean())
    if offset:
        wrong = abs(mean - 1) < NEAR and negative < BOTH_SIGNS / 4
        claim, bound = "(1 + w) is declared, but the stored weights are centred on 1", "mean near 0"
    else:
        zero_centred = abs(mean) < NEAR and negative > BOTH_SIGNS
        wrong = zero_centred
        claim, bound = "w is declared, but the stored weights are centred on 0", "mean near 1"
    if not offset and not bool(weight.any()):
        return _finding(decl, "weights.constant", f"{decl.name} is all zero", 0.0, bound, "it was never loaded")
    if not wrong:
        return None
    return replace(
        _finding(decl, "weights.norm_mean", f"{decl.name}: {claim}", f"mean {mean:.4g}", bound, ""), verdict="note"
    )


def _finding(decl: ParamDecl, kind: str, claim: str, measured: object, bound: str, remedy: str) -> Finding:
    return Finding(kind, "weights", "fail", claim, measured, bound, (decl.name,), remedy)
