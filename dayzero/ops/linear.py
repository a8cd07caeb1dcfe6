"""Matrix products. Accumulated in f64 and rounded once, so that a row's result does not depend on its neighbours.

T tokens, K input width, N output width, G groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.decl import Fp8Blocks
from dayzero.ops.activation import KINDS, glu
from dayzero.ops.bounds import MATMUL, MATMUL_ADD, MATMUL_F32, MATMUL_GLU
from dayzero.ops.contract import contract
from dayzero.ops.fp8_blocks import halves, pieces

Weight = Tensor | Fp8Blocks  # of which the values are code times scale, in f32
_ROWS_AT_ONCE = 8192  # bounds the f64 copy of a vocabulary-sized weight


def product_f64(x_TK: Tensor, w_NK: Weight) -> Tensor:
    """x @ w^T [T, N] in f64."""
    return torch.cat([x_TK.double() @ w.double().T for w in pieces(w_NK, _ROWS_AT_ONCE)], dim=-1)


@contract("linear.matmul", bound=MATMUL, traits={"bias": (False, True)})
def matmul(x_TK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """x @ w^T + bias, in x's dtype [..., N]. The bias is added before the one rounding."""
    y_TN = product_f64(x_TK, w_NK)
    return (y_TN if bias_N is None else y_TN + bias_N.double()).to(x_TK.dtype)


@contract("linear.matmul_f32", bound=MATMUL_F32, traits={"bias": (False, True)})
def matmul_f32(x_TK: Tensor, w_NK: Weight, bias_N: Tensor | None = None) -> Tensor:
    """x @ w^T + bias [..., N] in f32, whatever the operands are stored in: router logits, index weights, f32 heads."""
    y_TN = product_f64(x_TK, w_NK)
    return (y_TN if bias_N is None else y_TN + bias_N.double()).float()


@contract("linear.matmul_glu", bound=MATMUL_GLU, traits={"kind": KINDS}, composed=True)
def matmul_glu(x_TK: Tensor, w_NK: Weight, activation: Mapping[str, Any]) -> Tensor:
    """``activation.glu`` of x times the first and x times the second half of w: [..., N / 2] in x's dtype.

    activation: its keyword arguments, e.g. {"kind": "silu"}. Both products are rounded to x's dtype before.
    """
    return glu.body(*(matmul.body(x_TK, half) for half in halves(w_NK)), **activation)


@contract("linear.matmul_add", bound=MATMUL_ADD, composed=True)
def matmul_add(x_TK: Tensor, w_NK: Weight, added_TN: Tensor) -> Tensor:
    """added + ``linear.matmul`` of x and w as it is rounded: [..., N] in x's dtype, added in f32."""
    return (added_TN.float() + matmul.body(x_TK, w_NK).float()).to(x_TK.dtype)


@contract("linear.grouped", bound=MATMUL)
def grouped(x_TGK: Tensor, w_GNK: Tensor) -> Tensor:
    """Block-diagonal product: group g of x times w[g]^T -> [T, G, N] in x's dtype."""
    return torch.einsum("tgk,gnk->tgn", x_TGK.double(), w_GNK.double()).to(x_TGK.dtype)
