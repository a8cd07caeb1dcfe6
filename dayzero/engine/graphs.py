"""Steps that are recorded once and replayed: as CUDA graphs, or, to prove the rest on a CPU, by calling the same work
again. The only file of the engine that calls CUDA; other devices pass through the same functions.

A recording is a list of pieces: what the device can repeat by itself, and between two such pieces work that needs the
host (``StepView.on_host``). Mostly it is one piece. Within a piece a device does on two streams what may be done at the
same time (``StepView.beside``).
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dayzero.view import Beside, First, OnHost, Second, Span, in_turn

Work = Callable[[tuple[Span, ...], OnHost, Beside], None]  # reads and writes memory whose addresses never change
FIRST_LOOKS, LOOK_EVERY = 3, 16  # runs of a recording in which addresses are looked at: see ``Again``
WARM_RUNS = 2  # before a capture: kernels are compiled and loaded in the first, tuned and cached by libraries in both


class Replay(Protocol):
    """One recording. num_pieces: that the device repeats by itself. num_forks: places where it does two at a time."""

    num_pieces: int
    num_forks: int

    def run(self, spans: tuple[Span, ...]) -> None:
        """The work again, with what lies at its addresses now. spans: the step's; captured work has no use for them."""


class Again:
    """The same work called again. debug: every tensor it reads that it did not make itself must lie where it lay the
    first time, as a graph would go on reading there. It is looked at in the first few runs and now and then."""

    def __init__(self, work: Work, spans: tuple[Span, ...], debug: bool = False) -> None:
        self._work, self._debug = work, debug
        self._kept: list[Tensor] = []
        self._at = self._runs = 0
        self._addresses: frozenset[tuple[int, int]] | None = None
        self._seen: _Addresses | None = None
        self.num_pieces, self.num_forks = 1, 0
        if debug:  # as before a capture: what is made once and kept is there when addresses are looked at
            self._work(spans, self._on_host, in_turn)
        self.run(spans)
        self.num_pieces = 1 + self._at

    def run(self, spans: tuple[Span, ...]) -> None:
        self._at = 0
        self._runs += 1
        if not self._debug or (self._runs > FIRST_LOOKS and self._runs % LOOK_EVERY):
            self._work(spans, self._on_host, in_turn)
            return
        with _Addresses() as seen:
            self._seen = seen
            self._work(spans, self._on_host, in_turn)
        self._seen = None
        if self._addresses is None:
            self._addresses = frozenset(seen.outside)
        moved = seen.outside.keys() - self._addresses
        names = sorted({seen.outside[one] for one in moved})[:9]
        assert not moved, f"a recorded step reads memory that it did not read when it was recorded: {names}"

    def _on_host(self, work: Callable[[], Any], like: Any) -> Any:
        """As in a capture: what the host made is copied to where the pieces behind it look for it. The host may read
        what it likes."""
        with nullcontext() if self._seen is None else self._seen.looking_away():
            if self._at == len(self._kept):
                self._kept.append(torch.empty_like(like))
            kept = self._kept[self._at].copy_(work())
        self._at += 1
        return kept


class _Addresses(TorchDispatchMode):
    """outside: (address of the storage, its bytes) -> operator and shape, of tensors that were not made while this was
    on. Single numbers of the host are left out: captured, they are arguments of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: dict[tuple[int, int], str] = {}
        self._known: dict[int, Tensor] = {}  # by address; those made inside are kept, so that no address comes back
        self._away = False

    @contextmanager
    def looking_away(self) -> Iterator[None]:
        self._away = True
        try:
            yield
        finally:
            self._away = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._away:
            return func(*args, **(kwargs or {}))
        for one in tree_leaves((args, kwargs)):
            storage = one.untyped_storage() if isinstance(one, Tensor) and one.numel() else None
            if storage is not None and storage.data_ptr() not in self._known:
                self._known[storage.data_ptr()] = one
                if one.dim() or storage.nbytes() > one.element_size():
                    self.outside[storage.data_ptr(), storage.nbytes()] = f"{func} of {tuple(one.shape)}"
        out = func(*args, **(kwargs or {}))
        for one in tree_leaves(out):
            if isinstance(one, Tensor):
                self._known.setdefault(one.untyped_storage().data_ptr(), one)
        return out


@dataclass(slots=True)
class Memory:
    """What all graphs of an engine share: one pool of memory, as they never run at once, the stream they are captured
    on, and the one beside it. num_bytes: what capturing took from the device, the driver's part included."""

    pool: Any = field(default_factory=lambda: torch.cuda.graph_pool_handle())
    stream: Any = field(default_factory=lambda: torch.cuda.Stream())
    side: Any = field(default_factory=lambda: torch.cuda.Stream())
    num_bytes: int = 0


