"""What to bind next: variants of an operator for a device that are not bound, and why."""

from __future__ import annotations

from dataclasses import replace

from dayzero.decl import OpUse
from dayzero.hardware import HARDWARE
from dayzero.ops.catalog import Catalog, Line
from dayzero.planner.next_bindings import Untried, untried

GPU = replace(HARDWARE["h200"], features=frozenset({"sm90", "triton"}))
USE = OpUse("mix.rows", "layers.0.mixer.mix", (("sinks", True),))


def lines(*given: Line) -> Catalog:
    catalog = Catalog()
    for line in (Line("mix.rows", "reference", "any", (), "m:f"), *given):
        catalog.add(line)
    return catalog


SINKS = {"sinks": (False, True)}
ALL = lines(
    Line("mix.rows", "bound", "cuda", (), "m:f", SINKS, rank=30),
    Line("mix.rows", "second", "cuda", ("sm90",), "m:f", SINKS, rank=20),
    Line("mix.rows", "never", "any", (), "m:f", SINKS),
    Line("mix.rows", "blackwell", "cuda", ("sm100", "triton"), "m:f", SINKS, rank=50),
    Line("mix.rows", "narrow", "cuda", (), "m:f", SINKS, rank=40, dtypes=("f32",)),
    Line("mix.rows", "plain", "cuda", (), "m:f", {"sinks": (False,)}, rank=60),
    Line("mix.rows", "processor", "cpu", (), "m:f", SINKS, rank=90),
)


def test_what_fits_comes_first_and_every_other_has_its_reason() -> None:
    found = untried(USE, "bound", GPU, "bf16", ALL)
    assert found == [
        Untried("mix.rows", "second", True, "fits, ranked below the one that is bound"),
        Untried("mix.rows", "never", True, "fits, but is only bound when it is asked for"),
        Untried("mix.rows", "plain", False, "mix.rows (plain) has sinks of [False], not True"),
        Untried("mix.rows", "blackwell", False, "needs sm100"),
        Untried("mix.rows", "narrow", False, "is for f32, not bf16"),
    ]


def test_only_variants_for_this_kind_of_device_and_not_the_bound_one() -> None:
    cpu = {one.variant: one.why for one in untried(USE, "reference", HARDWARE["cpu"], "f32", ALL)}
    assert cpu.keys() == {"processor", "never"} and "a plan would take it" in cpu["processor"]
    assert untried(USE, "never", HARDWARE["cpu"], "f32", lines()) == []
    assert untried(OpUse("unknown.contract", "x"), "reference", GPU, "bf16", ALL) == []
