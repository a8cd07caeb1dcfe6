"""The launch of a kernel in CUDA C++ that has an activation: no GPU is asked, but its module wants Triton."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")

from dayzero.ops.activation import KINDS
from dayzero.ops.cuda import linear


@pytest.mark.parametrize(
    ("given", "want"), [({}, ("silu", 0.0)), ({"kind": "silu_clamped", "limit": 10}, (None, 10.0))]
)
def test_a_kernel_is_launched_for_what_the_reference_takes(
    given: dict[str, Any], want: tuple[str | None, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, float]] = []

    def kernel(setting: object, cols: int, forms: dict[str, int], fp8: bool) -> Any:
        def launch(grid: object, threads: int, arguments: tuple[Any, ...], *, overlap: bool) -> None:
            launched.append((forms["GLU"], arguments[-2].limit))

        return launch

    monkeypatch.setattr(linear, "_kernel", kernel)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    x, w = (torch.ones(rows, 64, dtype=torch.bfloat16) for rows in (2, 32))
    y = linear.few_gated(x, w, given)
    assert y is not None and y.shape == (2, 16)
    assert launched == [(KINDS.index(want[0] or given["kind"]), want[1])]