class Fork:
    """``StepView.beside`` on two streams: the second piece of work runs on the one beside, from a fork to a join.

    Memory that is let go of is taken again by work on the stream that it was taken on, and by no other, but at once and
    without an event (torch's allocator, in the pool of graphs too). Here that is right without ``record_stream``, with
    which memory would never be taken again within a capture:

    - Memory of the side is taken again by the side, behind a later fork: behind all that the main stream was asked for
      until then, and nobody asks for more of what he has let go of. So what the side made may be read on the main
      stream behind the join like anything else. As the second piece is asked for before the first one, nothing that the
      first lets go of can be taken again beside it either.
    - Memory of the main stream may be taken again by the first piece while the second one reads it. So what that reads
      and found there must be held up to the join: by the two pieces, which are held here, or by who calls.

    Kernels that may begin early (programmatic dependent launch) keep their order across a fork and a join: a graph has
    one edge to such a kernel from each that it comes behind, and ``griddepcontrol.wait``, which stands in ours before
    they touch anything that another one writes, waits for "all prerequisite grids" (PTX ISA). Out of a capture an event
    that a stream waits for is waited for before the launch.
    """

    def __init__(self, memory: Memory) -> None:
        self._main, self._side = memory.stream, memory.side
        self._at: Literal["", "second", "first", "joined"] = ""  # what is being asked for
        self.uses = 0

    def beside(self, first: Callable[[], First], second: Callable[[], Second]) -> tuple[First, Second]:
        """As ``view.Beside``. Within one of two pieces: in turn, as there is no third stream."""
        if self._at:
            return in_turn(first, second)
        self.uses += 1
        self._at = "second"
        self._side.wait_stream(self._main)
        with torch.cuda.stream(self._side):
            aside = second()
        self._at = "first"
        made = first()
        self.join()
        self._at = ""
        return made, aside

    def join(self) -> None:
        """What the main stream is asked for from here on comes behind all that the side was asked for."""
        assert self._at != "second", "work of the host lies between two graphs, and cannot be done aside"
        if self._at == "first":
            self._main.wait_stream(self._side)
            self._at = "joined"


class Captured:
    """A list of CUDA graphs, with the host's work between them. Captured on ``memory``'s streams, replayed on the one
    that is current then. streams: 1 or 2."""

    def __init__(self, work: Work, spans: tuple[Span, ...], memory: Memory, streams: int = 2) -> None:
        self._memory, self._fork = memory, Fork(memory)
        beside: Beside = self._fork.beside if streams > 1 else in_turn
        self._pieces: list[Callable[[], Any]] = []
        self._graph: Any = None
        memory.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(memory.stream):
            for _ in range(WARM_RUNS):
                work(spans, lambda host_work, like: torch.zeros_like(like), beside)
            memory.stream.synchronize()
            torch.cuda.empty_cache()  # what the runs above leave is of no use to the pool of the graphs
            self._begin()
            self._fork.uses, whole = 0, False
            try:
                work(spans, self._on_host, beside)
                whole = True
            finally:  # a capture that broke cannot be ended; the first error is the one to tell
                with nullcontext() if whole else suppress(RuntimeError):
                    self._end()
        torch.cuda.current_stream().wait_stream(memory.stream)
        self.num_pieces, self.num_forks = 1 + len(self._pieces) // 2, self._fork.uses

    def run(self, spans: tuple[Span, ...]) -> None:
        del spans
        for piece in self._pieces:
            piece()

    def _begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._memory.pool, capture_error_mode="thread_local")

    def _end(self) -> None:
        self._graph.capture_end()
        self._pieces.append(self._graph.replay)

    def _on_host(self, work: Callable[[], Any], like: Any) -> Any:
        """Nothing is computed while a graph is captured, so the work only gets its place in the list. A graph ends with
        all of its streams joined, so what runs beside it ends before the host's part."""
        self._fork.join()
        self._end()
        kept = torch.empty_like(like)
        self._pieces.append(lambda: kept.copy_(work()))
        self._begin()
        return kept


@contextmanager
def capturing(memory: Memory) -> Iterator[None]:
    """Around all captures of an engine: nothing is collected in between, and what they take is counted."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.mem_get_info()[0]
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    memory.num_bytes = max(0, before - torch.cuda.mem_get_info()[0])


def most_bytes(work: Callable[[], None], device: str) -> int:
    """Most bytes that ``work`` holds at a time on the device beyond what is held before; 0 on a CPU, where nobody
    counts them."""
    if device != "cuda":
        work()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.max_memory_allocated() - before


class Mark:
    """A point in the device's work, at the end of what it has been asked for so far."""

    def __init__(self, device: str) -> None:
        self._time = time.perf_counter()
        self._event: Any = None
        if device == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()

    def wait(self) -> None:
        """Until the device has come to it."""
        if self._event is not None:
            self._event.synchronize()

    def seconds_since(self, other: Mark) -> float:
        """Of the device's time. Both must have been waited for."""
        if self._event is None:
            return self._time - other._time
        return float(other._event.elapsed_time(self._event)) / 1e3


def pinned(num_bytes: int, device: str) -> Tensor:
    """Zeros on the host, from where copies to the device need not be waited for."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda")


def hold_back(device: str, seconds: float) -> None:
    """Keep an accelerator busy with nothing for about so long, so that what it is asked for meanwhile runs without gaps
    behind that: times between marks are then the device's alone."""
    if device == "cuda":
        torch.cuda._sleep(int(seconds * 2e9))  # cycles, at about 2 GHz


def traced(device: str, work: Callable[[], object]) -> list[Mapping[str, Any]]:
    """What the host asked for and what the device did while ``work`` ran: events of a Chrome trace, times in
    microseconds, as torch's profiler writes them (the device's are CUPTI's). Empty where there is no device; it is run
    then, too."""
    if device != "cuda":
        work()
        return []
    both = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=both, acc_events=True) as seen:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(path))
        events: list[Mapping[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events
