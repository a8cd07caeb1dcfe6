"""Weights made from a seed: what they are, that any piece is a slice of the whole, that every family runs on them."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_support import run_json

from dayzero import LLM, SamplingParams
from dayzero.blocks.open import open_model
from dayzero.checkpoint.building import packed_bytes
from dayzero.checkpoint.dequant import dequantize
from dayzero.checkpoint.extents import DTYPES
from dayzero.checkpoint.formats import parts as stored_parts
from dayzero.decl import FP8_BLOCK, QUANTIZED_FORMATS, Form, Format, Fp8Blocks, Mxfp4
from dayzero.engine import seeded as engine_seeded
from dayzero.engine.expert_choice import Choices, entropy, even_entropy
from dayzero.engine.seeded import open_seeded
from dayzero.errors import ModelError, UsageError
from dayzero.models.blueprint import require_recipe
from dayzero.rehearse import draws, picks
from dayzero.rehearse import seeded as loaders
from dayzero.rehearse.draws import Draw, coded, quantiles
from dayzero.rehearse.picks import STRIDE, key_of, normal, pick, rows_of
from dayzero.rehearse.seeded import SeededLoader
from dayzero.rehearse.shrink import shrink

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.json"))
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
SMALL: dict[str, Any] = {"device": "cpu", "dtype": "float32", "pool_bytes": 64 << 20, "max_running": 4}


def small(name: str, folder: Path) -> str:
    """A source of a twin's size, with every trait of the real config."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(shrink(config, require_recipe(config).twin, keep_vocab=False, changes={}))
    )
    return f"seeded:{folder}"


def loader_of(where: str, dtype: torch.dtype = torch.bfloat16) -> SeededLoader:
    loader = open_seeded(where, dtype=dtype).loader
    assert isinstance(loader, SeededLoader)
    return loader


# --- numbers --------------------------------------------------------------------------------------------------------


