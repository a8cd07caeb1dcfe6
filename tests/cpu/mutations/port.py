"""Mutations of operators and of how a model is put together: stage 2 with the oracle's recorded traces."""

from __future__ import annotations

from tests.cpu.mutations.mutation import Mutation, Part, Patches

NUMERICS = (Part("numerics"),)
OP = "operator"

# (fault of tests/cpu/faults, kind, layer at fault, base)
LIFTED: tuple[tuple[str, str, str, str], ...] = (
    ("layer norms before and after attention swapped", "A", "weights", "tied"),
    ("sinks dropped in sinks", "A", OP, "sinks"),
    ("head of a tied model never copied", "B", "weights", "tied"),
    ("nibbles reversed", "D", OP, "sinks"),
    ("e8m0 bias off by one", "D", OP, "sinks"),
    ("rope interleaved for half-split", "E", OP, "tied"),
    ("rope base of the class default", "E", "config", "tied"),
    ("window one token short", "E", OP, "sinks"),
    ("relu dropped in index", "E", OP, "index"),
    ("one fewer in index", "E", OP, "index"),
    ("start forgotten in index", "E", OP, "index"),
    ("norm eps 1e-3 for 1e-5", "F", OP, "tied"),
    ("clamp dropped in sinks", "F", OP, "sinks"),
    ("gate before norm in head_delta", "F", OP, "head_delta"),
    ("beta squashed twice in channel_delta", "F", OP, "channel_delta"),
    ("bias in bf16 in latent", "G", OP, "index"),
    ("groups of experts ignored", "G", OP, "index"),
    ("routed scale dropped", "G", OP, "index"),
    ("window of zeros in channel_delta", "K", OP, "channel_delta"),
    ("state in bf16 in head_delta", "K", OP, "head_delta"),
    ("image normalised as another tower's", "R", OP, "depth"),
    ("positions stretched from corner to corner", "R", OP, "depth"),
)

TESTS = "tests.cpu.test_accept_numerics:"
# (function of the stage's own tests, name, kind, layer, base)
OF_TESTS: tuple[tuple[str, str, str, str, str], ...] = (
    ("positions_of_a_chunk", "positions of a chunk count from its start", "K", OP, "small"),
    ("lost_sum", "a residual sum is off by a hundredth", "F", OP, "small"),
    ("wrong_head", "logits are off by a hundredth", "B", OP, "small"),
    ("narrow_sums", "what layers add is a tenth too large in bfloat16", "G", OP, "latent"),
    ("narrow_service", "what is served in bfloat16 is another model", "T", OP, "small"),
    ("wrong_scale", "quantised rows are read with scales 6 % too large", "D", "cache", "small"),
    ("unused_record", "rows lie plain though the plan says otherwise", "M", "cache", "small"),
)


def inputs_of_experts(patches: Patches) -> None:
    """Inputs of experts are rounded with scales 6 % too large."""
    patches.wrap(
        "dayzero.ops.experts_fp8:rounded_to_fp8_128", lambda rounded: lambda x, dtype: rounded(x, dtype) * 1.06
    )


MUTATIONS: tuple[Mutation, ...] = (
    *(Mutation(name, kind, layer, base, NUMERICS, plant=f"fault:{name}") for name, kind, layer, base in LIFTED),
    *(Mutation(name, kind, layer, base, NUMERICS, plant=TESTS + place) for place, name, kind, layer, base in OF_TESTS),
    Mutation("inputs of experts have other scales", "D", OP, "index", NUMERICS, plant=inputs_of_experts),
)
