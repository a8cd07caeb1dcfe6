"""Stacked experts that are read one at a time: the same bits, each byte once, and never the whole stack in memory."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import stacked_experts
from dayzero.blocks.open import LoadedModel, open_model
from dayzero.blocks.stack import Stack
from dayzero.checkpoint.dequant import quantize
from dayzero.checkpoint.formats import parts
from dayzero.checkpoint.lazy import ExpertStack
from dayzero.checkpoint.rules import Fuse, Rule, Split
from dayzero.checkpoint.source import LocalSource
from dayzero.checkpoint.stream import Loader
from dayzero.decl import FORMATS, ParamDecl
from dayzero.errors import CheckpointError
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.cpu.test_checkpoint_stream import FP8, make_loader, seeded, stored_fp8

CONFIGS = Path(__file__).parent.parent / "paper" / "configs"
REPOSITORY = Path(__file__).resolve().parents[2]
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": []}
GATE, UP, DOWN = (f"layers.0.x.{n}" for n in ("gate", "up", "down"))
E = 5


def separate() -> tuple[dict[str, Tensor], list[Rule]]:
    """One tensor an expert, block fp8 with ragged blocks for one of them."""
    tensors: dict[str, Tensor] = {}
    for e in range(E):
        tensors |= stored_fp8(f"m.0.{e}.up.weight", seeded(140, 64, seed=e))
        tensors |= stored_fp8(f"m.0.{e}.gate.weight", seeded(140, 64, seed=E + e))
        tensors |= stored_fp8(f"m.0.{e}.down.weight", seeded(64, 140, seed=9 * E + e))
    return tensors, [Rule(f"m.{{i}}.{{e}}.{n}.weight", f"layers.{{i}}.x.{n}[{{e}}]") for n in ("gate", "up", "down")]


def stacked(plain: bool) -> tuple[dict[str, Tensor], list[Rule | Split]]:
    """All experts in one tensor, gate and up row by row: packed blocks, or plain with the last dimensions swapped."""
    fused, down = seeded(E, 280, 64), seeded(E, 64, 160, seed=2)[..., :140]
    down = down if plain else seeded(E, 64, 160, seed=2)
    rules = [
        Split("m.{i}.gate_up", (GATE.replace("0", "{i}"), UP.replace("0", "{i}")), dim=1, interleaved=True,
              transpose_plain=True),
        Rule("m.{i}.down", DOWN.replace("0", "{i}"), transpose_plain=True),
    ]  # fmt: skip
    if plain:
        return {
            "m.0.gate_up": fused.transpose(1, 2).bfloat16(),
            "m.0.down": down.transpose(1, 2).bfloat16(),
        }, rules
    tensors = {}
    for name, weight in (("m.0.gate_up", fused), ("m.0.down", down)):
        by_role = quantize(FORMATS["mxfp4_interleaved"], weight)
        named = parts(FORMATS["mxfp4_interleaved"], name, tuple(weight.shape))
        tensors |= {p.name: by_role[p.role] for p in named if p.role in by_role}
    return tensors, rules


def build(form: str, folder: Path) -> Loader:
    tensors, rules = separate() if form == "separate" else stacked(plain=form == "plain stack")
    inner = 160 if form == "mxfp4 stack" else 140
    decls = [ParamDecl(GATE, (E, 140, 64)), ParamDecl(UP, (E, 140, 64)), ParamDecl(DOWN, (E, 64, inner))]
    claim: Mapping[str, object] | None = {"separate": FP8, "mxfp4 stack": MXFP4}.get(form)
    return make_loader(folder, tensors, decls, rules, claim=claim)


@pytest.mark.parametrize("form", ["separate", "plain stack", "mxfp4 stack"])
def test_every_expert_is_the_same_to_the_bit_and_read_once(form: str, tmp_path: Path) -> None:
    loader = build(form, tmp_path)
    whole = loader.load("layers.0")
    reads: list[tuple[str, int, int]] = loader.source.reads  # type: ignore[attr-defined]
    bytes_whole = sum(length for *_, length in reads)
    reads.clear()
    got = loader.load("layers.0", lazy={GATE, UP, DOWN})
    assert list(got) == list(whole) and not reads, "nothing is read before an expert is asked for"
    before = loader.bytes_read
    for e in (3, 0, 1, 4, 2):
        for name in (GATE, UP, DOWN):
            stack: object = got[name]
            assert isinstance(stack, ExpertStack) and stack.shape == whole[name].shape and len(stack) == E
            assert stack.dtype == whole[name].dtype
            one = got[name][e]
            assert torch.equal(one, whole[name][e]) and one.is_contiguous()
        assert len(reads) == len(set(reads)), "gate and up of one stored tensor come with one read"
    assert loader.bytes_read - before == sum(length for *_, length in reads) == bytes_whole
    got[GATE][3]
    assert len(reads) == len(set(reads)) + (1 if form == "plain stack" else 2), "and are not kept"
    with pytest.raises(IndexError):
        got[GATE][E]


@pytest.mark.parametrize("form", ["separate", "plain stack", "mxfp4 stack"])
def test_experts_are_kept_up_to_a_budget_and_none_for_another(form: str, tmp_path: Path) -> None:
    """Each run asks for the experts in rising order, so giving up the oldest would never find one again."""
    loader = build(form, tmp_path)
    whole = loader.load("layers.0")
    reads: list[tuple[str, int, int]] = loader.source.reads  # type: ignore[attr-defined]
    one = sum(whole[name][0].nbytes for name in (GATE, UP, DOWN))
    for room, kept in ((one * E, E), (2 * one + whole[UP][0].nbytes // 2, 2), (0, 0)):
        got, counts = loader.load("layers.0", lazy={GATE, UP, DOWN}, keep_bytes=room), []
        for _ in range(3):
            reads.clear()
            for e in range(E):
                for name in (GATE, UP, DOWN):
                    assert torch.equal(got[name][e], whole[name][e])
            counts.append(len(reads))
        assert counts[0] == counts[0] // E * E and counts[1:] == [counts[0] // E * (E - kept)] * 2
    got = loader.load("layers.0", lazy={GATE, UP, DOWN}, keep_bytes=one * E)
    reads.clear()
    assert torch.equal(got[UP][0], whole[UP][0]) and reads, "what one load kept is not another's"


def test_only_what_is_asked_for_is_lazy(tmp_path: Path) -> None:
    loader = build("plain stack", tmp_path)
    got = loader.load("layers.0", lazy={GATE})
    want = loader.load("layers.0")
    assert isinstance(got[UP], Tensor) and isinstance(got[DOWN], Tensor) and torch.equal(got[UP], want[UP])
    assert torch.equal(got[GATE][2], want[GATE][2])


def test_experts_that_do_not_lie_apart_are_loaded_whole(tmp_path: Path) -> None:
    """Two halves along the experts' own dimension, and rows of a matrix under scale blocks."""
    halves = {"a": seeded(2, 3, 4), "b": seeded(2, 3, 4, seed=1)}
    loader = make_loader(tmp_path, halves, [ParamDecl("x", (4, 3, 4))], [Fuse(("a", "b"), "x")])
    assert torch.equal(loader.load("x", lazy={"x"})["x"], torch.cat((halves["a"], halves["b"])))
    folder = tmp_path / "matrix"
    folder.mkdir()
    tensors = stored_fp8("m.weight", seeded(140, 64))
    loader = make_loader(folder, tensors, [ParamDecl("m", (140, 64))], [Rule("m.weight", "m")], claim=FP8)
    assert isinstance(loader.load("m", lazy={"m"})["m"], Tensor)


