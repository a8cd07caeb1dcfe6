"""Which variant a plan takes: the best-ranked one that the device, the dtype and the site's options allow."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from dayzero.decl import OpUse
from dayzero.errors import UsageError
from dayzero.hardware import HARDWARE
from dayzero.models.blueprint import blueprint, require_recipe
from dayzero.ops.bindings import bound_uses
from dayzero.ops.catalog import CATALOG, Line, builtin, lacking
from dayzero.planner.bindings import choose, decide
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


def test_a_variant_that_does_not_list_the_latents_width_has_any() -> None:
    """An installed package's, say: nothing but ``latent`` is asked of it."""
    catalog = builtin()
    catalog.add(Line("attention.paged", "theirs", "cuda", (), "m:f", {"latent": (True,)}, rank=99))
    use = OpUse("attention.paged", "here", (("latent", True), ("latent_width", 384)))
    assert choose([use], HARDWARE["h200"], "bf16", catalog) == {"attention.paged@here": "theirs"}
    assert bound_uses({"attention.paged": "theirs"}, [use], catalog) == {"attention.paged@here": "theirs"}
    catalog.add(Line("attention.paged", "none", "cuda", (), "m:f", {}, rank=100))
    assert choose([use], HARDWARE["h200"], "bf16", catalog) == {"attention.paged@here": "theirs"}


@cache
def _uses(name: str) -> tuple[OpUse, ...]:
    config = json.loads((Path(__file__).parent / "configs" / f"{name}.json").read_text())
    return tuple(blueprint(config, require_recipe(config)).spec.contracts())


def _decided(name: str, *asked: str, dtype: str = "bf16") -> dict[str, str]:
    return decide(_uses(name), HARDWARE["h200"], dtype, dict(one.split("=") for one in asked))


ENTRY, GATED, ADDED, CHOICE = (
    "attention.norm_rope_write", "linear.matmul_glu", "linear.matmul_add", "moe.matmul_route"
)  # fmt: skip
ADD_NORM, ROW, MIXED = "residual.add_norm", "cache.write_latent", "residual.attn_mix_norm"
LATENT = "latent.attend"


@pytest.mark.parametrize(
    ("model", "asked", "gone", "left"),
    [
        ("qwen3_8b", "rope.apply=reference", [ENTRY], [GATED, ADD_NORM]),
        ("qwen3_8b", "norm.rms=reference", [ENTRY, ADD_NORM], [GATED]),
        ("qwen3_8b", "cache.write=reference", [ENTRY], [GATED, ADD_NORM]),
        ("qwen3_8b", "linear.matmul=reference", [GATED], [ENTRY, ADD_NORM]),
        ("qwen3_8b", "linear.matmul=torch_cuda", [GATED], [ENTRY, ADD_NORM]),
        ("qwen3_8b", "activation.glu=triton", [GATED], [ENTRY, ADD_NORM]),
        ("qwen3_30b_a3b", "moe.route=reference", [CHOICE], [ENTRY, ADD_NORM]),
        ("qwen3_30b_a3b", "linear.matmul_f32=reference", [CHOICE], [ENTRY]),
        ("deepseek_v3", "linear.matmul=torch_cuda", [GATED, ADDED], [CHOICE, ROW]),
        ("deepseek_v3", "rope.apply=reference", [ROW], [GATED, ADDED, CHOICE]),
        ("deepseek_v3", "cache.write=reference", [ROW], [GATED]),
        ("kimi_k3", "residual.attn_mix=reference", [MIXED], [GATED, ROW]),
        ("deepseek_v3", "attention.paged=triton", [LATENT], [ROW, GATED]),
        ("deepseek_v3", "latent.values=reference", [LATENT], [ROW, GATED]),
    ],
)
def test_what_is_asked_for_runs_though_an_operator_would_do_its_work(
    model: str, asked: str, gone: list[str], left: list[str]
) -> None:
    chosen, got = _decided(model), _decided(model, asked)
    assert {place.partition("@")[0] for place in chosen} >= {*gone, *left}
    assert not [place for place in got if place.partition("@")[0] in gone]
    for contract in left:
        assert [p for p in got if p.startswith(f"{contract}@")] == [p for p in chosen if p.startswith(f"{contract}@")]
    contract, _, variant = asked.partition("=")
    of_it = [place for place in chosen if place.startswith(f"{contract}@")]
    assert of_it and [got.get(place, "reference") for place in of_it] == [variant] * len(of_it)


