"""The kernels of ``kernels.cpp`` as functions with the signatures of their contracts.

T tokens, H query heads, K key heads (in products: input width), N output width, D width, V value width, R rows,
P pages of a row. f32 and bf16 only. A tensor whose last dimension is not packed is copied first.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from dayzero.ops.native.build import library
from dayzero.ops.rope import angles
from dayzero.view import Paged

TYPES = {torch.float32: 0, torch.bfloat16: 1}
_I32, _I64, _F32, _PTR = ctypes.c_int32, ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


_Fields = list[tuple[str, Any]]


class _PagedArgs(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        [(n, _PTR) for n in ("q", "keys", "values", "out", "lse", "table", "first", "query_start", "start", "sinks")]
        + [(n, _I64) for n in ("q_token", "q_head", "key_block", "value_block", "rows", "pages", "page", "heads",
                               "key_heads", "width", "value_width", "window")]
        + [("scale", _F32), ("softcap", _F32), ("q_type", _I32), ("type", _I32), ("threads", _I32)]
    )  # fmt: skip


class _RopeArgs(ctypes.Structure):
    _fields_: ClassVar[_Fields] = (
        [(n, _PTR) for n in ("x", "y", "positions", "frequencies", "angles")]
        + [(n, _I64) for n in ("tokens", "heads", "width", "token_stride", "head_stride", "count", "begin")]
        + [("cos_factor", _F32), ("sin_factor", _F32)]
        + [(n, _I32) for n in ("interleaved", "type", "threads")]
    )


def check_machine() -> None:
    """Build the kernels now if they are not built. Raises MachineError naming what this machine lacks."""
    library()


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A bf16 weight [N, K] as dayzero_linear reads it. words: int32, padded to whole panels and pairs."""

    words: Tensor
    outputs: int
    inputs: int

    @property
    def nbytes(self) -> int:
        """Bytes it holds."""
        return self.words.numel() * self.words.element_size()


def _type(x: Tensor) -> int:
    if x.dtype not in TYPES or x.device.type != "cpu":
        raise ValueError(f"native_cpu takes f32 and bf16 on a CPU, not {x.dtype} on {x.device}; bind another variant")
    return TYPES[x.dtype]


def _packed_last(x: Tensor) -> Tensor:
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


