"""Sampling values at the edge of what floating point can hold are legal, so they must mean what they say; and a cache
folder that a crash has left behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from dayzero.engine.request import SamplingParams
from dayzero.engine.sampler import SlotState, draw, shape_logits
from dayzero.ops.native import build

LOGITS = torch.tensor([0.5, 3.0, -2.0, 2.9, -1.0])


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-30])
@pytest.mark.parametrize("more", [{}, {"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1}], ids=str)
def test_the_smallest_temperatures_are_greedy(temperature: float, more: dict[str, float]) -> None:
    """Divided by them a logit is infinite, and of infinities there is no softmax."""
    params = SamplingParams(temperature=temperature, **more)  # type: ignore[arg-type]
    for chance in (0.0, 0.5, 1 - 2**-53):
        assert draw(LOGITS, params, chance) == 1
        masked = LOGITS.masked_fill(torch.tensor([False, True, False, False, True]), -torch.inf)
        assert draw(masked, params, chance) == 3


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-39, 1e-10])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_smallest_repetition_penalties_repeat(penalty: float, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, repetition_penalty=penalty)
    row = LOGITS.clone()
    shape_logits(row, SlotState("r", params, 0, 2, (), [2, 3]), 0)
    assert bool(row.isfinite().all())
    for chance in (0.0, 0.5, 1 - 2**-53):
        assert draw(row, params, chance) == 3


def test_a_library_that_was_cut_short_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a power cut: renamed, never written. Else no server would start until somebody deletes it."""

    def small(path: Path, compiler: str, runtime: Path, flags: tuple[str, ...]) -> Path:
        path.unlink(missing_ok=True)
        subprocess.run([compiler, "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", str(path)], check=True)
        return path

    monkeypatch.setattr(build, "compile_into", small)
    key = build._key(build.find_compiler(), build.find_openmp(), build.FLAGS)
    cut = tmp_path / f"kernels-{key}.so"
    cut.write_bytes(b"")
    assert build.load((), tmp_path)._name == str(cut) and cut.stat().st_size > 0
