"""Which form dense latent attention takes, and what a plan counts for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dayzero.arch.mixers import MLA
from dayzero.ops.latent_forms import LEAST_QUERIES, SCRATCH_BYTES, Widths, attend_bytes, expands, keys_at_once
from dayzero.planner.step_memory import latent_bytes

KIMI = Widths(heads=32, nope=128, shared=64, rank=512, value=128)


def flops(count: int, start: int, widths: Widths) -> tuple[float, float]:
    """(absorbed, expanded) of one row, a head."""
    _, nope, shared, rank, value = widths
    pairs, project = count * (start + (count + 1) / 2), rank * (nope + value)
    return (
        project * count + (2 * rank + shared) * pairs,
        project * (start + count) + (nope + shared + value) * pairs,
    )


@pytest.mark.parametrize("start", [0, 1, 100, 5_000, 1_000_000])
@pytest.mark.parametrize("count", [1, 127, 128, 150, 170, 171, 172, 8192])
@pytest.mark.parametrize("widths", [KIMI, Widths(128, 192, 64, 512, 256), Widths(4, 24, 8, 16, 20)])
def test_a_chunk_takes_the_form_of_fewer_flops(count: int, start: int, widths: Widths) -> None:
    absorbed, expanded = flops(count, start, widths)
    assert expands(count, start, widths) == (count >= LEAST_QUERIES and expanded <= absorbed)


def test_where_it_turns_over_behind_a_long_history() -> None:
    assert expands(128, 0, KIMI) and not expands(127, 0, KIMI)
    assert expands(171, 1_000_000, KIMI) and not expands(170, 1_000_000, KIMI)


def test_keys_fill_the_scratch_in_whole_pages() -> None:
    assert keys_at_once(KIMI, 64) == 16_384 and keys_at_once(replace_heads(128), 64) == 4096
    assert (
        keys_at_once(replace_heads(33), 64) % 128 == keys_at_once(replace_heads(33), 256) % 256 == 0
        and keys_at_once(KIMI, 1 << 20) == 1 << 20
    )
    assert keys_at_once(replace_heads(4), 64) == 16_384 and keys_at_once(replace_heads(1000), 64) == 1024
    assert keys_at_once(replace_heads(33)) * 2 * 33 * 256 <= SCRATCH_BYTES


def replace_heads(heads: int) -> Widths:
    return KIMI._replace(heads=heads)


def test_a_plan_counts_the_scratch_and_what_is_kept_beside_it() -> None:
    short, long = (attend_bytes(KIMI, 8192, context, 2) for context in (8192, 1 << 20))
    out, kept = 8192 * 32 * 128 * 2, 8192 * 32 * 129 * 4
    assert long == out + max(SCRATCH_BYTES + 16_384 * 576 * 16 + kept, 2048 * 32 * 1088 * 4)
    assert short == out + 2048 * 32 * 1088 * 4  # absorbed, of many rows that are short
    mixer = MLA(2304, 32, None, 512, 128, 64, 128, None, 192**-0.5, 1e-5)
    rows = 2304 + 32 * 192 + 2 * 576
    assert latent_bytes(mixer, 8192, 1 << 20, 2, 1) == 8192 * rows * 2 + long
    assert latent_bytes(mixer, 8192, 1 << 20, 2, 4) < latent_bytes(replace(mixer, q_rank=1536), 8192, 1 << 20, 2, 1)
