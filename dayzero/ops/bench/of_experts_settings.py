"""Ways to run the grouped products of experts in 8 bits, beside the one that ``experts_tables`` has: what its rows are
chosen by. Each entry is the table's way at one number of tokens, with the others as its peers.

``--only settings`` runs them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from torch import Tensor

from dayzero.ops.bench.entry import Entry, Prepared
from dayzero.ops.bench.of_experts import EIGHT, Again, repeated
from dayzero.ops.contract import CONTRACTS, relative_l2
from dayzero.ops.experts_tables import Run, Settings, in_parts, settings_of
from dayzero.ops.moe import experts as reference

ENDLESS = float("inf")


def _settings(high: int, small: int, warps: int, stages: int) -> Settings:
    return {"SMALL": small, "HIGH": high, "DEEP": 64, "SPLIT": 1, "num_warps": warps, "num_stages": stages}


def _few() -> Iterator[Run]:
    """Where memory is what takes time: rows of a tile, of the matrix, warps, stages."""
    for rows, high, warps, stages in (
        (16, 64, 4, 3), (16, 64, 4, 6), (16, 128, 8, 3), (16, 128, 8, 4), (32, 64, 4, 4), (32, 128, 8, 3),
    ):  # fmt: skip
        yield Run(ENDLESS, rows, *[_settings(high, 0, warps, stages)] * 2)


def _many() -> Iterator[Run]:
    """Where products are: the two may differ in rows of the matrix."""
    for rows, first, second in (
        (64, (64, 4, 3), (128, 8, 3)), (64, (64, 4, 4), (128, 8, 4)), (64, (128, 8, 3), (128, 8, 3)),
        (128, (64, 4, 3), (64, 4, 3)), (128, (128, 8, 2), (128, 8, 3)), (128, (128, 8, 3), (128, 8, 3)),
    ):  # fmt: skip
        yield Run(ENDLESS, rows, *(_settings(high, rows // 2, *more) for high, *more in (first, second)))


def _word(run: Run) -> str:
    both = [f"{s['HIGH']}/{s['num_warps']}/{s['num_stages']}" for s in (run.gate_up, run.down)]
    return f"{run.rows} x {' '.join(dict.fromkeys(both))}"


def _swept(num_tokens: int) -> Prepared:
    """One layer; every way is checked on the last two tokens."""
    from dayzero.ops.triton.experts import experts, pack
    from dayzero.ops.triton.experts_matmul import down_product, gate_up
    from dayzero.ops.triton.experts_rows import combine, sort_by_expert
    from dayzero.ops.triton.machine import hardware_word, num_processors

    drawn, (x, ids, weights) = EIGHT.drawn(), EIGHT.rows(num_tokens)
    gate, up, down = (repeated(pack(stack), EIGHT.experts) for stack in drawn)
    programs = num_processors(ids.device)

    def layer(run: Run) -> Tensor:
        by_expert = sort_by_expert(ids, EIGHT.experts, run.rows)
        first, second = (
            in_parts(settings, stack.shape, by_expert.most, programs)
            for settings, stack in ((run.gate_up, gate), (run.down, down))
        )
        hidden = gate_up(x, gate, up, by_expert, EIGHT.activation, None, first)
        return combine(down_product(hidden, down, by_expert, None, second), by_expert, weights, x.dtype)

    own = settings_of(EIGHT.form, ids.numel(), EIGHT.experts, hardware_word(ids.device))
    few = ids.numel() < 20 * EIGHT.experts
    others = [run for run in (_few() if few else _many()) if _word(run) != _word(own)]
    last = slice(-2, None)

    def check() -> Mapping[str, tuple[float, float]]:
        want = reference.body(x[last], ids[last], weights[last], *map(Again, drawn), EIGHT.activation)
        bound = CONTRACTS[reference.name].bound["bf16"].value
        return {_word(run): (relative_l2(layer(run)[last], want), bound) for run in (own, *others)}

    num_bytes = len(ids.unique()) * (gate.nbytes + up.nbytes + down.nbytes) // EIGHT.experts + 2 * x.nbytes
    flops = {"bf16": 6.0 * ids.numel() * EIGHT.width * EIGHT.inner}
    peers = {_word(run): [partial(layer, run)] for run in others}
    return Prepared(
        [lambda: experts(x, ids, weights, gate, up, down, EIGHT.activation)], check, num_bytes, flops, peers
    )


def entries() -> Iterator[Entry]:
    for num_tokens in (1, 16, 64, 256, 8192):
        yield Entry("moe.experts", "triton", f"settings of 8 bits T={num_tokens}", partial(_swept, num_tokens))
