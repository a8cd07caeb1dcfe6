"""The kernels compiled on this machine match their references: both widths, without intrinsics, one thread and two.

A build with 16 lanes runs anywhere: a compiler splits vectors its target lacks. What differs on a machine with AVX-512
is the instructions, which only such a machine can run.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from ops_support import close, poisoned_memory, tensors  # noqa: F401

from dayzero.errors import MachineError
from dayzero.ops import linear
from dayzero.ops.activation import glu
from dayzero.ops.bind import bind, prepack_of, resolve
from dayzero.ops.cases import CASES
from dayzero.ops.cases_paged import paged_inputs
from dayzero.ops.catalog import CATALOG
from dayzero.ops.contract import CONTRACTS
from dayzero.ops.native import build, calls
from dayzero.ops.norm import rms
from dayzero.ops.paged import paged
from dayzero.ops.random_inputs import Inputs, strided
from dayzero.ops.rope import apply
from tests.parity import fits

BF16, F32 = torch.bfloat16, torch.float32
ELEMENT = {F32: "f32", BF16: "bf16"}
BUILDS: dict[str, tuple[str, ...]] = {
    "own": (),  # as this machine's users get it
    "8": ("DAYZERO_LANES=8",),
    "16": ("DAYZERO_LANES=16",),
    "portable": ("DAYZERO_LANES=8", "DAYZERO_PORTABLE"),
}
LINES = [line for line in CATALOG.lines.values() if line.variant == "native_cpu"]


@lru_cache
def _library(name: str) -> ctypes.CDLL:
    return build.load(BUILDS[name])


@pytest.fixture(
    params=[
        ("own", 1),
        ("own", 2),
        *(pytest.param(other, marks=pytest.mark.slow) for other in (("8", 1), ("8", 2), ("16", 2), ("portable", 1))),
    ],
    ids=lambda p: f"{p[0]}x{p[1]}",
)
def native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The calls over one of the builds, with a number of threads: the build's name."""
    name, threads = request.param
    before = torch.get_num_threads()
    monkeypatch.setattr(calls, "library", lambda: _library(name))
    torch.set_num_threads(threads)
    yield name
    torch.set_num_threads(before)


def _matches(contract: str, gots: Any, wants: Any, element: torch.dtype) -> None:
    bound = CONTRACTS[contract].bound[ELEMENT[element]].value
    for got, want in zip(tensors(gots), tensors(wants), strict=True):
        assert got.dtype == want.dtype
        close(got, want, bound)


def _element(inputs: dict[str, Any]) -> torch.dtype:
    found = {x.dtype for x in inputs.values() if isinstance(x, torch.Tensor)}
    return BF16 if BF16 in found else F32


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.contract)
def test_it_matches_its_reference_on_every_case(native: str, line: Any) -> None:
    tried = 0
    for case in CASES[line.contract]:
        inputs = case.make(0)
        if not fits(line, inputs):
            continue
        given = case.make(0)
        prepack = prepack_of(line)
        if prepack is not None:
            given["w"] = prepack(given.pop("w_NK"))
        _matches(line.contract, resolve(line)(**given), CONTRACTS[line.contract].body(**inputs), _element(inputs))
        tried += 1
    assert tried


@pytest.mark.slow
def test_every_build_has_the_lanes_asked_for() -> None:
    asked = {"8": 8, "16": 16, "portable": 8}
    assert {name: _library(name).dayzero_lanes() for name in asked} == asked


def test_the_own_build_has_this_machines_lanes() -> None:
    assert build.library().dayzero_lanes() == (16 if " avx512f " in build.cpu_flags() else 8)


# --- attention ----------------------------------------------------------------------------------------------------

ROWS = ((40, 1), (0, 1), (63, 1), (64, 1), (5, 0), (0, 37), (30, 17), (700, 1))


@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=ELEMENT.get)
def test_every_head_width(native: str, width: int, dtype: torch.dtype) -> None:
    inputs = paged_inputs(Inputs(width), ROWS, (4, 2), (width, width), dtype)
    _matches("attention.paged", calls.paged(**inputs), paged.body(**inputs), dtype)


@pytest.mark.parametrize("group", range(1, 9))
def test_every_group(native: str, group: int) -> None:
    inputs = paged_inputs(Inputs(group), ROWS, (2 * group, 2), (64, 64), BF16, page=8)
    _matches("attention.paged", calls.paged(**inputs), paged.body(**inputs), BF16)


