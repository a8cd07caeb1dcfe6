"""The constants of an activation as kernels take them."""

from __future__ import annotations

from dayzero.ops.activation import KINDS, activation_of


def test_constants_as_kernels_take_them() -> None:
    assert activation_of({}) == (KINDS.index("silu"), [0.0] * 4)
    clamped = {"kind": "clamped", "limit": 7.0, "alpha": 1.702}
    assert activation_of(clamped) == (KINDS.index("clamped"), [7.0, 1.702, 0.0, 0.0])
    situ = {"kind": "situ", "beta": 4, "linear_beta": 25}
    assert activation_of(situ) == (KINDS.index("situ"), [0.0, 0.0, 4.0, 25.0])
