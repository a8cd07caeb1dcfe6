"""Experts in blocks of 8 bits in Triton's interpreter, beyond the cases: parts of K, tall tiles, damage, an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.decl import Fp8Blocks
from dayzero.engine.request import SamplingParams
from dayzero.ops.cases import CASES
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.experts_tables import Run
from dayzero.ops.fp8_blocks import widened
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.cpu.engine_support import REFERENCE, Engine, ask, prompt_ids
from tests.parity import bitwise_equal

triton = pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)

import triton.language as tl  # noqa: E402

from dayzero.ops.triton import fp8_tiles  # noqa: E402
from dayzero.ops.triton.fp8_tiles import HALF, ByteTiles, pack, widened_bytes  # noqa: E402
from dayzero.ops.triton.mxfp4 import word_places  # noqa: E402

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
GREEDY = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
REACHED = 2.0**-7  # of the logits' spread: bf16 rows where references have f32 rows, some products in turn


def given(name: str) -> dict[str, Any]:
    return next(case for case in CASES["moe.experts"] if case.name == name).make(3)


@triton.jit
def _read(words, out, wide):
    tile, half = tl.program_id(0), tl.program_id(1)
    values = widened_bytes(tl.load(words + (tile * 2 + half) * 1024 + word_places(0, 1)), 1)
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    at = (tile // wide * 64 + row) * wide * 128 + tile % wide * 128 + half * 64 + column
    tl.store(out + at, values)


def test_tiles_hold_every_code_at_its_place() -> None:
    """What a kernel reads of each tile, laid side by side, is the matrix; what is beyond it is zero."""
    codes = torch.randint(0, 255, (2, 200, 300), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x01
    stack = Fp8Blocks(codes.view(torch.float8_e4m3fn), torch.ones(2, 2, 3))
    tiles = pack(stack)
    assert tiles.codes.shape == (2, 4, 3, 2, HALF) and tiles.shape == (2, 200, 300)
    for number in range(2):
        out = torch.full((256, 384), torch.nan)
        _read[12, 2](tiles.codes[number].contiguous(), out, 3)
        assert torch.equal(out[:200, :300], widened(stack[number]))
        assert not out[200:].any() and not out[:, 300:].any()


def _executed(program: str, words: tuple[int, int]) -> list[int]:
    """The four results of the inline assembly for two words, in whole numbers; its operations are few."""

    def halves(x: int) -> Tensor:
        return torch.tensor([x & 0xFFFF, x >> 16], dtype=torch.int32).to(torch.int16).view(torch.bfloat16)

    def times(a: int, b: int) -> int:
        low, high = (halves(a).double() * halves(b).double()).to(torch.bfloat16).view(torch.int16).tolist()
        return (low & 0xFFFF) | (high & 0xFFFF) << 16

    registers = {"$4": words[0], "$5": words[1]}
    for line in program.strip("{} \n").split(";"):
        word, *operands = line.replace(",", " ").split() or [""]
        if not word or word == ".reg":
            continue
        to, *values = operands
        given = [registers[v] if v in registers else int(v, 0) for v in values]
        registers[to] = {
            "and.b32": lambda a, b=0, *_: a & b,
            "shl.b32": lambda a, b=0, *_: a << b & 0xFFFFFFFF,
            "shr.b32": lambda a, b=0, *_: a >> b,
            "mov.b32": lambda a, *_: a,
            "mul.rn.bf16x2": lambda a, b=0, *_: times(a, b),
            "lop3.b32": lambda a, b=0, c=0, table=0, *_: (a & b) | c if table == 0xEA else -1,
        }[word](*given)
    return [registers[f"${i}"] for i in range(4)]


def test_the_assembly_gives_what_the_interpreter_gives() -> None:
    """Each pair of words of a tile with every code, signs and subnormals among them."""
    codes = torch.arange(256).to(torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0
    codes = codes.view(1, 1, 256)[..., torch.randperm(256, generator=torch.Generator().manual_seed(1))]
    tiles = pack(Fp8Blocks(codes.expand(1, 64, 256).view(torch.float8_e4m3fn), torch.ones(1, 1, 2)))
    exact = codes[0, 0].view(torch.float8_e4m3fn).float()
    for block in range(2):
        for half in range(2):
            words = tiles.codes[0, 0, block, half].view(2, 4, 8, 4, 2, 2)[:, 0, 0, :, 0]  # of the first row
            for k5 in range(2):
                for k1 in range(4):
                    pair = [int(w) & 0xFFFFFFFF for w in words[k5, k1].tolist()]
                    planes = _executed(fp8_tiles._ASSEMBLY.value, (pair[0], pair[1]))
                    for plane, value in enumerate(planes):  # [k4, k3]
                        got = torch.tensor([value & 0xFFFF, value >> 16], dtype=torch.int32).to(torch.int16)
                        column = block * 128 + half * 64 + k5 * 32 + (plane >> 1) * 16 + (plane & 1) * 8 + k1 * 2
                        assert torch.equal(got.view(torch.bfloat16).float(), exact[column : column + 2])


@pytest.mark.parametrize(("parts", "high"), [(2, 64), (3, 128)])
def test_parts_and_tall_tiles_give_the_same(parts: int, high: int) -> None:
    from dayzero.ops.triton.experts_matmul import down_product, gate_up
    from dayzero.ops.triton.experts_rows import combine, sort_by_expert

    inputs = given("8 bits, more blocks")
    gate, up, down = (pack(inputs[name]) for name in ("gate_EID", "up_EID", "down_EDI"))
    settings = {"SMALL": 0, "HIGH": high, "DEEP": 64, "SPLIT": parts, "num_warps": 4, "num_stages": 2}
    run = Run(1.0, 16, settings, settings)
    x = inputs["x_TD"].contiguous()
    for tokens in (1, 7):
        rows = {name: inputs[name][-tokens:] for name in ("ids_TN", "weights_TN")}
        by_expert = sort_by_expert(rows["ids_TN"], len(gate), run.rows)
        hidden = gate_up(x[-tokens:], gate, up, by_expert, inputs["activation"], inputs["biases"], run.gate_up)
        y = down_product(hidden, down, by_expert, inputs["biases"], run.down)
        got = combine(y, by_expert, rows["weights_TN"], torch.bfloat16)
        want = CONTRACTS["moe.experts"].body(**{**inputs, **rows, "x_TD": x[-tokens:]})
        assert relative_l2(got, want) <= CONTRACTS["moe.experts"].bound["bf16"].value


def test_a_code_that_is_nan_makes_sums_nan() -> None:
    """As a decoded one would, where bits alone would read 480."""
    from dayzero.ops.triton.experts import experts

    inputs = given("8 bits, 7 tokens torch.bfloat16 biases True")
    inputs["ids_TN"] = torch.tensor([[0, 1, -1]] * 3 + [[2, 3, -1]] * 4)
    inputs["up_EID"].codes.view(torch.uint8)[1, 130, 150] = 0xFF
    scales = pack(inputs["up_EID"]).scales
    assert scales.isnan().nonzero().tolist() == [[1, 1, 1]]
    got = experts(**inputs)
    assert got[:3].isnan().any(1).all() and got[3:].isfinite().all()


@pytest.mark.parametrize("odd", ["gate_EID", "up_EID"])
def test_gate_and_up_in_two_forms_are_refused(odd: str) -> None:
    from dayzero.ops.triton.experts import experts

    inputs = given("8 bits, 7 tokens torch.bfloat16 biases True")
    inputs[odd] = torch.stack([widened(inputs[odd][e]) for e in range(len(inputs[odd]))]).bfloat16()
    with pytest.raises(ValueError, match="give both in one form"):
        experts(**inputs)


def test_packed_once_is_packed_in_the_call_and_neighbours_change_nothing() -> None:
    from dayzero.ops.triton.experts import experts, pack

    inputs = given("8 bits, 7 tokens torch.bfloat16 biases True")
    packed = {name: pack(inputs[name]) for name in ("gate_EID", "up_EID", "down_EDI")}
    assert all(pack(stack) is stack for stack in packed.values())
    whole = experts(**{**inputs, **packed})
    assert bitwise_equal(experts(**inputs), whole)
    some = {name: inputs[name][2:5] for name in ("x_TD", "ids_TN", "weights_TN")}
    assert bitwise_equal(experts(**{**inputs, **packed, **some}), whole[2:5].contiguous())


@pytest.mark.slow
def test_an_engine_over_stored_experts_gives_what_references_give(tmp_path: Path) -> None:
    """All of a model's mixtures in Triton on tiles of 8 bits, in bf16, beside references on the same stored stacks."""
    source = tmp_path / "config"
    source.mkdir()
    (source / "config.json").write_bytes((CONFIGS / "deepseek_v32.json").read_bytes())
    write_twin(str(source), str(tmp_path / "twin"), TwinOptions())
    options: dict[str, Any] = {"page_tokens": 16, "max_running": 4, "prefix_cache": False, "record": True}
    options |= {"graphs": "off", "dtype": "bfloat16"}
    plain = Engine(tmp_path / "twin", bindings=REFERENCE, **options)
    made = Engine(tmp_path / "twin", bindings=(*REFERENCE, ("moe.experts", "triton")), **options)

    def stacks(engine: Engine, kind: type) -> bool:
        layers = engine.runner.stack._layers.values()  # type: ignore[attr-defined]
        found = [stack for layer in layers for stack in getattr(layer.channel, "weights", ())]
        return bool(found) and all(isinstance(stack, kind) for stack in found)

    assert stacks(plain, Fp8Blocks) and stacks(made, ByteTiles)
    assert "in 8 bits as stored" in dict(made.runner.info.table)["experts"]
    requests = [ask(str(n), prompt_ids(n, n), GREEDY) for n in (5, 17)]
    want, got = plain.run(requests), made.run(requests)
    for name, answer in want.items():
        one, other = got[name].logits[0], answer.logits[0]  # of the same tokens: the prompt's
        assert _apart(one, other) <= REACHED


def _apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / (other.max() - other.min()))
