"""The catalog lines of this package. No torch: a line names its function, which is imported when it is bound."""

from __future__ import annotations

from dayzero.ops.catalog import REFERENCE, Catalog, Line

AVERAGE = {"partial": (True,)}


def register(catalog: Catalog) -> None:
    """The entry point of group ``dayzero.operators``."""
    for contract, function in (("average.window", "window_mean"), ("activation.relu_squared", "relu_squared")):
        traits = AVERAGE if contract == "average.window" else {}
        catalog.add(Line(contract, REFERENCE, "any", (), f"nova_dayzero.ops:{function}", traits))
    catalog.add(Line("average.window", "running", "cpu", (), "nova_dayzero.ops:window_mean_running", AVERAGE))
    # Wrong on purpose: it forgets the oldest visible token. An alignment has to name the site it is bound to.
    catalog.add(Line("average.window", "short", "cpu", (), "nova_dayzero.ops:window_mean_short", AVERAGE))
