"""Read by every Python that has this folder in PYTHONPATH: plants a mutation in processes of the product, before they
begin. Which one, and in which processes, the environment says. Nothing of this is in the package."""

import os
import sys
import traceback

NAME, PROCESS = "DAYZERO_TEST_MUTATION", "DAYZERO_TEST_PROCESS"
ROLES = {"dayzero": "http", "dayzero.engine.worker": "engine"}


def _plant() -> None:
    name, given = os.environ.get(NAME), sys.orig_argv
    role = ROLES.get(given[given.index("-m") + 1]) if "-m" in given[:-1] else None
    if not name or role is None or os.environ.get(PROCESS) not in ("both", role):
        return
    from tests.cpu.mutations.catalogue import by_name
    from tests.cpu.mutations.mutation import Patches

    plant = by_name(name).plant
    assert callable(plant), f"{name}: what is planted in another process must be a function"
    plant(Patches())


planted = False
try:
    _plant()
    planted = True
finally:
    if not planted:  # Python would go on without it
        traceback.print_exc()
        os._exit(97)
