"""Matrix products through torch's oneDNN, with the weight laid out once as its kernels read it. Any CPU in f32; in bf16
only processors with AVX-512 or better, where alone it is fast.

T tokens, K input width, N output width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dayzero.errors import MachineError

_ROWS_HINT = 16  # how many rows the layout is made for; it serves any number


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [N, K] as oneDNN reads it. weight: opaque; only this module may use it."""

    weight: Tensor
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes of the values it holds, without oneDNN's own padding, which torch does not tell."""
        return self.outputs * self.inputs * self.weight.element_size()


def check_machine() -> None:
    """Raises MachineError when this build of torch has no oneDNN, or lacks its packed products."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    missing = [name for name in names if not hasattr(torch.ops.mkldnn, name)]
    if missing or not torch.backends.mkldnn.is_available():
        what = f"mkldnn.{missing[0]}" if missing else "oneDNN"
        raise MachineError(f"the onednn operators need {what}, which this build of torch lacks; bind other variants.")


def pack(w_NK: Tensor) -> PackedWeight:
    """Lay an f32 or bf16 weight out. The original is not needed afterwards.

    Raises MachineError when oneDNN does not take this dtype on this processor, ValueError for another dtype.
    """
    check_machine()
    if w_NK.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"onednn packs f32 and bf16 weights, not {w_NK.dtype}; bind another variant")
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(w_NK.detach().contiguous(), _ROWS_HINT)
    except RuntimeError as error:
        said = (str(error).strip().splitlines() or ["no reason given"])[0]
        raise MachineError(
            f"oneDNN does not take {w_NK.dtype} weights on this processor ({said}); bind native_cpu or torch_cpu."
        ) from error
    return PackedWeight(packed, *w_NK.shape)


def matmul(x_TK: Tensor, w: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul``; in f32 also ``linear.matmul_f32``. x, bias and the result have the weight's dtype: oneDNN's op
    gives no f32 result for bf16 operands, so that for bf16 weights it is no ``linear.matmul_f32``.
    """
    if x_TK.dtype != w.weight.dtype or x_TK.shape[-1] != w.inputs:
        raise ValueError(
            f"x is {x_TK.dtype} of width {x_TK.shape[-1]}, the weight {w.weight.dtype} takes width {w.inputs}"
        )
    lead = x_TK.shape[:-1]
    x = x_TK.reshape(-1, w.inputs).contiguous()
    if x.shape[0] == 0:  # oneDNN refuses products without rows
        return x_TK.new_zeros(*lead, w.outputs)
    bias = None if bias_N is None else bias_N.to(x.dtype).contiguous()
    return torch.ops.mkldnn._linear_pointwise(x, w.weight, bias, "none", [], "").reshape(*lead, w.outputs)
