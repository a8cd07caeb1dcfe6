"""Every mutation, by name and in order. No torch."""

from __future__ import annotations

from functools import cache

from tests.cpu.mutations import checkpoint, engine, port, service
from tests.cpu.mutations.mutation import KINDS, Mutation


@cache
def all_mutations() -> tuple[Mutation, ...]:
    made = tuple(one for room in (checkpoint, port, engine, service) for one in room.MUTATIONS)
    assert len({one.name for one in made}) == len(made), "two mutations have one name"
    missing = set(KINDS) - {one.kind for one in made}
    assert not missing, f"no mutation of kind {missing}"
    return made


def by_name(name: str) -> Mutation:
    return next(one for one in all_mutations() if one.name == name)