@pytest.mark.parametrize(
    ("model", "part", "whole"),
    [
        ("qwen3_8b", "norm.rms@layers.3.mixer.k_norm", [f"{ENTRY}@layers.3.mixer.qkv"]),
        ("qwen3_8b", "norm.rms@layers.3.mixer_norm", [f"{ADD_NORM}@layers.3.mixer_add_norm"]),
        ("qwen3_8b", "norm.rms@final_norm", [f"{ADD_NORM}@final_add_norm"]),
        (
            "qwen3_8b", "residual.add@layers.35.add",
            [f"{ADD_NORM}@final_add_norm", f"{ADD_NORM}@layers.35.channel_add_norm"],
        ),
        (
            "qwen3_8b", "residual.add@layers.2.add",
            [f"{ADD_NORM}@layers.2.channel_add_norm", f"{ADD_NORM}@layers.3.mixer_add_norm"],
        ),
        ("qwen3_30b_a3b", "linear.matmul_f32@layers.4.channel.router", [f"{CHOICE}@layers.4.channel.choose"]),
        ("deepseek_v3", "linear.matmul@layers.4.channel.shared.down", [f"{ADDED}@layers.4.channel.shared.down"]),
        ("kimi_linear_48b_a3b", "latent.queries@layers.3.mixer.queries", [f"{LATENT}@layers.3.mixer.attention"]),
        ("deepseek_v3", "linear.matmul@layers.4.channel.shared.up", [f"{GATED}@layers.4.channel.shared.gate_up"]),
    ],
)  # fmt: skip
def test_one_site_is_left_to_its_parts_and_no_other(model: str, part: str, whole: list[str]) -> None:
    chosen, got = _decided(model), _decided(model, f"{part}=reference")
    assert sorted(chosen.keys() - got.keys()) == sorted([part, *whole])


def test_an_operator_and_a_part_of_it_are_not_both_asked_for() -> None:
    with pytest.raises(UsageError, match=r"'attention.norm_rope_write' and 'rope.apply' are of the same work"):
        _decided("qwen3_8b", f"{ENTRY}=triton", "rope.apply=reference")
    part = "linear.matmul@layers.4.channel.shared.down"
    with pytest.raises(UsageError, match=rf"'{ADDED}' and '{part}' are of the same work: at layers.4"):
        _decided("deepseek_v3", f"{ADDED}=few_rows", f"{part}=torch_cuda")
    # the same words from what an alignment asks, which chooses nothing
    with pytest.raises(UsageError, match=r"'attention.norm_rope_write' and 'rope.apply' are of the same work"):
        bound_uses({ENTRY: "triton", "rope.apply": "reference"}, _uses("qwen3_8b"))
    chosen = _decided("qwen3_8b")
    assert _decided("qwen3_8b", f"{ENTRY}=triton", "linear.matmul@layers.0.mixer.q=few_rows") == chosen
    assert not [p for p in _decided("qwen3_8b", f"{ENTRY}=reference", "rope.apply=triton") if p.startswith(ENTRY)]
    assert _decided("qwen3_8b", "*=reference", f"{ENTRY}@layers.0.mixer.qkv=triton") == {
        f"{ENTRY}@layers.0.mixer.qkv": "triton"
    }
    assert set(_decided("qwen3_8b", "*=reference", "norm.rms=triton").values()) == {"triton"}


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