def _float(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _at(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def pack(w_NK: Tensor) -> PackedWeight:
    """Lay a bf16 weight out for ``matmul``. The original is not needed afterwards. ValueError for another dtype."""
    if w_NK.dtype != torch.bfloat16:
        raise ValueError(f"native_cpu packs bf16 weights, not {w_NK.dtype}; bind another variant")
    w_NK = _packed_last(w_NK)
    outputs, inputs = w_NK.shape
    panel = 2 * library().dayzero_lanes()
    words = torch.empty(math.ceil(outputs / panel) * panel * math.ceil(inputs / 2), dtype=torch.int32)
    library().dayzero_pack(
        _PTR(w_NK.data_ptr()), _I64(outputs), _I64(inputs), _I64(w_NK.stride(0)), _PTR(words.data_ptr()),
        _I32(torch.get_num_threads()),
    )  # fmt: skip
    return PackedWeight(words, outputs, inputs)


def _product(x_TK: Tensor, w: PackedWeight, bias_N: Tensor | None, dtype: torch.dtype) -> Tensor:
    kind = _type(x_TK)
    if x_TK.shape[-1] != w.inputs:
        raise ValueError(f"x has width {x_TK.shape[-1]}, the weight takes {w.inputs}")
    lead = x_TK.shape[:-1]
    x = _packed_last(x_TK)
    x = x if x.dim() == 2 else x.reshape(-1, w.inputs)
    y = torch.empty(x.shape[0], w.outputs, dtype=dtype)
    bias = _float(bias_N)
    if x.shape[0]:
        library().dayzero_linear(
            _PTR(x.data_ptr()), _I64(x.stride(0)), _I64(x.shape[0]), _I64(w.inputs), _PTR(w.words.data_ptr()),
            _I64(w.outputs), _PTR(_at(bias)), _PTR(y.data_ptr()), _I32(kind), _I32(TYPES[dtype]),
            _I32(torch.get_num_threads()),
        )  # fmt: skip
    return y if len(lead) == 1 else y.reshape(*lead, w.outputs)


def matmul(x_TK: Tensor, w: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul``: bf16 weights, widened on the way; sums in f32, one rounding to x's dtype."""
    return _product(x_TK, w, bias_N, x_TK.dtype)


def matmul_f32(x_TK: Tensor, w: PackedWeight, bias_N: Tensor | None = None) -> Tensor:
    """``linear.matmul_f32``: as ``matmul``, without the rounding."""
    return _product(x_TK, w, bias_N, torch.float32)


def paged(
    q_THD: Tensor,
    keys: Paged,
    values: Paged,
    *,
    scale: float,
    window: int | None = None,
    sinks_H: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """``attention.paged``: (out [T, H, V] in q's dtype, lse [T, H] f32).

    q's dtype may differ from that of keys and values. Reads no key before a query's window and none behind its
    own position. Sums are f32, probabilities too.
    """
    kind = _type(q_THD)
    q = _packed_last(q_THD)
    tokens, heads, width = q.shape
    blocks, page, key_heads, _ = keys.rows.shape
    value_width = values.rows.shape[3]
    _check_paged(q, keys, values)
    out = torch.empty(tokens, heads, value_width, dtype=q.dtype)
    lse = torch.empty(tokens, heads, dtype=torch.float32)
    if tokens == 0:
        return out, lse
    sinks = _float(sinks_H)
    table, first, query_start, start = (
        x.contiguous() for x in (keys.table, keys.first, keys.query_start, keys.start)
    )  # fmt: skip
    library().dayzero_paged(ctypes.byref(_PagedArgs(
        q.data_ptr(), keys.rows.data_ptr(), values.rows.data_ptr(), out.data_ptr(), lse.data_ptr(), table.data_ptr(),
        first.data_ptr(), query_start.data_ptr(), start.data_ptr(), _at(sinks), q.stride(0), q.stride(1),
        keys.rows.stride(0), values.rows.stride(0), table.shape[0], table.shape[1], page, heads, key_heads, width,
        value_width, window or 0, scale, softcap or 0.0, kind, _type(keys.rows), torch.get_num_threads(),
    )))  # fmt: skip
    return out, lse


def _check_paged(q_THD: Tensor, keys: Paged, values: Paged) -> None:
    """ValueError for shapes and layouts the kernel cannot read: it checks nothing itself."""
    _, page, key_heads, width = keys.rows.shape
    if q_THD.shape[2] != width or q_THD.shape[1] % key_heads or values.rows.shape[1:3] != keys.rows.shape[1:3]:
        raise ValueError(f"queries {tuple(q_THD.shape)}, keys {tuple(keys.rows.shape)} and values "
                         f"{tuple(values.rows.shape)} do not fit together")  # fmt: skip
    for rows in (keys.rows, values.rows):
        packed = not rows.numel() or rows[0].is_contiguous()
        if rows.dtype != keys.rows.dtype or not packed:
            raise ValueError(
                f"blocks of {rows.dtype} with strides {rows.stride()} are not packed {keys.rows.dtype} rows"
            )
    for ints in (keys.table, keys.first, keys.query_start, keys.start):
        if ints.dtype != torch.int32:
            raise ValueError(f"tables and positions are int32, not {ints.dtype}")


def rms(
    x: Tensor, weight_D: Tensor | None = None, *, eps: float, offset: bool = False, scale_in: str = "f32"
) -> Tensor:
    """``norm.rms`` with f32 sums."""
    if scale_in not in ("f32", "dtype"):
        raise ValueError(f"scale_in is 'f32' or 'dtype', not {scale_in!r}")
    kind = _type(x)
    x = _packed_last(x)
    rows = x if x.dim() == 3 else x[None] if x.dim() == 2 else x.reshape(1, -1, x.shape[-1])
    y = torch.empty(x.shape, dtype=x.dtype)
    weight = None if weight_D is None else _packed_last(weight_D)
    shape = (_I64 * 5)(rows.shape[0], rows.shape[1], rows.stride(0), rows.stride(1), rows.shape[2])
    library().dayzero_rms(
        _PTR(x.data_ptr()), _PTR(y.data_ptr()), shape, _PTR(_at(weight)), _I32(0 if weight is None else _type(weight)),
        _I32(offset), _I32(scale_in == "dtype"), _F32(eps), _I32(kind), _I32(torch.get_num_threads()),
    )  # fmt: skip
    return y


def apply_rope(
    x_THD: Tensor,
    positions: Tensor,
    inv_freq_F: Tensor,
    *,
    style: str,
    part: str = "first",
    factor: float = 1.0,
    sections: tuple[int, int, int] | None = None,
    inverse: bool = False,
) -> Tensor:
    """``rope.apply``: angles as the reference takes them, cos and sin in f32."""
    if style not in ("half", "interleaved") or part not in ("first", "last"):
        raise ValueError(f"style is 'half' or 'interleaved' and part 'first' or 'last', not {style!r} and {part!r}")
    kind, count = _type(x_THD), inv_freq_F.shape[0]
    x = _packed_last(x_THD)
    tokens, heads, width = x.shape
    if 2 * count > width:
        raise ValueError(f"{2 * count} dimensions cannot be rotated in a head of {width}")
    flat = positions.dim() == 1 and positions.dtype == torch.int64
    turns = None if flat else angles(positions, inv_freq_F, sections).contiguous()
    places, freq = (positions.contiguous(), inv_freq_F.float().contiguous()) if flat else (None, None)
    y = torch.empty(tokens, heads, width, dtype=x.dtype)
    library().dayzero_rope(ctypes.byref(_RopeArgs(
        x.data_ptr(), y.data_ptr(), _at(places), _at(freq), _at(turns), tokens, heads, width, x.stride(0), x.stride(1),
        count, 0 if part == "first" else width - 2 * count, factor, -factor if inverse else factor,
        style == "interleaved", kind, torch.get_num_threads(),
    )))  # fmt: skip
    return y


def silu_glu(
    gate_TI: Tensor,
    up_TI: Tensor,
    *,
    kind: str = "silu",
    limit: float = 0.0,
    alpha: float = 0.0,
    beta: float = 0.0,
    linear_beta: float = 0.0,
) -> Tensor:
    """``activation.glu`` of kind silu, f32 inside."""
    if kind != "silu" or limit or alpha or beta or linear_beta:
        raise ValueError(f"this variant computes silu without constants, not {kind!r}; bind another one to this site")
    element = _type(gate_TI)
    if up_TI.dtype != gate_TI.dtype or up_TI.shape != gate_TI.shape:
        raise ValueError(f"gate {tuple(gate_TI.shape)} {gate_TI.dtype}, up {tuple(up_TI.shape)} {up_TI.dtype}")
    width = gate_TI.shape[-1]
    gate, up = (x if x.dim() == 2 else x.reshape(-1, width) for x in (_packed_last(gate_TI), _packed_last(up_TI)))
    out = torch.empty(gate_TI.shape, dtype=gate_TI.dtype)
    library().dayzero_silu(
        _PTR(gate.data_ptr()), _PTR(up.data_ptr()), _PTR(out.data_ptr()), _I64(gate.shape[0]), _I64(width),
        _I64(gate.stride(0)), _I64(up.stride(0)), _I32(element), _I32(torch.get_num_threads()),
    )  # fmt: skip
    return out
