"""Matrices that stay as they are stored: what their codes and scales mean is what decoding gives, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dayzero.checkpoint import statistics
from dayzero.checkpoint.building import cut, packed_bytes
from dayzero.checkpoint.dequant import dequantize, quantize
from dayzero.checkpoint.formats import parts
from dayzero.checkpoint.rules import Alias, Fuse, Narrow, Rule, RuleLike, Slice, Split
from dayzero.checkpoint.stream import Loader
from dayzero.decl import (
    FORMATS,
    FP8_BLOCK,
    FP8_BLOCK_E8M0,
    FP8_BLOCK_WEIGHT_SCALE,
    MXFP4_PACK,
    Form,
    Format,
    Fp8Blocks,
    Mxfp4,
    Packed,
    ParamDecl,
)
from dayzero.errors import CheckpointError
from tests.cpu.test_checkpoint_stream import make_loader, seeded

FP8_FORMATS = (FP8_BLOCK, FP8_BLOCK_E8M0, FP8_BLOCK_WEIGHT_SCALE)
CLAIMS = {
    "fp8_block": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "fp8_block_e8m0": {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "fp8_block_weight_scale": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
FP8: Form = "fp8_block"
EVERY_FORMAT = pytest.mark.parametrize("fmt", FP8_FORMATS, ids=lambda fmt: fmt.name)


def stored(fmt: Format, name: str, weight: Tensor) -> dict[str, Tensor]:
    by_role = quantize(fmt, weight)
    return {p.name: by_role[p.role] for p in parts(fmt, name, tuple(weight.shape)) if p.role in by_role}


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Values whose blocks differ by up to some 2^12."""
    weight = seeded(*shape, seed=seed)
    octaves = torch.randint(
        -8, 5, (shape[-2] // 128 + 1, shape[-1] // 128 + 1), generator=torch.Generator().manual_seed(1)
    )
    wide = octaves.repeat_interleave(128, 0)[: shape[-2]].repeat_interleave(128, 1)[:, : shape[-1]]
    return weight * torch.exp2(wide.float())


def meant(value: Packed | Tensor) -> Tensor:
    """f32, by the decoder of checkpoints."""
    if isinstance(value, Tensor):
        return value.float()
    fmt = MXFP4_PACK if isinstance(value, Mxfp4) else FP8_BLOCK
    return dequantize(fmt, {"weight": value.codes, "scale": value.scales}, value.shape)


def check_packed(loader: Loader, names: tuple[str, ...]) -> None:
    """All of a layer, and each expert: packed and then decoded as decoded at once."""
    forms: dict[str, Form] = dict.fromkeys(names, FP8)
    assert {name: loader.packs(name) for name in names} == forms
    want, got = loader.load("layers.0"), loader.load("layers.0", packed=forms)
    assert list(want) == list(got)
    for name in names:
        value: object = got[name]
        assert isinstance(value, Fp8Blocks) and value.shape == tuple(want[name].shape)
        assert value.scales.dtype == torch.float32 and value.codes.dtype == torch.float8_e4m3fn
        assert value.nbytes == packed_bytes(FP8, value.shape)
        assert torch.equal(meant(value), want[name])
        if want[name].dim() == 3:
            assert loader.expert_bytes(name, FP8) == value.nbytes // len(value)
    assert loader.findings == []
    stacks = [name for name in names if want[name].dim() == 3 and loader.by_expert(name)]
    for number in range(len(want[stacks[0]]) if stacks else 0):
        ones = loader.expert(stacks, number, forms)
        assert set(ones) == set(stacks)
        for name, one in ones.items():
            assert isinstance(one, Fp8Blocks) and torch.equal(meant(one), want[name][number])


def by_expert(fmt: Format, folder: Path) -> Loader:
    tensors: dict[str, Tensor] = {}
    for e in range(3):
        tensors |= stored(fmt, f"m.0.{e}.gate.weight", spread(140, 260, seed=e))
        tensors |= stored(fmt, f"m.0.{e}.down.weight", spread(260, 140, seed=e + 9))
    decls = [ParamDecl("layers.0.gate", (3, 140, 260)), ParamDecl("layers.0.down", (3, 260, 140))]
    rules = [Rule(f"m.{{i}}.{{e}}.{n}.weight", f"layers.{{i}}.{n}[{{e}}]") for n in ("gate", "down")]
    return make_loader(folder, tensors, decls, rules, claim=CLAIMS[fmt.name])


def fused_by_expert(fmt: Format, folder: Path) -> Loader:
    """Gate above up in each expert's tensor: rows are cut where a scale block ends."""
    tensors: dict[str, Tensor] = {}
    for e in range(3):
        tensors |= stored(fmt, f"m.0.{e}.gate_up.weight", spread(396, 200, seed=e))
    decls = [ParamDecl("layers.0.gate", (3, 256, 200)), ParamDecl("layers.0.down", (3, 140, 200))]
    rules = [Split("m.{i}.{e}.gate_up.weight", ("layers.{i}.gate[{e}]", "layers.{i}.down[{e}]"))]
    return make_loader(folder, tensors, decls, rules, claim=CLAIMS[fmt.name])


def stacked(fmt: Format, folder: Path) -> Loader:
    """All experts in one tensor, gate above up."""
    tensors = stored(fmt, "m.0.gate_up", spread(3, 384, 130)) | stored(fmt, "m.0.down", spread(3, 70, 140, seed=4))
    decls = [
        ParamDecl(f"layers.0.{n}", (3, *s)) for n, s in (("gate", (128, 130)), ("up", (256, 130)), ("down", (70, 140)))
    ]
    rules = [Split("m.{i}.gate_up", ("layers.{i}.gate", "layers.{i}.up"), dim=1), Rule("m.{i}.down", "layers.{i}.down")]
    return make_loader(folder, tensors, decls, rules, claim=CLAIMS[fmt.name])


def matrices(fmt: Format, folder: Path) -> Loader:
    """Matrices alone: one whole, two of one tensor, one of two tensors."""
    tensors = stored(fmt, "m.0.o.weight", spread(70, 300)) | stored(fmt, "m.0.qk.weight", spread(300, 140, seed=1))
    tensors |= stored(fmt, "m.0.a.weight", spread(128, 150, seed=2)) | stored(
        fmt, "m.0.b.weight", spread(128, 150, seed=3)
    )
    shapes = {"o": (70, 300), "q": (128, 140), "k": (172, 140), "ab": (256, 150)}
    decls = [ParamDecl(f"layers.0.{name}", shape) for name, shape in shapes.items()]
    rules = [
        Rule("m.{i}.o.weight", "layers.{i}.o"), Split("m.{i}.qk.weight", ("layers.{i}.q", "layers.{i}.k")),
        Fuse(("m.{i}.a.weight", "m.{i}.b.weight"), "layers.{i}.ab"),
    ]  # fmt: skip
    return make_loader(folder, tensors, decls, rules, claim=CLAIMS[fmt.name])


@EVERY_FORMAT
@pytest.mark.parametrize("make", [by_expert, fused_by_expert, stacked, matrices], ids=lambda make: make.__name__)
def test_what_stays_packed_means_what_decoding_gives(
    fmt: Format, make: Callable[[Format, Path], Loader], tmp_path: Path
) -> None:
    loader = make(fmt, tmp_path)
    check_packed(loader, tuple(loader.names()))


def refusals(fmt: Format) -> Iterator[tuple[str, dict[str, Tensor], list[ParamDecl], list[RuleLike]]]:
    half, whole = spread(140, 130), spread(280, 130)
    yield (
        "rows within a scale block", stored(fmt, "m.w.weight", whole),
        [ParamDecl("a", (140, 130)), ParamDecl("b", (140, 130))], [Split("m.w.weight", ("a", "b"))],
    )  # fmt: skip
    yield (
        "rows in turn", stored(fmt, "m.w.weight", whole), [ParamDecl("b", (140, 130)), ParamDecl("a", (140, 130))],
        [Split("m.w.weight", ("a", "b"), interleaved=True)],
    )  # fmt: skip
    yield (
        "a part that ends within a block", stored(fmt, "m.x.weight", half) | stored(fmt, "m.y.weight", half),
        [ParamDecl("b", (280, 130))], [Fuse(("m.x.weight", "m.y.weight"), "b")],
    )  # fmt: skip
    yield (
        "padding", stored(fmt, "m.w.weight", torch.cat((spread(128, 130), torch.zeros(128, 130)))),
        [ParamDecl("b", (128, 130))], [Narrow("m.w.weight", "b", 256)],
    )  # fmt: skip
    yield "a plain tensor", {"m.w.weight": half}, [ParamDecl("b", (140, 130))], [Rule("m.w.weight", "b")]
    same = stored(fmt, "m.w.weight", half)
    same["m.v.weight"] = dequantize(fmt, quantize(fmt, half), (140, 130))
    yield (
        "a copy to compare", same, [ParamDecl("b", (140, 130))],
        [Rule("m.w.weight", "b"), Alias("m.v.weight", "b", why="tied")],
    )  # fmt: skip


@pytest.mark.parametrize("number", range(6))
def test_what_cannot_be_cut_from_codes_and_scales_is_decoded(number: int, tmp_path: Path) -> None:
    why, tensors, decls, rules = list(refusals(FP8_BLOCK))[number]
    claim = None if why == "a plain tensor" else CLAIMS["fp8_block"]
    loader = make_loader(tmp_path, tensors, decls, rules, claim=claim)
    assert loader.packs("b") is None, why
    value = loader.load("b", packed={"b": FP8})["b"]
    assert isinstance(value, Tensor) and torch.equal(value, loader.load("b")["b"])


def test_only_what_is_asked_for_in_its_form_stays_packed(tmp_path: Path) -> None:
    loader = matrices(FP8_BLOCK, tmp_path)
    got = loader.load("layers.0", packed={"layers.0.q": FP8, "layers.0.o": "mxfp4"})
    packed: dict[str, object] = dict(got)
    assert isinstance(packed["layers.0.q"], Fp8Blocks)
    assert all(isinstance(packed[f"layers.0.{name}"], Tensor) for name in ("o", "k", "ab"))
    assert [FORMATS[name].form for name in ("bf16", "mxfp4_pack", "nvfp4_pack", "fp8_block", "int4_pack")] == [
        None, "mxfp4", None, FP8, None,
    ]  # fmt: skip


def test_a_cut_is_a_view_between_blocks() -> None:
    by_role = quantize(FP8_BLOCK, spread(2, 300, 260))
    value = Fp8Blocks(by_role["weight"], by_role["scale"])
    whole = meant(value)
    for piece in (Slice(1, 128, 300), Slice(1, 128, 250), Slice(2, 128, 260), Slice(0, 1, 2)):
        part = cut(value, piece)
        index = [slice(None)] * 3
        index[piece.dim] = slice(piece.start, piece.stop)
        assert torch.equal(meant(part), whole[tuple(index)])
        assert part.codes.untyped_storage().data_ptr() == value.codes.untyped_storage().data_ptr()
    with pytest.raises(AssertionError, match="a piece of a scale block"):
        cut(value, Slice(1, 64, 300))


# --- damage -----------------------------------------------------------------------------------------------------------


def one_matrix(folder: Path, tensors: dict[str, Tensor], fmt: Format = FP8_BLOCK) -> Loader:
    rules = [Rule("m.{i}.w.weight", "layers.{i}.w")]
    return make_loader(folder, tensors, [ParamDecl("layers.0.w", (140, 130))], rules, claim=CLAIMS[fmt.name])


@EVERY_FORMAT
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), 3e38])
def test_a_scale_that_is_refused_decoded_is_refused_packed(fmt: Format, scale: float, tmp_path: Path) -> None:
    tensors = stored(fmt, "m.0.w.weight", spread(140, 130))
    (name,) = [name for name in tensors if "scale" in name]
    if fmt.scale == "e8m0":
        tensors[name].view(torch.uint8)[1, 1] = 254 if scale == 3e38 else 255
    else:
        tensors[name][1, 1] = scale
    said = []
    for packed in ({}, {"layers.0.w": FP8}):
        loader = one_matrix(tmp_path, tensors, fmt)
        loader.dtype = torch.bfloat16
        with pytest.raises(CheckpointError) as failed:
            loader.load("layers.0", packed=packed)
        said.append(str(failed.value))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        ("nan", "weights.not_finite"), ("first nan", "weights.not_finite"), ("zero", "weights.constant"),
        ("zero scales", "weights.constant"),
    ],
)  # fmt: skip
def test_what_statistics_find_in_decoded_values_they_find_in_packed_ones(
    damage: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "CODES_AT_ONCE", 5000)  # of the 18,200 that there are
    tensors = stored(FP8_BLOCK, "m.0.w.weight", spread(140, 130))
    if damage == "nan":
        tensors["m.0.w.weight"].view(torch.uint8)[139, 129] = 0xFF
    elif damage == "first nan":
        tensors["m.0.w.weight"].view(torch.uint8)[0, 0] = 0x7F
    else:
        tensors["m.0.w.weight" if damage == "zero" else "m.0.w.weight_scale_inv"].zero_()
    found = []
    for packed in ({}, {"layers.0.w": FP8}):
        loader = one_matrix(tmp_path, tensors)
        loader.load("layers.0", packed=packed)
        found.append(loader.findings)
    assert found[0] == found[1] and [f.kind for f in found[0]] == [kind]


def test_one_dead_expert_of_a_packed_stack_is_named(tmp_path: Path) -> None:
    loader = by_expert(FP8_BLOCK, tmp_path)
    entry = loader.index.entries["m.0.1.gate.weight"]
    with open(tmp_path / "model.safetensors", "r+b") as file:
        file.seek(entry.start)
        file.write(bytes(entry.nbytes))
    loader.load("layers.0", packed={"layers.0.gate": FP8, "layers.0.down": FP8})
    assert [(f.kind, f.evidence) for f in loader.findings] == [("weights.constant", ("layers.0.gate[1]",))]
