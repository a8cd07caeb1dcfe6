"""Which variant a plan takes: the best-ranked one that the device, the dtype and the site's options allow."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dayzero.decl import OpUse
from dayzero.errors import UsageError
from dayzero.hardware import HARDWARE
from dayzero.ops.bindings import bound_uses
from dayzero.ops.catalog import CATALOG, Line, builtin, lacking
from dayzero.planner.bindings import choose
from dayzero.planner.detect import processor_features

CPU = replace(HARDWARE["cpu"], features=frozenset({"cxx", "onednn", "avx2"}))
BF16_CPU = replace(CPU, features=CPU.features | {"avx512", "avx512_bf16"})
AMX_CPU = replace(CPU, features=BF16_CPU.features | {"amx_bf16"})
BARE_CPU = replace(CPU, features=frozenset())


def _one(contract: str, hardware: object, dtype: str, **traits: object) -> str | None:
    found = choose([OpUse(contract, "here", tuple(sorted(traits.items())))], hardware, dtype)  # type: ignore[arg-type]
    assert set(found) <= {f"{contract}@here"}
    return found.get(f"{contract}@here")


@pytest.mark.parametrize(
    "hardware, dtype, product, product_f32",
    [
        (CPU, "bf16", "native_cpu", "native_cpu"),
        (BF16_CPU, "bf16", "native_cpu", "native_cpu"),
        (AMX_CPU, "bf16", "onednn_amx", "native_cpu"),
        (CPU, "f32", "onednn_f32", "onednn_f32"),
        (BF16_CPU, "f32", "onednn_f32", "onednn_f32"),
        (CPU, "f16", "torch_cpu", "torch_cpu"),
        (BARE_CPU, "bf16", "torch_cpu", "torch_cpu"),
        (HARDWARE["h100"], "bf16", "few_rows", "few_rows"),
        (HARDWARE["h100"], "f16", "torch_cuda", "torch_cuda"),
    ],
)
def test_products(hardware: object, dtype: str, product: str | None, product_f32: str | None) -> None:
    assert _one("linear.matmul", hardware, dtype) == product
    assert _one("linear.matmul_f32", hardware, dtype) == product_f32


def test_options_of_the_site_count() -> None:
    assert _one("attention.paged", CPU, "bf16", window=True, sinks=True) == "native_cpu"
    assert _one("attention.paged", BARE_CPU, "bf16", window=True, sinks=False) == "torch_cpu"
    assert _one("attention.paged", BARE_CPU, "bf16", window=True, sinks=True) == "tiled"
    assert _one("attention.paged", CPU, "bf16", latent=True) == "tiled"
    assert _one("activation.glu", CPU, "bf16", kind="silu") == "native_cpu"
    assert _one("activation.glu", CPU, "bf16", kind="situ") is None
    assert _one("no.such", CPU, "bf16") is None


def test_a_latent_that_is_no_power_of_two_wide_gets_a_variant_that_reads_it() -> None:
    h200 = HARDWARE["h200"]
    assert _one("attention.paged", h200, "bf16", latent=True, latent_width=512) == "cuda"
    assert _one("attention.paged", h200, "bf16", latent=True, latent_width=384) == "tiled"
    use = OpUse("attention.paged", "here", (("latent", True), ("latent_width", 384)))
    for variant in ("triton", "cuda"):
        with pytest.raises(UsageError, match=rf"here: variant '{variant}' does not fit: .*latent_width of .*not 384"):
            bound_uses({"attention.paged": variant}, [use])


def test_every_site_by_itself_and_an_unranked_variant_is_never_taken() -> None:
    uses = [OpUse("activation.glu", f"layers.{i}", (("kind", kind),)) for i, kind in enumerate(("silu", "situ"))]
    assert choose(uses, CPU, "bf16") == {"activation.glu@layers.0": "native_cpu"}
    catalog = builtin()
    catalog.add(Line("norm.l2", "unranked", "cpu", (), "m:f"))
    assert choose([OpUse("norm.l2", "x")], CPU, "bf16", catalog) == {}
    catalog.add(Line("norm.l2", "ranked", "cpu", (), "m:f", rank=1))
    assert choose([OpUse("norm.l2", "x")], CPU, "bf16", catalog) == {"norm.l2@x": "ranked"}


def test_what_is_chosen_has_the_options_and_no_reference_has_a_rank() -> None:
    for line in CATALOG.lines.values():
        assert (line.variant == "reference") <= (line.rank == 0)
        assert not line.prepack or ":" in line.prepack
        assert not lacking(line, {})


def test_flags_of_the_processor(tmp_path: Path) -> None:
    listed = tmp_path / "cpuinfo"
    listed.write_text(
        "processor: 0\nflags\t\t: fpu avx2 avx512f avx512_bf16 amx_tile\n\nflags: amx_bf16\n", encoding="utf-8"
    )
    assert processor_features(listed) == {"avx2", "avx512", "avx512_bf16"}
    listed.write_text("processor: 0\nFeatures: asimd bf16\n", encoding="utf-8")
    assert processor_features(listed) == frozenset()
    assert processor_features(tmp_path / "none") == frozenset()
