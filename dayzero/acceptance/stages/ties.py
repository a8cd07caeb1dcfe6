"""How far rounding moves what a server says: where two log-probabilities are the same, where two tokens are a tie.

Two computations of one place differ by what they round: another batch, another chunk, one token at a time. A logit is
of size 16 to 32 where a model is sure of it. In bfloat16 (8 bits of significand, its leading one counted) two numbers
of that size lie 2^(4 - 7) = 0.125 apart, and a logit that is rounded once may come out one such step lower or higher;
what was rounded before it in the layers is a mean of many roundings and adds less. In float32 (24 bits) a step is
2^(4 - 23), and the last rounding hides nothing, so a chain of CHAIN roundings of one step each is counted.

A log-probability is a logit less the normaliser, and the margin of two tokens is one logit less another: each of the
two may have moved by a step, in opposite directions. So both are held to two steps, and to one bound.
"""

from __future__ import annotations

LARGEST_EXPONENT = 4  # of logits: 2^4 <= |x| < 2^5
CHAIN = 256  # roundings on the way of a logit: a few in each of some dozen layers, and sums of blocks
# Significand bits of what activations are kept in, and roundings that count. A dtype that nobody tells is narrow.
_NARROW = (8, 1)
_DTYPES = {"f32": (24, CHAIN), "float32": (24, CHAIN), "fp32": (24, CHAIN), "float": (24, CHAIN)}


def step_of(dtype: str) -> float:
    """How far one logit may lie from itself in two computations, in nat. dtype: as a server's card says it."""
    bits, roundings = _DTYPES.get(dtype.removeprefix("torch."), _NARROW)
    return float(roundings * 2.0 ** (LARGEST_EXPONENT - (bits - 1)))


def bound_of(dtype: str) -> float:
    """Log-probabilities of one token that lie no further apart are the same; two tokens no further apart are a tie.

    float32: 9.8e-4 nat; 16 bits, and where nobody says: 0.25 nat."""
    return 2 * step_of(dtype)
