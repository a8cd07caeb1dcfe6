"""Heads of attention entered by one launch: what the operators in turn make, however many tokens there are, under a
captured graph, and far into a large pool."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dayzero.decl import packed_row
from dayzero.ops.bind import bind
from dayzero.ops.heads_write import HeadNorms, Kept
from dayzero.ops.latent_write import Turn
from dayzero.ops.records import RowCodec, codec_of
from tests.parity import bitwise_equal, close

pytestmark = pytest.mark.gpu

PAGE, MANY, FEW = 64, 16, 4
FORMS: dict[str, dict[str, Any]] = {
    "norm, turn": {}, "1 + w, in f32": {"offset": True, "scale_in": "f32"}, "no norm": {"normed": False},
    "no turn": {"freqs": 0}, "interleaved": {"style": "interleaved"}, "part, last": {"freqs": 24, "part": "last"},
    "three axes": {"sections": (24, 20, 20)}, "64 wide": {"width": 64, "freqs": 32, "factor": 1.2},
    "256 wide, part": {"width": 256, "freqs": 32}, "kv_fp8": {"record": "kv_fp8"}, "f32": {"dtype": torch.float32},
}  # fmt: skip


def operators() -> tuple[Any, ...]:
    names = ("attention.norm_rope_write", "norm.rms", "rope.apply", "cache.write")
    return tuple(bind(name, "test", {name: "triton"}) for name in names)


def inputs(
    tokens: int, *, width: int = 128, freqs: int = 64, normed: bool = True, offset: bool = False,
    scale_in: str = "dtype", record: str = "kv_bf16", dtype: torch.dtype = torch.bfloat16, **turning: Any,
) -> tuple[Any, ...]:  # fmt: skip
    """(q, k, v, kept, codec, norms, turn) on the device; q, k and v side by side in one product."""
    made = torch.Generator("cuda").manual_seed(tokens)
    x = torch.randn(tokens, (MANY + 2 * FEW) * width, generator=made, device="cuda").to(dtype)
    q, k, v = (part.unflatten(1, (-1, width)) for part in x.split([MANY * width, FEW * width, FEW * width], dim=1))
    codec = codec_of(packed_row(record, (FEW, width)))
    order = torch.randperm(2 * tokens, generator=made, device="cuda")[:tokens]
    pools = (pool(-(-2 * tokens // PAGE), codec, width, dtype) for _ in range(2))
    kept = Kept(*pools, order // PAGE, order % PAGE)
    weights = (torch.randn(width, generator=made, device="cuda").to(dtype) / 8 + (not offset) for _ in range(2))
    norms = HeadNorms(*weights, 1e-6, offset, scale_in) if normed else None
    shape = (3, tokens) if "sections" in turning else (tokens,)
    at = torch.randint(0, 1_000_000, shape, generator=made, device="cuda")
    freq_F = (1e6 ** (-torch.arange(freqs, device="cuda") / max(freqs, 1))).float()
    turn = Turn(at, freq_F, **{"style": "half", **turning}) if freqs else None
    return q, k, v, kept, codec, norms, turn


def pool(blocks: int, codec: RowCodec | None, width: int, dtype: torch.dtype) -> torch.Tensor:
    if codec is None:
        return torch.full((blocks, PAGE, FEW, width), torch.nan, dtype=dtype, device="cuda")
    return torch.full((blocks, PAGE, codec.row.num_bytes), 0xFF, dtype=torch.uint8, device="cuda")


def in_turn(q: Any, k: Any, v: Any, kept: Kept, codec: Any, norms: HeadNorms | None, turn: Turn | None) -> Any:
    _, rms, rope, write = operators()
    heads = [q, k]
    if norms is not None:
        options = {"eps": norms.eps, "offset": norms.offset, "scale_in": norms.scale_in}
        heads = [rms(x, w, **options) for x, w in zip(heads, norms[:2], strict=True)]
    if turn is not None:
        at, freq_F, style, part, factor, sections = turn
        heads = [rope(x, at, freq_F, style=style, part=part, factor=factor, sections=sections) for x in heads]
    write(heads[1], kept.keys, kept.blocks_T, kept.offsets_T, codec)
    write(v, kept.values, kept.blocks_T, kept.offsets_T, codec)
    return heads[0]


@pytest.mark.parametrize("form", FORMS)
def test_the_numbers_are_those_of_the_operators_in_turn(form: str) -> None:
    """But for what a compiler joins into one rounding of f32 here and not there: with narrow numbers it shows where a
    sum lies within 2^-15 of a step's half way between two of them, in one of some ten thousand at most."""
    for tokens in (1, 3, 63, 256, 1500):
        given = inputs(tokens, **FORMS[form])
        other = given[3]._replace(keys=given[3].keys.clone(), values=given[3].values.clone())
        got = operators()[0](*given)
        want = in_turn(*given[:3], other, *given[4:])
        assert bitwise_equal(given[3].values, other.values)
        for one, two in (got, want), (given[3].keys, other.keys):
            if one.dtype != torch.uint8:  # of codes one step is an eighth
                close(one.nan_to_num(), two.nan_to_num(), 2.0**-21 if one.dtype == torch.float32 else 2.0**-12)
            if one.dtype != torch.float32:
                assert int((one.nan_to_num() != two.nan_to_num()).sum()) <= 1 + one.numel() * 1e-4


