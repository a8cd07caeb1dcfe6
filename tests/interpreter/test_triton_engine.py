"""A whole engine over variants in Triton, in the interpreter: steps recorded as on a GPU, where no operator is told
where a row stands, give the tokens that references give eagerly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dayzero.engine.request import SamplingParams
from dayzero.ops.catalog import CATALOG
from dayzero.rehearse.twin import TwinOptions, write_twin
from tests.cpu.engine_support import REFERENCE, Engine, ask, prompt_ids

triton = pytest.importorskip("triton", reason="the environment for these tests is made by .ci/run")
if not triton.knobs.runtime.interpret:
    pytest.skip("needs TRITON_INTERPRET=1 before triton is imported", allow_module_level=True)

CONFIGS = Path(__file__).parents[1] / "paper" / "configs"
GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
BY_SHAPES = 1e-5  # of the logits' spread: sums in float32, as for references


def test_recorded_steps_without_positions_give_what_references_give(tmp_path: Path) -> None:
    source = tmp_path / "config"
    source.mkdir()
    (source / "config.json").write_bytes((CONFIGS / "qwen3_8b.json").read_bytes())
    write_twin(str(source), str(tmp_path / "twin"), TwinOptions())
    options: dict[str, Any] = {"page_tokens": 16, "max_running": 4, "prefix_cache": False, "record": True}
    plain = Engine(tmp_path / "twin", graphs="off", **options)
    uses = plain.runner.stack.spec.contracts()
    parts = {part.partition("@")[0] for use in uses if (use.contract, "triton") in CATALOG.lines for part in use.parts}
    used = {use.contract for use in uses} - parts | {"sample.greedy"}  # a composed operator goes without its parts
    bound = tuple((contract, "triton") for contract in sorted(used) if (contract, "triton") in CATALOG.lines)
    made = Engine(tmp_path / "twin", graphs="static", debug=False, bindings=(*REFERENCE, *bound), **options)
    assert ("attention.paged", "triton") in bound and made.runner._ready.recording.hidden
    requests = [ask(str(n), prompt_ids(n, n), GREEDY) for n in (5, 15, 17)]
    want, got = plain.run(requests), made.run(requests)
    for name, answer in want.items():
        assert got[name].tokens == answer.tokens
        for one, other in zip(got[name].logits, answer.logits, strict=True):
            assert float((one - other).abs().max()) <= BY_SHAPES * float(other.max() - other.min())
    counters = made.loop.progress().counters
    assert counters["graph_steps"] >= 2 and counters["padded_rows"] >= 2 and torch.isfinite(got["5"].logits[0]).all()
