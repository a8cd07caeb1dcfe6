"""Matrices that are read by rows: the same bits, no byte that is not needed, judged and compared as a whole one is."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dayzero.acceptance import align
from dayzero.acceptance.align import AlignOptions, align_source
from dayzero.blocks.open import LoadedModel
from dayzero.blocks.stack import vocabulary_matrices
from dayzero.checkpoint.lazy import MatrixRows
from dayzero.checkpoint.rules import Alias, Fuse, Narrow, Optional, Rule
from dayzero.checkpoint.stream import Loader
from dayzero.decl import ParamDecl
from dayzero.errors import CheckpointError
from tests.cpu.test_checkpoint_expert_stacks import twin
from tests.cpu.test_checkpoint_stream import FP8, make_loader, seeded, stored_fp8

REPOSITORY = Path(__file__).resolve().parents[2]
R, C = 101, 7
DECL = ParamDecl("embed", (R, C), "embed")


def by_rows(loader: Loader, name: str = "embed") -> MatrixRows:
    got: object = loader.load(name, lazy={name})[name]
    assert isinstance(got, MatrixRows)
    return got


def reads(loader: Loader) -> list[tuple[str, int, int]]:
    return loader.source.reads  # type: ignore[attr-defined]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_the_same_to_the_bit_and_no_others_are_read(dtype: torch.dtype, tmp_path: Path) -> None:
    loader = make_loader(tmp_path, {"e": seeded(R, C).bfloat16()}, [DECL], [Rule("e", "embed")], dtype)
    whole = loader.load("embed")["embed"]
    reads(loader).clear()
    rows = by_rows(loader)
    assert not reads(loader) and len(rows) == R and rows.shape == whole.shape and rows.dtype == whole.dtype
    ids = torch.tensor([[100, 3, 3], [0, 4, 57]])
    assert torch.equal(rows[ids], whole[ids]) and rows[ids].dtype == dtype
    assert sorted({length for *_, length in reads(loader)}) == [C * 2] and len(set(reads(loader))) == 5
    assert rows[ids[:0]].shape == (0, 3, C)
    for wrong in (-1, R):
        with pytest.raises(IndexError, match=f"of {R}"):
            rows[torch.tensor([5, wrong])]


@pytest.mark.parametrize("size", [1, 16, R, 8192])
def test_blocks_of_rows_are_the_matrix_and_each_byte_is_read_once(size: int, tmp_path: Path) -> None:
    loader = make_loader(tmp_path, {"e": seeded(R, C)}, [DECL], [Rule("e", "embed")])
    whole = loader.load("embed")["embed"]
    reads(loader).clear()
    blocks = list(by_rows(loader).split(size))
    assert [len(block) for block in blocks] == [len(block) for block in whole.split(size)]
    assert torch.equal(torch.cat(blocks), whole) and not any(block.requires_grad for block in blocks)
    assert len(set(reads(loader))) == len(blocks) and sum(length for *_, length in reads(loader)) == R * C * 4


def test_what_is_not_stored_row_after_row_is_loaded_whole(tmp_path: Path) -> None:
    tall, square = ParamDecl("m", (140, 64)), ParamDecl("m", (8, 8))
    cases: list[tuple[ParamDecl, dict[str, Tensor], Sequence[Any], Any]] = [
        (tall, stored_fp8("m.weight", seeded(140, 64)), [Rule("m.weight", "m")], FP8),
        (square, {"x": seeded(8, 8)}, [Rule("x", "m", transpose_plain=True)], None),
        (square, {"x": seeded(4, 8), "y": seeded(4, 8)}, [Fuse(("x", "y"), "m")], None),
        (square, {"x": torch.cat((seeded(8, 8), torch.zeros(2, 8)))}, [Narrow("x", "m", 10)], None),
        (square, {"x": seeded(64)}, [Rule("x", "m", stored=(64,))], None),
        (square, {"z": seeded(1)}, [Optional("x", "m", 0.5, why="a half"), Rule("z", "z")], None),
    ]
    for number, (decl, tensors, rules, claim) in enumerate(cases):
        folder = tmp_path / str(number)
        folder.mkdir()
        decls = [decl, ParamDecl("z", (1,), "scalar")] if "z" in tensors else [decl]
        loader = make_loader(folder, tensors, decls, rules, claim=claim)
        assert isinstance(loader.load("m", lazy={"m"})["m"], Tensor), number


def test_a_tied_copy_is_compared_as_far_as_rows_are_read(tmp_path: Path) -> None:
    embed, rules = seeded(R, C), [Rule("embed", "embed"), Alias("head", "embed", why="tied")]
    other = embed.clone()
    other[60, 2] += 1
    loader = make_loader(tmp_path, {"embed": embed, "head": other}, [DECL], rules)
    rows = by_rows(loader)
    assert torch.equal(rows[torch.tensor([3, 59, 61])], embed[[3, 59, 61]])
    with pytest.raises(CheckpointError, match="head differs from the tensor that embed is loaded from"):
        rows[torch.tensor([60])]
    with pytest.raises(CheckpointError, match="head differs"):
        list(rows.split(16))


def test_a_copy_is_compared_once(tmp_path: Path) -> None:
    embed, rules = seeded(R, C), [Rule("embed", "embed"), Alias("head", "embed", why="tied")]
    loader = make_loader(tmp_path, {"embed": embed, "head": embed}, [DECL], rules)
    rows = by_rows(loader)
    list(rows.split(50))
    assert len(reads(loader)) == 6, "three blocks of each"
    list(rows.split(50))
    assert len(reads(loader)) == 9


BAD = {
    "zero": (torch.zeros(R, C), ("weights.constant", "embed is all zero")),
    "constant": (torch.full((R, C), 0.25), ("weights.constant", "embed is constant (0.25)")),
    "NaN": (seeded(R, C).index_put((torch.tensor([77]), torch.tensor([2])), torch.tensor(torch.nan)),
            ("weights.not_finite", "embed holds NaN values")),
}  # fmt: skip


@pytest.mark.parametrize("name", list(BAD))
def test_a_matrix_is_judged_by_all_its_blocks(name: str, tmp_path: Path) -> None:
    value, expected = BAD[name]
    loader = make_loader(tmp_path, {"e": value}, [DECL], [Rule("e", "embed")])
    loader.load("embed")
    whole = [(f.kind, f.claim, f.verdict, f.evidence) for f in loader.findings]
    loader = make_loader(tmp_path, {"e": value}, [DECL], [Rule("e", "embed")])
    rows = by_rows(loader)
    for _ in range(2):
        list(rows.split(16))
    assert [(f.kind, f.claim, f.verdict, f.evidence) for f in loader.findings] == whole
    assert whole == [(*expected, "fail", ("embed",))]


def test_unused_rows_may_be_zero(tmp_path: Path) -> None:
    """A vocabulary is padded with rows that no text asks for: a block or a row of them is no fault."""
    value = seeded(R, C)
    value[80:] = 0
    loader = make_loader(tmp_path, {"e": value}, [DECL], [Rule("e", "embed")])
    rows = by_rows(loader)
    list(rows.split(10))
    rows[torch.tensor([90])], rows[torch.tensor([90, 5])]
    assert loader.findings == []


def test_rows_that_a_text_needs_are_judged(tmp_path: Path) -> None:
    value = seeded(R, C)
    value[50:] = 0
    loader = make_loader(tmp_path, {"e": value}, [DECL], [Rule("e", "embed")])
    rows = by_rows(loader)
    rows[torch.tensor([60, 61, 61, 99])]
    assert [(f.kind, f.evidence) for f in loader.findings] == [("weights.constant", ("embed[3 rows]",))]
    rows[torch.tensor([70, 71])]
    assert len(loader.findings) == 1, "told once"


# --- through an alignment ---------------------------------------------------------------------------------------------


def test_which_matrices_a_stack_takes_by_rows(tmp_path: Path) -> None:
    spec = cast(LoadedModel, twin("qwen3_8b", tmp_path)).spec
    assert vocabulary_matrices(spec) == {"embed", "head"}
    assert vocabulary_matrices(spec, {"embed.lookup@embed": "x"}) == {"head"}
    assert vocabulary_matrices(spec, {"linear.matmul_f32@head": "x"}) == {"embed"}


def test_a_tied_head_is_taken_by_rows_only_when_both_uses_are(tmp_path: Path) -> None:
    spec = cast(LoadedModel, twin("smollm2_135m", tmp_path)).spec
    assert vocabulary_matrices(spec) == {"embed"}
    for use in ("embed.lookup@embed", "linear.matmul_f32@head"):
        assert vocabulary_matrices(spec, {use: "x"}) == frozenset()


@pytest.mark.parametrize("name", ["qwen3_30b_a3b", "smollm2_135m"])
def test_an_alignment_is_the_same_to_the_bit(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By rows, whole, and with experts kept or read anew: one report."""
    twin(name, tmp_path)
    folder, trace = str(tmp_path / "twin"), str(tmp_path / "trace")
    oracle = None if name.startswith("qwen") else str(REPOSITORY / "dayzero" / "oracles" / "plain_llama.py")
    if oracle is None:
        pytest.importorskip("transformers")
    align_source(folder, AlignOptions(oracle=oracle, record=trace, num_tokens=20, threads=1))

    def report(**more: Any) -> dict[str, Any]:
        made = align_source(folder, AlignOptions(trace=trace, threads=1, **more)).to_json()
        return {k: v for k, v in made.items() if k not in ("seconds", "peak_rss_bytes")}

    first = report(expert_bytes=0)
    assert first["verdict"] == "pass" and report() == first
    monkeypatch.setattr(align, "vocabulary_matrices", lambda spec, bound: frozenset())
    monkeypatch.setattr(align, "stacked_experts", lambda spec, bound: frozenset())
    assert report() == first


