"""Products with a weight that oneDNN laid out: f32 on any processor, bf16 where oneDNN takes it, else a clear no."""

from __future__ import annotations

import pytest
import torch
from ops_support import close, poisoned_memory  # noqa: F401

from dayzero.errors import MachineError
from dayzero.ops import linear
from dayzero.ops.bind import prepack_of
from dayzero.ops.catalog import CATALOG
from dayzero.ops.contract import CONTRACTS
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.ops.vendor import onednn

BF16, F32 = torch.bfloat16, torch.float32
SIZES = [(1, 1), (31, 33), (64, 32), (65, 127)]


def _takes_bf16() -> bool:
    try:
        onednn.pack(torch.zeros(16, 16, dtype=BF16))
    except MachineError:
        return False
    return True


needs_bf16 = pytest.mark.skipif(not _takes_bf16(), reason="oneDNN takes no bf16 weights on this processor")


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("outputs, inputs", SIZES)
@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=needs_bf16)], ids=["f32", "bf16"])
def test_products_of_every_size(threads: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    r = Inputs(outputs)
    w, bias = strided(r.normal(outputs, inputs, dtype=dtype)), r.normal(outputs, dtype=dtype)
    packed = onednn.pack(w)
    assert packed.nbytes == w.numel() * w.element_size()
    bound = CONTRACTS["linear.matmul"].bound["f32" if dtype == F32 else "bf16"].value
    for tokens in (0, 1, 2, 7, 64, 130):
        x = strided(r.normal(tokens, inputs, dtype=dtype))
        for b in (None, bias):
            close(onednn.matmul(x, packed, b), linear.matmul.body(x, w, b), bound)
    torch.set_num_threads(before)


def test_one_layout_serves_leading_dimensions() -> None:
    r = Inputs(1)
    w, x = r.normal(24, 16), r.normal(2, 3, 16)
    close(onednn.matmul(x, onednn.pack(w)), linear.matmul.body(x, w), CONTRACTS["linear.matmul"].bound["f32"].value)


@pytest.mark.skipif(_takes_bf16(), reason="oneDNN takes bf16 weights on this processor")
def test_a_processor_without_bf16_products_is_told_so() -> None:
    with pytest.raises(MachineError, match="oneDNN does not take torch.bfloat16 weights.*bind native_cpu"):
        onednn.pack(torch.zeros(16, 16, dtype=BF16))


def test_what_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = onednn.pack(torch.zeros(8, 16))
    with pytest.raises(ValueError, match="takes width 16"):
        onednn.matmul(torch.zeros(2, 15), packed)
    with pytest.raises(ValueError, match="float32 takes"):
        onednn.matmul(torch.zeros(2, 16, dtype=BF16), packed)
    with pytest.raises(ValueError, match="f32 and bf16 weights"):
        onednn.pack(torch.zeros(8, 16, dtype=torch.float16))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(MachineError, match="need oneDNN"):
        onednn.check_machine()


def test_every_line_packs_with_this_module_and_claims_no_f32_result_of_bf16() -> None:
    lines = [line for line in CATALOG.lines.values() if line.variant.startswith("onednn")]
    assert {line.contract for line in lines} == {"linear.matmul", "linear.matmul_f32"}
    for line in lines:
        assert prepack_of(line) is onednn.pack
        assert line.contract == "linear.matmul" or line.dtypes == ("f32",)
