"""One line of the catalog: a variant of an operator contract. No torch.

``traits`` of a line: option -> values it supports. Among the values "int" and "float" stand for any such number; all
others are meant literally. An option that a line does not name is one it does not have; of ``SIZES``, which it names
to limit them, it has any. Options are named as the specs in ``arch`` name what they are, which need not be an argument:
``index`` is True where an index list is passed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dayzero.decl import Form

Traits = Mapping[str, tuple[object, ...]]
REFERENCE = "reference"
SIZES = frozenset({"latent_width"})  # of what another option says a line has: here ``latent``

# Values of the option ``record``: rows kept as e4m3 codes with scales. Every variant has plain rows: no option.
LATENT_RECORDS = ("mla_fp8_656", "mla_fp8_tiled")
INDEX_RECORDS = ("idx_fp8_128", "idx_mxfp8_32")
KV_RECORDS = ("kv_fp8",)
MOST_DRAWN = 1 << 18  # tokens: their weights, whole numbers of 2^-44, sum to less than 2^63


@dataclass(frozen=True, slots=True)
class Line:
    """contract: ``family.word``. variant: its name, ``reference`` for the body. target: ``any`` device, ``cpu``,
    ``cuda``… needs: packages and features, e.g. ``triton>=3.5``. module: ``package.module:function``.

    prepack: ``package.module:function`` that lays a weight [N, K] out for this variant, whose function then takes the
    result (which has ``nbytes``) in the weight's place; empty when it takes the weight as it is. rank: a plan prefers
    the highest that fits; 0 is never preferred. dtypes: activation dtypes it is limited to (``bf16``), empty for any.
    packed: forms (``decl.Form``) in which it takes matrices as they are stored, beside tensors; of experts: it takes
    them by expert alone. ring: of those: it converts them in a rank's ring (``ops/experts_sizes``), whose bytes a plan
    counts. most: of sampling: the largest vocabulary that it draws from, 0 for any. eager: why a step that runs it
    cannot be captured in a CUDA graph (``ops/capture``); empty where it can.
    """

    contract: str
    variant: str
    target: str
    needs: tuple[str, ...]
    module: str
    traits: Traits = field(default_factory=dict)
    prepack: str = ""
    rank: int = 0
    dtypes: tuple[str, ...] = ()
    packed: tuple[Form, ...] = ()
    ring: bool = False
    most: int = 0
    eager: str = "does not say that it can be captured"

    @property
    def graph(self) -> bool:
        """Whether a step of one token a row that runs it can be captured in a CUDA graph."""
        return not self.eager
