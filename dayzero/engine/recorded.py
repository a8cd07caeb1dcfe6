"""Steps whose rows all have one token, recorded by number of rows and replayed: from late tokens to logits, the
likeliest token of each row and its place in ``newest``.

B rows of a recording, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from dayzero.blocks.stack import Stack
from dayzero.cache.layout import Layout
from dayzero.cache.views import PoolViews
from dayzero.engine import buckets
from dayzero.engine.choose import USES, Best, Chooser, SampleOps, no_numbers
from dayzero.engine.config import EngineConfig
from dayzero.engine.fixed import Inputs, Outputs, hidden_spans
from dayzero.engine.graphs import Again, Captured, Memory, Replay, capturing, most_bytes
from dayzero.engine.step import Step
from dayzero.errors import MachineError, UserError
from dayzero.ops.records import codec_of
from dayzero.units import bytes_text, counted
from dayzero.view import Beside, OnHost, Span, in_turn

Told = Callable[[int, int], None]  # recordings made, recordings to make


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step gave, of its own rows; the next step overwrites it. lost: bool [B], whether a hidden state is no
    number."""

    logits_BV: torch.Tensor
    best: Best
    lost_B: torch.Tensor
    facts: Mapping[str, float]


class Recorded:
    """The recordings of an engine. widths: of tables, as in ``buckets.table_widths``. plan: how steps are recorded.
    config: with ``debug`` what a step must not read is poisoned before it, and addresses are checked."""

    def __init__(
        self, stack: Stack, views: PoolViews, chooser: Chooser, config: EngineConfig, widths: Mapping[str, int],
        plan: buckets.RecordingPlan,
    ) -> None:  # fmt: skip
        assert plan.how, "a plan without recordings"
        tower = stack.spec.vision
        self.axes = 3 if tower is not None and tower.place == "grid" else 1
        self.sizes = buckets.sizes(config.max_running)
        self.inputs = Inputs(
            views, chooser.newest, self.sizes[-1], widths, axes=self.axes, debug=config.debug,
            tells_padding=plan.in_pieces,
        )  # fmt: skip
        self.outputs = Outputs.of(self.sizes[-1], stack.spec.vocab, chooser.newest.device)
        self._stack, self._chooser, self._how, self._debug = stack, chooser, plan.how, config.debug
        self._hidden, self._streams = plan.hidden, plan.streams
        self._memory: Memory | None = None
        self._replays: dict[int, Replay] = {}

    # --- recording

    @torch.inference_mode()
    def record(self, told: Told = lambda made, wanted: None) -> None:
        """Make all recordings, the largest first, so that the smaller ones find room in its memory. Rows are all
        padding then: nothing is written but scratch. MachineError where a step cannot be captured."""
        if self._how == "captured":
            self._memory = Memory()
        with nullcontext() if self._memory is None else capturing(self._memory):
            for made, size in enumerate(reversed(self.sizes)):
                told(made, len(self.sizes))
                self._replays[size] = self._recording(size)
        told(len(self.sizes), len(self.sizes))

    def _recording(self, size: int) -> Replay:
        self.inputs.put(None, size)
        spans = self._spans(None, size)

        work = partial(self._work, size)
        if self._memory is None:
            return Again(work, spans, self._debug)
        try:
            return Captured(work, spans, self._memory, self._streams)
        except torch.OutOfMemoryError as error:
            raise MachineError(
                f"The device has no room for a step of {counted(size, 'row')} beside weights and pool: give "
                "--pool-bytes less, or a smaller --max-running."
            ) from error
        except UserError:  # it says itself what to do
            raise
        except (RuntimeError, ValueError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise MachineError(
                f"A step of {counted(size, 'row')} cannot be captured as a CUDA graph ({said}). Start with --graphs "
                "off; if it fails then too, bind another variant of the operator it names."
            ) from error

    def _spans(self, step: Step | None, size: int) -> tuple[Span, ...]:
        return hidden_spans(size) if self._hidden else self.inputs.spans(step, size)

    def _work(self, size: int, spans: tuple[Span, ...], on_host: OnHost, beside: Beside) -> None:
        """What is recorded."""
        view = self.inputs.view(size, spans, on_host, beside)
        hidden_BD = self._stack.forward(view)
        logits_BV = self._stack.head(hidden_BD)
        best_B = self._chooser.ops.greedy(logits_BV)
        out = self.outputs.first(size)
        out.logits.copy_(logits_BV)
        out.best.copy_(best_B)
        out.bad.copy_(no_numbers(logits_BV))
        out.lost.copy_(hidden_BD.isnan().any(-1))
        slots_B = self.inputs.tensors["slots"][:size]
        self.inputs.newest.index_copy_(0, slots_B, best_B.clamp(max=logits_BV.shape[1] - 1))

    @torch.inference_mode()
    def eagerly(self) -> None:
        """Compute the largest step once, of padding alone, without recording it and on one stream: what a second one
        takes for itself is small beside what a pool leaves free."""
        size = self.sizes[-1]
        self.inputs.put(None, size)
        self._work(size, self._spans(None, size), lambda work, like: torch.zeros_like(like), in_turn)

    # --- replaying

    def why_eager(self, step: Step) -> str:
        """Why ``step`` is not one that was recorded (``buckets.REASONS``); empty when it is."""
        return buckets.why_eager(step, self.inputs.widths)

    def run(self, step: Step, positions: np.ndarray | None = None) -> Ran:
        """Compute ``step``, for which ``why_eager`` knows nothing. On an accelerator nothing is waited for. positions:
        as in ``Inputs.put``."""
        num = len(step.rows)
        size = buckets.bucket_of(num, self.sizes)
        if self._debug:
            self.inputs.views.poison_scratch()
            self.outputs.poison()
        replay = self._replays[size]
        self.inputs.put(step, size, positions)
        replay.run(self._spans(step, size))
        out = self.outputs.first(num)
        facts = {
            "graph_steps": 1.0, "graph_replays": float(replay.num_pieces), "graph_forks": float(replay.num_forks),
            "padded_rows": float(size - num),
        }  # fmt: skip
        return Ran(out.logits, Best(out.best, out.bad), out.lost, facts)

    # --- what is told

    def row(self, reserved: int) -> str:
        """Of the start table. reserved: bytes that were left for it when the pool was sized."""
        pieces = sorted({replay.num_pieces for replay in self._replays.values()})
        text = f"{counted(len(self.sizes), 'size')} up to {counted(self.sizes[-1], 'row')}"
        if pieces != [1]:
            text += f", {'/'.join(map(str, pieces))} pieces each"
        if forks := max(replay.num_forks for replay in self._replays.values()):
            text += f", two streams at {counted(forks, 'place')}"
        if self._memory is None:
            return f"{text}, static: the same work called again"
        return f"{text}, {bytes_text(self._memory.num_bytes)} (reserved {bytes_text(reserved)})"


def reserved_bytes(stack: Stack, layout: Layout, config: EngineConfig, plan: buckets.RecordingPlan, device: str) -> int:
    """Bytes to leave beside the pool for recordings and what they read and write: measured with a pool of one slab. 0
    where steps are not captured."""
    if plan.how != "captured":
        return 0
    return most_bytes(lambda: _measured(stack, layout, config, plan, device), device)


def _measured(stack: Stack, layout: Layout, config: EngineConfig, plan: buckets.RecordingPlan, device: str) -> None:
    views = PoolViews(layout, 1, device=device, codec_of=codec_of, scratch_tokens=config.max_running)
    chooser = Chooser((), config.seed, config.max_running, sample_ops(stack), device=device)
    widths = buckets.table_widths(layout, config, config.context(stack.spec.max_positions))
    Recorded(stack, views, chooser, config, widths, plan).eagerly()


def sample_ops(stack: Stack) -> SampleOps:
    """The operators of sampling as they are bound."""
    return SampleOps(*(stack.site.op(use.contract, use.site) for use in USES))
