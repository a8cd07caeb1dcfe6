"""What a spec says of composed operators, against their contracts."""

from __future__ import annotations

import pytest

from dayzero.acceptance.taken import Taken
from dayzero.arch.channels import GLU
from dayzero.arch.residuals import AttnRes, Plain
from dayzero.errors import UsageError
from dayzero.ops.bind import resolve
from dayzero.ops.catalog import CATALOG, REFERENCE
from dayzero.ops.contract import CONTRACTS
from tests.cpu.random_models import DIM, NORM, attention, latent, model, moe


def test_uses_of_composed_contracts_name_uses_as_their_parts() -> None:
    for line in CATALOG.lines.values():
        if line.variant == REFERENCE:
            resolve(line)  # which declares its contract
    shared = moe(shared=GLU(DIM, 24))
    for residual in (Plain(NORM), AttnRes(NORM, 2, 4)):
        uses = model((attention(), latent()), (shared, GLU(DIM, 24)), residual).contracts()
        places = {use.place for use in uses}
        for use in uses:
            assert bool(use.parts) == CONTRACTS[use.contract].composed, use
            assert places.issuperset(use.parts) and set(use.beside) <= set(use.parts)
            assert not [part for part in use.parts if CONTRACTS[part.partition("@")[0]].composed]


def test_an_alignment_refuses_a_composed_operator_beside_one_of_its_parts() -> None:
    spec = model((attention(),), (GLU(DIM, 24),), Plain(NORM))
    whole, part = "linear.matmul_glu@layers.0.channel.gate_up", "activation.glu"
    uses = {use.place: use for use in spec.contracts()}
    assert any(one.startswith(part) for one in uses[whole].parts)
    with pytest.raises(UsageError, match=rf"'{whole}' and '{part}' are of the same work: at layers.0"):
        Taken({whole: "few_rows", part: REFERENCE}, CATALOG, spec)
    assert Taken({whole: "few_rows"}, CATALOG, spec).bound == {whole: "few_rows"}
    assert Taken({whole: REFERENCE, part: REFERENCE}, CATALOG, spec).bound == {}
