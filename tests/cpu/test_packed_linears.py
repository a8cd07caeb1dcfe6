"""Linear layers whose weights stay in blocks of 8 bits: which do, what the references make of them, and that a model
answers as with decoded ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.arch.channels import GLU
from dayzero.arch.norms import Activation
from dayzero.blocks.glu import GLUBlock
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.open import LoadedModel
from dayzero.blocks.site import Params, Site, as_stored, reference
from dayzero.blocks.stack import Stack
from dayzero.decl import Fp8Blocks, OpUse
from dayzero.engine import load as engine_load
from dayzero.engine.config import EngineConfig
from dayzero.engine.experts import keep_experts, stored_forms
from dayzero.engine.launch import LaunchSpec
from dayzero.engine.seeded import open_seeded
from dayzero.hardware import HARDWARE
from dayzero.models.blueprint import require_recipe
from dayzero.ops import fp8_blocks as ops_fp8_blocks
from dayzero.ops.activation import glu
from dayzero.ops.bindings import bound_uses
from dayzero.ops.cases_fp8 import fp8_blocks
from dayzero.ops.catalog import CATALOG, Catalog, Line
from dayzero.ops.experts_fp8 import rounded_to_fp8_128
from dayzero.ops.fp8_blocks import halves, joined, packed_rows, pieces, widened
from dayzero.ops.linear import matmul, matmul_add, matmul_f32, matmul_glu
from dayzero.ops.linear_rounded import matmul_fp8_128
from dayzero.ops.random_inputs import Inputs
from dayzero.parallel.mesh import Mesh
from dayzero.planner.bindings import decide
from dayzero.planner.kept import as_kept, expert_lines
from dayzero.planner.packed_linears import linear_lines
from dayzero.planner.placement import read_model, stage_bytes, stages_of
from dayzero.rehearse.shrink import shrink
from tests.parity import close

CONFIG = Path(__file__).parents[1] / "paper" / "configs" / "deepseek_v32.json"
# Weights of more than one block, of which the first of those side by side has whole blocks, or has none.
WHOLE = {"hidden_size": 160, "q_lora_rank": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
SHORT = {"hidden_size": 160, "q_lora_rank": 136, "intermediate_size": 200, "moe_intermediate_size": 72}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def source(folder: Path, sizes: Mapping[str, Any]) -> str:
    config = json.loads(CONFIG.read_text())
    small = shrink(config, require_recipe(config).twin, keep_vocab=False, changes=sizes)
    (folder / "config.json").write_text(json.dumps(small))
    return f"seeded:{folder}"


def blocks_line(contract: str) -> Line:
    """The reference as a variant for the CPU that takes 8 bits."""
    name = contract.partition(".")[2]
    traits = {"bias": (False, True)}
    return Line(contract, "blocks", "cpu", (), f"dayzero.ops.linear:{name}", traits, rank=99, packed=("fp8_block",))


CONTRACTS = ("linear.matmul", "linear.matmul_f32")


@pytest.fixture
def catalog() -> Catalog:
    grown = CATALOG.copy()
    for contract in CONTRACTS:
        grown.add(blocks_line(contract))
    return grown


# --- the form -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (128, 128), (129, 257), (300, 65), (0, 5)], ids=str)
def test_values_are_codes_times_scales_and_the_references_multiply_by_them(size: tuple[int, int]) -> None:
    r = Inputs(0)
    weight = fp8_blocks(r, *size, loose=True)
    exact = weight.codes.float()
    for row in range(size[0]):
        for block in range(weight.scales.shape[1]):
            exact[row, 128 * block : 128 * block + 128] *= weight.scales[row // 128, block]
    assert torch.equal(widened(weight), exact)
    assert torch.equal(widened(weight, slice(7, 200), torch.bfloat16), exact[7:200].bfloat16())
    assert torch.equal(torch.cat(list(pieces(weight, 50))), exact)
    x, bias = r.normal(3, size[1]), r.normal(size[0])
    assert torch.equal(matmul(x, weight, bias), matmul(x, exact, bias))
    assert torch.equal(matmul_f32(x, weight), matmul_f32(x, exact))
    added = r.normal(3, size[0])
    assert torch.equal(matmul_add(x, weight, added), matmul_add(x, exact, added))


def test_rounded_inputs_are_multiplied_by_the_same_weights() -> None:
    r = Inputs(6)
    weight, x, bias = fp8_blocks(r, 200, 300), r.normal(4, 300) * 30, r.normal(200)
    x[1, 128:256] = 0  # a block without any number but zero
    rounded = rounded_to_fp8_128(x, torch.float32)
    assert torch.equal(rounded[1, 128:256], x[1, 128:256]) and not torch.equal(rounded, x)
    for given in (weight, widened(weight)):
        # A rounded value has at most the bits of f32: one rounding of each side is left.
        close(matmul_fp8_128(x, given, bias), matmul(rounded, weight, bias), 2.0**-22)


def test_the_halves_of_a_gated_layer_have_blocks_of_their_own() -> None:
    r = Inputs(1)
    gate, up, x = fp8_blocks(r, 128, 70), fp8_blocks(r, 128, 70), r.normal(5, 70)
    together = joined([gate, up])
    assert [torch.equal(widened(got), widened(want)) for got, want in zip(halves(together), (gate, up))] == [True, True]
    apart = torch.cat([widened(gate), widened(up)])
    assert torch.equal(matmul_glu(x, together, {"kind": "silu"}), matmul_glu(x, apart, {"kind": "silu"}))
    with pytest.raises(AssertionError, match="both halves"):
        halves(fp8_blocks(r, 200, 70))


def test_matrices_become_one_where_no_block_has_rows_of_two() -> None:
    r = Inputs(2)
    for rows in ((1536, 576), (128, 128, 1), (7,)):
        parts = [fp8_blocks(r, count, 140) for count in rows]
        assert torch.equal(widened(joined(parts)), torch.cat([widened(part) for part in parts]))
    assert joined([fp8_blocks(r, 576, 140), fp8_blocks(r, 1536, 140)]) is None
    assert joined([fp8_blocks(r, 128, 140), r.normal(4, 140)]) is None and joined([r.normal(4, 9)] * 2).shape == (8, 9)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_nan_makes_its_block_nan(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_fp8_blocks, "_ROWS", 100)  # of the 300 that there are
    weight = fp8_blocks(Inputs(3), 300, 200)
    weight.codes.view(torch.uint8)[130, 190] = code
    before = weight.scales.clone()
    laid_out = packed_rows(weight)
    assert laid_out.scales.isnan().nonzero().tolist() == [[1, 1]] and torch.equal(weight.scales, before)
    loose = fp8_blocks(Inputs(3), 300, 200, loose=True)
    whole = packed_rows(loose)
    assert not loose.codes.is_contiguous() and not loose.scales.is_contiguous()
    assert whole.codes.is_contiguous() and whole.scales.is_contiguous() and torch.equal(widened(whole), widened(loose))
    with pytest.raises(ValueError, match="not \\(3, 2\\)"):
        packed_rows(Fp8Blocks(weight.codes, weight.scales[:2]))


# --- which weights ----------------------------------------------------------------------------------------------------


def lines(uses: tuple[OpUse, ...], asked: Mapping[str, str]) -> dict[str, Line]:
    return linear_lines(uses, decide(uses, HARDWARE["h200"], "bf16", asked), CATALOG)


def test_a_weight_stays_where_every_operator_that_takes_it_has_the_form(tmp_path: Path) -> None:
    model = open_seeded(source(tmp_path, WHOLE))
    uses, last = model.spec.contracts(), f"layers.{len(model.spec.layers) - 1}"
    kept = stored_forms(model.loader, lines(uses, {}))
    of_mixer = {f"{last}.mixer.{name}" for name in ("q_a", "q_b", "kv_a", "o", "index.q", "index.k")}
    of_channel = {f"{last}.channel.shared.{name}" for name in ("gate", "up", "down")}
    assert {name for name in kept if name.startswith(last)} == of_mixer | of_channel
    assert set(kept.values()) == {"fp8_block"} and "layers.0.channel.gate" in kept
    others = stored_forms(model.loader, lines(uses, {f"linear.matmul@{last}.mixer.o": "torch_cuda"}))
    assert kept.keys() - others.keys() == {f"{last}.mixer.o"}
    gated = f"linear.matmul_glu@{last}.channel.shared.gate_up"
    assert stored_forms(model.loader, lines(uses, {gated: "reference"})) == kept, "its parts have the form"
    assert not stored_forms(model.loader, linear_lines(uses, {}, CATALOG)), "references are given decoded weights"


def test_what_a_composed_operator_takes_beside_the_product_is_decoded() -> None:
    product = OpUse("linear.matmul_f32", "router")
    route = OpUse("moe.matmul_route", "choose", parts=(product.place,))
    bound = {product.place: "few_rows", route.place: "triton"}
    for uses in ((product, route), (route, product)):
        assert linear_lines(uses, bound, CATALOG)["router"].packed == ()
    assert linear_lines((product, route), {product.place: "few_rows"}, CATALOG)["router"].packed == ("fp8_block",)


@pytest.mark.parametrize("sizes", [WHOLE, SHORT], ids=["whole blocks", "short blocks"])
def test_what_is_loaded_has_the_bytes_that_a_plan_counts(sizes: Mapping[str, Any], tmp_path: Path) -> None:
    model = open_seeded(source(tmp_path, sizes), dtype=torch.bfloat16)
    uses, experts = model.spec.contracts(), {"moe.experts": "triton"}
    packed = {**keep_experts(model, experts, CATALOG, None).packed, **stored_forms(model.loader, lines(uses, {}))}
    names = [*(f"layers.{i}" for i in range(len(model.spec.layers))), "embed", "head", "final_norm"]
    held = sum(value.nbytes for name in names for value in model.loader.load(name, packed=packed).values())
    paper, mesh = read_model(str(tmp_path / "config.json"), None), Mesh()
    kept = as_kept(paper, expert_lines(model.spec, experts, CATALOG) | lines(uses, {}))
    assert stage_bytes(kept, mesh, stages_of(kept, mesh)) == [held] != stage_bytes(paper, mesh, stages_of(paper, mesh))


def test_experts_whose_gate_and_up_are_stored_unlike_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = open_seeded(source(tmp_path, WHOLE))
    packs, first = model.loader.packs, "layers.3.channel.experts"
    for odd in ("gate", "up"):
        monkeypatch.setattr(model.loader, "packs", lambda n, odd=odd: None if n == f"{first}.{odd}" else packs(n))
        kept = keep_experts(model, {}, CATALOG, None).packed
        assert {name for name in kept if name.startswith(first)} == {f"{first}.down"}
    monkeypatch.setattr(model.loader, "packs", packs)
    assert {f"{first}.{name}" for name in ("gate", "up", "down")} <= keep_experts(
        model, {}, CATALOG, None
    ).packed.keys()


# --- whole models -----------------------------------------------------------------------------------------------------


def logits(model: LoadedModel, load: Callable[[str], dict[str, Tensor]], **how: Any) -> Tensor:
    cache = LocalCache(model.spec, torch.float32)
    return Stack(model.spec, load, **how).forward(cache.view(TOKENS))


def one_call(contract: str, site: str) -> Callable[..., Any]:
    """The reference, as a function that no block takes for it: composed operators are called as one."""
    body = reference(contract, site)
    return (lambda *a, **k: body(*a, **k)) if contract in (matmul_glu.name, matmul_add.name) else body


def in_one_piece(weight: Any) -> Any:
    return packed_rows(weight) if isinstance(weight, Fp8Blocks) else weight


def lay_out(contract: str, site: str) -> Callable[[Any], Any] | None:
    """Weights side by side are laid out as one, as one function lays out both."""
    return in_one_piece if contract.startswith("linear.") else None


@pytest.mark.parametrize("sizes", [WHOLE, SHORT], ids=["whole blocks", "short blocks"])
@pytest.mark.parametrize("bind, prepack", [(reference, as_stored), (one_call, lay_out)], ids=["alone", "side by side"])
def test_a_model_answers_as_with_decoded_weights(
    sizes: Mapping[str, Any], bind: Any, prepack: Any, tmp_path: Path
) -> None:
    """To the bit: in f32 a decoded value is the product of code and scale, as the references make it."""
    model = open_seeded(source(tmp_path, sizes), dtype=torch.float32)
    kept = stored_forms(model.loader, lines(model.spec.contracts(), {}))
    taken: list[str] = []

    def load(prefix: str) -> dict[str, Any]:
        values: dict[str, Any] = dict(model.loader.load(prefix, packed=kept))
        taken.extend(name for name, value in values.items() if isinstance(value, Fp8Blocks))
        return values

    want = logits(model, model.loader.load)
    assert torch.equal(logits(model, load, bind=bind, prepack=prepack), want)
    assert len(taken) == len(kept) > 20
    rounded = open_seeded(source(tmp_path, sizes), dtype=torch.bfloat16)
    error = (logits(rounded, rounded.loader.load).double() - want).norm() / want.double().norm()
    assert 0 < error < 0.1, "rounding weights and activations to bf16 is no other model, but not the same bits"


@pytest.mark.parametrize("sizes", [WHOLE, SHORT], ids=["whole blocks", "short blocks"])
def test_an_engine_loads_weights_as_the_bound_variants_take_them(
    sizes: Mapping[str, Any], tmp_path: Path, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = source(tmp_path, sizes)
    config = EngineConfig(dtype="float32", pool_bytes=16 << 20, bindings=(("*", "reference"),))

    def held(bindings: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        launch = LaunchSpec(source=where, config=replace(config, bindings=bindings))
        seen: dict[str, Any] = {}
        before = engine_load._placed

        def placed(*args: Any) -> dict[str, Any]:
            values = before(*args)
            seen.update(values)
            return values

        with monkeypatch.context() as patch:
            patch.setattr(engine_load, "_placed", placed)
            patch.setattr(engine_load, "load_entry_points", lambda: (catalog, ()))
            tables.append(dict(engine_load.load_model(launch).info.table))
        packed = {name: value for name, value in seen.items() if isinstance(value, Fp8Blocks)}
        return {name: value for name, value in packed.items() if "experts" not in name}

    tables: list[dict[str, str]] = []
    assert not held((("*", "reference"),)) and "linear layers" not in tables[0]
    kept = held((("*", "reference"), ("linear.matmul", "blocks")))
    assert tables[1]["linear layers"] == f"{len(kept)} weights in 8 bits as stored, inputs bf16"
    assert "layers.0.mixer.o" in kept and not any("kv_b" in name or "router" in name for name in kept)


def test_weights_are_made_in_the_form_that_is_asked_for_where_they_have_it(tmp_path: Path) -> None:
    loader, name = open_seeded(source(tmp_path, WHOLE)).loader, "layers.0.mixer.o"
    for form, kind in (("fp8_block", Fp8Blocks), ("mxfp4", Tensor)):
        assert isinstance(loader.load(name, packed={name: form})[name], kind)  # type: ignore[dict-item]


def test_products_of_rounded_and_of_other_inputs_stay_apart() -> None:
    r = Inputs(7)
    weights, x = {name: r.normal(30, 40) for name in ("gate", "up", "q", "k")}, r.normal(4, 40)
    for rounded in ("gate", "up", "q", "k"):
        site = Site("here", one_call, prepack=lay_out, rounded={f"here.{rounded}"})
        products = {name: (matmul_fp8_128 if name == rounded else matmul)(x, w) for name, w in weights.items()}
        for names in (("q", "k"), ("k", "q")):
            got = site.linears(Params(weights), names)(x)
            assert all(torch.equal(one, products[name]) for one, name in zip(got, names, strict=True))
        block = GLUBlock(GLU(40, 30, Activation("silu")), Params({**weights, "down": r.normal(40, 30)}), site)
        assert torch.equal(block.gated(x), glu(products["gate"], products["up"], kind="silu"))


def test_weights_that_are_stored_unlike_stay_apart() -> None:
    r = Inputs(5)
    packed, plain, x = fp8_blocks(r, 128, 40), r.normal(30, 40), r.normal(4, 40)
    params = Params({"q": packed, "k": plain})  # type: ignore[dict-item]
    got = Site("here", prepack=lay_out).linears(params, ("q", "k"))(x)
    assert torch.equal(got[0], matmul(x, packed)) and torch.equal(got[1], matmul(x, plain))


def test_the_test_variant_is_one_that_a_plan_may_bind(catalog: Catalog) -> None:
    use = OpUse("linear.matmul", "here")
    assert bound_uses({"linear.matmul": "blocks"}, [use], catalog) == {"linear.matmul@here": "blocks"}
