"""Rows of the cache as e4m3 codes with scales: bytes by hand, what comes back, the choice of records, and the engine's
equalities (``test_engine_equalities``) with rows kept so."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dayzero.arch.record_choice import with_records
from dayzero.arch.records import record_bytes
from dayzero.cache.layout import lay_out
from dayzero.decl import PackedRow, packed_row
from dayzero.errors import UsageError
from dayzero.ops.cases_paged import paged_inputs
from dayzero.ops.random_inputs import Inputs
from dayzero.ops.records import RowCodec, decode, encode, packed, write
from dayzero.view import Paged

ONE, TWO, THREE = (struct.pack("<f", x) for x in (1.0, 2.0, 3.0))
LEAST = 1e-4 / 448  # scale of a tile of zeros
RECORDS = {
    "mla_fp8_656": ((576,), (512, 64)), "mla_fp8_tiled": ((44,), (33, 11)), "idx_fp8_128": ((150,), ()),
    "idx_mxfp8_32": ((40,), ()), "kv_fp8": ((2, 24), ()),
}  # fmt: skip


def row_of(record: str, shape: tuple[int, ...], parts: tuple[int, ...] = ()) -> PackedRow:
    row = packed_row(record, shape, parts)
    assert row is not None
    return row


def written(row: PackedRow, values: list[list[float]], offsets: list[int]) -> bytes:
    """The bytes of a page of 16 that held 0xFF before."""
    rows = torch.full((2, 16, row.num_bytes), 0xFF, dtype=torch.uint8)
    x, at = torch.tensor(values).unflatten(1, row.shape), torch.tensor(offsets)
    write.body(x, rows, torch.ones_like(at), at, RowCodec(row))
    assert bool((rows[0] == 0xFF).all())
    return rows[1].numpy().tobytes()


def test_a_latent_row_lies_together() -> None:
    """Codes, a pad, a scale that is a power of two, the shared key in bf16, zeros up to 16 bytes."""
    row = row_of("mla_fp8_tiled", (5,), (3, 2))
    page = written(row, [[448, -1, 0.5, 1, -2], [449, 0, -2, float("nan"), 3]], [2, 0])
    assert page[32:48] == bytes.fromhex("7eb83000") + ONE + bytes.fromhex("803f00c0") + bytes(4)
    # 449 / 448 needs the next power of two; 224.5 lies nearest to 224.
    assert page[0:16] == bytes.fromhex("7600b800") + TWO + bytes.fromhex("c07f4040") + bytes(4)
    assert page[16:32] == bytes([0xFF] * 16) and page[48:] == bytes([0xFF] * (len(page) - 48))


def test_index_keys_lie_by_planes() -> None:
    """Codes of the whole page, then its scales."""
    row = row_of("idx_fp8_128", (4,))
    page = written(row, [[1344, 3, -1.5, 0], [0, 0, 0, 0]], [15, 1])
    assert page[60:64] == bytes.fromhex("7e38b000") and page[64 + 60 : 64 + 64] == THREE
    scale = struct.unpack("<f", page[64 + 4 : 64 + 8])[0]
    assert page[4:8] == bytes(4) and scale == pytest.approx(LEAST, rel=1e-6)
    assert page[:4] == page[64:68] == bytes([0xFF] * 4)


def test_exponents_of_two_tiles() -> None:
    row = row_of("idx_mxfp8_32", (33,))
    page = written(row, [[448.0, *[0.0] * 31, 0.0], [900.0, *[0.0] * 31, 56.0]], [0, 3])
    assert page[0] == 0x7E and page[33 * 16 : 33 * 16 + 2] == bytes([127, 105])  # 2^-22 is the next above the least
    # 900 / 448 needs 4 (225 is nearest to 224); 56 / 448 is 2^-3 itself.
    assert (page[99], page[99 + 32]) == (0x76, 0x7E) and page[33 * 16 + 6 : 33 * 16 + 8] == bytes([129, 124])


def test_each_head_has_a_scale() -> None:
    page = written(row_of("kv_fp8", (2, 2)), [[448, 1, 1344, 3]], [0])
    assert page[:4] == bytes.fromhex("7e387e38") and page[64:72] == ONE + THREE


def test_the_smallest_codes_round_to_even() -> None:
    row = row_of("idx_fp8_128", (5,))
    codes = encode(torch.tensor([448, 2**-9, 2**-10, 3 * 2**-10, -(2**-6)]), row).codes
    assert codes.tolist() == [0x7E, 0x01, 0x00, 0x02, 0x88]


@pytest.mark.parametrize("record", RECORDS)
def test_what_is_no_number_stays_where_it_is(record: str) -> None:
    row = row_of(record, *RECORDS[record])
    x = Inputs(0).normal(3, *row.shape)
    x[1].view(-1)[0], x[2].view(-1)[1] = torch.nan, torch.inf
    got, clean = decode(encode(x, row), row).flatten(1), decode(encode(Inputs(0).normal(3, *row.shape), row), row)
    assert torch.equal(got[0], clean.flatten(1)[0])
    assert got[1].isnan().tolist() == [True, *[False] * (got.shape[1] - 1)]
    end = min(row.tile, row.num_codes)
    assert bool(got[2, :end].isnan().all()) and not bool(got[2, end:].isnan().any())


@pytest.mark.parametrize("record", RECORDS)
def test_what_comes_back_is_within_half_a_step(record: str) -> None:
    """3 bits behind the point: 2^-4 of a value, or half of the smallest code; the shared key has bf16's 2^-9."""
    row = row_of(record, *RECORDS[record])
    x = Inputs(1).normal(65, *row.shape) * torch.exp(4 * Inputs(2).normal(65, *row.shape))
    got = decode(encode(x, row), row).flatten(1)
    x = x.flatten(1)
    num = row.num_codes
    for tile in range(row.num_scales):
        part = slice(tile * row.tile, min(num, (tile + 1) * row.tile))
        scale = x[:, part].abs().amax(1, keepdim=True) / 448 * (1 if row.scale == "f32" else 2)
        assert bool(((got - x)[:, part].abs() <= x[:, part].abs() / 16 + scale * 2**-10 * 1.001).all())
    assert bool(((got - x)[:, num:].abs() <= x[:, num:].abs() * 2**-8).all())