def test_an_expert_is_judged_when_it_is_read(tmp_path: Path) -> None:
    tensors = {f"m.{e}": seeded(4, 6, seed=e) for e in range(E)} | {"m.2": torch.zeros(4, 6), "m.4": torch.zeros(4, 6)}
    tensors["m.3"] = tensors["m.3"].clone()
    tensors["m.3"][1, 1] = torch.nan
    loader = make_loader(tmp_path, tensors, [ParamDecl("up", (E, 4, 6))], [Rule("m.{e}", "up[{e}]")])
    stack = loader.load("up", lazy={"up"})["up"]
    stack[0], stack[1]
    assert loader.findings == [], "experts 2, 3 and 4 were never read"
    for e in (2, 2, 3, 4):
        stack[e]
    found = [(f.kind, f.verdict, f.evidence) for f in loader.findings]
    assert found == [("weights.constant", "fail", ("up[2]",)), ("weights.not_finite", "fail", ("up[3]",))]


def test_a_shard_that_vanishes_before_an_expert_is_read(tmp_path: Path) -> None:
    loader = build("separate", tmp_path)
    got = loader.load("layers.0", lazy={UP})
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors .* disappeared"):
        got[UP][1]


# --- through the stack ------------------------------------------------------------------------------------------------


def twin(name: str, folder: Path, **changes: object) -> LoadedModel:
    shutil.copy(CONFIGS / f"{name}.json", folder / "config.json")
    write_twin(str(folder / "config.json"), str(folder / "twin"), TwinOptions(changes=changes))
    return open_model(str(folder / "twin"))