@pytest.mark.parametrize("more", [{"window": 1}, {"window": 33}, {"window": 1000}, {"sinks": 3.0}, {"softcap": 2.0}])
@pytest.mark.parametrize("heads", [(3, 3), (6, 1)])
def test_every_option(native: str, heads: tuple[int, int], more: dict[str, Any]) -> None:
    r = Inputs(7)
    inputs = paged_inputs(r, ROWS, heads, (40, 24), BF16, page=8, window=more.get("window"))
    if "sinks" in more:
        inputs["sinks_H"] = r.normal(heads[0]) * more["sinks"]
    if "softcap" in more:
        inputs["softcap"] = more["softcap"]
    _matches("attention.paged", calls.paged(**inputs), paged.body(**inputs), BF16)


@pytest.mark.parametrize("rows", [((1500, 1),), ((900, 2), (3, 1)), ((600, 40),), ((0, 130),)])
@pytest.mark.parametrize("window", [None, 700])
def test_long_rows_that_are_split_between_threads(
    native: str, rows: tuple[tuple[int, int], ...], window: int | None
) -> None:
    r = Inputs(3)
    inputs = paged_inputs(r, rows, (2, 1), (64, 64), F32, window=window)
    inputs["sinks_H"] = r.normal(2)
    _matches("attention.paged", calls.paged(**inputs), paged.body(**inputs), F32)


def test_scores_too_large_for_an_exponential_and_queries_of_another_type(native: str) -> None:
    inputs = paged_inputs(Inputs(4), ROWS, (4, 2), (64, 64), BF16)
    inputs["scale"] = 40.0
    inputs["q_THD"] = inputs["q_THD"].float()
    gots, wants = calls.paged(**inputs), paged.body(**inputs)
    for got, want in zip(gots, wants, strict=True):
        assert got.dtype == want.dtype == F32
    # A score near 2^10 has steps of 2^-14 in f32 and its own sum drifts by some: probabilities are off by 1e-3 at most.
    close(gots[0], wants[0], 1e-3)
    close(gots[1], wants[1], 1e-6)


def test_no_rows_and_rows_without_queries(native: str) -> None:
    for rows in ((), ((4, 0),), ((4, 0), (9, 0))):
        inputs = paged_inputs(Inputs(1), rows, (4, 2), (16, 24), BF16)
        out, lse = calls.paged(**inputs)
        assert out.shape == (0, 4, 24)
        assert lse.shape == (0, 4)


def test_what_does_not_fit_is_refused() -> None:
    inputs = paged_inputs(Inputs(1), ((4, 1),), (4, 2), (16, 16), BF16)
    with pytest.raises(ValueError, match="do not fit together"):
        calls.paged(**inputs | {"q_THD": torch.zeros(1, 3, 16, dtype=BF16)})
    with pytest.raises(ValueError, match="f32 and bf16"):
        calls.paged(**inputs | {"q_THD": torch.zeros(1, 4, 16, dtype=torch.float16)})


# --- products -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("outputs, inputs", [(1, 1), (31, 33), (32, 64), (65, 127)])
def test_products_of_every_size(native: str, outputs: int, inputs: int) -> None:
    r = Inputs(outputs)
    w, bias = r.normal(outputs, inputs, dtype=BF16), r.normal(outputs)
    packed = calls.pack(w)
    assert packed.nbytes >= w.numel() * 2
    for tokens in (0, 1, 2, 3, 4, 5, 7, 64, 130):
        x = strided(r.normal(tokens, inputs, dtype=BF16))
        wide = x.float()
        _matches("linear.matmul", calls.matmul(x, packed, bias), linear.matmul.body(x, w, bias), BF16)
        _matches("linear.matmul_f32", calls.matmul_f32(x, packed), linear.matmul_f32.body(x, w), BF16)
        _matches("linear.matmul_f32", calls.matmul_f32(wide, packed, bias), linear.matmul_f32.body(wide, w, bias), F32)


def test_a_row_of_a_product_does_not_depend_on_its_neighbours(native: str) -> None:
    r = Inputs(2)
    x, packed = r.normal(9, 200, dtype=BF16), calls.pack(r.normal(70, 200, dtype=BF16))
    whole = calls.matmul_f32(x, packed)
    for row in range(9):
        assert torch.equal(whole[row : row + 1], calls.matmul_f32(x[row : row + 1], packed))