def by_hand(key: picks.Key, row: int, column: int) -> int:
    """The hash, in whole numbers of any size."""
    mask = 0xFFFFFFFF

    def mixed(word: int, late: int = 0) -> int:
        word ^= word >> 16
        word = word * 0x85EBCA6B & mask ^ late
        word ^= word >> 16
        word = word * 0xC2B2AE35 & mask
        return word ^ word >> 16

    early, late = (mixed(row * STRIDE + word & mask) for word in key)
    word = mixed((column // 2) * STRIDE + early & mask, late)
    return (word >> 16 * (column % 2) & 0xFFFF) + (1 << 15) & 0xFFFF


def test_values_are_the_hash_of_key_and_place() -> None:
    key, rows = key_of("layers.0.mixer.q", 5), torch.tensor([0, 1, 77_777, 2**31 - 1])
    numbers = pick(torch.arange(1 << 16), key, rows, range(3, 60))
    assert numbers.tolist() == [[by_hand(key, row, column) for column in range(3, 60)] for row in rows.tolist()]
    assert key_of("layers.0.mixer.q", 5) != key_of("layers.0.mixer.q", 6) != key_of("layers.0.mixer.k", 6)


@pytest.mark.parametrize("words", [1, 2, 7, 64, 1 << 22])
def test_a_piece_is_the_slice_of_the_whole_whatever_a_chunk_holds(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    table, key = normal().float(), key_of("x", 0)
    whole = pick(table, key, rows_of((3, 5), (range(3), range(5))), range(33)).view(3, 5, 33)
    monkeypatch.setitem(picks.CHUNK_WORDS, "cpu", words)
    for first, second, third in itertools.product(
        (range(3), range(1, 3)), (range(5), range(2, 4)), (range(33), range(1, 32), range(7, 8), range(6, 20))
    ):
        got = pick(table, key, rows_of((3, 5), (first, second)), third).view(len(first), len(second), len(third))
        assert torch.equal(got, whole[first.start : first.stop, second.start : second.stop, third.start : third.stop])


def test_values_are_independent_and_normal() -> None:
    many = pick(normal(), key_of("x", 0), torch.arange(1500), range(1500))
    n = math.sqrt(many.numel())
    # Six standard errors of sums of that many independent numbers: chance 2e-9 each.
    assert abs(float(many.mean())) < 6 / n and abs(float(many.square().mean()) - 1) < 6 * math.sqrt(2) / n
    assert abs(float((many**4).mean()) - 3) < 6 * math.sqrt(96) / n
    shifts = [(many[:, :-k] * many[:, k:]).mean() for k in (1, 2, 3)] + [(many[:-k] * many[k:]).mean() for k in (1, 2)]
    assert max(abs(float(one)) for one in shifts) < 6.5 / n
    largest = torch.linalg.svdvals(many.float() / math.sqrt(1500))
    assert 1.9 < float(largest[0]) < 2.1, "the edge of a random matrix's spectrum is 2"


@pytest.mark.parametrize("fmt", QUANTIZED_FORMATS, ids=lambda fmt: fmt.name)
@pytest.mark.parametrize("fan_in", [64, 7168])
def test_codes_and_scales_have_the_deviation_asked_for(fmt: Format, fan_in: int) -> None:
    made = coded(fmt, fan_in**-0.5)
    square = made.values.double().square().mean() * made.scale_values.double().square().mean()
    gain = float(square) * (made.whole or 1.0) ** 2 * fan_in
    assert abs(gain - 1) < 0.01  # e8m0 scales come in steps, of 65,536 quantiles
    if fmt.scale == "e8m0" and fmt.block == (1, 32):
        assert 6 <= len(made.scales.unique()) <= 12, "exponents of trained weights span about eight"
    assert made.scale_values.isfinite().all() and bool((made.scale_values > 0).all())


def test_draws_by_role(tmp_path: Path) -> None:
    k3, plain = loader_of(small("kimi_k3", tmp_path)).load(""), tmp_path / "plain"
    plain.mkdir()
    linear = loader_of(small("kimi_linear_48b_a3b", plain)).load("")
    for values in (k3, linear):
        for name, value in values.items():
            word = name.rsplit(".", 1)[-1]
            if word.endswith("norm"):
                assert bool((value == 1).all()), name
            if word.endswith("bias") and word != "dt_bias":
                assert not value.any(), name
    rates = torch.cat([v for n, v in linear.items() if n.endswith("a_log")]).exp()
    assert 1 <= float(rates.min()) < 6 and 10 < float(rates.max()) <= 16.001
    steps = torch.nn.functional.softplus(torch.cat([v for n, v in linear.items() if n.endswith("dt_bias")]))
    assert 0.0009 < float(steps.min()) < 0.002 and 0.05 < float(steps.max()) < 0.11
    bounded = torch.cat([v for n, v in k3.items() if n.endswith("dt_bias")]).exp()
    assert float(bounded.min()) < 0.002 and float(bounded.max()) > 8
    assert float(quantiles(Draw("normal", 0.5)).std()) == pytest.approx(0.5, rel=1e-3)


# --- parameters of every family -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_is_made_and_cut_in_any_order(name: str, tmp_path: Path) -> None:
    where = small(name, tmp_path)
    loader = loader_of(where)
    values = loader.load("")
    assert loader.bytes_read == loader.index.total_bytes
    again, other = loader_of(where), loader_of(f"{where}?seed=1")
    for param in reversed(list(values)):
        value, decl = values[param], loader._decls[param]
        assert tuple(value.shape) == decl.shape and bool(value.isfinite().all()), param
        assert torch.equal(again.piece(param), value), param
        if value.numel() > 8 and bool((value != value.flatten()[0]).any()):
            assert not torch.equal(other.piece(param), value), param
        box = tuple(range(size // 3, max(size // 3 + 1, size - size // 5)) for size in decl.shape)
        assert torch.equal(again.piece(param, box), value[tuple(slice(r.start, r.stop) for r in box)]), param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_packed_decodes_to_the_same(dtype: torch.dtype, tmp_path: Path) -> None:
    loader = loader_of(small("kimi_k3", tmp_path), dtype)
    names: dict[str, Form] = {name: "mxfp4" for name in loader.names() if loader.packs(name) == "mxfp4"}
    assert names and all("experts" in name for name in names)
    fmt = loader.format_of(next(iter(names)))
    for name in list(names)[:3]:
        whole = loader.piece(name)
        kept = loader.load(name, packed=names)[name]
        assert isinstance(kept, Mxfp4) and kept.shape == tuple(whole.shape)
        parts = {"weight": kept.codes, "scale": kept.scales}
        assert torch.equal(dequantize(fmt, parts, tuple(whole.shape), dtype), whole)
        one = loader.expert([name], 3, {name: "mxfp4"})[name]
        assert isinstance(one, Mxfp4)
        assert torch.equal(one.codes, kept.codes[3]) and torch.equal(one.scales, kept.scales[3])
        assert torch.equal(loader.load(name, lazy=[name])[name][5], whole[5])


@pytest.mark.parametrize("fmt", [fmt for fmt in QUANTIZED_FORMATS if fmt.form == "fp8_block"], ids=lambda fmt: fmt.name)
def test_what_stays_in_8_bits_decodes_to_the_same(fmt: Format, tmp_path: Path, monkeypatch: Any) -> None:
    """Of every parameter that a checkpoint stores so, matrices and stacks, whole, by expert and in boxes of blocks."""
    loader = loader_of(small("deepseek_v32", tmp_path), torch.float32)
    names = dict.fromkeys((name for name in loader.names() if loader.packs(name) == "fp8_block"), "fp8_block")
    assert any(len(loader._decls[name].shape) == 2 for name in names) and any("experts" in name for name in names)
    stored = {name: fmt if name in names else loader.format_of(name) for name in loader.names()}
    monkeypatch.setattr(SeededLoader, "format_of", lambda self, param: stored[param])
    for name in names:
        whole, kept = loader.piece(name), loader.load(name, packed=names)[name]
        assert isinstance(kept, Fp8Blocks) and kept.nbytes == packed_bytes("fp8_block", tuple(whole.shape))
        assert torch.equal(_meant(kept), whole)
        if len(whole.shape) == 3:
            one = loader.expert([name], 3, names)[name]
            assert isinstance(one, Fp8Blocks) and torch.equal(_meant(one), whole[3])
        box = (*(range(n) for n in whole.shape[:-2]), *(range(n // 256 * 128, n) for n in whole.shape[-2:]))
        index = tuple(slice(run.start, run.stop) for run in box)
        part = loader.packed_piece(name, box)
        assert isinstance(part, Fp8Blocks) and torch.equal(_meant(part), whole[index])


def _meant(value: Fp8Blocks) -> torch.Tensor:
    return dequantize(FP8_BLOCK, {"weight": value.codes, "scale": value.scales}, value.shape)


@pytest.mark.parametrize("fmt", QUANTIZED_FORMATS, ids=lambda fmt: fmt.name)
def test_every_format_decodes_as_the_reference_does(fmt: Format, tmp_path: Path, monkeypatch: Any) -> None:
    loader = loader_of(small("kimi_k3", tmp_path))
    name = next(name for name in loader.names() if loader.packs(name))
    shape = loader._decls[name].shape
    monkeypatch.setattr(SeededLoader, "format_of", lambda self, param: fmt)
    made, whole = loader.parts(name), loader.piece(name)
    stored = {part.role: part for part in stored_parts(fmt, "t", shape)}
    parts = {role: _as_stored(made[role], stored[role]) for role in made}
    if "shape" in stored:
        parts["shape"] = torch.tensor(shape)
    assert torch.equal(dequantize(fmt, parts, shape, torch.bfloat16), whole)
    box = (range(1, 4), range(3, 50), range(5, 40))
    assert torch.equal(loader.piece(name, box), whole[1:4, 3:50, 5:40])


def _as_stored(value: torch.Tensor, part: Any) -> torch.Tensor:
    return value.view(DTYPES[part.dtype[0]]).reshape(part.shape)


# --- running --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_family_runs_and_answers_the_same_again(name: str, tmp_path: Path) -> None:
    where = small(name, tmp_path)
    answers = []
    for _ in range(2):
        with LLM(where, **SMALL) as llm:
            made = llm.generate([[5, 6, 7, 8, 9], "text in bytes"], GREEDY)
            answers.append([one.token_ids for one in made])
            assert all(one.error is None and len(one.token_ids) == 6 for one in made)
            rows = dict(llm.info.table)
            assert "seed 0" in rows["made from"] and "cut" not in rows
            assert ("expert choice" in rows) == ("expert_choice" in llm.info.facts) == ("experts" in rows)
    assert answers[0] == answers[1]


def test_experts_that_are_made_when_chosen_give_the_same(tmp_path: Path) -> None:
    where, answers = small("kimi_k3", tmp_path), []
    for options in ({}, {"expert_bytes": 1 << 19}):
        with LLM(where, **SMALL, **options) as llm:
            answers.append(llm.generate([[5, 6, 7, 8, 9]], GREEDY)[0].token_ids)
    assert answers[0] == answers[1]


def test_a_cut_says_what_it_loses(tmp_path: Path) -> None:
    where = small("kimi_k3", tmp_path)
    rows = dict(engine_seeded.seeded_rows(open_seeded(f"{where}?layers=3&experts=8")))
    assert rows["cut"].startswith("3 of 9 layers, 8 experts; loses ") and "latent" in rows["cut"]
    rows = dict(engine_seeded.seeded_rows(open_seeded(f"{where}?layers=8")))
    assert rows["cut"] == "8 of 9 layers; every trait is kept"


def test_alignment_has_nothing_to_compare(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no files of weights"):
        open_model(small("qwen3_8b", tmp_path))


def test_bench_runs_on_made_weights(tmp_path: Path) -> None:
    where = small("qwen3_30b_a3b", tmp_path)
    options = ["--in-process", "--device", "cpu", "--concurrency", "2", "--requests", "2", "--prompt-tokens", "16"]
    code, report = run_json("bench", where, *options, "--output-tokens", "4", "--pool-bytes", "32MiB")
    assert code == 0 and report["verdict"] == "pass" and report["expert_choice"]["share"] > 0.8


# --- how experts are chosen -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(1, 2, 8), (3, 2, 5), (200, 4, 16), (64, 16, 896)])
def test_an_even_choice_has_the_entropy_expected_of_it(tokens: int, top_k: int, experts: int) -> None:
    draw = np.random.default_rng(3)
    seen = [entropy(np.stack([draw.permutation(experts)[:top_k] for _ in range(tokens)])) for _ in range(300)]
    spread = float(np.std(seen)) / math.sqrt(len(seen))
    assert abs(float(np.mean(seen)) - even_entropy(tokens, top_k, experts)) < 5 * spread + 1e-9


def test_entropy_counts_choices() -> None:
    counts = Counter([0, 0, 0, 1])
    want = -sum(c / 4 * math.log(c / 4) for c in counts.values())
    assert entropy(np.array([[0, 0], [0, 1], [-1, -1]])) == pytest.approx(want)
    assert even_entropy(0, 2, 8) == 0 and even_entropy(5, 8, 8) == pytest.approx(math.log(8))


def test_a_router_that_prefers_a_few_voids_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def same(decl: Any, mixer: Any, tied: bool) -> Draw:
        return Draw("constant", 0.01) if decl.role == "router" else draws.draw_of(decl, mixer, tied)

    where = small("qwen3_30b_a3b", tmp_path)
    monkeypatch.setattr(loaders, "draw_of", same)  # all logits alike: ties go to the first experts
    with pytest.raises(ModelError, match="void"):
        LLM(where, **SMALL)


def test_nothing_is_kept_of_choices_unless_asked(tmp_path: Path) -> None:
    spec = open_seeded(small("qwen3_30b_a3b", tmp_path)).spec
    choices = Choices(spec)
    ids = torch.tensor([[0, 1], [2, 3]])
    route = choices.bind(lambda contract, site: lambda: (ids, None))("moe.route", "layers.0.channel.route")
    route()
    assert choices.any and choices.take() is None
    choices.listening = True
    route()
    found = choices.take()
    assert found is not None and found.tokens == 2 and found.entropy == pytest.approx(math.log(4))
    assert not Choices(replace(spec, layers=())).any
