"""Loading: every byte range once, every slice in its place, nothing filled twice, nothing held longer than needed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dayzero.checkpoint.coverage import cover
from dayzero.checkpoint.dequant import quantize
from dayzero.checkpoint.formats import parts
from dayzero.checkpoint.index import read_index
from dayzero.checkpoint.quant_config import resolve
from dayzero.checkpoint.rules import (
    Alias,
    Expansion,
    Fuse,
    Narrow,
    Optional,
    Rule,
    RuleLike,
    Slice,
    Split,
    Target,
    expand,
)
from dayzero.checkpoint.source import LocalSource
from dayzero.checkpoint.stream import Loader
from dayzero.decl import FORMATS, Format, ParamDecl
from dayzero.errors import CheckpointError

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}


class Recording(LocalSource):
    """Remembers every read once ``reads`` is a list."""

    reads: list[tuple[str, int, int]]

    def read(self, file: str, start: int, length: int) -> bytes:
        if hasattr(self, "reads"):
            self.reads.append((file, start, length))
        return super().read(file, start, length)

    def read_into(self, file: str, start: int, into: memoryview) -> None:
        if hasattr(self, "reads"):
            self.reads.append((file, start, len(into)))
        super().read_into(file, start, into)


def make_loader(
    folder: Path,
    tensors: Mapping[str, Tensor],
    decls: Iterable[ParamDecl],
    rules: Iterable[RuleLike],
    dtype: torch.dtype = torch.float32,
    claim: Mapping[str, object] | None = None,
    change: object = None,
) -> Loader:
    """A loader over one shard. change: a function that edits the expansion before it is covered."""
    save_file({name: t.clone().contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text("{}")
    source = Recording(folder)
    index = read_index(source)
    expansion = expand(decls, rules)
    if callable(change):
        change(expansion)
    coverage = cover(expansion, index.entries, resolve(claim))
    loader = Loader(source, index, coverage, dtype)
    source.reads = []
    return loader


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def stored_fp8(name: str, weight: Tensor, fmt: Format = FORMATS["fp8_block"]) -> dict[str, Tensor]:
    by_role = quantize(fmt, weight)
    return {p.name: by_role[p.role] for p in parts(fmt, name, tuple(weight.shape)) if p.role in by_role}


def test_every_byte_is_read_once_in_file_order(tmp_path: Path) -> None:
    tensors = {f"m.{i}.{n}.weight": seeded(5, 7, seed=i) for i in range(3) for n in ("a", "b")}
    decls = [ParamDecl(f"layers.{i}.{n}", (5, 7)) for i in range(3) for n in ("a", "b")]
    rules = [Rule(f"m.{{i}}.{n}.weight", f"layers.{{i}}.{n}") for n in ("b", "a")]
    loader = make_loader(tmp_path, tensors, decls, rules)
    for i in range(3):
        got = loader.load(f"layers.{i}")
        assert sorted(got) == [f"layers.{i}.a", f"layers.{i}.b"]
        assert torch.equal(got[f"layers.{i}.b"], tensors[f"m.{i}.b.weight"])
    reads = loader.source.reads  # type: ignore[attr-defined]
    assert len(reads) == 6 == len(set(reads)) and reads == sorted(reads)
    assert loader.bytes_read == sum(length for _, _, length in reads) == 6 * 5 * 7 * 4


def test_a_prefix_is_whole_words(tmp_path: Path) -> None:
    tensors = {f"m.{i}.weight": seeded(2, 3, seed=i) for i in (1, 10)}
    decls = [ParamDecl(f"layers.{i}.q", (2, 3)) for i in (1, 10)]
    loader = make_loader(tmp_path, tensors, decls, [Rule("m.{i}.weight", "layers.{i}.q")])
    assert list(loader.load("layers.1")) == ["layers.1.q"]
    with pytest.raises(AssertionError, match=r"layers\.2"):
        loader.load("layers.2")


def test_float32_is_kept_where_a_declaration_says_so(tmp_path: Path) -> None:
    tensors = {"a": seeded(4, 4), "b": seeded(4)}
    decls = [ParamDecl("a", (4, 4)), ParamDecl("b", (4,), "bias", "f32")]
    loader = make_loader(tmp_path, tensors, decls, [Rule("a", "a"), Rule("b", "b")], torch.bfloat16)
    got = loader.load("a") | loader.load("b")
    assert torch.equal(got["a"], tensors["a"].bfloat16()) and torch.equal(got["b"], tensors["b"])


def test_splits_run_after_one_another_or_row_by_row(tmp_path: Path) -> None:
    fused, mixed, bias = seeded(9, 4), seeded(3, 4, 10), seeded(3, 10)
    decls = [
        ParamDecl("q", (5, 4)), ParamDecl("k", (4, 4)),
        ParamDecl("gate", (3, 5, 4)), ParamDecl("up", (3, 5, 4)),
        ParamDecl("gate_bias", (3, 5), "bias"), ParamDecl("up_bias", (3, 5), "bias"),
    ]  # fmt: skip
    rules = [
        Split("qk.weight", ("q", "k")),
        Split("gate_up", ("gate", "up"), dim=1, interleaved=True, transpose_plain=True),
        Split("gate_up_bias", ("gate_bias", "up_bias"), dim=1, interleaved=True),
    ]
    loader = make_loader(tmp_path, {"qk.weight": fused, "gate_up": mixed, "gate_up_bias": bias}, decls, rules)
    got = {name: loader.load(name)[name] for name in ("q", "k", "gate", "up", "gate_bias", "up_bias")}
    assert torch.equal(got["q"], fused[:5]) and torch.equal(got["k"], fused[5:])
    assert torch.equal(got["gate"], mixed.transpose(1, 2)[:, 0::2])
    assert torch.equal(got["up"], mixed.transpose(1, 2)[:, 1::2])
    assert torch.equal(got["gate_bias"], bias[:, 0::2]) and torch.equal(got["up_bias"], bias[:, 1::2])


def test_a_fused_tensor_is_read_once_for_all_its_parameters(tmp_path: Path) -> None:
    loader = make_loader(
        tmp_path, {"m.0.qk": seeded(6, 4)}, [ParamDecl("l.0.q", (2, 4)), ParamDecl("l.0.k", (4, 4))],
        [Split("m.{i}.qk", ("l.{i}.q", "l.{i}.k"))],
    )  # fmt: skip
    assert sorted(loader.load("l.0")) == ["l.0.k", "l.0.q"]
    assert len(loader.source.reads) == 1  # type: ignore[attr-defined]


def test_parts_are_fused_and_shapes_restored(tmp_path: Path) -> None:
    one, two, conv = seeded(3, 4, seed=1), seeded(3, 4, seed=2), seeded(6, 1, 4)
    rules = [Fuse(("one", "two"), "both"), Rule("conv", "conv", stored=("d0", 1, "d1"), also=(("d0", "d1"),))]
    decls = [ParamDecl("both", (6, 4)), ParamDecl("conv", (6, 4), "conv", "f32")]
    loader = make_loader(tmp_path, {"one": one, "two": two, "conv": conv}, decls, rules)
    assert torch.equal(loader.load("both")["both"], torch.cat((one, two)))
    assert torch.equal(loader.load("conv")["conv"], conv[:, 0])


def test_quantised_experts_are_decoded_into_one_tensor(tmp_path: Path) -> None:
    """Ragged blocks; what is loaded is what the stored codes mean, not what they were made from."""
    weights = [seeded(140, 260, seed=e) for e in range(3)]
    tensors: dict[str, Tensor] = {}
    for e, weight in enumerate(weights):
        tensors |= stored_fp8(f"m.0.experts.{e}.up.weight", weight)
    decl = ParamDecl("layers.0.up", (3, 140, 260))
    rules = [Rule("m.{i}.experts.{e}.up.weight", "layers.{i}.up[{e}]")]
    loader = make_loader(tmp_path, tensors, [decl], rules, claim=FP8)
    got = loader.load("layers.0")["layers.0.up"]
    for e, weight in enumerate(weights):
        name = f"m.0.experts.{e}.up.weight"
        scale = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0)[:140].repeat_interleave(128, 1)[:, :260]
        assert torch.equal(got[e], tensors[name].float() * scale)
        assert (got[e] - weight).abs().max() < 0.2
    assert len(set(loader.source.reads)) == len(loader.source.reads) == 6  # type: ignore[attr-defined]


def test_one_stored_tensor_is_held_at_a_time(tmp_path: Path) -> None:
    """The bytes that were read, as Python's allocator sees them; parameters live in torch's. Those that a parameter
    holds as they are stored are read into it."""
    decl, rule = ParamDecl("up", (12, 256, 128)), Rule("m.experts.{e}.w", "up[{e}]")
    for dtype, size, least, most in ((torch.bfloat16, 2, 1.0, 1.5), (torch.float32, 4, 0.0, 0.5)):
        tensors = {f"m.experts.{e}.w": seeded(256, 128, seed=e).to(dtype) for e in range(12)}
        loader = make_loader(tmp_path, tensors, [decl], [rule])
        tracemalloc.start()
        try:
            loader.load("up")
            peak_bytes = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert least * size < peak_bytes / (256 * 128) < most * size, dtype


def test_padding_is_cut_off_and_must_be_zero(tmp_path: Path) -> None:
    value = torch.cat((seeded(4), torch.zeros(3)))
    decl, rule = ParamDecl("layers.0.a", (4,), "scalar", "f32"), Narrow("m.{i}.A_log", "layers.{i}.a", 7)
    loader = make_loader(tmp_path, {"m.0.A_log": value}, [decl], [rule])
    assert torch.equal(loader.load("layers.0")["layers.0.a"], value[:4])
    value[5] = 0.25
    loader = make_loader(tmp_path, {"m.0.A_log": value}, [decl], [rule])
    with pytest.raises(CheckpointError, match=r"m\.0\.A_log has 7 rows of which the model uses 4, but row 5"):
        loader.load("layers.0")


def test_what_a_checkpoint_may_lack_is_filled_as_its_rule_says(tmp_path: Path) -> None:
    decls = [ParamDecl(f"l.{i}.a", (4, 3)) for i in range(2)]
    decls += [ParamDecl(f"l.{i}.b", (4,), "bias", "f32") for i in range(2)]
    rules = [Rule("m.{i}.a", "l.{i}.a"), Optional("m.{i}.b", "l.{i}.b", 0.5, why="left out when it is a half")]
    tensors = {"m.0.a": seeded(4, 3), "m.1.a": seeded(4, 3), "m.1.b": seeded(4)}
    loader = make_loader(tmp_path, tensors, decls, rules, torch.bfloat16)
    assert torch.equal(loader.load("l.0")["l.0.b"], torch.full((4,), 0.5))
    assert torch.equal(loader.load("l.1")["l.1.b"], tensors["m.1.b"])
    assert loader.findings == []


def test_a_tied_copy_must_be_equal(tmp_path: Path) -> None:
    embed = seeded(6, 3)
    rules = [Rule("embed", "embed"), Alias("head", "embed", why="tied")]
    loader = make_loader(tmp_path, {"embed": embed, "head": embed}, [ParamDecl("embed", (6, 3), "embed")], rules)
    assert torch.equal(loader.load("embed")["embed"], embed)
    other = embed.clone()
    other[0, 0] += 1
    loader = make_loader(tmp_path, {"embed": embed, "head": other}, [ParamDecl("embed", (6, 3), "embed")], rules)
    with pytest.raises(CheckpointError, match="head differs from the tensor that embed is loaded from"):
        loader.load("embed")


def test_filling_twice_or_in_part_is_an_assertion(tmp_path: Path) -> None:
    decls = [ParamDecl("a", (4, 3))]
    twice = [Rule("x", "a"), Rule("y", "a")]
    loader = make_loader(tmp_path, {"x": seeded(4, 3), "y": seeded(4, 3)}, decls, twice)
    with pytest.raises(AssertionError, match="a: .* is filled twice"):
        loader.load("a")

    def halve(expansion: Expansion) -> None:
        group = expansion.groups[0]
        target = Target(decls[0], False, Slice(0, 0, 2), Slice(0, 0, 2))
        object.__setattr__(group, "targets", (target,))

    loader = make_loader(tmp_path, {"x": seeded(4, 3)}, decls, [Rule("x", "a")], change=halve)
    with pytest.raises(AssertionError, match="6 of 12 elements"):
        loader.load("a")


def test_an_incomplete_checkpoint_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing, unknown or misshapen"):
        make_loader(tmp_path, {"x": seeded(4, 3)}, [ParamDecl("a", (4, 3))], [Rule("other", "a")])


def test_a_shard_that_vanishes_is_one_sentence(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, {"x": seeded(4, 3)}, [ParamDecl("a", (4, 3))], [Rule("x", "a")])
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* disappeared"):
        loader.load("a")


def test_statistics_are_taken_once_per_parameter(tmp_path: Path) -> None:
    loader = make_loader(tmp_path, {"x": torch.zeros(4, 3)}, [ParamDecl("a", (4, 3))], [Rule("x", "a")])
    loader.load("a")
    loader.load("a")
    assert [(f.kind, f.verdict, f.evidence) for f in loader.findings] == [("weights.constant", "fail", ("a",))]
