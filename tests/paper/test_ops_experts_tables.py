"""The table of how grouped products run: whole, in order, and parts only where programs are few."""

from __future__ import annotations

import itertools

import pytest

from dayzero.ops.experts_tables import PROGRAMS, TABLES, in_parts, settings_of


@pytest.mark.parametrize("device", TABLES)
@pytest.mark.parametrize("form", ["bf16", "w4", "w4a8", "w8", "w8a8"])
def test_every_number_of_rows_has_its_settings(device: str, form: str) -> None:
    runs = TABLES[device][form]
    assert [run.below for run in runs] == sorted(run.below for run in runs)
    assert [run.rows for run in runs] == sorted(run.rows for run in runs)
    assert settings_of(form, 1 << 40, 1, device) is runs[-1]
    assert settings_of(form, 1, 896, device) is runs[0]
    for first, second in itertools.pairwise(runs):
        assert settings_of(form, int(first.below * 10), 10, device) is second


def test_a_device_without_a_table_runs_as_the_one_that_was_measured() -> None:
    assert settings_of("w4", 100, 10, "another") is settings_of("w4", 100, 10, "h200")


def test_only_few_programs_are_split() -> None:
    settings = settings_of("w4", 4, 32).gate_up
    assert in_parts(settings, (32, 64 * 132 * PROGRAMS, 64), 1, 132)["SPLIT"] == 1
    assert in_parts(settings, (32, 64, 64), 1, 132)["SPLIT"] == 4
    assert in_parts(settings, (32, 64 * 132, 64), PROGRAMS // 2, 132)["SPLIT"] == 2
