"""Experts whose inputs are rounded to e4m3 with a scale for each token and 128 columns (fp8_128): W4A8 where weights
have 4 bits. Another contract than ``moe.experts``: what the rounding costs is a quantisation error, not a bound.

T tokens, E experts, N chosen experts a token, D model width, I intermediate width, B = ceil(K / 128) blocks of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dayzero.decl import Mxfp4
from dayzero.ops.activation import KINDS, glu
from dayzero.ops.bounds import EXPERTS_FP8
from dayzero.ops.contract import contract
from dayzero.ops.experts_mxfp4 import dense, groups_outside, tile_rows, to_e4m3, widen_e4m3
from dayzero.ops.experts_sizes import BLOCK, SLICES, ring_bytes
from dayzero.ops.linear import product_f64
from dayzero.ops.moe import summed_by_expert
from dayzero.units import ceil_div

LARGEST, LEAST_AMAX = 448.0, 1e-4  # of e4m3; of a block's largest magnitude, so that no scale is zero

Product = Callable[[Tensor, Any, Tensor | None], Tensor]  # x [T, K], an expert's matrix [N, K], bias [N] -> [T, N]


def to_fp8_128(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """(e4m3 [T, K], f32 scales [T, B]) with x about codes * scale: scale = largest magnitude of the block / 448."""
    short = -x_TK.shape[-1] % BLOCK
    blocks_TBC = F.pad(x_TK.float(), (0, short)).unflatten(-1, (-1, BLOCK))
    scale_TB = blocks_TBC.abs().amax(-1).clamp(min=LEAST_AMAX) / LARGEST
    codes = (blocks_TBC / scale_TB[..., None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return codes.flatten(-2)[..., : x_TK.shape[-1]], scale_TB


def rounded_to_fp8_128(x_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """The values that ``to_fp8_128`` keeps of x, in ``dtype``: exact in f64."""
    codes, scale_TB = to_fp8_128(x_TK)
    scales_TK = scale_TB.to(dtype).repeat_interleave(BLOCK, dim=-1)[..., : x_TK.shape[-1]]
    return codes.to(dtype) * scales_TK


@contract(
    "moe.experts_fp8_128", bound=EXPERTS_FP8,
    traits={"act": KINDS, "bias": (False, True), "activation": ("fp8_128",)},
)  # fmt: skip
def experts_fp8_128(
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    gate_EID: Tensor,
    up_EID: Tensor,
    down_EDI: Tensor,
    activation: Mapping[str, Any],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """``moe.experts`` with the inputs of all three products rounded by ``to_fp8_128``; weights are as there."""

    def product(x_TK: Tensor, matrix: Any, bias_N: Tensor | None) -> Tensor:
        y_TN = product_f64(rounded_to_fp8_128(x_TK, torch.float64), dense(matrix, torch.float32))
        return (y_TN if bias_N is None else y_TN + bias_N.double()).to(x_TK.dtype)

    return _experts(product, (x_TD, ids_TN, weights_TN), (gate_EID, up_EID, down_EDI), activation, biases)


def _experts(
    product: Product,
    rows: tuple[Tensor, Tensor, Tensor],
    matrices: tuple[Any, Any, Any],
    activation: Mapping[str, Any],
    biases: tuple[Tensor, Tensor, Tensor] | None,
) -> Tensor:
    gates, ups, downs = matrices

    def one(x_RD: Tensor, expert: int) -> Tensor:
        b_gate, b_up, b_down = (b[expert] for b in biases) if biases is not None else (None, None, None)
        gate, up = product(x_RD, gates[expert], b_gate), product(x_RD, ups[expert], b_up)
        return product(glu.body(gate, up, **activation), downs[expert], b_down)

    return summed_by_expert(*rows, one)


# --- never materialised: widened inside the product, tile by tile -----------------------------------------------------


def widening(
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    gate_EID: Tensor,
    up_EID: Tensor,
    down_EDI: Tensor,
    activation: Mapping[str, Any],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """``moe.experts_fp8_128`` in f32, a tile of each matrix widened at a time."""
    rows, matrices = (x_TD, ids_TN, weights_TN), (gate_EID, up_EID, down_EDI)
    return _experts(_widening_product, rows, matrices, activation, biases)


def _widening_product(x_TK: Tensor, matrix: Tensor | Mxfp4, bias_N: Tensor | None) -> Tensor:
    def tile(rows: slice) -> Tensor:
        return dense(matrix[rows], torch.float32).float()

    return _by_tiles(rounded_to_fp8_128(x_TK, torch.float32), tile, len(matrix), bias_N).to(x_TK.dtype)


def _by_tiles(x_TK: Tensor, tile: Callable[[slice], Tensor], num_rows: int, bias_N: Tensor | None) -> Tensor:
    """x @ tiles^T + bias [T, N] in f32. tile: rows -> f32 [n, K]."""
    out_TN, step = x_TK.new_empty(len(x_TK), num_rows), tile_rows(x_TK.shape[-1])
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        out_TN[:, rows] = F.linear(x_TK, tile(rows))
    return out_TN if bias_N is None else out_TN + bias_N.float()


# --- the workspace: activated experts as e4m3 in a ring of slices -----------------------------------------------------


class Ring:
    """The workspace of a rank: slices that are filled and read in turn, whatever layer or expert they serve.

    num_bytes: of all slices, each for one whole matrix (``experts_sizes.ring_bytes``). A slice is valid until
    ``SLICES - 1`` more were taken. fallbacks: matrices so far that were not converted because groups of theirs lie
    outside of e4m3's reach; those are widened inside the product.
    """

    def __init__(self, num_bytes: int, device: str | torch.device = "cpu") -> None:
        self.slice_bytes = num_bytes // SLICES
        self._memory = torch.empty(SLICES, self.slice_bytes, dtype=torch.uint8, device=device)
        self._next = 0
        self.fallbacks = 0

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def take(self, num_rows: int, num_columns: int) -> tuple[Tensor, Tensor]:
        """(float8_e4m3fn [R, C], f32 [R, B]) in the next slice, their contents undefined."""
        scale_bytes = 4 * num_rows * ceil_div(num_columns, BLOCK)
        memory = self._memory[self._next]
        self._next = (self._next + 1) % SLICES
        scales = memory[:scale_bytes].view(torch.float32).view(num_rows, -1)
        codes = memory[scale_bytes : scale_bytes + num_rows * num_columns]
        return codes.view(torch.float8_e4m3fn).view(num_rows, num_columns), scales

    def experts(
        self,
        x_TD: Tensor,
        ids_TN: Tensor,
        weights_TN: Tensor,
        gate_EID: Any,
        up_EID: Any,
        down_EDI: Any,
        activation: Mapping[str, Any],
        biases: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> Tensor:
        """``moe.experts_fp8_128`` for stacks in 4 bits: the same numbers as ``widening``."""
        rows, matrices = (x_TD, ids_TN, weights_TN), (gate_EID, up_EID, down_EDI)
        return _experts(self._product, rows, matrices, activation, biases)

    def _product(self, x_TK: Tensor, matrix: Mxfp4, bias_N: Tensor | None) -> Tensor:
        if not isinstance(matrix, Mxfp4):
            raise ValueError("this variant converts experts that are kept in 4 bits; bind another one to this site")
        if groups_outside(matrix):
            self.fallbacks += 1
            return _widening_product(x_TK, matrix, bias_N)
        codes, scales = self.take(*matrix.shape)
        to_e4m3(matrix, codes, scales)
        rounded_TK = rounded_to_fp8_128(x_TK, torch.float32)
        tiles = partial(_e4m3_tile, codes, scales)
        return _by_tiles(rounded_TK, tiles, len(matrix), bias_N).to(x_TK.dtype)


def _e4m3_tile(codes: Tensor, scales: Tensor, rows: slice) -> Tensor:
    return widen_e4m3(codes[rows], scales[rows])


def ring(
    x_TD: Tensor,
    ids_TN: Tensor,
    weights_TN: Tensor,
    gate_EID: Any,
    up_EID: Any,
    down_EDI: Any,
    activation: Mapping[str, Any],
    biases: tuple[Tensor, Tensor, Tensor] | None = None,
) -> Tensor:
    """``Ring.experts`` with a ring of its own, for a caller without a rank's."""
    own = Ring(ring_bytes(gate_EID.shape[-2], gate_EID.shape[-1]), x_TD.device)
    return own.experts(x_TD, ids_TN, weights_TN, gate_EID, up_EID, down_EDI, activation, biases)