def test_a_token_is_the_same_alone_and_among_many() -> None:
    q, k, v, kept, codec, norms, turn = inputs(2000)
    fused = operators()[0]
    many = fused(q, k, v, kept, codec, norms, turn)
    for token in (0, 7, 1999):
        at = slice(token, token + 1)
        own = Kept(torch.zeros_like(kept.keys), torch.zeros_like(kept.values), kept.blocks_T[at], kept.offsets_T[at])
        alone = fused(q[at], k[at], v[at], own, codec, norms, turn._replace(positions=turn.positions[at]))
        place = int(kept.blocks_T[token]), int(kept.offsets_T[token])
        assert torch.equal(alone[0], many[token])
        assert torch.equal(own.keys[place], kept.keys[place]) and torch.equal(own.values[place], kept.values[place])


@pytest.mark.parametrize("record", ["kv_bf16", "kv_fp8"])
def test_a_graph_enters_what_its_buffers_say_when_it_is_replayed(record: str) -> None:
    fused, given = operators()[0], inputs(7, record=record)
    fused(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fused(*given)
    again = inputs(9, record=record)  # other numbers, of which the first seven tokens are taken
    empty = 0xFF if record == "kv_fp8" else torch.nan
    for pool_ in given[3][:2]:
        pool_.fill_(empty)
    for old, new in zip((*given[:3], given[6].positions), (*again[:3], again[6].positions), strict=True):
        old.copy_(new[:7])
    given[3].blocks_T.zero_()
    given[3].offsets_T.copy_(torch.arange(7, device="cuda") * 2)
    graph.replay()
    keys, values = (torch.full_like(x, empty) for x in given[3][:2])
    other = given[3]._replace(keys=keys, values=values)
    want = fused(*given[:3], other, *given[4:])
    assert bitwise_equal(out, want) and bitwise_equal(given[3].keys, other.keys)
    assert bitwise_equal(given[3].values, other.values)


def test_rows_beyond_4_gib_lie_where_they_belong() -> None:
    """Blocks numbered by units of 256 bytes, as the engine's pool has them; the last token is far behind."""
    size, stride = PAGE * FEW * 128, 128
    memory = torch.empty(5 << 29, dtype=torch.bfloat16, device="cuda")
    num = (memory.numel() - 2 * size) // stride + 1
    keys, values = (
        memory.as_strided((num, PAGE, FEW, 128), (stride, FEW * 128, 128, 1), begin) for begin in (0, size)
    )  # fmt: skip
    blocks = torch.tensor([0, num - 1, num // 2], device="cuda")
    q, k, v, kept, codec, norms, turn = inputs(3)
    kept = Kept(keys, values, blocks, kept.offsets_T)
    operators()[0](q, k, v, kept, codec, norms, turn)
    own = Kept(*(pool(3, None, 128, q.dtype) for _ in range(2)), torch.arange(3, device="cuda"), kept.offsets_T)
    operators()[0](q, k, v, own, codec, norms, turn)
    for token in range(3):
        offset = int(kept.offsets_T[token])
        assert torch.equal(keys[blocks[token], offset], own.keys[token, offset])
        assert torch.equal(values[blocks[token], offset], own.values[token, offset])