def test_leading_dimensions_slices_and_wrong_shapes() -> None:
    r = Inputs(5)
    w = r.normal(24, 16, dtype=BF16)
    packed, x = calls.pack(w), r.normal(2, 3, 32, dtype=BF16)[..., :16]
    _matches("linear.matmul", calls.matmul(x, packed), linear.matmul.body(x, w), BF16)
    with pytest.raises(ValueError, match="takes 16"):
        calls.matmul(r.normal(2, 15, dtype=BF16), packed)
    with pytest.raises(ValueError, match="bf16 weights"):
        calls.pack(w.float())


# --- row by row ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [BF16, F32], ids=ELEMENT.get)
@pytest.mark.parametrize("width", [1, 15, 64, 1000])
def test_norms_and_activations_of_slices(native: str, dtype: torch.dtype, width: int) -> None:
    r = Inputs(width)
    wide = r.normal(37, 3, 2 * width, dtype=dtype) * 9
    x, weight = wide[:, :2, width:], r.normal(width, dtype=dtype)
    for more in ({}, {"offset": True}, {"scale_in": "dtype"}, {"weight_D": None}):
        given = {"weight_D": weight, "eps": 1e-6} | more
        _matches("norm.rms", calls.rms(x, **given), rms.body(x, **given), dtype)
    gate, up = wide[:, 0, :width], wide[:, 1, width:]
    _matches("activation.glu", calls.silu_glu(gate, up), glu.body(gate, up), dtype)


def test_rotation_of_a_slice_and_many_tokens(native: str) -> None:
    r = Inputs(6)
    x, positions = r.normal(300, 5, 80, dtype=BF16)[:, 1:4], r.integers(0, 1_000_000, 300)
    for style in ("half", "interleaved"):
        for part in ("first", "last"):
            given = {"style": style, "part": part, "factor": 1.3, "inv_freq_F": 1e6 ** (-torch.arange(32) / 32)}
            _matches("rope.apply", calls.apply_rope(x, positions, **given), apply.body(x, positions, **given), BF16)


def test_a_bf16_result_is_the_f32_result_rounded_once_to_nearest(native: str) -> None:
    """A bound of two roundings would also let truncation pass."""
    r = Inputs(8)
    x, up = r.normal(33, 70, dtype=BF16) * 3, r.normal(33, 70, dtype=BF16)
    packed = calls.pack(r.normal(50, 70, dtype=BF16))
    assert torch.equal(calls.matmul(x, packed), calls.matmul_f32(x, packed).to(BF16))
    assert torch.equal(calls.rms(x, eps=1e-6), calls.rms(x.float(), eps=1e-6).to(BF16))
    assert torch.equal(calls.silu_glu(x, up), calls.silu_glu(x.float(), up.float()).to(BF16))
    heads, positions = r.normal(33, 2, 24, dtype=BF16), r.integers(0, 999, 33)
    given = {"positions": positions, "inv_freq_F": 1e4 ** (-torch.arange(8) / 8), "style": "half"}
    assert torch.equal(calls.apply_rope(heads, **given), calls.apply_rope(heads.float(), **given).to(BF16))


@pytest.mark.parametrize("heads", [(4, 2), (12, 2)])
def test_attention_in_bf16_leans_to_no_side(native: str, heads: tuple[int, int]) -> None:
    """Where probabilities are rounded as well, the result differs from the f32 one, but not by a factor: truncation
    anywhere would shrink it by half a step of bf16 on average, 2^-9."""
    inputs = paged_inputs(Inputs(8), ROWS, heads, (24, 40), BF16)
    wide = calls.paged(**inputs | {"q_THD": inputs["q_THD"].float()})[0].double()
    narrow = calls.paged(**inputs)[0].double()
    assert abs(float((narrow * wide).sum() / (wide * wide).sum()) - 1) < 2.0**-11


@pytest.mark.parametrize("dtype", [BF16, F32], ids=ELEMENT.get)
@pytest.mark.parametrize("tokens", [1, 2, 9])
def test_a_nan_in_a_key_that_is_seen_shows_in_the_result(native: str, tokens: int, dtype: torch.dtype) -> None:
    inputs = paged_inputs(Inputs(9), ((0, tokens),), (4, 2), (64, 64), dtype)
    first = int(inputs["keys"].table[0, 0])
    inputs["keys"].rows[first, 0] = float("nan")
    assert calls.paged(**inputs)[0].isnan().all()


