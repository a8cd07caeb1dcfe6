"""What a spec says of composed operators, against their contracts."""

from __future__ import annotations

from dayzero.arch.channels import GLU
from dayzero.arch.residuals import AttnRes, Plain
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