@pytest.mark.parametrize("record", RECORDS)
def test_paged_reads_what_was_written(record: str) -> None:
    row = row_of(record, *RECORDS[record])
    made = paged_inputs(Inputs(0), ((40, 3), (0, 1), (30, 17)), (1, 1), (8, 8), torch.float32)["keys"]
    values = Inputs(1).normal(*made.rows.shape[:2], *row.shape)
    pages = packed(Paged(values, made.table, made.first, made.query_start, made.start, made.spans), row)
    plain = Paged(decode(encode(values, row), row), made.table, made.first, made.query_start, made.start, made.spans)
    assert pages.record == record and plain.record == "" and pages.shape == plain.shape and pages.page == plain.page
    for span in pages.spans:
        assert torch.equal(pages.history(span)[0], plain.history(span)[0])
        assert torch.equal(pages.part(span, 1, span.start + 1), plain.part(span, 1, span.start + 1))
        at = torch.arange(span.start + span.count).flip(0)[:, None]
        assert torch.equal(pages.take(span, at), plain.take(span, at))
        assert torch.equal(pages.headed().take(span, at), plain.headed().take(span, at))


# --- the choice -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny() -> Any:
    from tests.cpu.test_blocks_stack import SPEC

    return SPEC


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fp4", "none of latent=RECORD"),
        ("kv=idx_bf16", "kv=kv_bf16, kv=kv_fp8"),
        ("kv=kv_fp8,kv=kv_bf16", "given twice"),
        ("kv=kv_fp8", "keeps no keys and values"),
        ("latent=mla_fp8_656", "this model's are 18 [+] 6; give latent=mla_fp8_tiled"),
        ("gate=gate_bf16", "none of"),
        ("", "none of"),
    ],
)
def test_a_wrong_choice_is_one_sentence(tiny: Any, text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        with_records(tiny, text)


def test_rows_need_pages_they_fit(tiny: Any) -> None:
    needs = with_records(tiny, "fp8").cache()
    with pytest.raises(UsageError, match="multiple of 16"):
        lay_out(needs, dtype="bf16", page_tokens=8)
    wide, narrow = lay_out(tiny.cache(), dtype="bf16"), lay_out(needs, dtype="bf16")
    assert wide.token_bytes == 2 * 2 * (18 + 6 + 16)
    # 18 codes and 2 zeros, a scale, 6 bf16 numbers, zeros up to 48; 16 codes and a scale.
    assert narrow.token_bytes == 2 * (48 + 16 + 4)
    assert sum(record_bytes(need) for need in needs if need.unit == "token") == narrow.token_bytes
    assert "mla_fp8_tiled" in " ".join(text for _, text in narrow.lines())


# --- the engine -------------------------------------------------------------------------------------------------------

CHOICES = (
    ("deepseek_v32", "latent=mla_fp8_tiled,index=idx_fp8_128"),
    ("llama", "kv=kv_fp8"),
    pytest.param(("deepseek_v32", "index=idx_mxfp8_32"), marks=pytest.mark.slow),
    pytest.param(("gpt_oss", "fp8"), marks=pytest.mark.slow),
    pytest.param(("kimi_k31", "fp8"), marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=CHOICES, ids=str)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    pytest.importorskip("transformers")
    from small_models import write_small

    from tests.cpu.test_engine_equalities import Model

    family, cache = request.param

    class Narrow(Model):
        def engine(self, **options: object) -> Any:
            return super().engine(**{"cache": cache, **options})

    return Narrow(write_small(family, tmp_path_factory.mktemp(family)))


EQUALITIES = (
    "test_any_chunking_gives_the_same", "test_a_warm_prefix_gives_the_same_at_every_place_in_a_page",
    "test_a_turn_goes_on_where_the_last_one_ended", "test_preempted_equals_not_preempted",
    "test_one_form_equals_the_other", "test_prompt_logprobs_are_the_same_in_one_chunk_and_in_many",
)  # fmt: skip


@pytest.mark.parametrize("equality", EQUALITIES)
def test_equalities_hold_for_packed_rows(model: Any, equality: str) -> None:
    from tests.cpu import test_engine_equalities

    getattr(test_engine_equalities, equality)(model)


@pytest.mark.parametrize("run_ahead", [True, False])
def test_together_equals_alone(model: Any, run_ahead: bool) -> None:
    from tests.cpu.test_engine_equalities import test_together_equals_alone

    test_together_equals_alone(model, run_ahead)


def test_what_the_engine_says_of_its_rows(model: Any) -> None:
    runner = model.lone.runner
    rows = {group: text for group, text in runner.info.table if group.startswith("cache group tokens")}
    assert any("fp8" in text for text in rows.values()), rows
    assert "fp8" in str(runner.info.facts["cache_records"])


def test_shared_rows_are_packed_once(tmp_path: Path) -> None:
    """Layers that read an earlier layer's keys and values, with a window: in chunks, together and warm."""
    from tests.cpu.engine_support import ask, prompt_ids
    from tests.cpu.path_recipe import make_twin
    from tests.cpu.test_engine_shared_kv import CONFIG, GREEDY, RECIPE, engine

    twin = make_twin(CONFIG, RECIPE, tmp_path / "twin")
    prompts = {"short": prompt_ids(11, 2), "trunk": prompt_ids(48, 1), "branch": prompt_ids(48, 1)[:37] + [5, 6, 7]}
    lone = engine(twin, cache="fp8", prefix_cache=False)
    want = {name: lone.one(prompt, GREEDY) for name, prompt in prompts.items()}
    made = engine(twin, cache="fp8", chunk_tokens=7, max_step_tokens=40, max_running=4)
    for _ in range(2):
        for name, answer in made.run([ask(name, prompt, GREEDY) for name, prompt in prompts.items()]).items():
            assert answer.tokens == want[name].tokens, name
            assert close_to(answer.logits[0], want[name].logits[0]), name


def close_to(one: Tensor, other: Tensor) -> bool:
    return float((one - other).abs().max()) <= 1e-5 * float(other.max() - other.min())