def test_a_nan_stays_a_nan_and_an_infinity_does_not_become_one(native: str) -> None:
    x = torch.tensor([[float("nan"), 1.0, 2.0, 3.0]], dtype=BF16)
    assert calls.rms(x, eps=1e-6).isnan().all()
    assert calls.silu_glu(x, x)[0].isnan().tolist() == [True, False, False, False]
    assert calls.matmul(x, calls.pack(torch.ones(3, 4, dtype=BF16))).isnan().all()
    huge = torch.full((1, 4), 3e38, dtype=BF16)
    assert calls.matmul(huge, calls.pack(torch.ones(3, 4, dtype=BF16))).isinf().all()


# --- building -----------------------------------------------------------------------------------------------------


def test_one_pool_of_threads() -> None:
    calls.check_machine()
    script = (
        "import torch; from dayzero.ops.native import calls; calls.check_machine(); torch.ones(2**20).sum();"
        "print(len({l.split()[-1] for l in open('/proc/self/maps') if 'omp' in l.split()[-1] and '.so' in l}))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "1"


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source that takes no time to compile, in the place of the kernels'."""
    source = tmp_path / "small.cpp"
    source.write_text('extern "C" int dayzero_lanes() { return 8; }\n', encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE", source)


@pytest.mark.usefixtures("small_source")
def test_a_library_is_kept_found_again_and_not_mistaken_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    build.load((), cache)
    (kept,) = cache.iterdir()
    with monkeypatch.context() as patched:
        patched.setattr(build, "compile_into", lambda *given: pytest.fail("compiled again"))
        build.load((), cache)
    build.load(("OTHER=1",), cache)
    monkeypatch.setattr(build, "cpu_flags", lambda: "another processor")
    build.load((), cache)
    assert kept in cache.iterdir()
    assert len(list(cache.iterdir())) == 3


def test_what_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int f( {", encoding="utf-8")
    monkeypatch.setattr(build, "SOURCE", broken)
    with pytest.raises(MachineError, match="cannot be compiled here.*broken"):
        build.load((), tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    build.library.cache_clear()
    with pytest.raises(MachineError, match=r"C\+\+ compiler"):
        bind("norm.rms", "final_norm", {"norm.rms": "native_cpu"})
    build.library.cache_clear()
    monkeypatch.setattr(build, "_OPENMP", build.re.compile("no such runtime"))
    with pytest.raises(MachineError, match="OpenMP"):
        build.find_openmp()


def _compiles(monkeypatch: pytest.MonkeyPatch, full: tuple[Path, ...]) -> list[Path]:
    """The compiler replaced by one that has no room below the folders ``full``; where it was asked to write."""
    asked: list[Path] = []
    maps = Path("/proc/self/maps").read_text().splitlines()
    library = next(line.split()[-1] for line in maps if "/libm.so" in line)  # any that can be loaded

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        out = Path(command[-1])
        if "-o" not in command:
            return subprocess.CompletedProcess(command, 0, "any", "")
        asked.append(out)
        if any(out.is_relative_to(folder) for folder in full):
            return subprocess.CompletedProcess(command, 1, "", f"fatal: {out}: No space left on device\n")
        shutil.copy(library, out)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(build.subprocess, "run", run)
    return asked


def test_a_full_folder_falls_back_to_a_temporary_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever refuses: the compiler, or the system when a folder is made in it. Then in one sentence."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(build.tempfile, "tempdir", str(temporary))
    asked = _compiles(monkeypatch, full=(cache,))
    build.load((), cache)
    assert [path.parent.parent == cache for path in asked] == [True, False, False] and asked[-1].is_relative_to(
        temporary
    )
    assert list(cache.iterdir()) == list(temporary.iterdir()) == []
    _compiles(monkeypatch, full=(cache, temporary))
    with pytest.raises(MachineError, match="no space left in .*temporary.*TMPDIR"):
        build.load((), cache)

    def refuse(self: object, *_: object, **more: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(build.tempfile.TemporaryDirectory, "__init__", refuse)
    monkeypatch.setattr(build.tempfile.TemporaryDirectory, "__del__", lambda self: None, raising=False)
    with pytest.raises(MachineError, match="No space left on device .*TMPDIR") as told:
        build.load((), cache)
    assert told.value.exit_code == 3


@pytest.mark.usefixtures("small_source")
def test_a_folder_others_can_write_to_is_not_trusted(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    assert build.load((), shared).dayzero_lanes() == 8
    assert list(shared.iterdir()) == []
