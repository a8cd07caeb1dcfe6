"""The constants of an activation as kernels take them, and the launch of one that has them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dayzero.ops.activation import KINDS, activation_of
from dayzero.ops.cuda import linear


def test_constants_as_kernels_take_them() -> None:
    assert activation_of({}) == (KINDS.index("silu"), [0.0] * 4)
    clamped = {"kind": "clamped", "limit": 7.0, "alpha": 1.702}
    assert activation_of(clamped) == (KINDS.index("clamped"), [7.0, 1.702, 0.0, 0.0])
    situ = {"kind": "situ", "beta": 4, "linear_beta": 25}
    assert activation_of(situ) == (KINDS.index("situ"), [0.0, 0.0, 4.0, 25.0])


@pytest.mark.parametrize(
    ("given", "want"), [({}, ("silu", 0.0)), ({"kind": "silu_clamped", "limit": 10}, (None, 10.0))]
)
def test_a_kernel_is_launched_for_what_the_reference_takes(
    given: dict[str, Any], want: tuple[str | None, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, float]] = []

    def kernel(setting: object, cols: int, forms: dict[str, int]) -> Any:
        def launch(grid: object, threads: int, arguments: tuple[Any, ...], *, overlap: bool) -> None:
            launched.append((forms["GLU"], arguments[-2].limit))

        return launch

    monkeypatch.setattr(linear, "_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, w = (torch.ones(rows, 64, dtype=torch.bfloat16) for rows in (2, 32))
    y = linear.few_gated(x, w, given)
    assert y is not None and y.shape == (2, 16)
    assert launched == [(KINDS.index(want[0] or given["kind"]), want[1])]