PROGRAM = """
import sys, torch
from dayzero.planner.memory import peak_rss_bytes, return_large_blocks
from dayzero.blocks.local_cache import LocalCache
from dayzero.blocks.open import open_model
from dayzero.blocks.stack import Stack, vocabulary_matrices
torch.set_num_threads(1)
return_large_blocks()
model = open_model(sys.argv[1])
lazy = vocabulary_matrices(model.spec) if sys.argv[2] == "lazy" else ()
stack = Stack(model.spec, lambda prefix: model.loader.load(prefix, lazy), resident=False)
view = LocalCache(model.spec, torch.float32).view([3, 4, 5])
before = peak_rss_bytes()
stack.head(stack.close(stack.layer(0, stack.open(view), view)))
print(peak_rss_bytes() - before)
"""


def test_memory_stays_far_below_the_matrix(tmp_path: Path) -> None:
    """The process's own peak over a vocabulary that is ten times what the head multiplies at once."""
    vocab, dim = 81920, 256
    twin("qwen3_8b", tmp_path, vocab_size=vocab, hidden_size=dim, num_hidden_layers=1)
    grown = {}
    for how in ("lazy", "eager"):
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / "twin"), how]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=120)
        grown[how] = int(done.stdout)
    size = 4 * vocab * dim
    assert grown["eager"] > 1.2 * size, "the measure sees a matrix"
    # A tenth of it twice in f32 (the block at hand and the next one), once in bf16 as read, once in f64, twice over
    # for what the library packs.
    assert grown["lazy"] < 0.7 * size
