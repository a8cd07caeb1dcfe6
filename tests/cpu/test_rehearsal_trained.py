"""The rehearsal model as the package holds it, against what ``evaluate.py`` and the trainer measured of it.

Bounds are what was measured minus its spread in so small a sample: needles and pictures 256 each, in the last line of
the training log; text in ``evaluation.json``.
"""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dayzero import LLM
from dayzero.cli import main
from dayzero.demo import PICTURE, REHEARSAL
from dayzero.engine.request import SamplingParams

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "rehearsal"
SPREADS = 3.0  # standard deviations of a binomial sample
# Other kernels and batches round otherwise, which moves a loss by far less than this share of it.
LOSS_MOVES = 0.005


@pytest.fixture(scope="module", autouse=True)
def here() -> Iterator[None]:
    before = sys.path[:]
    sys.path.insert(0, str(EXAMPLE))
    yield
    sys.path[:] = before


@pytest.fixture(scope="module")
def measured() -> Any:
    return json.loads((EXAMPLE / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(REHEARSAL), max_running=8) as opened:
        yield opened


def enough(found: Any, before: Any) -> bool:
    """Whether as many are right as a sample of this size must have, the lower end of the measured share being true."""
    count, share = found["of"], before["bound"]
    return bool(found["right"] >= count * share - SPREADS * math.sqrt(count * share * (1 - share)))


def test_a_sample_can_be_too_bad() -> None:
    assert enough({"right": 8, "of": 8}, {"bound": 0.95})
    assert not enough({"right": 4, "of": 8}, {"bound": 0.95})


def test_the_folder_is_small_and_whole() -> None:
    assert sum(file.stat().st_size for file in REHEARSAL.iterdir()) < 16 << 20
    assert all(file.stat().st_mode & 0o044 for file in REHEARSAL.iterdir()), "an installed file is read by others too"
    assert PICTURE.is_file()


def test_needles_are_found(llm: LLM, measured: Any) -> None:
    import evaluate

    found = evaluate.needle_grid(llm, evaluate.maker_of(REHEARSAL), [256], 8, 1)
    assert enough(found["256"], measured["needles"]["256"]), found


def test_pictures_are_named(llm: LLM, measured: Any) -> None:
    import evaluate
    import measure

    before = measured["pictures"]
    found = evaluate.pictures(llm, 12)
    assert enough(found.pop("all"), before)
    for name, one in found.items():
        assert enough(one, measure.share(before[name], before["of"])), found


@pytest.mark.slow
@pytest.mark.parametrize("length", [1024, 4096, 8192])
def test_needles_are_found_far_away(llm: LLM, measured: Any, length: int) -> None:
    import evaluate

    found = evaluate.needle_grid(llm, evaluate.maker_of(REHEARSAL), [length], 5, 1)
    assert enough(found[str(length)], measured["needles"][str(length)]), found


@pytest.mark.slow
def test_text_costs_what_it_did(llm: LLM) -> None:
    import evaluate

    measured = json.loads((EXAMPLE / "evaluation.json").read_text(encoding="utf-8"))
    maker = evaluate.maker_of(REHEARSAL)
    found = evaluate.perplexity(llm, maker.text.tolist(), 4)
    assert found["loss"] == pytest.approx(measured["held_out_first"]["loss"], rel=LOSS_MOVES)


@pytest.mark.slow
def test_the_demo_needs_no_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import images
    import numpy as np
    from PIL import Image

    connect = socket.socket.connect

    def here_alone(one: socket.socket, address: Any) -> None:
        if one.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "::1"):
            raise OSError(f"the demo wanted to reach {address}")
        connect(one, address)

    monkeypatch.setattr(socket.socket, "connect", here_alone)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["demo", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    number, picture = said["answers"]
    assert re.findall(r"\d+", number["answer"]) == ["48213"] and "48213" in number["question"]
    shown = images.draw(np.random.default_rng(6))
    assert np.array_equal(np.asarray(Image.open(PICTURE)), shown.pixels)
    assert picture["answer"].strip() == shown.answer


def test_small_talk(llm: LLM) -> None:
    answer = llm.chat([{"role": "user", "content": "Who wrote Hamlet?"}], SamplingParams(temperature=0, max_tokens=24))
    assert answer.message.content == "William Shakespeare wrote Hamlet."