class Counting(LocalSource):
    """Remembers every read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.reads: list[tuple[str, int, int]] = []

    def read(self, file: str, start: int, length: int) -> bytes:
        self.reads.append((file, start, length))
        return super().read(file, start, length)

    def read_into(self, file: str, start: int, into: memoryview) -> None:
        self.reads.append((file, start, len(into)))
        super().read_into(file, start, into)


@pytest.mark.parametrize("name", ["gpt_oss_20b", "qwen3_30b_a3b", "deepseek_v3", "kimi_linear_48b_a3b"])
def test_a_walk_reads_only_the_experts_that_were_chosen(name: str, tmp_path: Path) -> None:
    model = twin(name, tmp_path)
    spec, tokens = model.spec, [5, 17, 3]
    lazy = stacked_experts(spec)
    assert lazy <= {d.name for d in spec.params()} and len(lazy) % 3 == 0 and lazy
    eager = Stack(spec, model.loader.load)
    want = eager.head(eager.forward(LocalCache(spec, torch.float32).view(tokens)))

    source = Counting(tmp_path / "twin")
    loader = Loader(source, model.index, model.coverage, torch.float32)
    chosen: dict[str, set[int]] = {}
    asked: list[tuple[str, int]] = []

    def tap(site: str, value: Tensor) -> None:
        if site.endswith(".experts"):
            chosen[site] = set(value.flatten().tolist())

    expert = loader._expert

    def counted(names: list[str], number: int) -> dict[str, Tensor]:
        asked.extend((n, number) for n in names)
        return expert(names, number)

    loader._expert = counted  # type: ignore[method-assign, assignment]
    stack = Stack(spec, lambda prefix: loader.load(prefix, lazy), tap=tap, resident=False)
    got = stack.head(stack.forward(LocalCache(spec, torch.float32).view(tokens)))
    assert torch.equal(got, want)
    expected = {
        (f"{site.removesuffix('.experts')}.channel.experts.{matrix}", e)
        for site, ids in chosen.items()
        for e in ids
        for matrix in ("gate", "up", "down")
    }
    assert len(asked) == len(set(asked)) and set(asked) == expected
    assert all(len(ids) < spec.layers[-1].channel.router.experts for ids in chosen.values())  # type: ignore[union-attr]
    assert len(source.reads) == len(set(source.reads)) and loader.bytes_read == sum(size for *_, size in source.reads)


def test_a_bound_variant_gets_whole_tensors(tmp_path: Path) -> None:
    spec = twin("qwen3_30b_a3b", tmp_path).spec
    left = stacked_experts(spec, {"moe.experts@layers.1.channel.experts": "torch_cpu"})
    assert stacked_experts(spec) - left == {f"layers.1.channel.experts.{n}" for n in ("gate", "up", "down")}


PROGRAM = """
import sys, torch
from dayzero.planner.memory import peak_rss_bytes, return_large_blocks
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.moe import stacked_experts
from dayzero.blocks.open import open_model
from dayzero.blocks.stack import Stack
torch.set_num_threads(1)
return_large_blocks()
model = open_model(sys.argv[1])
lazy = stacked_experts(model.spec) if sys.argv[2] == "lazy" else ()
stack = Stack(model.spec, lambda prefix: model.loader.load(prefix, lazy), resident=False)
view = LocalCache(model.spec, torch.float32).view([3, 4, 5])
before = peak_rss_bytes()
carry = stack.layer(0, stack.open(view), view)
print(peak_rss_bytes() - before)
"""


def test_memory_stays_far_below_the_stack(tmp_path: Path) -> None:
    """The process's own peak over one layer of 160 experts, of which three tokens choose a few."""
    sizes = {"num_experts": 160, "moe_intermediate_size": 160, "hidden_size": 320, "num_hidden_layers": 1}
    model = twin("qwen3_30b_a3b", tmp_path, **sizes)
    shapes = [d.shape for d in model.spec.params() if d.name in stacked_experts(model.spec)][:3]
    stack_bytes = sum(4 * torch.Size(shape).numel() for shape in shapes)
    assert stack_bytes > 90 << 20
    grown = {}
    for how in ("lazy", "eager"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "twin"), how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=120)
        grown[how] = int(done.stdout)
    assert grown["eager"] > 0.8 * stack_bytes, "the measure sees a stack"
    assert grown["lazy"] < 0.2 * stack_bytes
