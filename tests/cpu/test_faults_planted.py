"""Every planted fault is caught by the command that should catch it, and by name; what is not caught is listed.

Twins and the oracle's traces are made once. Traces take some seconds each: a process that imports the library.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("transformers")
from dayzero.acceptance.align import AlignOptions, align_source
from dayzero.planner.inspect import inspect_source
from dayzero.planner.plan_report import PlanOptions
from dayzero.planner.planner import plan_source
from tests.cpu.faults.catalogue import KINDS, Fault, all_faults
from tests.cpu.faults.stand import ALIGNED, TWINS, Stand, loaded

FAULTS = all_faults()
CAUGHT = [f for f in FAULTS if f.caught_by is not None]
MISSED = [f for f in FAULTS if f.caught_by is None]


@pytest.fixture(scope="module")
def stand(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Stand:
    """With the traces that the selected tests need, made two at a time."""
    given = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    needed = {p["fault"].twin for p in given if isinstance(p.get("fault"), Fault) and p["fault"].plant is not None}
    needed |= {p["word"] for p in given if p.get("word") in TWINS}
    made = Stand(tmp_path_factory.mktemp("faults"))
    made.record([word for word in ALIGNED if word in needed])
    return made


def by_name(fault: Fault) -> str:
    return f"{fault.kind}-{fault.name.replace(' ', '_')}"


@pytest.mark.parametrize("word", TWINS)
def test_the_unmutated_twin_passes_every_command(stand: Stand, word: str) -> None:
    """Without this, a catch could be the twin's own fault."""
    folder = str(stand.twin(word))
    report = inspect_source(folder)
    assert report.verdict != "fail", report.findings
    assert not loaded(Path(folder))
    plan = plan_source(folder, PlanOptions("h100"))
    assert plan.verdict != "fail", plan.findings
    if word in ALIGNED:
        aligned = align_source(folder, AlignOptions(trace=str(stand.trace(word)), threads=1))
        # A library's forward is given no images: that a tower was not compared is said, and is no fault of the twin.
        assert not [f for f in aligned.findings if f.verdict != "pass" and f.kind != "align.vision"]
        assert aligned.first_diverging is None


@pytest.mark.parametrize("fault", CAUGHT, ids=by_name)
def test_a_fault_is_caught_by_name(stand: Stand, fault: Fault) -> None:
    outcome = stand.judge(fault)
    assert outcome.caught, f"{fault.run} says nothing"
    assert outcome.named, f"{fault.run} does not name {fault.names}: {outcome.said}"


@pytest.mark.parametrize("fault", MISSED, ids=by_name)
def test_what_is_listed_as_missed_is_missed(stand: Stand, fault: Fault) -> None:
    """Once the product catches it, the list is to be shortened."""
    assert not stand.judge(fault).caught


def test_the_catalogue_covers_every_kind() -> None:
    kinds = Counter(f.kind for f in CAUGHT)
    assert len(CAUGHT) >= 40 and all(kinds[kind] >= 3 for kind in KINDS), kinds
    assert {f.run for f in CAUGHT} == {"inspect", "align", "load", "plan", "twin"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all-zero matrix", "plain norms stored around 0"])
def test_align_reports_what_loading_finds(stand: Stand, name: str) -> None:
    """Faults of loading through the whole command: the oracle runs on the changed checkpoint, and agrees with us."""
    fault = next(f for f in FAULTS if f.name == name)
    assert fault.edit is not None
    folder = stand.copy(fault.twin)
    fault.edit(folder)
    report = align_source(str(folder), AlignOptions(num_tokens=16, threads=1))
    assert report.first_diverging is None and report.verdict == "fail"
    assert any(f.kind.startswith("weights.") and f.verdict == "fail" for f in report.findings)
