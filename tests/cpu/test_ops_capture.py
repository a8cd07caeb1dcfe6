"""What the catalog says of capturing: bodies that launch by shapes alone read nothing back and bring nothing along."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dayzero.engine.graphs import Again
from dayzero.ops.bind import resolve
from dayzero.ops.capture import BY_ROW, READS
from dayzero.ops.cases import CASES
from dayzero.ops.catalog import CATALOG, Line
from dayzero.view import at_once

READING = (
    "_local_scalar_dense",
    "nonzero",
    "_unique",
    "unique_dim",
    "unique_consecutive",
    "equal",
    "is_nonzero",
    "masked_select",
)
FOR_ANY = [line for line in CATALOG.lines.values() if line.target == "any"]
ASKING = [line for line in FOR_ANY if line.eager in (READS, BY_ROW)]
BY_SHAPES = [line for line in FOR_ANY if line.graph and line.contract in CASES]


class HostReads(TorchDispatchMode):
    """found: operators that hand numbers of the device to the host, or whose result's shape depends on them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith(READING):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def reads(work: Callable[[], Any]) -> list[str]:
    with HostReads() as seen:
        work()
    return seen.found


@pytest.mark.parametrize("line", BY_SHAPES, ids=lambda line: f"{line.contract}-{line.variant}")
def test_what_launches_by_shapes_asks_the_host_nothing(line: Line) -> None:
    """Called again on the same memory it reads the same addresses: no constant comes from the host at each call."""
    function = resolve(line)
    for case in CASES[line.contract]:
        inputs = case.make(0)
        assert reads(lambda inputs=inputs: function(**inputs)) == [], case.name
        again = Again(lambda spans, on_host, beside, inputs=inputs: function(**inputs), (), debug=True)
        again.run(())


@pytest.mark.parametrize("line", ASKING, ids=lambda line: f"{line.contract}-{line.variant}")
def test_what_asks_the_host_is_seen_to_do_so(line: Line) -> None:
    """Else the test above would prove nothing."""
    function = resolve(line)
    assert any(reads(lambda case=case: function(**case.make(0))) for case in CASES[line.contract])


def test_every_line_says_whether_it_can_be_captured() -> None:
    assert Line("norm.rms", "mine", "cuda", (), "m:f").eager, "a line that says nothing cannot be captured"
    for line in CATALOG.lines.values():
        assert line.graph == (line.eager == "")
        assert line.target != "cpu" or line.eager
    safe = {(line.contract, line.variant) for line in CATALOG.lines.values() if line.graph}
    assert {("attention.paged", "cuda"), ("recurrence.paged", "cuda"), ("moe.experts", "triton")} <= safe


def test_a_number_from_the_host_is_found() -> None:
    """At each call a constant lies elsewhere, and a graph would read where it lay first."""
    held: list[Tensor] = []  # so that no address comes back

    def work(spans: object, on_host: object, beside: object) -> None:
        held.append(torch.tensor([1.0, 2.0]))
        held[-1] + 1

    again = Again(work, (), debug=True)
    with pytest.raises(AssertionError, match="memory that it did not read"):
        again.run(())


def test_work_of_the_host_lies_between_pieces() -> None:
    x, y = torch.zeros(3), torch.zeros(3)

    def work(spans: object, on_host: Any, beside: object) -> None:
        twice = on_host(lambda: torch.full_like(x, 2 * float(x.sum())), x)
        y.copy_(twice + on_host(lambda: twice + 1, x))

    again = Again(work, ())
    assert again.num_pieces == 3
    x += 1
    again.run(())
    assert y.tolist() == [13.0] * 3
    assert at_once(lambda: 5, None) == 5
